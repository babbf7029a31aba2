"""Several levels of draft trees in one launch: what it is told, computes and says (:mod:`levels`).

:mod:`engine.cuda` and :mod:`engine.cpu` compute it, as :mod:`level_ops` defines it.
"""
