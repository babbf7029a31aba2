"""What the next step of a target computes: continuous batching of prefill chunks, decodes and verifications.

Pure decisions over token counts; knows nothing of models, tokens or streams.

* Sessions that decode go first, each with one token of its own, so that a long prompt never stops running text.
* What is left of the step's token budget is shared out as room for drafts, evenly.
* Then prompts are prefilled in chunks, first come first served, out of their own allowance.
* When the cache is short, the session that started last is preempted: it keeps its tokens and its place in the queue,
  and is computed again later. None is ever failed for want of room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one step, in tokens."""

    drafts_per_session: int = 8
    """Most draft tokens verified for one session."""
    verify: int = 64
    """Most tokens computed for sessions that decode, drafts included (never less than one each)."""
    prefill: int = 256
    """Most prompt tokens computed."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One running session, oldest first: how many of its committed tokens are not in the cache yet (at least 1)."""

    uncached: int

    @property
    def decodes(self) -> bool:
        """Only the last token is missing: the session is past its prompt."""
        return self.uncached == 1


@dataclass(frozen=True, slots=True)
class Share:
    """What one session gets in a step: ``feed`` of its uncached tokens and, if that is all of them, room for drafts."""

    feed: int = 0
    drafts: int = 0


def shares(demands: Sequence[Demand], budget: Budget) -> list[Share]:
    """Split one step's budget; the answer has one entry per demand."""
    decoding = sum(demand.decodes for demand in demands)
    drafts = min(budget.drafts_per_session, max(budget.verify - decoding, 0) // max(decoding, 1))
    prefill = budget.prefill
    answer: list[Share] = []
    for demand in demands:
        if demand.decodes:
            answer.append(Share(1, drafts))
        else:
            feed = min(demand.uncached, prefill)
            prefill -= feed
            answer.append(Share(feed))
    return answer


def preempt(needs: Sequence[int], free: int) -> int:
    """How many sessions, from the last, must give way so that the others' ``needs`` (in blocks) fit in ``free``.

    Conservative: the room a preempted session gives back is not counted, the next step will see it.
    """
    total = sum(needs)
    victims = 0
    while total > free and victims < len(needs):
        victims += 1
        total -= needs[-victims]
    return victims
