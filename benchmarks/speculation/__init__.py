"""Ours against plain decoding, sequential and PEARL-like drafting, and transformers.

``settings`` is the design, ``run`` carries it out, ``records`` says what the workers' step records mean, ``figures``
turns both into rows and ratios, ``report`` shows them.
"""
