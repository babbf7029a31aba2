"""How fast the core decodes, without models and machines: :mod:`simulate`.

From what steps and messages cost (:mod:`costs`) and how well drafts agree with the target (:mod:`agreement`), made up
or :mod:`recorded`.
"""
