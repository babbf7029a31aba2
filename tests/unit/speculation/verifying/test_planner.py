"""Decisions of a target over its sessions, without models or clocks."""

from dataclasses import replace

import pytest

from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Limits,
    Open,
    Proposal,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Support,
)
from speculation.trie import VerificationTree
from speculation.verifying.payoff import FIRST_PROBE, PROBE, SETTLE, Answered
from speculation.verifying.planner import DEAF_AFTER, Asked, Planner
from speculation.verifying.target_session import TargetSession

PROMPT = (1, 2, 3)
DRAFT = Speculation(sources=frozenset({Source.DRAFT}))


def session(planner: Planner, speculation: Speculation = DRAFT) -> TargetSession:
    return planner.session(Open(SessionId(1), 1, PROMPT, Sampling(), Limits(500), speculation), 100)


def push(to: TargetSession, *tokens: int, confidence: float = 0.9, at: float = 0.0) -> None:
    anchor, parents = to.trie.position, tuple(range(ANCHOR, len(tokens) - 1))
    to.propose(Proposal(SessionId(1), 1, anchor, to.trie.digest, tokens, parents, (confidence,) * len(tokens)), at)


def planner(slope: float = 0.001, step: float = 0.03) -> Planner:
    """One that has measured its steps: ``step`` seconds, and ``slope`` more for every further token."""
    made = Planner()
    for sessions in (1, 2, 4):
        for tokens in range(1, 33):
            made.observe(sessions, tokens, step + slope * (tokens - 1))
    return made


def step(made: Planner, one: TargetSession, now: float, drawn: list[int] | None = None) -> float:
    """Plan, verify and commit as the target drew; return when the step ended."""
    (tree,) = made.plan([Asked(one, 8)], now).trees
    assert tree is not None
    now += made.cost(1)(1 + len(tree.nodes))
    one.commit((drawn or []) + [9] * (1 + len(tree.nodes) - len(drawn or [])), now)
    return now


def test_what_pays_is_verified_and_nothing_where_nothing_pays():
    cheap, dear = planner(slope=0.0001), planner(slope=0.06)
    for made, count in ((cheap, 3), (dear, 0)):
        one = session(made)
        push(one, 4, 5, 6)
        (tree,) = made.plan([Asked(one, 8)], 0.0).trees
        assert tree is not None
        assert len(tree.nodes) == count


def test_drafts_pay_no_more_beside_prompts_than_they_do_alone():
    """Prompts take their time in any case: more tokens that share it are no gain."""
    for slope, count in ((0.0001, 3), (0.06, 0)):
        made = planner(slope)
        one = session(made)
        push(one, 4, 5, 6)
        (tree,) = made.plan([Asked(one, 8)], 0.0, prefilled=16).trees
        assert tree is not None
        assert len(tree.nodes) == count


def test_a_session_without_drafts_goes_on_at_once_when_nothing_is_known_of_arrivals():
    made = planner()
    plan = made.plan([Asked(session(made), 8)], 0.0)
    assert plan.wake is None
    assert plan.trees[0] is not None


def missed(made: Planner, one: TargetSession, delay: float) -> float:
    """Bring a session to where its drafts come ``delay`` after every miss, four at a time; return the time."""
    now = step(made, one, 0.0)
    push(one, *range(10, 20), at=now)
    now = step(made, one, now, list(range(10, 19)))
    now = step(made, one, now, [19])  # with drafts at hand: what its time is worth
    assert one.throughput.rate > 0
    for _ in range(40):
        assert one.answered is not None
        assert one.answered.at == now
        push(one, 4, 5, 6, 7, at=now + delay)
        now = step(made, one, now + delay, [4, 5, 6, 7])
    return now


def test_a_lone_session_waits_for_drafts_that_come_soon_and_not_for_late_ones():
    for delay, waits in ((0.002, True), (0.5, False)):
        made = planner()
        one = session(made)
        now = missed(made, one, delay)
        plan = made.plan([Asked(one, 8)], now)
        assert (plan.wake is not None) is waits
        assert (plan.trees[0] is None) is waits
        if plan.wake is not None:
            assert now < plan.wake < now + 0.01


def test_a_wait_ends_with_the_drafts_or_in_vain_and_is_not_repeated_for_ever():
    made = planner()
    one = session(made)
    now = missed(made, one, 0.002)
    wake = made.plan([Asked(one, 8)], now).wake
    assert wake is not None
    waits: list[bool] = []
    for _ in range(20):  # the drafter is dead now
        plan = made.plan([Asked(one, 8)], now)
        waits.append(plan.wake is not None)
        while plan.wake is not None:
            now = plan.wake
            plan = made.plan([Asked(one, 8)], now)
        assert plan.trees[0] is not None
        now += 0.03
        one.commit([9], now)
    assert waits[0] and sum(waits) < 8 and not any(waits[-8:])


def test_nobody_waits_when_others_compute():
    made = planner()
    one = session(made)
    now = missed(made, one, 0.002)
    plan = made.plan([Asked(one, 8), Asked(session(made), 8)], now)
    assert plan.wake is None
    assert None not in plan.trees


@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PARALLEL])
def test_the_baselines_verify_a_whole_draft_or_nothing(schedule):
    made = planner(slope=0.06)  # where the rule would verify none
    one = session(made, replace(DRAFT, schedule=schedule, max_depth=3))
    assert made.plan([Asked(one, 8)], 1.0).trees == (None,)
    push(one, 4, 5)
    plan = made.plan([Asked(one, 8)], 1.1)
    assert plan.trees == (None,)
    assert plan.wake == 1.0 + DEAF_AFTER
    push(one, 4, 5, 6)
    (tree,) = made.plan([Asked(one, 8)], 1.2).trees
    assert tree is not None
    assert tree.tokens == (4, 5, 6)


def test_a_baseline_without_a_drafter_goes_on_alone():
    made = planner()
    one = session(made, replace(DRAFT, schedule=Schedule.SEQUENTIAL, max_depth=3))
    other = session(made)
    plan = made.plan([Asked(one, 8), Asked(other, 8)], 0.0)
    assert plan.trees[0] is None  # and the other is not held up
    assert plan.trees[1] is not None
    (tree,) = made.plan([Asked(one, 8)], DEAF_AFTER).trees
    assert tree is not None
    one.commit([9], DEAF_AFTER)
    assert made.plan([Asked(one, 8)], DEAF_AFTER).trees != (None,)


def test_under_the_rejection_rule_a_token_is_not_left_out_because_of_what_follows():
    """The best prefix does look ahead: a dear second token is paid for by sure ones behind it, or not at all."""
    made = Planner()
    for tokens in range(1, 33):
        made.observe(1, tokens, 0.03 if tokens == 1 else 0.04)
    q = Support((4,), (SUPPORT_TOTAL,))
    counts: dict[Rule, list[int]] = {Rule.COUPLED: [], Rule.REJECTION: []}
    for rule in Rule:
        for follows in (0.99, 0.01):
            one = session(made, replace(DRAFT, rule=rule))
            proposal = Proposal(
                SessionId(1), 1, 3, one.trie.digest, (4,) * 4, (ANCHOR, 0, 1, 2), (0.15, *[follows] * 3)
            )
            one.propose(replace(proposal, q=(q,) * 4) if rule is Rule.REJECTION else proposal)
            (tree,) = made.plan([Asked(one, 4)], 0.0).trees
            assert tree is not None
            counts[rule].append(len(tree.nodes))
    assert counts[Rule.COUPLED] == [4, 0]
    assert min(counts[Rule.REJECTION]) >= 1


def drawn(to: TargetSession, *tokens: int) -> None:
    """Drafts from a q that is as sure of two tokens."""
    half = SUPPORT_TOTAL // 2
    q = tuple(Support((token, 99), (half, half)) for token in tokens)
    chain = tuple(range(ANCHOR, len(tokens) - 1))
    to.propose(Proposal(SessionId(1), 1, to.trie.position, to.trie.digest, tokens, chain, q=q))


def test_under_the_rejection_rule_a_token_is_not_left_out_because_of_how_many_follow():
    """A stop token has none behind it, here or in a session of the same seed, which draws the same."""
    made = Planner()
    for sessions in (1, 2):
        for tokens, seconds in ((1, 0.020), (2, 0.032), (9, 0.034), (10, 0.034), (18, 0.050)):
            made.observe(sessions, tokens, seconds)
    for alone in (True, False):
        offered: set[bool] = set()
        for drafts in ((4,), (5, 6, 7, 8, 9, 10, 11, 12)):
            asked = [Asked(session(made, replace(DRAFT, rule=Rule.REJECTION)), 8) for _ in range(2 - alone)]
            for one in asked:
                drawn(one.session, *drafts)
            tree = made.plan(asked, 0.0).trees[-1]
            assert tree is not None
            offered.add(bool(tree.nodes))
        assert len(offered) == 1


def answered(after: float, depth: int = 8) -> tuple[Planner, TargetSession]:
    """A session whose drafts, ``depth`` tokens, always came so many seconds after a miss, at its next miss at 1.0."""
    made = planner(slope=0.0001, step=0.035)
    one = session(made)
    one.throughput.observe(4, 0.140)  # time is cheap, drafts are worth a wait of any length that is allowed
    for _ in range(50):
        one.draft_latency.observe(Answered(0.0, 0, [after] * depth))
    one.begin_verification(one.candidates(0))
    one.commit([9], 1.0)
    return made, one


def test_what_takes_longer_than_a_step_is_not_waited_for():
    """It comes during the next one anyway."""
    made, one = answered(after=0.038)
    assert made.plan([Asked(one, 8)], 1.0).wake is None
    made, one = answered(after=0.020)
    plan = made.plan([Asked(one, 8)], 1.0)
    assert plan.trees == (None,)
    assert plan.wake is not None
    assert 1.020 < plan.wake < 1.035


def test_a_wait_over_and_over_again_for_the_same_moment_does_not_happen():
    """Even on a clock that wakes it on the dot."""
    made, one = answered(after=0.003)
    wakes = [1.0]
    while (wake := made.plan([Asked(one, 8)], wakes[-1]).wake) is not None:
        assert wake > wakes[-1]
        wakes.append(wake)
    assert len(wakes) == 2


class DraftedAgain:
    """A session that has a weak draft at each commit, and is drafted again after it."""

    def __init__(self, after: float, *, weak: float = 0.3, right: bool = True) -> None:
        """``after``: seconds from a commit to the new drafts, which are ``right`` or never; inf: none come."""
        self.planner = planner(slope=0.0001)
        self.session = session(self.planner)
        self.after, self.weak, self.right, self.now = after, weak, right, 0.0
        self.waits: list[float] = []
        """What each step was held for."""

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        made, one, began = self.planner, self.session, self.now
        position, digest = one.trie.position, one.trie.digest
        tokens = tuple(self._text(position + i) if self.right else 5 for i in range(4))
        anew = Proposal(SessionId(1), 1, position, digest, tokens, (ANCHOR, 0, 1, 2), (0.9,) * 4)
        push(one, 4, confidence=self.weak, at=began - 0.001)
        plan = made.plan([Asked(one, 8)], began)
        now, fresh = began, began + self.after
        while plan.wake is not None:
            if now < fresh <= plan.wake:
                now = fresh
                one.propose(anew, fresh)
            else:
                now = plan.wake
            plan = made.plan([Asked(one, 8)], now)
        self.waits.append(now - began)
        (tree,) = plan.trees
        assert tree is not None
        self.now = now + made.cost(1)(1 + len(tree.nodes))
        one.commit([self._text(position), *(self._text(node.end) for node in tree.nodes)], self.now)
        if now < fresh < self.now:  # it comes while the step is under way, and is heard of after it
            one.propose(anew, fresh)

    @staticmethod
    def _text(position: int) -> int:
        return 10 + position % 80


def test_new_drafts_are_waited_for_where_those_at_hand_are_worth_less():
    served = DraftedAgain(after=0.003)
    served.steps(60)
    assert sum(0 < wait < 0.004 for wait in served.waits[-20:]) >= 8


@pytest.mark.parametrize(
    "served",
    [DraftedAgain(after=0.040), DraftedAgain(after=0.003, right=False), DraftedAgain(after=float("inf"))],
    ids=["slow", "lying", "dead"],
)
def test_new_drafts_that_are_late_wrong_or_never_come_are_not_waited_for(served):
    served.steps(60)
    assert not any(served.waits[-30:])
    assert max(served.waits) <= served.planner.cost(1)(1)


def test_what_steps_have_committed_does_not_bound_what_drafts_made_again_are_expected_to_bring():
    """They verified drafts that were made before the last outcome."""
    served = DraftedAgain(after=0.003)
    served.steps(20)
    one, made = served.session, served.planner
    expected = made._later(Asked(one, 8), VerificationTree(), 0.0, 0)
    assert max(kept for _, kept, _ in expected) > 1.0
    one.throughput.tokens = 1.01
    assert made._later(Asked(one, 8), VerificationTree(), 0.0, 0) == expected


def test_what_a_step_has_no_room_for_is_not_waited_for():
    """However deep the drafts that come: a session that may verify one token has all it can use in one at hand."""
    served = DraftedAgain(after=0.003)
    served.steps(20)
    one, made = served.session, served.planner
    (deep,), (shallow,) = (
        {round(drafts, 3) for _, _, drafts in made._later(Asked(one, count), VerificationTree(), 0.0, 0)[-1:]}
        for count in (8, 1)
    )
    assert deep > 3.0 and shallow <= 1.0
    assert made._later(Asked(one, 1), VerificationTree(), 0.0, 1) == []


def test_waits_that_have_brought_less_than_hoped_for_are_not_repeated():
    served = DraftedAgain(after=0.003)
    served.steps(60)
    assert any(served.waits[-4:])
    assert served.planner._waits.expected > 0.0
    for _ in range(50):
        served.planner._waits.add(0.0, 5.0, 30.0)
    served.steps(4)
    assert not any(served.waits[-4:])


def test_a_drafter_that_dies_is_waited_for_in_vain_a_few_times_and_not_for_long():
    served = DraftedAgain(after=0.003)
    served.steps(60)
    served.after = float("inf")
    served.steps(60)
    assert 0 < sum(wait > 0 for wait in served.waits[60:]) < 20
    assert max(served.waits) <= served.planner.cost(1)(1)
    assert not any(served.waits[-30:])


@pytest.mark.parametrize(
    "speculation",
    [
        replace(DRAFT, enabled=False),
        replace(DRAFT, sources=frozenset({Source.LOOKUP})),
    ],
)
def test_who_gets_no_drafts_waits_for_none(speculation):
    made = planner()
    missed(made, session(made), 0.002)
    one = session(made, speculation)
    now = step(made, one, 1.0)
    assert one.answered is None
    assert made.plan([Asked(one, 8)], now).wake is None


def test_the_room_for_drafts_goes_where_they_are_likeliest():
    made = planner(slope=0.0)
    sure, doubtful = session(made), session(made)
    push(sure, 4, 5, 6, 7, confidence=0.95)
    push(doubtful, 4, 5, 6, 7, confidence=0.3)
    plan = made.plan([Asked(sure, 8), Asked(doubtful, 8)], 0.0, room=4)
    assert [len(tree.nodes) for tree in plan.trees] == [4, 0]


def test_who_verifies_all_it_has_gets_an_even_part_of_the_room():
    made = Planner(adaptive=False)
    full, short = session(made), session(made)
    push(full, 4, 5, 6, 7)
    push(short, 4)
    plan = made.plan([Asked(full, 8), Asked(short, 8)], 0.0, room=5)
    assert [len(tree.nodes) for tree in plan.trees] == [2, 1]


# -- whether drafting pays ---------------------------------------------------------------------------------------------


class Served:
    """A session that is always drafted for, one token right or none, on a device that this slows down."""

    def __init__(
        self, right: bool, slower: float, *, adaptive: bool = True, beside: bool = True, rule: Rule = Rule.COUPLED
    ) -> None:
        self.planner = Planner(adaptive=adaptive, beside=beside)
        opened = Open(SessionId(1), 1, PROMPT, Sampling(), Limits(5000), replace(DRAFT, rule=rule))
        self.session = self.planner.session(opened, 100)
        self.right, self.slower, self.now = right, slower, 0.0
        self.leads: list[int | None] = []
        self.offered: list[int] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.leads[-1:] != [0]:
                push(self.session, 4)
            (tree,) = self.planner.plan([Asked(self.session, 8)], self.now).trees
            assert tree is not None
            quiet = self.leads[-SETTLE:] == [0] * SETTLE
            seconds = 0.01 if quiet else 0.01 * self.slower
            verification = self.session.commit(
                [4 if self.right else 5, 6][: 1 + len(tree.nodes)], self.now + seconds
            ).verification
            self.planner.observe(1, 1 + len(tree.nodes), seconds, len(verification.tokens))
            self.now += seconds + 0.001
            self.leads.append(verification.lead)
            self.offered.append(verification.offered)


def test_drafters_are_told_to_rest_during_a_probe_of_plain_steps():
    served = Served(right=True, slower=1.2)
    served.steps(FIRST_PROBE + PROBE + 2)
    assert 0 not in served.leads[:FIRST_PROBE] + served.leads[-2:]
    assert served.leads[FIRST_PROBE:-2] == [0] * PROBE
    assert served.offered[FIRST_PROBE:-2] == [0] * PROBE
    assert served.planner.cost(1)(1) == pytest.approx(0.013, rel=0.01), (
        "beside drafters again, and what the host took between"
    )


def test_all_drafters_rest_where_plain_decoding_is_faster():
    losing, winning = Served(right=False, slower=1.5), Served(right=True, slower=1.5)
    for served in (losing, winning):
        served.session.lookahead_policy.observe = lambda *_: None  # type: ignore[method-assign]
        served.steps(300)
    assert losing.leads[-1] == 0
    assert winning.leads[-1] != 0


def test_where_drafters_rest_those_of_new_sessions_are_told_to_as_well():
    losing = Served(right=False, slower=1.5)
    losing.session.lookahead_policy.observe = lambda *_: None  # type: ignore[method-assign]
    losing.steps(300)
    other = session(losing.planner)
    losing.planner.plan([Asked(other, 8)], losing.now)
    assert other.commit([7], losing.now).verification.lead == 0


@pytest.mark.parametrize("how", [{"adaptive": False}, {"beside": False}], ids=["without a budget", "in turn"])
def test_nothing_is_ever_probed_without_a_budget_by_gain_or_beside_a_drafter_in_turn(how: dict[str, bool]):
    served = Served(right=False, slower=1.5, **how)
    served.session.lookahead_policy.observe = lambda *_: None  # type: ignore[method-assign]
    served.steps(300)
    assert 0 not in served.leads


def test_sessions_without_drafts_say_nothing_of_drafters():
    made = planner()
    one, now = session(made, replace(DRAFT, enabled=False)), 0.0
    for _ in range(40):
        now = step(made, one, now)
    other = session(made)
    for _ in range(15):
        now = step(made, other, now)
    assert other.expects_drafts, "it has not learned anything yet that would have its drafter rest"


def test_how_often_drafts_are_right_is_learned_of_those_made_at_the_target_too():
    made = planner()
    one = session(made, replace(DRAFT, sources=frozenset({Source.EAGLE})))
    before = one.lookahead_policy.agreement
    anchor, digest = one.trie.position, one.trie.digest
    one.propose(Proposal(SessionId(1), 1, anchor, digest, (4,), (ANCHOR,), (0.9,), source=Source.EAGLE))
    step(made, one, 0.0, [5])
    assert one.lookahead_policy.agreement < before


def test_drafters_rest_while_there_is_no_room_for_drafts():
    made = planner()
    one = session(made)
    (tree,) = made.plan([Asked(one, 8)], 0.0, room=0).trees
    assert tree is not None
    assert one.commit([9], 0.03).verification.lead == 0


def test_drafters_of_the_baseline_schedules_are_not_judged():
    made = Planner()
    one = session(made, replace(DRAFT, schedule=Schedule.SEQUENTIAL, max_depth=1))
    for now in range(2 * FIRST_PROBE):
        push(one, 4)
        (tree,) = made.plan([Asked(one, 8)], float(now)).trees
        assert tree is not None
        one.commit([5, 6], now + 0.5)
        made.observe(1, 2, 0.5, 1)
        assert made.shared_estimators.drafting_pays


def test_a_step_that_reads_prompts_and_a_pause_say_nothing_of_the_time_between_steps():
    made = Planner()
    one = session(made, replace(DRAFT, enabled=False))

    def step_at(now: float, prefilled: int = 0) -> None:
        made.plan([Asked(one, 8)], now, prefilled)
        one.commit([9], now + 0.01)
        if not prefilled:
            made.observe(1, 1, 0.01, 1)

    step_at(0.0)
    step_at(5.0, prefilled=40)
    step_at(5.06)
    made.plan([], 5.07)
    step_at(5.075)
    assert made.cost(1)(1) == pytest.approx(0.01)
    step_at(5.087)
    assert 0.01 < made.cost(1)(1) < 0.012, "the host took two milliseconds before the last"


def test_what_drafting_in_turn_takes_is_no_part_of_the_next_step():
    made = Planner(beside=False)
    one = session(made, replace(DRAFT, enabled=False))
    for number in range(20):
        now = 0.018 * number  # seven milliseconds of drafts, ten of the step, one between
        made.plan([Asked(one, 8)], now)
        one.commit([9], now + 0.017)
        made.observe(1, 1, 0.01, 1, 0.007)
    assert made.cost(1)(1) == pytest.approx(0.011, rel=0.01)


def test_in_a_class_of_rows_all_that_has_room_is_verified():
    made = Planner(row_classes=(16, 32))
    for _ in range(3):
        made.observe(1, 1, 0.03)
    one = session(made)
    push(one, *range(4, 24), confidence=0.97)
    (tree,) = made.plan([Asked(one, 15)], 0.0, room=15).trees
    assert tree is not None
    assert len(tree.nodes) == 15


def branched(made: Planner) -> TargetSession:
    """With a chain of three and second choices beside each, which are likely enough to be verified."""
    one = session(made)
    push(one, 4, 5, 6, confidence=0.6)
    tokens, parents = (14, 4, 15, 5, 16), (ANCHOR, ANCHOR, 1, 1, 3)
    odds = (0.35, 0.6, 0.35, 0.6, 0.35)
    one.propose(Proposal(SessionId(1), 1, one.trie.position, one.trie.digest, tokens, parents, odds), 0.0)
    return one


@pytest.mark.parametrize(("times", "taken"), [(1.0, 6), (1.05, 6), (3.0, 3)])
def test_a_tree_is_verified_where_that_is_worth_what_its_shape_costs(times, taken):
    made = planner(slope=0.0001)
    one = branched(made)
    (tree,) = made.plan([Asked(one, 8)], 0.0).trees
    assert tree is not None and tree.branched and len(tree.nodes) == 6, "nothing is known of trees"
    made.observe(1, 7, 0.0306 * times)
    (tree,) = made.plan([Asked(branched(made), 8)], 1.0).trees
    assert tree is not None and not tree.branched, "nothing is known of chains beside a drafter"
    made.observe(1, 4, 0.0303)
    (tree,) = made.plan([Asked(branched(made), 8)], 2.0).trees
    assert tree is not None
    assert len(tree.nodes) == taken
    assert tree.branched == (taken > 3)


def test_in_a_batch_one_tree_makes_the_step_a_dear_one():
    made = planner(slope=0.0001)
    made.plan([Asked(branched(made), 8)], 0.0)
    made.observe(2, 8, 0.09)
    made.plan([], 0.5)
    made.observe(2, 4, 0.0303)
    chain = session(made)
    push(chain, 4, 5, 6)
    trees = made.plan([Asked(branched(made), 8), Asked(chain, 8)], 1.0).trees
    assert [tree is not None and not tree.branched and len(tree.nodes) for tree in trees] == [3, 3]


def test_a_first_step_over_many_sessions_does_not_find_out_by_trying_what_drafts_cost():
    """Of 16 texts with four likely drafts each, where each further token costs as much as a plain one."""
    offered = []
    for believed in ({}, {1: 0.01, 16: 0.02, 64: 0.08}):
        made = Planner(believed=believed)
        asked = [Asked(session(made), 8) for _ in range(16)]
        for one in asked:
            push(one.session, 5, 6, 7, 8, confidence=0.7)
        offered.append(sum(len(tree.nodes) for tree in made.plan(asked, 0.0).trees if tree is not None))
    assert offered[0] >= 32 and offered[1] == 0
