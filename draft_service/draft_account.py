"""What the steps of a drafter took, and what became of its drafts: counted, told to the recorder, and learned from.

Decides which steps tell what a forward costs: only those that drafted and read nothing else, since what one of several
levels takes is known as a step of one level and the further ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.levels import DraftLevels
from draft_service.sequence import DraftBatchEntry, DraftCounters
from engine.recorder import Recorder
from speculation.drafting.draft_session import DraftSession, LookaheadDemand
from speculation.messages import Verification
from speculation.verifying.budget import StepCost


class DraftAccount:
    """The steps of one draft worker so far, and the verifications it heard. Times are in seconds."""

    def __init__(
        self, counters: DraftCounters, cost: StepCost, launches: DraftLevels, recorder: Recorder | None
    ) -> None:
        """``cost`` and ``launches`` learn from the steps."""
        self._counters, self._cost, self._launches, self._recorder = counters, cost, launches, recorder
        self._outcomes: list[dict[str, object]] = []  # for the record of the next step

    def note(self, session: DraftSession) -> None:
        """Keep for the record what the session has learned about its candidates."""
        if session.outcomes:
            found = [[[round(c, 4) for c in one.confidences], one.right] for one in session.outcomes]
            self._outcomes.append({"session": session.opened.session, "outcomes": found})
            session.outcomes.clear()

    def verified(self, verification: Verification, lead: LookaheadDemand) -> None:
        """A verification was heard, which found as many drafts as ``lead`` says."""
        self._counters.asked += lead.asked
        self._counters.delivered += lead.reached
        self._counters.verified += 1
        self._counters.accepted += verification.accepted

    def observe(
        self, entries: Sequence[DraftBatchEntry], started: float, ended: float, forward: float, guessing: float
    ) -> None:
        """A step is over. ``forward``, ``guessing``: what the draft model took of it, and what guessed for it."""
        tokens = sum(entry.size for entry in entries)
        self._counters.steps += 1
        self._counters.step_microseconds += round((ended - started) * 1e6)
        self._counters.computed += tokens
        levels = max(entry.levels for entry in entries)
        if all(len(entry.tokens) == len(entry.expands) for entry in entries):
            took, first = ended - started - guessing, sum(len(entry.tokens) for entry in entries)
            launch = self._launches.time_of(len(entries))
            launch.observe(levels, took)
            # Not less than an even share, however long further levels are thought to take.
            self._cost.observe(first, max(took - (levels - 1) * launch.further, took / levels))
        if self._recorder:
            self._recorder.write(
                role="draft",
                start=started,
                end=ended,
                forward=forward,
                tokens=tokens,
                levels=levels,
                sessions=[entry.sequence.session.opened.session for entry in entries],
                learned=self._outcomes,
            )
            self._outcomes = []
