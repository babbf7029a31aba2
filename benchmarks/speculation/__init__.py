"""Ours against plain decoding, sequential and PEARL-like drafting, and transformers.

``settings`` is the design, ``run`` carries it out and shows it, ``figures`` turns runs and the workers' step records
into rows and ratios.
"""
