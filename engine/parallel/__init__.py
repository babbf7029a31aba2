"""Tensor parallelism: several processes, the ranks of a group, compute every step of one model together.

Rank 0 is the worker. It alone keeps books, samples and talks to routers; the others hold their part of the weights and
of the cache, and compute what they are told. One broadcast a step tells them.
"""
