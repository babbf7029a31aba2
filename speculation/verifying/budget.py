"""How many draft tokens a step verifies, and when to wait for some: expected tokens against measured time.

A step that computes ``n`` tokens takes ``T(n)`` seconds and commits one token for each session that decodes, plus every
draft token that is kept. Drafts are worth adding, likeliest first, as long as tokens per second go up:

    choose the m that maximises  (sessions + p_1 + ... + p_m) / T(base + m),   p_1 >= p_2 >= ...

with ``p_i`` the probability that the i-th draft token is kept together with everything above it. What prompts take of
``T`` is left out: it is spent in any case, and shared out among more tokens it would make drafts seem to pay. Both
sides are measured while serving: :class:`StepCost` learns ``T``, :mod:`speculation.verifying.calibration` what a
drafter's word is worth. Zero is a candidate like any other, so verification switches itself off where it does not pay.
What is known fades, so it is tried again later. A draft worker divides its own steps by the same rule, but for a few
places that it always expands (:func:`best_places`).

A session with few drafts may do better to wait for more than to compute a step now. Time has a price, the ``rate`` of
tokens a second that the session makes while it has drafts; so of all there is to do, take what maximises

    tokens gained  -  rate * seconds spent

over "now" and "at a later moment, with the drafts that are likely to have come by then" (:func:`worth_waiting`,
:func:`kept_if_drafted_again`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from speculation.trie import Node

Owner = TypeVar("Owner", bound=Hashable)


def rows_for(tokens: int, row_classes: Sequence[int]) -> int:
    """Rows that a step of ``tokens`` is computed with: the smallest of the ascending classes, if any holds so many."""
    at = bisect_left(row_classes, tokens)
    return row_classes[at] if at < len(row_classes) else tokens


def room_for_drafts(sessions: int, each: int, max_drafts: int, row_classes: Sequence[int] = ()) -> tuple[int, int]:
    """Room for drafts of one session and of all, where each may have ``each`` and all together ``max_drafts``.

    Where steps are padded to classes of rows, a session may fill the class after the one that it would need alone: a
    class more costs little and a text that is easy has drafts for it, which :class:`StepCost` and odds decide. What
    would be left empty of the class of all together may be had as well, by any session.
    """
    if each and rows_for(1 + each, row_classes) in row_classes:
        above = row_classes.index(rows_for(1 + each, row_classes)) + 1
        each = row_classes[min(above, len(row_classes) - 1)] - 1
    wanted = sessions * (1 + each)
    spare = rows_for(wanted, row_classes) - wanted if each else 0
    return min(each + spare, max_drafts), min(sessions * each + spare, max_drafts)


class StepCost:
    """``T(n)``: seconds of a step that computes ``n`` tokens, learned online; never falls with ``n``.

    Where steps are padded to classes of rows, ``T`` is a staircase, and a class is measured as one: what has room in
    the class that is paid for costs next to nothing (:data:`ROW`), whatever its shape. Elsewhere steps whose drafts
    branch may cost more than others of their size, and are measured apart.
    """

    SMOOTHING = 0.1
    """Weight of a new measurement, at least: the first few of a size count alike."""
    FADES = 128
    """Steps after which what is known of a size counts as much as one new measurement: the machine may have changed."""
    OUTLIER = 3.0
    """A step that took this many times longer than expected counts as that long only."""
    SLOPE = 0.02
    """Assumed cost of one more token, as a share of a step, beyond what was measured: low, so that it gets measured."""
    ROW = 0.0005
    """Assumed cost of one more token within a class, as a share of a step: what the host does for it. Keeps out what is
    next to hopeless."""
    CLASS = 0.1
    """Assumed cost of each further class beyond what was measured, as a share of a step."""
    LARGEST = 512
    """Larger steps are prefill and teach nothing about drafts."""
    MEMORY = 2000
    """Steps after which a size that did not occur again is forgotten, and so gets tried again."""
    DOUBTED = 128
    """The same of a size that was measured only once: what held up that one step may have been anything. Measured again
    it is believed. Not of the smallest, which the others are weighed against."""
    STALE = 4
    """Steps after which a size that did not occur again is taken to have changed as those that did: what was measured
    on a machine that was busy for a moment would keep it from ever being tried again."""

    def __init__(
        self, row_classes: Sequence[int] = (), smoothing: float = SMOOTHING, believed: Mapping[int, float] = {}
    ) -> None:
        """``row_classes``: numbers of rows that steps are padded to, ascending; empty: each costs what it computes.

        ``smoothing``: weight of a new measurement. ``believed``: seconds by tokens, until such a step is measured.
        """
        assert list(row_classes) == sorted(set(row_classes)), "classes of rows ascend"
        self._row_classes, self._smoothing = row_classes, smoothing
        self._branched: StepCost | None = None  # of steps whose drafts branch, once there was one
        self._branched_at = self._branched_times = 0  # also of steps doubted since
        self._measured = dict(believed)
        self._seen = dict.fromkeys(believed, 0)
        self._times = dict.fromkeys(believed, 0)  # how often each size was measured, also of those doubted since
        self._steps = 0
        self._sizes: list[int] = []
        self._costs: list[float] = []
        self._sort()

    def observe(self, tokens: int, seconds: float, *, branched: bool = False) -> None:
        """Learn from one step. ``branched``: whether its drafts were more than a chain for each session."""
        if not 0 < tokens <= self.LARGEST or seconds <= 0.0:
            return
        if branched and not self._row_classes:
            self._branched = self._branched or StepCost(smoothing=self._smoothing)
            self._branched.observe(tokens, seconds)
            self._branched_at = self._steps
            self._branched_times += 1
            return
        tokens = rows_for(tokens, self._row_classes)
        known = self._measured.get(tokens)
        if known is not None:
            age = self._steps - self._seen[tokens]
            weight = max(self._smoothing, 1 / (self._times[tokens] + 1), age / (age + self.FADES))
            seconds = known + weight * (min(seconds, self.OUTLIER * known) - known)
            self._carry_along(tokens, seconds / known)
        self._measured[tokens] = seconds
        self._times[tokens] = self._times.get(tokens, 0) + 1
        self._steps += 1
        self._seen[tokens] = self._steps
        self._forget()
        self._sort()

    def _forget(self) -> None:
        """Have sizes tried again that did not occur for long."""
        smallest = min(size for size in self._seen if self._times[size])
        for size, step in list(self._seen.items()):
            once = self._times[size] == 1 and size != smallest
            if step < self._steps - (self.DOUBTED if once else self.MEMORY):
                del self._measured[size], self._seen[size]
                if not once:
                    del self._times[size]
        once = self._branched_times == 1
        if self._branched is not None and self._steps > self._branched_at + (self.DOUBTED if once else self.MEMORY):
            self._branched = None
            self._branched_times = int(once)

    def _sort(self) -> None:
        self._sizes = sorted(self._measured)
        self._costs = rising([self._measured[size] for size in self._sizes], [1.0] * len(self._sizes))

    def _carry_along(self, tokens: int, change: float) -> None:
        """Have sizes that did not occur, or not of late, change as this one did, on an average of those that did."""
        late = {size for size, step in self._seen.items() if step > self._steps - self.STALE and self._times[size]}
        stale = [size for size in self._seen if size not in late and size != tokens]
        share = change ** (1 / (len(self._seen) - len(stale)))
        for size in stale:
            self._measured[size] *= share

    def __call__(self, tokens: int, *, branched: bool = False) -> float:
        """Expected seconds; between measured sizes on a straight line. 1 before anything was measured."""
        if self._branched is not None and not self._sizes:
            return self._branched(tokens)
        if self._branched is not None and branched:
            return max(self._branched(tokens), self(tokens))
        rows = rows_for(tokens, self._row_classes)
        return self._at(rows) * (1 + self.ROW * tokens if self._row_classes else 1.0)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return any(self._times.values()) or self._branched is not None

    @property
    def knows_branched(self) -> bool:
        """Whether steps whose drafts branch were measured apart."""
        return self._branched is not None

    @property
    def knows_chains(self) -> bool:
        """Whether steps whose drafts do not branch were measured; else others stand for them."""
        return bool(self._sizes)

    def measured_up_to(self, tokens: int) -> bool:
        """Whether a step of at most so many tokens was measured: else the cost of larger ones stands for it."""
        rows = rows_for(tokens, self._row_classes)
        return any(self._times[size] and size <= rows for size in self._measured)

    def _at(self, tokens: int) -> float:
        if not self._sizes:
            return 1.0 + self.SLOPE * tokens
        sizes, costs = self._sizes, self._costs
        at = bisect_left(sizes, tokens)
        if at == len(sizes):
            classes = bisect_right(self._row_classes, tokens) - bisect_right(self._row_classes, sizes[-1])
            beyond = self.CLASS * classes if classes else self.SLOPE * (tokens - sizes[-1])
            return costs[-1] * (1 + beyond)
        if at == 0 or sizes[at] == tokens:
            return costs[at]
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return costs[at - 1] + share * (costs[at] - costs[at - 1])


def rising(costs: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest sequence that never falls (pool adjacent violators); ``weights``: how much each entry counts."""
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, entries
    for cost, weight in zip(costs, weights, strict=True):
        total, count = cost * weight, 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            above, more, size = pools.pop()
            total, weight, count = total + above, weight + more, count + size
        pools.append((total, weight, count))
    return [total / weight for total, weight, count in pools for _ in range(count)]


def choose(
    odds: Sequence[Sequence[float]],
    base: int,
    cost: Callable[[int], float],
    max_drafts: int | None = None,
    certain: float | None = None,
) -> list[int]:
    """How many of each session's draft tokens to verify, ``max_drafts`` of them together.

    ``odds[s]`` are session ``s``'s path probabilities, falling; ``base`` is what the step computes anyway. Sessions
    without drafts have an empty entry. ``certain``: what is gained anyway; None: one token for each session.
    """
    ranked = sorted(((p, s) for s, row in enumerate(odds) for p in row), key=lambda pair: -pair[0])[:max_drafts]
    chosen = [0] * len(odds)
    gained = len(odds) if certain is None else certain
    for _, session in ranked[: best_prefix([p for p, _ in ranked], gained, base, cost)]:
        chosen[session] += 1
    return chosen


def best_prefix(gains: Sequence[float], certain: float, base: int, cost: Callable[[int], float]) -> int:
    """How many of the falling ``gains``, one for each token added to ``base``, make the most of a second.

    ``certain`` is gained by the ``base`` tokens; with none of these either, something is always worth doing.
    """
    best_rate, best_count = (certain / cost(base), 0) if certain else (-1.0, 0)
    expected = certain
    for count, gain in enumerate(gains, start=1):
        expected += gain
        rate = expected / cost(base + count)
        if rate > best_rate:
            best_rate, best_count = rate, count
    return best_count


CHEAP_PLACES = 8
"""A draft step of so few tokens takes about as long as one of a single token: it is bound by reading the weights."""


def best_places(
    frontiers: Mapping[Owner, Sequence[Node]],
    max_places: int,
    num_scheduled_tokens: int,
    certain: int,
    cost: Callable[[int], float],
) -> dict[Owner, list[Node]]:
    """The places that a draft step expands: of all frontiers the likeliest, as many as pay, ``max_places`` at most.

    A few always: deepening the likeliest branch alone would make more of this step, but at the next refusal its
    alternatives must have a continuation, and there is time for them only now. The step feeds ``num_scheduled_tokens``
    tokens of ``certain`` other sessions besides.
    """
    places = [(owner, node) for owner, frontier in frontiers.items() for node in frontier]
    places = sorted(places, key=lambda place: -place[1].weight)[:max_places]
    pay = best_prefix([node.weight for _, node in places], certain, num_scheduled_tokens, cost)
    chosen: dict[Owner, list[Node]] = {}
    for owner, node in places[: max(pay, CHEAP_PLACES)]:
        chosen.setdefault(owner, []).append(node)
    return chosen


def kept_if_drafted_again(
    shares: Sequence[float], agreement: float, come: int, at_hand: Sequence[float]
) -> tuple[float, float]:
    """How many drafts are expected to be kept, and to be there, at a moment; drafting begins anew with each commit.

    ``shares``: chance of a path of 1, 2, ... tokens by then, of which ``come`` have come since the last commit;
    ``agreement``: that one draft token is kept. ``at_hand``: odds of the drafts there are. What comes stands in for
    those from before; what comes behind drafts that came already counts as far as the text gets there.
    """
    further = shares[come:]
    kept = sum(share * agreement**k for k, share in enumerate(further, start=1))
    if come:
        reached = min(sum(at_hand) / come, agreement**come)
        return sum(at_hand) + reached * kept, len(at_hand) + sum(further)
    still = 1.0 - shares[0]
    return kept + still * sum(at_hand), sum(further) + still * len(at_hand)


def worth_waiting(
    rate: float,
    now: tuple[float, float],
    later: Sequence[tuple[float, float, float]],
    cost: Callable[[int], float],
) -> float | None:
    """Seconds to wait for drafts at most, or None for a step at once.

    ``rate`` is in tokens a second. ``now``: drafts expected to be kept of those at hand, and how many these are;
    ``later``: seconds from now, and the same by then.
    """
    best, chosen = now[0] - rate * cost(1 + round(now[1])), None
    for seconds, kept, drafts in later:
        value = kept - rate * (seconds + cost(1 + round(drafts)))
        if value > best:
            best, chosen = value, seconds
    return chosen
