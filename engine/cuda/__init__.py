"""Steps on CUDA: recorded once, then replayed (:mod:`graphs`), as are levels of drafts (:mod:`recorded_levels`).

A step is a list of rows (:mod:`engine.attention.rows`), padded to a few sizes; :mod:`engine.attention.row_attention`
computes their attention. Where these cannot run, or compute wrong, :mod:`engine.forward` computes sequence by
sequence, and slots of the cache are moved by torch.
"""
