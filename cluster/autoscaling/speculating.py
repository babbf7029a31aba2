"""What drafting is worth in a simulated fleet: how much is verified, how far drafters run ahead, what that costs them.

Averages, where :mod:`simulation.simulate` draws and compares tokens: a draft token is kept with the chance
``alpha`` if all before it were. The rules are those that serve, in small: a target verifies as many drafts as make the
most tokens a second, and asks for no lead when that is none; else for a lead whose last token still has a fair chance
(:mod:`speculation.verifying.lookahead_policy`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from simulation.costs import Costs
from speculation.verifying.lookahead_policy import FAIR_CHANCE

MAX_LOOKAHEAD = 48


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """What a target wants of drafters while it decodes so many sessions."""

    lead: int
    """Tokens; 0: nothing."""
    verified: int
    """Draft tokens a step for every session, if they are there."""


class Speculating:
    """The averages of one set-up."""

    def __init__(self, costs: Costs, alpha: float, max_lookahead: int) -> None:
        """``max_lookahead``: draft tokens verified for a session in one step; 0: requests ask for no drafts."""
        self.allowed = max_lookahead > 0
        self._costs, self._alpha, self._max_lookahead = costs, min(alpha, 0.99), max_lookahead
        self.wanted = cache(self._wanted)

    def committed(self, drafts: float) -> float:
        """Tokens that a step commits for a session that verifies so many drafts."""
        return float((1.0 - self._alpha ** (drafts + 1.0)) / (1.0 - self._alpha))

    def _wanted(self, sessions: int) -> DraftingPlan:
        """For a step of so many sessions that decode."""

        def rate(drafts: int) -> float:
            return self.committed(drafts) / self._costs.verify_seconds(sessions, sessions * (1 + drafts))

        best = max(range(self._max_lookahead + 1), key=rate)
        if not best or not self._alpha:
            return DraftingPlan(0, 0)
        return DraftingPlan(min(math.ceil(math.log(FAIR_CHANCE) / math.log(self._alpha)), MAX_LOOKAHEAD), best)

    def places(self, drafting: DraftingPlan) -> float:
        """Places that a drafter expands for each verification to keep the lead: all of it after a refusal."""
        refused = 1.0 - float(self._alpha**drafting.verified)
        return refused * drafting.lead + self.committed(drafting.verified)
