"""Making draft models better at what one target says: data, samples of the target's, objectives, training, figures.

Above :mod:`engine`, which loads models; nothing that serves imports it.
"""
