"""Ways to draft without a draft model, at the target or beside a draft model.

:mod:`lookup` and :mod:`suffix` copy what followed the same words before, :mod:`prediction` follows a text that the
caller expects. :mod:`registry` is where others are added, and says what one session has of all of them.
"""
