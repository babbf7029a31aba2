"""A simulation of the protocol under random faults, in virtual time: the sessions that serve, with promises to keep.

:mod:`.run` is what ``make sim`` runs; :mod:`.world` has a router's shell, :mod:`.workers` clock, network and processes,
:mod:`.toy_workers` their models, :mod:`.weather` which faults happen. ``tests/sim`` shows that planted bugs are found.
"""
