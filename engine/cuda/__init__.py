"""How a step is computed on CUDA: as rows, by kernels of our own, replayed.

- :mod:`engine.cuda.rows`: a step as a list of rows, padded to a few sizes;
- :mod:`engine.cuda.attention`: attention of rows over the paged cache, with :mod:`engine.cuda.attention_kernels`;
- :mod:`engine.cuda.graphs`: steps of each size recorded once as CUDA graphs, then replayed.

Where they cannot run, or compute wrong, :mod:`engine.attention` and :mod:`engine.forward` compute sequence by sequence.
"""
