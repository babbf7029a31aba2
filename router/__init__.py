"""The router: owns the life of every request, between applications on one side and workers on the other.

Imports neither torch nor the engine: it starts in a moment and runs where there is no GPU.
"""
