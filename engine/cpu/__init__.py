"""Decoder layers on CPUs: one call a step into C++, which a compiler here builds for the processor here.

Knows no models and no books; :mod:`engine.layers.fused` says which models have such layers.
"""
