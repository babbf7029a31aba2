"""What a target does next: which drafts each session verifies, and who waits for some.

The one place where a target's decisions about speculation are taken; the verify loop and the simulator both ask it.
Pure: it sees sessions and times, never a model. The rule itself is in :mod:`speculation.verifying.budget`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from speculation.frozen import frozen
from speculation.messages import Open
from speculation.sources.registry import LOOKUP, LocalSource, local_sources
from speculation.trie import VerificationTree
from speculation.verifying.budget import StepCost, choose, kept_if_drafted_again, worth_waiting
from speculation.verifying.calibration import Tally
from speculation.verifying.payoff import SETTLE, Payoff
from speculation.verifying.target_session import READ_AT_ONCE, SharedEstimators, TargetSession

LONGEST_WAIT = 1.0
"""Share of a plain step beyond which drafts are not waited for."""
WAITS_PRIOR, WAITS_MEMORY, FORGIVEN = 4.0, 30.0, 200.0
"""Drafts that waits are taken to have brought as expected; waits after which one counts for a third; steps without any
after which all that is known of them does, so that it is tried again."""
DEAF_AFTER = 0.5
"""Seconds that the baseline schedules wait for a drafter before they go on without."""


@frozen
class Asked:
    """A session that can commit in this step, and how many drafts there is room for."""

    session: TargetSession
    drafts: int


@frozen
class Plan:
    """``trees[i]`` is what the i-th session asked about verifies; None: it sits this step out, until ``wake``."""

    trees: tuple[VerificationTree | None, ...]
    wake: float | None = None
    """When to decide again if no message comes before; None if nobody waits."""


class Planner:
    """Decides for all sessions of a worker, and learns what steps cost."""

    def __init__(
        self,
        *,
        adaptive: bool = True,
        beside: bool = True,
        lookup: tuple[int, int] = LOOKUP,
        row_classes: Sequence[int] = (),
        believed: Mapping[int, float] = {},
    ) -> None:
        """``adaptive``: verify what pays; else all there is room for, and wait for nothing.

        ``beside``: drafters work during the target's steps, so that drafts may be waited for, and steps without any
        drafter be tried now and then; not so where one takes turns with the target, in its process.
        ``row_classes``: numbers of rows that steps are padded to, ``believed``: seconds of a step by its tokens, until
        such a step is measured (:class:`~speculation.verifying.budget.StepCost`).
        """
        self.shared_estimators = SharedEstimators()
        self._adaptive, self._beside, self._lookup = adaptive, beside, lookup
        self._payoffs: defaultdict[int, Payoff] = defaultdict(partial(Payoff, row_classes, believed))
        """By size class of the batch."""
        self._quiet_for = SETTLE  # steps since a drafter was last at work for a session of the step
        self._follow = beside
        """Whether drafters run ahead of all sessions of the step, none of which takes turns with them."""
        self._asked_at: float | None = None  # when the step to come was first asked about
        self._began: float | None = None  # when the step under way began
        self._ended: float | None = None  # when the step before ended, if the one to come follows on it
        self._waits = Tally()  # of waits for drafts made again: drafts gained, and expected to be
        self._hoped: tuple[float, float] | None = None
        """During such a wait: the drafts that would have been kept without it, and with it."""
        self._branched = False  # whether drafts branch in the step planned last

    def session(self, opened: Open, vocabulary: int, more: Sequence[LocalSource] = ()) -> TargetSession:
        """Start a session that learns from the others. ``more``: draft sources that the worker has made for it."""
        sources = (*local_sources(opened, self._lookup), *more)
        return TargetSession(opened, vocabulary=vocabulary, shared_estimators=self.shared_estimators, sources=sources)

    def cost(self, sessions: int) -> StepCost:
        """Seconds of a step over this many sessions, by its tokens, as long as drafters work or rest as they do now."""
        return self._payoff(sessions).cost(quiet=self._quiet)

    def _payoff(self, sessions: int) -> Payoff:
        return self._payoffs[sessions.bit_length()]

    @property
    def _quiet(self) -> bool:
        return self._quiet_for >= SETTLE

    def observe(
        self, sessions: int, tokens: int, seconds: float, committed: int | None = None, drafting: float = 0.0
    ) -> None:
        """Learn from the step planned last, which decoded ``sessions`` sessions and prefilled nothing.

        ``committed``: tokens of all together; None: nothing is learned of whether drafting pays. ``drafting``: seconds
        that it took besides, to draft in turn. What the host takes between two steps counts as part of the second,
        unless it waits on purpose.
        """
        payoff, between, waited = self._payoff(sessions), 0.0, 0.0
        if self._began is not None and self._asked_at is not None:
            if self._ended is not None:
                between = min(max(self._asked_at - self._ended, 0.0), seconds)
            waited = self._began - self._asked_at
            self._ended = self._began + seconds + drafting
            self._asked_at = self._began = None
        payoff.observe(tokens, seconds + between, quiet=self._quiet, branched=self._branched)
        if committed is None or not self._adaptive or not self._follow:
            return
        if not payoff.drafting:
            payoff.rested()
        elif not self._quiet:
            payoff.drafted(sessions, committed, waited + between + seconds)

    def plan(self, asked: Sequence[Asked], now: float, prefilled: int = 0, room: int | None = None) -> Plan:
        """Settle the next step, which computes ``prefilled`` tokens besides; ``room``: most drafts of all together."""
        asked = self._bounded(asked, room, probing=self._note(asked, now, room).probing)
        self.shared_estimators.unread = READ_AT_ONCE
        candidates = [one.session.candidates(one.drafts) for one in asked]
        waits = [self._baseline_wait(one, tree, now) for one, tree in zip(asked, candidates, strict=True)]
        going = [i for i, until in enumerate(waits) if until is None]
        trees = self._chosen([asked[i] for i in going], [candidates[i] for i in going], prefilled, room)
        chosen = dict(zip(going, trees, strict=True))
        if len(asked) == 1 and chosen and not prefilled:
            waits[0] = self._wait(asked[0], chosen[0], now)
            if waits[0] is not None:
                chosen = {}
        wakes = [until for until in waits if until is not None]
        return Plan(self._begin(asked, chosen, now), min(wakes, default=None))

    def _begin(
        self, asked: Sequence[Asked], chosen: Mapping[int, VerificationTree], now: float
    ) -> tuple[VerificationTree | None, ...]:
        """Have those sessions verify what is chosen for them; a step begins ``now`` if there are any."""
        begun = {i: asked[i].session.begin_verification(tree) for i, tree in chosen.items()}
        self._branched = any(tree.branched for tree in begun.values())
        if begun:
            self._began = now
        return tuple(begun.get(i) for i in range(len(asked)))

    def _note(self, asked: Sequence[Asked], now: float, room: int | None) -> Payoff:
        """Note when a step is asked for and who is at work beside it; tell sessions whether drafters shall be."""
        if self._began is not None or not asked:
            # The step before read prompts, so that nothing was learned from it, or there is none to come.
            self._ended = self._asked_at = self._began = None
        if self._asked_at is None:
            self._asked_at = now
            at_work = any(one.session.expects_drafts for one in asked)
            self._quiet_for = 0 if at_work else self._quiet_for + 1
            self._follow = self._beside and all(one.session.ahead for one in asked)
        payoff, shared = self._payoff(len(asked)), self.shared_estimators
        shared.drafting_pays = (payoff.drafting and room != 0) or not self._adaptive
        shared.break_even = payoff.break_even(len(asked))
        return payoff

    def _bounded(self, asked: Sequence[Asked], room: int | None, *, probing: bool) -> Sequence[Asked]:
        """The same with no more room for drafts than each may use; none for those that ``probing`` computes without."""
        if probing:
            asked = [Asked(one.session, 0) if one.session.ahead else one for one in asked]
        if room is not None:
            even = room // max(len(asked), 1)
            limits = [even if one.session.chains or not self._adaptive else room for one in asked]
            asked = [
                one if one.drafts <= limit else Asked(one.session, limit)
                for one, limit in zip(asked, limits, strict=True)
            ]
        return asked

    def _chosen(
        self, asked: Sequence[Asked], candidates: Sequence[VerificationTree], prefilled: int, room: int | None
    ) -> list[VerificationTree]:
        """What of its candidates each session verifies."""
        chosen = list(candidates)
        if not self._adaptive or not any(tree.nodes for tree in candidates):
            return chosen
        cost, certain = self.cost(len(asked)), len(asked) + prefilled
        base = certain
        by_gain = [i for i, one in enumerate(asked) if not one.session.chains]
        for i, one in enumerate(asked):
            if one.session.ahead and one.session.chains:
                max_drafts = min(one.drafts, one.session.deepest)
                chosen[i] = chosen[i].first(_first_below(chosen[i].odds, _price(len(asked), certain, max_drafts, cost)))
                base += len(chosen[i].nodes)
        taken = sum(len(chosen[i].nodes) for i, one in enumerate(asked) if one.session.chains)
        left = None if room is None else room - taken
        others = cost(certain) - cost(len(asked))
        best = _best([candidates[i] for i in by_gain], base, cost, left, others)
        for i, tree in zip(by_gain, best, strict=True):
            chosen[i] = tree
        return chosen

    def _wait(self, asked: Asked, tree: VerificationTree, now: float) -> float | None:
        """Until when a session that computes alone does better to wait for drafts than to go on with ``tree``."""
        session = asked.session
        answered = session.answered
        if not self._adaptive or not self._beside or not session.ahead:
            return None
        if answered is None or not session.throughput.rate:
            return None
        cost, at_hand = self.cost(1), sum(tree.odds)
        later = self._later(asked, tree, now - answered.at, len(answered.reached))
        rate = max(session.throughput.rate, 1.0 / cost(1))  # plain decoding is always to be had
        seconds = worth_waiting(rate, (at_hand, len(tree.nodes)), later, cost)
        self._learn_wait(at_hand, next((hoped for moment, hoped, _ in later if moment == seconds), None))
        return None if seconds is None else now + seconds

    def _later(self, asked: Asked, tree: VerificationTree, age: float, come: int) -> list[tuple[float, float, float]]:
        """Moments to wait for, in seconds from now, ``age`` seconds after a commit: drafts kept, and there, by then.

        What steps have committed is no bound here: many drafts that they verified were made before the last outcome.
        """
        session, plain, at_hand = asked.session, self.cost(1)(1), sum(tree.odds)
        deepest, agreement = min(asked.drafts, session.deepest), session.lookahead_policy.agreement
        trust, found = self._waits.factor(WAITS_PRIOR), list[tuple[float, float, float]]()
        if come >= deepest:
            return found
        for seconds, shares in session.draft_latency.moments(age, come):
            if age + seconds <= LONGEST_WAIT * plain:
                hoped, drafts = kept_if_drafted_again(shares[:deepest], agreement, come, tree.odds)
                found.append((seconds, at_hand + trust * (hoped - at_hand), drafts))
        return found

    def _learn_wait(self, at_hand: float, hoped: float | None) -> None:
        """Compare what a wait that is over has brought with what was hoped for; None: the step begins."""
        if hoped is not None:
            self._hoped = self._hoped or (at_hand, hoped)
        elif self._hoped is not None:
            before, wanted = self._hoped
            self._waits.add(max(at_hand - before, 0.0), wanted - before, WAITS_MEMORY)
            self._hoped = None
        else:
            self._waits.add(0.0, 0.0, FORGIVEN)

    @staticmethod
    def _baseline_wait(asked: Asked, tree: VerificationTree, now: float) -> float | None:
        """The baseline schedules verify a whole draft or nothing, and wait for it."""
        session = asked.session
        if session.ahead or not session.opened.speculation.enabled or session.in_vain:
            return None
        wanted = min(session.deepest, asked.drafts)
        if wanted <= 0:
            return None
        if len(tree.nodes) >= wanted or (tree.nodes and tree.nodes[-1].token in session.opened.limits.stop_tokens):
            return None
        deaf_at = session.waits_since(now) + DEAF_AFTER
        if now < deaf_at:
            return deaf_at
        session.in_vain = True
        return None


def _best(
    candidates: Sequence[VerificationTree], base: int, cost: StepCost, max_drafts: int | None, others: float
) -> list[VerificationTree]:
    """The first part of each session's candidates, or of the chain among them, that makes the most of a second.

    ``others``: seconds that the step takes for prompts. They are spent in any case, here or later: drafts that shared
    them out among more tokens would seem to pay, and prompts would take longer.
    """

    def part(trees: Sequence[VerificationTree], shape: Callable[[int], float]) -> list[VerificationTree]:
        counts = choose([tree.odds for tree in trees], base, lambda tokens: shape(tokens) - others, max_drafts)
        return [tree.first(count) for tree, count in zip(trees, counts, strict=True)]

    def rate(trees: Sequence[VerificationTree]) -> float:
        tokens = base + sum(len(tree.nodes) for tree in trees)
        branched = any(tree.branched for tree in trees)
        return (len(trees) + sum(sum(tree.odds) for tree in trees)) / (cost(tokens, branched=branched) - others)

    if not (cost.knows_branched and any(tree.branched for tree in candidates)):
        return part(candidates, cost)
    chains = part([tree.chain() for tree in candidates], cost)
    if not cost.knows_chains:
        return chains  # which shows what these take
    return max(chains, part(candidates, partial(cost, branched=True)), key=rate)


def _price(sessions: int, certain: int, max_drafts: int, cost: Callable[[int], float]) -> float:
    """Tokens that a draft token must promise to be worth its time, where a step has ``certain`` tokens, prompts' too.

    ``max_drafts``: how many drafts there is room for. Not how many there are, here or in other sessions: that depends
    on what was drawn, so the price would, and by it whether a drawn token is offered.
    """
    return sessions / cost(sessions) * (cost(certain + max_drafts) - cost(certain)) / max(max_drafts, 1)


def _first_below(odds: Sequence[float], price: float) -> int:
    """How many to take under the rejection rule: up to the first that is too dear.

    Not the best prefix: that would leave out a drawn token because of what follows it, hence because of its value, and
    such a choice biases the text (:mod:`speculation.acceptance`).
    """
    return next((i for i, chance in enumerate(odds) if chance < price), len(odds))
