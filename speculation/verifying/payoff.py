"""What drafting brings a target: when drafts come, how far drafters shall run ahead, and whether they pay at all.

The target finds out and tells them. For one session :class:`DraftLatencyEstimator`, :class:`LookaheadPolicy` and
:class:`ThroughputEstimator` learn that; for all sessions together, :class:`Payoff` does without drafts for a moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from speculation.verifying.budget import StepCost

WEIGHT = 0.1
"""Weight of the latest observation of one session."""
DEEPEST = 8
"""Tokens of a path that are timed."""
TIMES = tuple(0.0005 * 1.4**i for i in range(18))
"""Seconds after a commit at which the path is looked at: half a millisecond to 150."""
LARGEST_UNIT = 1e100
"""Weight of all commits from which on they are scaled down, long before a float overflows."""
TICK = 1e-6
"""Seconds; a moment nearer than this is now, or a wait that ends on the dot would be followed by one of no length."""
MAX_LOOKAHEAD = 48
"""Most tokens that drafters run ahead."""
FAIR_CHANCE = 0.002
"""Drafting stops where the odds of a token to be reached fall below this. Low: the step in flight comes in between."""
BREAK_EVEN = 0.05
"""Accepted drafts a verification that make up for drafting where it takes nothing from the target but messages."""
CREDIT = 3.0
"""Times the break-even that a drafter is credited with when it tries again: about ten verifications."""
FIRST_SESSION_REST, LONGEST_SESSION_REST = 32, 512
"""Verifications to rest for; doubles each time in a row."""
SETTLE = 2
"""Steps until drafters that are told to rest do: the message is on its way, a step of theirs under way."""
PROBE = SETTLE + 3
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
GAIN_WEIGHT = 1 / 64
"""Weight of the latest step in the gain."""


@dataclass(slots=True)
class Answered:
    """A commit that drafters answer: when, where, and when a path of 1, 2, ... tokens behind it came."""

    at: float
    position: int
    reached: list[float] = field(default_factory=list)
    """Seconds after it."""

    def arrived(self, depth: int, at: float) -> None:
        """A path of ``depth`` tokens is there."""
        self.reached += [at - self.at] * (min(depth, DEEPEST) - len(self.reached))


Moment = tuple[float, Sequence[float]]
"""A later moment, in seconds from now, and the chance of a path of 1, 2, ... tokens by then."""


class DraftLatencyEstimator:
    """By when how long a path is there. One for a worker, and one for each of its sessions that starts from it.

    A drafter hears of every commit and pushes what follows the new end: at once if it has drafted that already, else
    after it has. Learned is the share of commits after which a path of 1, 2, ... tokens had come by a given time, so
    that a target can tell whether waiting would pay. A dead drafter is waited for in vain once or twice.
    """

    def __init__(self, wider: DraftLatencyEstimator | None = None) -> None:
        """``wider``: what other sessions have seen; learns from this one as well. Unknown, nothing is expected."""
        self._wider = wider
        never = [[0.0] * (len(TIMES) + 1)] * DEEPEST
        self._came: list[list[float]] = [row.copy() for row in (wider._came if wider else never)]
        """By length of path (outer): weight of the commits after which it came by one of the times, and no sooner
        (inner); the last: later."""
        self._unit: float = wider._unit if wider else 1.0
        """Weight of all commits together. It grows, so that earlier ones count for less without being touched."""

    def moments(self, age: float, come: int = 0) -> list[Moment]:
        """Later moments, given that ``age`` seconds after the commit a path of ``come`` tokens has come."""
        if come >= DEEPEST:
            return []
        first = bisect_right(TIMES, age + TICK)
        shares = [[weight / self._unit for weight in accumulate(row[:-1])] for row in self._came]
        passed = [row[first - 1] if first else 0.0 for row in shares]
        open_share = max(1.0 - passed[come], WEIGHT)  # of the commits, those with nothing longer there by then
        moments: list[Moment] = []
        later = zip(*(row[first:] for row in shares), strict=True)
        for time, there in zip(TIMES[first:], later, strict=True):
            more = (max(share - gone, 0.0) for share, gone in zip(there[come:], passed[come:], strict=True))
            # Some with a short path by then have a long one later: a long one is no likelier than a short one.
            chances = [share / open_share for share in accumulate(more, min)]
            moments.append((time - age, [1.0] * come + chances))
        return moments

    def observe(self, answered: Answered) -> None:
        """Learn from a commit whose answer is over."""
        self._unit /= 1.0 - WEIGHT
        if self._unit > LARGEST_UNIT:
            self._came = [[weight / self._unit for weight in row] for row in self._came]
            self._unit = 1.0
        for row, seconds in zip(self._came, answered.reached, strict=False):
            row[bisect_left(TIMES, seconds)] += WEIGHT * self._unit
        if self._wider:
            self._wider.observe(answered)


class LookaheadPolicy:
    """How far drafters shall run ahead of one session, and when they rest.

    Two things are learned from each verification. How often the target says what was drafted gives the longest lead
    whose last token still has a fair chance; drafting further would only keep a processor from better work. And how
    many drafts are accepted a step tells whether drafting is of any use: drafts may be right and yet come too late,
    every time. Where fewer are than make up for what drafting costs the target's steps, the drafter rests, tries again
    after a while, and rests longer if nothing has changed.
    """

    def __init__(self, wider: LookaheadPolicy | None = None, break_even: float = BREAK_EVEN) -> None:
        """``wider``: what all sessions have seen; learns from this one too. ``break_even``: see :meth:`observe`."""
        self._wider = wider
        self._agreement: float = wider._agreement if wider else 0.8
        self._accepted: float = max(wider._accepted, CREDIT * break_even) if wider else 1.0
        self._resting = 0
        self._next_rest = FIRST_SESSION_REST
        self._lookahead = 0  # that the agreement comes to, once it was asked for

    @property
    def agreement(self) -> float:
        """Chance that the target goes on as drafted, by one token."""
        return min(max(self._agreement, 0.01), 0.99)

    @property
    def lead(self) -> int:
        """How many tokens to run ahead; 0 while resting."""
        if self._resting:
            return 0
        if not self._lookahead:
            self._lookahead = max(1, min(MAX_LOOKAHEAD, math.ceil(math.log(FAIR_CHANCE) / math.log(self.agreement))))
        return self._lookahead

    def observe(self, matched: int, diverged: bool, accepted: int | None, break_even: float = BREAK_EVEN) -> None:
        """Learn from a verification: ``matched`` drafts were followed, then one was not if ``diverged``.

        ``accepted`` is what the target could make use of: drafts that were in time; None: no drafter was to make any.
        ``break_even``: how many accepted a verification make up for what drafting takes.
        """
        if self._wider:
            self._wider.observe(matched, diverged, accepted, break_even)
        if self._resting:
            self._resting -= 1
            return
        if matched or diverged:
            self._lookahead = 0
            for right in [True] * matched + [False] * diverged:
                self._agreement += WEIGHT / 2 * (right - self._agreement)
        if accepted is None:
            return
        self._accepted += WEIGHT * (accepted - self._accepted)
        if self._accepted < break_even:
            self._resting = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_SESSION_REST)
            self._accepted = CREDIT * break_even
        elif self._accepted > CREDIT * break_even:
            self._next_rest = FIRST_SESSION_REST


class ThroughputEstimator:
    """The tokens that a session makes a second while it has drafts at hand: of steps that found drafts in the trie.

    Unknown before the first.
    """

    def __init__(self, wider: ThroughputEstimator | None = None) -> None:
        """``wider``: where other sessions have got to; learns from this one too."""
        self._wider = wider
        self.tokens: float = wider.tokens if wider else 1.0
        self._seconds: float = wider._seconds if wider else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 if unknown."""
        return self.tokens / self._seconds if self._seconds else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step committed ``tokens``, ``seconds`` after the one before it."""
        weight = WEIGHT if self._seconds else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self._seconds += weight * (seconds - self._seconds)
        if self._wider:
            self._wider.observe(tokens, seconds)


@dataclass(slots=True)
class DraftTurn:
    """What a step of a target is expected to commit, and it and the drafting before it to take."""

    tokens: float
    """Without drafts, one for each session."""
    seconds: float
    row_seconds: float
    """Of one draft more, without drafting it."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def extend(
        self, gains: Iterable[tuple[float, float, int]], deepest: int, first: Callable[[int], float], further: float
    ) -> tuple[int, int]:
        """How many of these places, best first, and levels make the most of a second; none if nothing more does.

        It comes to what is expected of it with them. ``gains``: tokens that one more draft there brings, the chance of
        a draft of its session to be right, and tokens computed for it. ``first``: seconds of a launch of one level, by
        all tokens computed; ``further``: of each level more, which is reckoned as wide as the first, and every draft as
        likely as its session's.
        """
        chosen, best = (0, 1), (self.tokens, self.seconds)
        rate, gained, read = self.rate, [0.0] * deepest, 0
        for number, (gain, chance, computed) in enumerate(gains, start=1):
            read += computed
            tokens, seconds = self.tokens, self.seconds + first(read)
            for level in range(deepest):
                gained[level] += gain
                gain *= chance
                seconds += number * self.row_seconds + (further if level else 0.0)
                tokens += gained[level]
                if tokens > rate * seconds:
                    rate, best, chosen = tokens / seconds, (tokens, seconds), (number, level + 1)
        self.tokens, self.seconds = best
        return chosen


class Payoff:
    """What steps over about so many sessions take, beside drafters and without, and whether drafters shall work.

    Beside working drafters all of a target's steps may cost more, those without drafts too. Hence two tables of step
    costs, one of steps beside drafters and one of *quiet* steps, while all of them rest. From the second follows what
    plain decoding would have committed in the time of a step, so

        lost = max(0, lost + tokens of plain decoding - tokens committed),    a session and step

    is what drafting has cost since it was last worth its while. When that comes to more than a few steps, quiet ones
    are measured again, since the machine may have become slower meanwhile; where it goes on, all drafters of the target
    rest. After a while they try again, and rest longer if nothing has changed. While drafting pays, quiet steps are
    measured in short *probes*, the rarer the more there is to lose.

    One for each size class of the batch: what pays for one session may not for sixty.
    """

    def __init__(self, row_classes: Sequence[int] = (), believed: Mapping[int, float] = {}) -> None:
        """Nothing is known; drafters work.

        ``row_classes``, ``believed``: see :class:`~speculation.verifying.budget.StepCost`.
        """
        self._beside, self._quiet = (StepCost(row_classes, believed=believed) for _ in range(2))
        self._lately = StepCost(row_classes, LATELY)  # quiet steps too, the latest of which count for more
        self._gain, self._drafted = 1.0, 0
        self._lost, self._doubted = 0.0, False
        """Steps of plain decoding, and whether quiet steps were measured since that was first too much."""
        self._resting = 0
        self._next_rest = FIRST_REST
        self._to_probe = FIRST_PROBE
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
        self._drafted += 1
        gain, plain = committed / sessions, seconds / (self._lately if self._quiet.known else self._beside)(sessions)
        self._gain += max(GAIN_WEIGHT, 1 / self._drafted) * (gain / plain - self._gain)
        if self._quiet.known:
            self._lost, limit = max(self._lost + plain - gain, 0.0), LOST + LOST_ALONE / math.sqrt(sessions)
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
        self._resting = steps
        self._to_probe = max(OFTEN, round(RARELY * (1.0 - 1.0 / max(self._gain, 1.0))))
