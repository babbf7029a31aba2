"""The core of Paceline: what is proposed, what is verified, what is committed.

Pure Python. Nothing here touches torch, sockets, threads, clocks or global randomness: every decision is a function of
the messages received, so the code that serves is the code that the simulator runs and the tests enumerate.

Read in this order:

- The law. :mod:`messages` (the words), :mod:`noise` (the shared coin), :mod:`trie` (where drafts live),
  :mod:`acceptance` (which of them are kept).
- One session at a worker. :mod:`.verifying.target_session` verifies and commits, :mod:`.drafting.draft_session` runs
  ahead of it; :mod:`.drafting.guesses` is staged drafting, a draft for the draft model. :mod:`sources` draft without
  one.
- How much. :mod:`.verifying.calibration` (what a source's confidence is worth), :mod:`.verifying.budget` and
  :mod:`.verifying.planner` (what a step of the target verifies), :mod:`.verifying.payoff` (when drafts come, how far to
  draft, and whether that pays).
- The router's side. :mod:`events` and :mod:`.request.session`, with :mod:`.request.placement` (how it comes to
  workers); :mod:`.request.poison_detector` (whose request kills targets).
- All of it at work, against the clock: :mod:`simulation`; under faults: :mod:`tests.faults`.
"""
