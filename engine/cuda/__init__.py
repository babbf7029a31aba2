"""Faster ways to compute a step on CUDA, each beside the plain one it must equal.

- :mod:`engine.cuda.pages`: which chunks of a step a paged kernel can compute, and what it is told of them;
- :mod:`engine.cuda.kernel`: torch's paged attention, in the variant that was found to compute right;
- :mod:`engine.cuda.graphs`: small steps recorded once as CUDA graphs, then replayed.

Whatever they cannot compute, or compute wrong, is computed by :mod:`engine.attention` and :mod:`engine.forward`.
"""
