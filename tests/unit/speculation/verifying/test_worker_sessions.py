"""One session at either worker, without models."""

from dataclasses import replace

import pytest

from speculation import digest as digests
from speculation.drafting.draft_session import (
    FIRST_CREDIT,
    IGNORED_BEFORE_REPUSH,
    LARGEST_SHARE,
    MAX_CREDIT,
    Candidate,
    DraftLimits,
    DraftSession,
    Sync,
)
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    FinishReason,
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
    Verification,
)
from speculation.trie import InsertResult, VerificationTree
from speculation.verifying.payoff import Answered, DraftLatencyEstimator
from speculation.verifying.target_session import SharedEstimators, TargetSession
from transport.codec import encode_to_worker

PROMPT = (1, 2, 3)
DRAFTS_ONLY = Speculation(sources=frozenset({Source.DRAFT}))


def added(session: TargetSession, proposal: Proposal) -> int:
    before = len(session.trie)
    session.propose(proposal)
    return len(session.trie) - before


def opened(end: int = 20, stop: frozenset[int] = frozenset(), speculation: Speculation = Speculation()) -> Open:
    return Open(SessionId(1), 4, PROMPT, Sampling(), Limits(end, stop), speculation)


def chain(*tokens: int, epoch: int = 4) -> Proposal:
    return Proposal(SessionId(1), epoch, len(PROMPT), digests.of(PROMPT), tokens, tuple(range(ANCHOR, len(tokens) - 1)))


def tree(*nodes: tuple[int, int, float]) -> Proposal:
    """Nodes as (token, parent, confidence)."""
    tokens, parents, confidence = zip(*nodes, strict=True)
    return Proposal(SessionId(1), 4, len(PROMPT), digests.of(PROMPT), tokens, parents, confidence)


def follow(session: TargetSession, *tokens: int) -> Proposal:
    """A chain that hangs from where the session's text ends now."""
    return replace(chain(*tokens), anchor_position=session.trie.position, anchor_digest=session.trie.digest)


def target(**kwargs) -> TargetSession:
    return TargetSession(opened(**kwargs), vocabulary=100)


def draft(lead: int = 8, hold: int = 1, enough: int = 20, **kwargs) -> DraftSession:
    return DraftSession(
        opened(**kwargs), vocabulary=100, limits=DraftLimits(lead=lead, hold=hold, enough=enough, hungry_width=4)
    )


def test_a_target_commits_accepted_drafts_and_its_own_token():
    session = target()
    session.propose(chain(4, 5, 6))
    assert session.begin_verification(session.candidates(8)).tokens == (4, 5, 6)
    commit = session.commit([4, 5, 9, 0])
    assert commit.kept == (0, 1)
    verification = commit.verification
    assert (verification.position, verification.tokens) == (3, (4, 5, 9))
    assert (verification.accepted, verification.offered) == (2, 3)
    assert verification.digest == digests.of((*PROMPT, 4, 5, 9))
    assert session.begin_verification(session.candidates(8)) == VerificationTree()


def test_proposals_that_arrive_during_a_step_count_for_the_next_one():
    session = target()
    session.begin_verification(session.candidates(8))
    session.propose(chain(4, 5))
    session.commit([4])
    assert session.begin_verification(session.candidates(8)).tokens == (5,)


def test_a_target_offers_nothing_beyond_the_limit_and_stops_there():
    session = target(end=5)
    session.propose(chain(4, 5, 6))
    assert session.begin_verification(session.candidates(8)).tokens == (4,)
    commit = session.commit([4, 5])
    assert commit.verification.tokens == (4, 5)
    assert commit.verification.finish is FinishReason.LENGTH


def test_a_stop_token_among_accepted_drafts_ends_the_session_there():
    session = target(stop=frozenset({5}))
    session.propose(chain(4, 5, 6))
    session.begin_verification(session.candidates(8))
    verification = session.commit([4, 5, 6, 7]).verification
    assert verification.tokens == (4, 5)
    assert verification.finish is FinishReason.STOP
    assert verification.accepted == 2


def test_other_epochs_and_switched_off_speculation_place_nothing():
    assert target().propose(chain(4, epoch=3)) is InsertResult.STALE
    off = target(speculation=Speculation(enabled=False))
    off.propose(chain(4))
    assert off.candidates(8) == VerificationTree()


def test_the_depth_a_request_allows_is_kept():
    session = target(speculation=Speculation(max_depth=1))
    session.propose(chain(4, 5, 6))
    assert session.begin_verification(session.candidates(8)).tokens == (4,)


def test_candidates_are_the_likeliest_subtree_and_offered_branch_by_branch():
    session = target()
    session.propose(tree((4, ANCHOR, 0.6), (5, ANCHOR, 0.3), (6, 0, 0.8), (7, 1, 0.5), (8, 2, 0.9)))
    best = session.candidates(4)
    assert best.tokens == (4, 6, 8, 5)
    assert best.odds == sorted(best.odds, reverse=True)
    offered = session.begin_verification(session.candidates(5))
    assert offered.tokens == (4, 6, 8, 5, 7)
    assert offered.parents == (ANCHOR, 0, 1, ANCHOR, 3)
    commit = session.commit([5, 0, 0, 0, 7, 9])
    assert commit.kept == (3, 4)
    assert commit.verification.tokens == (5, 7, 9)


def test_an_alternative_that_was_not_verified_survives_a_refusal():
    session = target()
    session.propose(tree((4, ANCHOR, 0.9), (5, ANCHOR, 0.05), (6, 1, 0.9)))
    session.begin_verification(session.candidates(1))
    commit = session.commit([5, 0])
    assert commit.verification.tokens == (5,)
    assert commit.verification.accepted == 0
    assert session.candidates(8).tokens == (6,)


def test_a_session_under_the_rejection_rule_keeps_one_chain_and_wants_q():
    session = target(speculation=Speculation(rule=Rule.REJECTION))
    assert session.propose(chain(4)) is InsertResult.MISSING_Q
    q = Support((4, 5), (SUPPORT_TOTAL - 1, 1))
    assert session.propose(replace(chain(4), q=(q,))) is InsertResult.PLACED
    assert session.propose(replace(chain(5), q=(q,))) is InsertResult.CUT
    assert session.candidates(8).nodes[0].q is q


def test_lookup_proposes_what_followed_before_and_is_told_apart():
    repeating = replace(opened(), tokens=(7, 8, 9, 5, 6, 7, 8, 9))
    session = TargetSession(repeating, vocabulary=100)
    found = session.candidates(3)
    assert found.tokens == (5, 6, 7)
    assert {node.source for node in found.nodes} == {Source.LOOKUP}
    without = replace(repeating, speculation=Speculation(sources=frozenset({Source.DRAFT})))
    assert TargetSession(without, vocabulary=100).candidates(3) == VerificationTree()


def test_drafters_are_told_to_stop_when_they_are_never_right_and_to_try_again():
    session = target(end=2000, speculation=Speculation(sources=frozenset({Source.DRAFT})))
    leads = []
    for _ in range(200):
        position, digest = session.trie.position, session.trie.digest
        session.propose(Proposal(SessionId(1), 4, position, digest, (4,), (ANCHOR,)))
        session.begin_verification(session.candidates(8))
        leads.append(session.commit([5, 5][: len(session._tree.nodes) + 1]).verification.lead)
    assert leads[0] > 0
    assert 0 in leads
    assert leads[leads.index(0) :].count(0) < len(leads[leads.index(0) :])


# -- misses ------------------------------------------------------------------------------------------------------------


def without_drafts(session: TargetSession, token: int, at: float | None = None) -> Verification:
    """A step that verifies nothing and commits ``token``."""
    session.begin_verification(VerificationTree())
    return session.commit([token], at).verification


def with_drafts(session: TargetSession, *drawn: int, at: float | None = None) -> Verification:
    """A step that verifies a draft less than what is drawn."""
    tree = session.begin_verification(session.candidates(len(drawn) - 1))
    assert len(tree.nodes) == len(drawn) - 1
    return session.commit(drawn, at).verification


def share_by(draft_latency: DraftLatencyEstimator, seconds: float, length: int = 1) -> float:
    """Believed chance of a path of this length within so many seconds of a commit."""
    return [moment[1][length - 1] for moment in draft_latency.moments(0.0) if moment[0] <= seconds][-1]


def test_drafts_are_timed_from_the_commit_that_they_answer():
    session = target(speculation=DRAFTS_ONLY)
    without_drafts(session, 4, at=1.000)
    assert session.answered == Answered(1.000, position=4)
    first, answer = session.answered, follow(session, 5, 6, 7)
    without_drafts(session, 5, at=1.030)
    session.propose(answer, at=1.005)  # it came during the step, and is looked at after it
    assert first.reached == pytest.approx([0.005] * 3)
    assert share_by(session.draft_latency, 0.010) == 0.0  # not learned before it is over
    with_drafts(session, 6, 7, 9, at=1.060)
    assert share_by(session.draft_latency, 0.010, length=3) == pytest.approx(0.1)
    assert share_by(session.draft_latency, 0.010, length=4) == share_by(session.draft_latency, 0.004) == 0.0
    assert session.answered == Answered(1.060, position=8)


def test_what_comes_after_the_next_commit_answers_that_one():
    """As far as it reaches beyond."""
    session = target(speculation=DRAFTS_ONLY)
    without_drafts(session, 4, at=1.000)
    late = follow(session, 5, 6, 7)
    without_drafts(session, 5, at=1.030)
    session.propose(late, at=1.032)
    assert session.answered is not None
    assert session.answered.reached == pytest.approx([0.002] * 2)


def test_drafts_from_before_both_commits_answer_none():
    session = target(speculation=DRAFTS_ONLY)
    without_drafts(session, 4, at=1.000)
    session.propose(follow(session, 5, 6), at=0.999)
    assert session.answered == Answered(1.000, position=4)


def test_requests_without_drafts_teach_nothing_of_when_drafts_come():
    shared = SharedEstimators()
    drafted, plain = (
        TargetSession(replace(opened(end=50), speculation=wanted), vocabulary=100, shared_estimators=shared)
        for wanted in (DRAFTS_ONLY, Speculation(sources=frozenset()))
    )
    without_drafts(drafted, 4, at=1.000)
    answer = follow(drafted, 5, 6, 7)
    drafted.propose(answer, at=1.005)
    without_drafts(drafted, 5, at=1.030)
    without_drafts(drafted, 6, at=1.060)
    known = share_by(shared.draft_latency, 0.010)
    assert known > 0.0
    for step in range(9):
        without_drafts(plain, 4, at=2.0 + step)
    assert plain.answered is None
    assert share_by(shared.draft_latency, 0.010) == known


def test_what_lookup_finds_at_once_says_nothing_of_when_drafts_come():
    session = TargetSession(replace(opened(end=50), tokens=(7, 8, 9, 5, 6, 7, 8, 9, 5)), vocabulary=100)
    without_drafts(session, 6, at=1.000)
    found = session.begin_verification(session.candidates(2))
    assert {node.source for node in found.nodes} == {Source.LOOKUP}
    session.commit([99, 99, 99], 1.030)
    assert session.answered == Answered(1.030, position=session.trie.position)
    session.begin_verification(VerificationTree())
    session.commit([8], 1.060)
    assert share_by(session.draft_latency, 0.010) == 0.0


# -- drafting ----------------------------------------------------------------------------------------------------------


def grow(session: DraftSession, *tokens: int) -> list[Proposal]:
    """Draft a chain, pushing after every token."""
    proposals = []
    for token in tokens:
        (node, *_) = session.frontier()
        assert session.expand(node, [Candidate(token, 0.9)]) == 1
        proposals += session.pushes()
    return proposals


def wire_bytes(proposal: Proposal) -> int:
    """Its size, and its place in the frame."""
    return len(encode_to_worker(proposal)) + 2


def test_a_drafter_runs_ahead_until_its_lead_is_spent():
    session = draft(lead=3)
    proposals = grow(session, 4, 5, 6)
    assert session.frontier() == []
    assert [proposal.anchor_position for proposal in proposals] == [3, 4, 5]
    assert proposals[2].anchor_digest == digests.of((*PROMPT, 4, 5))


def test_a_target_without_drafts_is_given_the_likeliest_chain_first():
    """What is expanded besides takes its time; there is some once the target has drafts to verify."""
    session = DraftSession(opened(), vocabulary=100, limits=DraftLimits(hold=1))
    session.expand(session.trie.root, [Candidate(4, 0.6), Candidate(5, 0.3)])
    assert [node.token for node in session.frontier()] == [4]
    assert session.pushes()
    assert [node.token for node in session.frontier()] == [4, 5]


def test_the_likeliest_places_come_first_and_hopeless_ones_not_at_all():
    session = draft()
    (root,) = session.frontier()
    assert session.expand(root, [Candidate(4, 0.5), Candidate(5, 0.4), Candidate(6, 0.001)]) == 2
    assert [node.token for node in session.frontier()] == [4, 5]
    session.expand(session.frontier()[0], [Candidate(7, 0.5)])
    assert [node.token for node in session.frontier()] == [5, 7]
    (proposal,) = session.pushes()
    assert (proposal.tokens, proposal.parents) == ((4, 5, 7), (ANCHOR, ANCHOR, 0))


def test_the_first_choice_is_drafted_however_doubtful():
    session = draft()
    (root,) = session.frontier()
    assert session.expand(root, [Candidate(4, 0.0001), Candidate(5, 0.0001)]) == 1
    assert session.frontier() == []  # and nothing beyond it


def test_pushes_wait_for_each_other_unless_the_target_has_nothing():
    session = draft(lead=24, hold=2, enough=6)
    sizes = []
    for token in range(10, 22):
        (node, *_) = session.frontier()
        session.expand(node, [Candidate(token, 0.9)])
        sizes.append(sum(len(proposal.tokens) for proposal in session.pushes()))
    assert sizes == [1, 0, 2, 0, 2, 0, 2, 0, 0, 0, 4, 0]  # at once, every two steps, and every four from six ahead


def test_fewer_steps_are_held_back_while_the_target_has_hardly_any_drafts():
    session = draft(lead=24, hold=4, enough=8)
    sizes = []
    for token in range(10, 24):
        (node, *_) = session.frontier()
        session.expand(node, [Candidate(token, 0.95)])
        sizes.append(sum(len(proposal.tokens) for proposal in session.pushes()))
    assert sizes == [1, 0, 2, 0, 2, 0, 0, 0, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("behind", [(9,), (5, 6), (5, 9), (5, 6, 7)])
def test_under_the_rejection_rule_no_token_waits_for_those_behind_it(schedule, behind):
    """9 ends the text, and after 6 and 7 the drafter has no idea. A token that leaves later then is left out more."""
    speculation = replace(DRAFTS_ONLY, rule=Rule.REJECTION, schedule=schedule, max_depth=6)
    session = draft(lead=24, hold=4, stop=frozenset({9}), speculation=speculation)
    sent: list[int] = []
    for token in (4, *behind):
        (node,) = session.frontier()
        flat = token in (6, 7)
        weights = (SUPPORT_TOTAL // 64,) * 64 if flat else (SUPPORT_TOTAL,)
        q = Support(tuple(range(64)) if flat else (token,), weights)
        session.expand(node, [Candidate(token, q.peak, q)])
        (proposal,) = session.pushes()
        sent += proposal.tokens
    assert sent == [4, *behind]


def test_a_target_that_ran_out_is_answered_with_the_verification_itself():
    """What is drafted but held back is needed now, and nothing more has to be computed for it."""
    drafting, verifying = draft(lead=24, hold=4), target()
    for proposal in grow(drafting, 4, 5, 6, 7):
        verifying.propose(proposal)
    drafting.verified(with_drafts(verifying, 4, 5, 6))
    assert len(verifying.trie) == 0
    (proposal,) = drafting.pushes()
    assert added(verifying, proposal) == 1
    assert proposal.tokens == (7,)
    assert drafting.pushes() == []


def test_a_target_that_has_drafts_is_not_sent_more_for_every_verification():
    drafting, verifying = draft(lead=24, hold=4), target()
    for proposal in grow(drafting, 4, 5, 6, 7, 8, 9):
        verifying.propose(proposal)
    drafting.verified(without_drafts(verifying, 4))
    assert [node.token for node in verifying.trie] == [5, 6, 7, 8]
    assert [node.token for node in drafting.trie] == [5, 6, 7, 8, 9]
    assert drafting.pushes() == []


@pytest.mark.parametrize(("starved", "share"), [(True, 1.0), (False, LARGEST_SHARE)])
def test_a_push_leaves_half_of_the_savings_for_later_unless_the_target_has_nothing(starved, share):
    limits = DraftLimits(children=8, width=8, min_weight=0.0, hold=1)
    session = DraftSession(opened(), vocabulary=10**6, limits=limits)
    savings = FIRST_CREDIT * limits.bytes_a_token
    if not starved:
        session.expand(session.trie.root, [Candidate(99, 0.1)])
        savings -= sum(map(wire_bytes, session.pushes()))
    while frontier := session.frontier():
        for node in frontier:
            session.expand(node, [Candidate(token, 0.12) for token in range(10**5, 10**5 + 8)])
    size = sum(map(wire_bytes, session.pushes()))
    assert 0.9 * share * savings < size <= share * savings


def test_no_more_is_saved_up_than_the_most():
    limits = DraftLimits(children=8, width=8, min_weight=0.0, hold=1, bytes_a_token=2.0)
    session = DraftSession(opened(end=10**4), vocabulary=10**6, limits=limits)
    for position in range(len(PROMPT), 1000):
        digest = digests.of((*PROMPT, *[9] * (position - len(PROMPT) + 1)))
        session.verified(Verification(SessionId(1), 4, position, (9,), digest))
    while frontier := session.frontier():
        for node in frontier:
            session.expand(node, [Candidate(token, 0.12) for token in range(10**5, 10**5 + 8)])
    size = sum(map(wire_bytes, session.pushes()))
    assert 0.9 * 2 * MAX_CREDIT < size <= 2 * MAX_CREDIT


def test_pushes_keep_to_the_bytes_that_committed_tokens_earn_and_the_likeliest_go_first():
    session = DraftSession(
        opened(end=1000), vocabulary=10**6, limits=DraftLimits(nodes=10**4, lead=10**3, hold=1, min_weight=0.0, width=8)
    )
    sent, position, rounds = 0, len(PROMPT), 60
    for _ in range(rounds):
        for step in range(8):
            for rank, node in enumerate(session.frontier()):
                tokens = range(1000 * step + 10 * rank, 1000 * step + 10 * rank + 3)
                session.expand(node, [Candidate(token, 0.5 / (1 + i)) for i, token in enumerate(tokens)])
            for proposal in session.pushes():
                sent += wire_bytes(proposal)
        tokens = (*session.tokens[len(PROMPT) :], 999_999)  # never what was drafted
        digest = digests.of((*PROMPT, *tokens))
        session.verified(Verification(SessionId(1), 4, position, (999_999,), digest, 0, 1))
        position += 1
    assert 0.5 * 58 * rounds < sent <= 58 * (rounds + FIRST_CREDIT)


# -- alternatives that come back -----------------------------------------------------------------------------------


def doubtful(session: DraftSession) -> list[Proposal]:
    """Draft 4, 5, 6 with even odds, and 7 in place of 6, too unlikely so far ahead; return what is sent."""
    proposals = []
    for candidates in ([Candidate(4, 0.3)], [Candidate(5, 0.3)], [Candidate(6, 0.5), Candidate(7, 0.1)]):
        (node, *_) = session.frontier()
        assert session.expand(node, candidates) == 1
        proposals += session.pushes()
    return proposals


def test_an_alternative_too_unlikely_far_ahead_is_drafted_when_the_text_comes_near():
    drafting, verifying = draft(), target(speculation=DRAFTS_ONLY)
    for proposal in doubtful(drafting):
        verifying.propose(proposal)
    drafting.verified(without_drafts(verifying, 4))
    assert [node.token for node in drafting.trie] == [5, 6, 7]
    (proposal,) = drafting.pushes()
    assert added(verifying, proposal) == 1
    place = drafting.trie.root.children[5].children[7]
    assert place in drafting.frontier()
    assert drafting.trie.root.children[5] not in drafting.frontier()
    assert drafting.expand(place, [Candidate(8, 0.9)]) == 1
    for proposal in drafting.pushes():
        assert added(verifying, proposal) == 1
    verification = with_drafts(verifying, 5, 7, 0, 8, 9)  # of 5, 6, 7, 8, the target wants 5, 7, 8
    assert verification.tokens == (5, 7, 8, 9)
    assert drafting.verified(verification) is Sync.ADVANCED
    assert drafting.tokens == verifying.tokens


def test_an_alternative_that_is_hopeless_near_the_text_too_stays_away():
    drafting, verifying = draft(), target()
    (root,) = drafting.frontier()
    drafting.expand(root, [Candidate(4, 0.9)])
    drafting.expand(root.children[4], [Candidate(5, 0.9), Candidate(6, 0.001)])
    drafting.verified(without_drafts(verifying, 4))
    assert [node.token for node in drafting.trie] == [5]


def test_places_that_found_no_room_for_their_drafts_get_them_when_there_is_some_and_are_not_drafted_again():
    limits = DraftLimits(nodes=4, hold=1, hungry_width=4)
    drafting, verifying = DraftSession(opened(), vocabulary=100, limits=limits), target(speculation=DRAFTS_ONLY)
    (root,) = drafting.frontier()
    drafting.expand(root, [Candidate(4, 0.9)])
    drafting.expand(root.children[4], [Candidate(5, 0.5), Candidate(6, 0.4)])
    first, second = drafting.frontier()
    assert drafting.expand(first, [Candidate(7, 0.9)]) == 1
    assert drafting.expand(second, [Candidate(8, 0.9)]) == 0  # expanded in the same step; the trie is full
    for proposal in drafting.pushes():
        verifying.propose(proposal)
    drafting.verified(without_drafts(verifying, 4))
    assert second.children[8] in drafting.trie
    assert drafting.frontier() == []  # full again
    for proposal in drafting.pushes():
        assert added(verifying, proposal) == 1
    drafting.verified(without_drafts(verifying, 6))
    assert [node.token for node in drafting.frontier()] == [8]


def test_a_place_without_room_that_becomes_the_end_of_the_text_is_not_drafted_again():
    limits = DraftLimits(nodes=3, hold=1, hungry_width=4)
    drafting, verifying = DraftSession(opened(), vocabulary=100, limits=limits), target(speculation=DRAFTS_ONLY)
    (root,) = drafting.frontier()
    drafting.expand(root, [Candidate(4, 0.5), Candidate(5, 0.4)])
    first, second = drafting.frontier()
    assert drafting.expand(first, [Candidate(6, 0.9)]) == 1
    assert drafting.expand(second, [Candidate(7, 0.9)]) == 0
    drafting.verified(without_drafts(verifying, 5))
    assert [node.token for node in drafting.frontier()] == [7]
    (proposal,) = drafting.pushes()
    assert added(verifying, proposal) == 1


def test_an_alternative_that_comes_back_while_lost_drafts_are_sent_again_is_sent_too():
    drafting, verifying = draft(lead=12), target(speculation=DRAFTS_ONLY)
    grow(drafting, *range(10, 10 + IGNORED_BEFORE_REPUSH - 1))
    doubtful(drafting)  # all lost on the way
    for token in range(10, 10 + IGNORED_BEFORE_REPUSH - 1):
        drafting.verified(without_drafts(verifying, token))
        assert drafting.pushes() == []
    drafting.verified(without_drafts(verifying, 4))
    assert [node.token for node in drafting.trie] == [5, 6, 7]
    (again,) = drafting.pushes()
    assert added(verifying, again) == 3


# -- what is sent, and what a verification leaves ------------------------------------------------------------------


def test_new_nodes_at_several_places_make_one_proposal_if_they_are_near():
    session = draft()
    (root,) = session.frontier()
    session.expand(root, [Candidate(4, 0.5), Candidate(5, 0.4)])
    session.pushes()
    for node, token in zip(session.frontier(), (6, 7), strict=True):
        session.expand(node, [Candidate(token, 0.9)])
    (proposal,) = session.pushes()
    assert proposal.anchor_position == len(PROMPT)
    assert (proposal.tokens, proposal.parents) == ((4, 5, 6, 7), (ANCHOR, ANCHOR, 0, 1))
    knows, new = target(), target()
    knows.propose(tree((4, ANCHOR, 0.5), (5, ANCHOR, 0.4)))
    assert (added(knows, proposal), added(new, proposal)) == (2, 4)


def test_new_nodes_far_from_each_other_make_a_proposal_each():
    session = draft(lead=16, hold=1)
    (root,) = session.frontier()
    session.expand(root, [Candidate(4, 0.9), Candidate(5, 0.5)])
    tip = session.trie.root.children[4]
    for token in range(10, 20):
        session.expand(tip, [Candidate(token, 0.9)])
        tip = tip.children[token]
    session.pushes()
    session.expand(tip, [Candidate(6, 0.9)])
    session.expand(session.trie.root.children[5], [Candidate(7, 0.9)])
    pushed = {(proposal.anchor_position, proposal.tokens) for proposal in session.pushes()}
    assert pushed == {(tip.end, (6,)), (len(PROMPT) + 1, (7,))}


def test_what_a_drafter_pushes_is_understood_by_a_target():
    drafting, verifying = draft(), target()
    for proposal in grow(drafting, 4, 5, 6):
        assert added(verifying, proposal) == 1
    assert verifying.begin_verification(verifying.candidates(8)).tokens == (4, 5, 6)
    verification = verifying.commit([4, 5, 6, 7]).verification
    assert drafting.verified(verification) is Sync.ADVANCED
    assert drafting.tokens == verifying.tokens
    assert drafting.frontier() == [drafting.trie.root]


def test_a_drafter_keeps_what_survives_a_verification():
    drafting, verifying = draft(), target()
    for proposal in grow(drafting, 4, 5, 6):
        verifying.propose(proposal)
    verifying.begin_verification(verifying.candidates(1))
    drafting.verified(verifying.commit([4, 5]).verification)
    assert [node.token for node in drafting.trie] == [6]


def test_a_drafter_ignores_repeats_and_says_when_it_lost_the_thread():
    drafting, verifying = draft(), target()
    verifying.begin_verification(verifying.candidates(0))
    first = verifying.commit([4]).verification
    verifying.begin_verification(verifying.candidates(0))
    second = verifying.commit([5]).verification
    assert drafting.verified(second) is Sync.LOST
    assert drafting.verified(first) is Sync.ADVANCED
    assert drafting.verified(first) is Sync.IGNORED


def test_drafts_that_the_target_seems_not_to_have_are_sent_again():
    drafting, verifying = draft(lead=12), target()
    grow(drafting, *range(4, 4 + IGNORED_BEFORE_REPUSH + 3))  # all lost on the way
    pushed = []
    for token in range(4, 4 + IGNORED_BEFORE_REPUSH):
        assert pushed == []
        verifying.begin_verification(verifying.candidates(8))
        drafting.verified(verifying.commit([token]).verification)
        pushed = drafting.pushes()
    (again,) = pushed
    assert added(verifying, again) == len(again.tokens) == 3


def test_only_what_is_ignored_again_and_again_is_sent_again_and_less_and_less_often():
    limits = DraftLimits(lead=40, hold=1, hungry_width=4, bytes_a_token=1e4)
    drafting, text = DraftSession(opened(end=100), vocabulary=100, limits=limits), PROMPT
    grow(drafting, *range(4, 34))

    def sent_again_after(*offers: int) -> list[int]:
        nonlocal text
        found = []
        for number, offered in enumerate(offers, start=1):
            position, text = len(text), (*text, len(text) + 1)
            drafting.verified(Verification(SessionId(1), 4, position, text[-1:], digests.of(text), offered, offered))
            found += [number] * bool(drafting.pushes())
        return found

    assert sent_again_after(0, 0, 1, 0, 0, 0) == [6]
    assert sent_again_after(0, 0, 0, 0, 0, 1, 0, 0, 0) == [9]
    assert sent_again_after(0, 0, 0, 0, 0, 0) == [6]


@pytest.mark.parametrize("sent", [4, 5])
def test_what_is_drafted_anew_has_room_beside_what_was_sent(sent):
    limits = DraftLimits(lead=8, nodes=8, hold=1, hungry_width=4)
    session = DraftSession(opened(), vocabulary=100, limits=limits)
    grow(session, *range(4, 4 + sent))
    session.redraft()
    assert len(session.trie) == (4 if sent == 4 else 0)
    assert session.frontier() == [session.trie.root]


def test_what_was_sent_is_gone_through_again_where_all_is_drafted_anew():
    session = draft()
    grow(session, 4, 5)
    session.redraft()
    for node in list(session.trie):
        assert session.frontier() == [node.above]
        assert session.expand(node.above, [Candidate(node.token, 0.9)]) == 0
    assert [node.token for node in session.frontier()] == [5]


def test_what_hangs_from_places_that_were_not_gone_through_again_waits_for_them():
    session = draft()
    grow(session, 4, 5, 6)
    session.redraft()
    for token in (4, 5):
        session.expand(session.frontier()[0], [Candidate(token, 0.9)])
    session.verified(Verification(SessionId(1), 4, 3, (4,), digests.of((*PROMPT, 4)), 1, 1))
    assert [node.token for node in session.frontier()] == [5]


def test_a_place_that_is_drafted_anew_has_room_for_others_beside_what_was_sent():
    session = draft()
    for tokens in ((4, 5, 6), (7, 8, 9)):
        candidates = [Candidate(token, sure) for token, sure in zip(tokens, (0.2, 0.15, 0.1), strict=True)]
        assert session.expand(session.trie.root, candidates) == 3
        session.pushes()
        session.redraft()


@pytest.mark.parametrize("rule", Rule)
def test_what_a_draft_costs_counts_where_no_choice_among_drafts_changes_the_law(rule):
    session = draft(speculation=Speculation(rule=rule))
    q = Support((4, 5), (SUPPORT_TOTAL // 2, SUPPORT_TOTAL // 2)) if rule is Rule.REJECTION else None
    session.expand(session.trie.root, [Candidate(4, 0.5, q)])
    session.price = 0.9
    assert bool(session.frontier()) is (rule is Rule.REJECTION)


def test_what_was_not_sent_is_forgotten_where_all_is_drafted_anew():
    session = draft(hold=4)
    assert len(grow(session, 4, 5)) == 1
    session.redraft()
    assert [node.token for node in session.trie] == [4]
    assert session.pushes() == []


def test_what_is_drafted_anew_is_sent_at_once_whatever_was_sent_before():
    session = draft(hold=4)
    grow(session, 4)
    session.redraft()
    session.expand(session.trie.root, [Candidate(6, 0.9)])
    assert len(session.pushes()) == 1


def test_under_the_rejection_rule_what_was_drawn_is_not_drawn_anew():
    session = draft(speculation=Speculation(rule=Rule.REJECTION))
    q = Support((4, 5), (SUPPORT_TOTAL // 2, SUPPORT_TOTAL // 2))
    session.expand(session.trie.root, [Candidate(4, 0.5, q)])
    session.redraft()
    (proposal,) = session.pushes()
    assert proposal.tokens == (4,)


def test_nothing_is_drafted_after_a_stop_token_or_past_the_end():
    session = draft(stop=frozenset({5}))
    grow(session, 4, 5)
    assert session.frontier() == []
    session = draft(end=5)
    grow(session, 4)
    assert session.frontier() == []


def test_a_sequential_drafter_sends_a_whole_draft_and_starts_over_with_each_verification():
    speculation = Speculation(max_depth=3, schedule=Schedule.SEQUENTIAL)
    drafting, verifying = draft(speculation=speculation), target(speculation=speculation)
    (proposal,) = grow(drafting, 4, 5, 6)
    assert proposal.tokens == (4, 5, 6)
    assert drafting.frontier() == []
    verifying.propose(proposal)
    verifying.begin_verification(verifying.candidates(2))
    drafting.verified(verifying.commit([4, 5, 6]).verification)
    assert len(drafting.trie) == 0
    assert drafting.frontier() == [drafting.trie.root]


def test_a_parallel_drafter_goes_on_but_drops_all_at_a_refusal():
    speculation = Speculation(max_depth=2, schedule=Schedule.PARALLEL)
    drafting, verifying = draft(speculation=speculation), target(speculation=speculation)
    for proposal in grow(drafting, 4, 5, 6):
        verifying.propose(proposal)
    verifying.begin_verification(verifying.candidates(2))
    drafting.verified(verifying.commit([4, 9, 0]).verification)
    assert len(drafting.trie) == 0


def test_a_drafter_obeys_the_lead_it_is_told():
    session = draft()
    grow(session, 4, 5)
    told = Verification(SessionId(1), 4, 3, (4,), digests.of((*PROMPT, 4)), 1, 1, lead=0)
    session.verified(told)
    assert session.frontier() == []
    session.verified(replace(told, position=4, tokens=(5,), digest=digests.of((*PROMPT, 4, 5)), lead=2))
    assert session.frontier() == [session.trie.root]


def test_a_drafter_that_begins_at_rest_waits_for_the_first_verification_where_these_say_how_far_to_run():
    session = DraftSession(opened(), vocabulary=100, resting=True)
    assert session.frontier() == []
    session.verified(Verification(SessionId(1), 4, 3, (4,), digests.of((*PROMPT, 4)), 0, 0, lead=2))
    assert session.frontier() == [session.trie.root]
    in_turn = Speculation(max_depth=2, schedule=Schedule.SEQUENTIAL)
    assert DraftSession(opened(speculation=in_turn), vocabulary=100, resting=True).frontier()


def test_what_a_resting_drafter_has_pushed_is_not_pushed_again_because_it_is_ignored():
    session = draft()
    grow(session, 4, 5, 6, 7, 8, 9)
    tokens = PROMPT
    for token in (4, 5, 6, 7, 8):
        tokens = (*tokens, token)
        session.verified(Verification(SessionId(1), 4, len(tokens) - 1, (token,), digests.of(tokens), 0, 0, lead=0))
        assert session.pushes() == []
