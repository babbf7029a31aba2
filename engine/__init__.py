"""Running a transformers model for serving: load it, cache its keys and values, step it, sample from it.

Shared by the target and the draft service. Knows nothing about requests, networks, tries or scheduling.
"""
