"""The core at work without models and machines, in two ways.

:mod:`faults`: the sessions that serve, under random faults, with promises that must hold (:mod:`fault_world`,
:mod:`fault_workers`, :mod:`weather`, :mod:`toy_workers`). :mod:`simulate`: how fast they are, from what steps
and messages cost (:mod:`costs`) and how well drafts agree with the target (:mod:`agreement`), made up or
:mod:`recorded`.
"""
