"""Whether drafting pays for the sessions of a target together, found out by doing without for a moment.

Draft workers may share a device, memory or cores with the target, and their messages take its time. All of a target's
steps then cost more, those without drafts too, so the price of drafting shows in no comparison of steps made beside
working drafters. Hence two tables of step costs, one of steps beside drafters and one of *quiet* steps, while all of
them rest. From the second follows what plain decoding would have committed in the time a step took, and so

    lost = max(0, lost + tokens of plain decoding - tokens committed),    a session and step

is what drafting has cost since it was last worth its while. When that comes to more than a few steps, quiet ones are
measured again, since the machine may have become slower meanwhile; where it goes on, all drafters of the target rest.
After a while they try again, and rest longer if nothing has changed. While drafting pays, quiet steps are measured in
short *probes*, the rarer the more there is to lose.

One :class:`Payoff` for each size class of the batch: what pays for one session may not for sixty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt

from speculation.verifying.budget import StepCost
from speculation.verifying.lookahead_policy import BREAK_EVEN

SETTLE = 2
"""Steps until drafters that are told to rest do: the message is on its way, a step of theirs under way."""
PROBE = SETTLE + 3
"""Steps of a probe."""
FIRST_PROBE = 24
"""Steps beside drafters before the first probe."""
RARELY, OFTEN = 1400, 128
"""Steps between two probes where plain decoding commits next to nothing in comparison, and where as much: with the
steps it takes to get ahead again, probes cost half a percent."""
LOST, LOST_ALONE = 2.0, 8.0
"""Steps of plain decoding that drafting may cost before it rests. Some more for few sessions, whose luck varies."""
STILL = 0.8
"""The part of that which still counts once quiet steps are to be measured again."""
FIRST_REST, LONGEST_REST = 512, 4096
"""Steps to rest for; doubles each time in a row."""
LATELY = 0.3
"""Weight of the latest quiet step in what plain decoding takes: there are few, and the machine or the texts may have
changed since the others."""
WEIGHT = 1 / 64
"""Weight of the latest step in the gain."""


class Payoff:
    """What steps over about so many sessions take, beside drafters and without, and whether drafters shall work."""

    def __init__(self, row_classes: Sequence[int] = (), believed: Mapping[int, float] = {}) -> None:
        """Nothing is known; drafters work.

        ``row_classes``, ``believed``: see :class:`~speculation.verifying.budget.StepCost`.
        """
        self._beside, self._quiet = (StepCost(row_classes, believed=believed) for _ in range(2))
        self._lately = StepCost(row_classes, LATELY)
        """Quiet steps too, the latest of which count for more."""
        self._gain, self._drafted = 1.0, 0
        self._lost, self._doubted = 0.0, False
        """Steps of plain decoding, and whether quiet steps were measured since that was first too much."""
        self._resting = 0
        self._next_rest = FIRST_REST
        self._to_probe = FIRST_PROBE
        self._since_quiet = 0
        """Steps beside drafters since the last quiet one."""
        self.probing = False
        """Whether the next steps are to be plain ones, which show what those cost."""

    @property
    def drafting(self) -> bool:
        """Whether drafters shall work."""
        return not self._resting

    def cost(self, *, quiet: bool) -> StepCost:
        """Seconds of a step by its tokens, while drafters rest or beside them; of the other kind if that is unknown."""
        first, second = (self._quiet, self._beside) if quiet else (self._beside, self._quiet)
        return first if first.known else second

    def break_even(self, sessions: int) -> float:
        """Accepted drafts a session and step that make up for what drafting takes from steps over so many sessions."""
        if not (self._quiet.known and self._beside.measured_up_to(sessions)):
            return BREAK_EVEN
        return max(self._beside(sessions) / self._lately(sessions) - 1.0, BREAK_EVEN)

    def observe(self, tokens: int, seconds: float, *, quiet: bool, branched: bool = False) -> None:
        """Learn what a step of so many tokens cost; ``branched``: see :meth:`.StepCost.observe`."""
        for cost in (self._quiet, self._lately) if quiet else (self._beside,):
            cost.observe(tokens, seconds, branched=branched)

    def rested(self) -> None:
        """A step went by in which drafters were to rest."""
        self._resting -= 1
        if not self._resting:
            self.probing = False

    def drafted(self, sessions: int, committed: int, seconds: float) -> None:
        """So many tokens were committed beside drafters, ``seconds`` after the step before."""
        self._to_probe -= 1
        self._since_quiet += 1
        self._drafted += 1
        gain, plain = committed / sessions, seconds / (self._lately if self._quiet.known else self._beside)(sessions)
        self._gain += max(WEIGHT, 1 / self._drafted) * (gain / plain - self._gain)
        if self._quiet.known:
            self._lost, limit = max(self._lost + plain - gain, 0.0), LOST + LOST_ALONE / sqrt(sessions)
            self._doubted = self._doubted and self._lost > 0.0
            if self._lost > limit:
                if self._doubted:
                    self._lost, self._doubted = 0.0, False
                    self._rest(self._next_rest)
                    self._next_rest = min(2 * self._next_rest, LONGEST_REST)
                    return
                # plain steps may take longer by now, too
                self._lost, self._doubted, self._to_probe = limit * STILL, True, 0
        if self._to_probe <= 0:
            self.probing = True
            if self._quiet.known and self._gain > 1.0 and not self._doubted:
                self._next_rest = FIRST_REST
            self._rest(PROBE)

    def _rest(self, steps: int) -> None:
        self._resting, self._since_quiet = steps, 0
        self._to_probe = max(OFTEN, round(RARELY * (1.0 - 1.0 / max(self._gain, 1.0))))
