"""The core of Paceline: what is proposed, what is verified, what is committed.

Pure Python. Nothing here touches torch, sockets, threads, clocks or global randomness: every decision is a function of
the messages received, so the code that serves is the code that the simulator runs and the tests enumerate.

Read in this order: :mod:`messages` (the words), :mod:`noise` (the shared coin), :mod:`trie` (where drafts live),
:mod:`acceptance` (the law), :mod:`target_session` and :mod:`draft_session` (one session at either worker),
:mod:`budget` and :mod:`pace` (how much to verify, how far to draft), :mod:`events` and :mod:`session` (the router's
side), :mod:`faults` (all of it under faults), :mod:`simulate` (how fast all of it is).
"""
