"""One session at either worker, without models."""

from dataclasses import replace

from speculation import digest as digests
from speculation.draft_session import MOST_CREDIT, PATIENCE, Candidate, DraftLimits, DraftSession, Sync
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
from speculation.target_session import TargetSession
from speculation.trie import Fate, Offer
from transport.codec import encode_to_worker

PROMPT = (1, 2, 3)


def opened(end: int = 20, stop: frozenset[int] = frozenset(), speculation: Speculation = Speculation()) -> Open:
    return Open(SessionId(1), 4, PROMPT, Sampling(), Limits(end, stop), speculation)


def chain(*tokens: int, epoch: int = 4) -> Proposal:
    return Proposal(SessionId(1), epoch, len(PROMPT), digests.of(PROMPT), tokens, tuple(range(ANCHOR, len(tokens) - 1)))


def tree(*nodes: tuple[int, int, float]) -> Proposal:
    """Nodes as (token, parent, confidence)."""
    tokens, parents, confidence = zip(*nodes, strict=True)
    return Proposal(SessionId(1), 4, len(PROMPT), digests.of(PROMPT), tokens, parents, confidence)


def target(**kwargs) -> TargetSession:
    return TargetSession(opened(**kwargs), vocabulary=100)


def draft(lead: int = 8, hold: int = 1, enough: int = 20, **kwargs) -> DraftSession:
    return DraftSession(opened(**kwargs), vocabulary=100, limits=DraftLimits(lead=lead, hold=hold, enough=enough))


def test_a_target_commits_accepted_drafts_and_its_own_token():
    session = target()
    session.propose(chain(4, 5, 6))
    assert session.offer(session.candidates(8)).tokens == (4, 5, 6)
    commit = session.commit([4, 5, 9, 0])
    assert commit.kept == (0, 1)
    verification = commit.verification
    assert (verification.position, verification.tokens) == (3, (4, 5, 9))
    assert (verification.accepted, verification.offered) == (2, 3)
    assert verification.digest == digests.of((*PROMPT, 4, 5, 9))
    assert session.offer(session.candidates(8)) == Offer()


def test_proposals_that_arrive_during_a_step_count_for_the_next_one():
    session = target()
    session.offer(session.candidates(8))
    session.propose(chain(4, 5))
    session.commit([4])
    assert session.offer(session.candidates(8)).tokens == (5,)


def test_a_target_offers_nothing_beyond_the_limit_and_stops_there():
    session = target(end=5)
    session.propose(chain(4, 5, 6))
    assert session.offer(session.candidates(8)).tokens == (4,)
    commit = session.commit([4, 5])
    assert commit.verification.tokens == (4, 5)
    assert commit.verification.finish is FinishReason.LENGTH


def test_a_stop_token_among_accepted_drafts_ends_the_session_there():
    session = target(stop=frozenset({5}))
    session.propose(chain(4, 5, 6))
    session.offer(session.candidates(8))
    verification = session.commit([4, 5, 6, 7]).verification
    assert verification.tokens == (4, 5)
    assert verification.finish is FinishReason.STOP
    assert verification.accepted == 2


def test_other_epochs_and_switched_off_speculation_place_nothing():
    assert target().propose(chain(4, epoch=3)).fate is Fate.STALE
    off = target(speculation=Speculation(enabled=False))
    off.propose(chain(4))
    assert off.candidates(8) == Offer()


def test_the_depth_a_request_allows_is_kept():
    session = target(speculation=Speculation(max_depth=1))
    session.propose(chain(4, 5, 6))
    assert session.offer(session.candidates(8)).tokens == (4,)


def test_candidates_are_the_likeliest_subtree_and_offered_branch_by_branch():
    session = target()
    session.propose(tree((4, ANCHOR, 0.6), (5, ANCHOR, 0.3), (6, 0, 0.8), (7, 1, 0.5), (8, 2, 0.9)))
    best = session.candidates(4)
    assert best.tokens == (4, 6, 8, 5)
    assert best.odds == sorted(best.odds, reverse=True)
    offered = session.offer(session.candidates(5))
    assert offered.tokens == (4, 6, 8, 5, 7)
    assert offered.parents == (ANCHOR, 0, 1, ANCHOR, 3)
    commit = session.commit([5, 0, 0, 0, 7, 9])
    assert commit.kept == (3, 4)
    assert commit.verification.tokens == (5, 7, 9)


def test_an_alternative_that_was_not_verified_survives_a_refusal():
    session = target()
    session.propose(tree((4, ANCHOR, 0.9), (5, ANCHOR, 0.05), (6, 1, 0.9)))
    session.offer(session.candidates(1))
    commit = session.commit([5, 0])
    assert commit.verification.tokens == (5,)
    assert commit.verification.accepted == 0
    assert session.candidates(8).tokens == (6,)


def test_a_session_under_the_rejection_rule_keeps_one_chain_and_wants_q():
    session = target(speculation=Speculation(rule=Rule.REJECTION))
    assert session.propose(chain(4)).fate is Fate.MISSING_Q
    q = Support((4, 5), (SUPPORT_TOTAL - 1, 1))
    assert session.propose(replace(chain(4), q=(q,))).fate is Fate.PLACED
    assert session.propose(replace(chain(5), q=(q,))).fate is Fate.CUT
    assert session.candidates(8).nodes[0].q is q


def test_lookup_proposes_what_followed_before_and_is_told_apart():
    repeating = replace(opened(), tokens=(7, 8, 9, 5, 6, 7, 8, 9))
    session = TargetSession(repeating, vocabulary=100)
    found = session.candidates(3)
    assert found.tokens == (5, 6, 7)
    assert {node.source for node in found.nodes} == {Source.LOOKUP}
    without = replace(repeating, speculation=Speculation(sources=frozenset({Source.DRAFT})))
    assert TargetSession(without, vocabulary=100).candidates(3) == Offer()


def test_drafters_are_told_to_stop_when_they_are_never_right_and_to_try_again():
    session = target(end=2000, speculation=Speculation(sources=frozenset({Source.DRAFT})))
    leads = []
    for _ in range(200):
        position, digest = session.trie.position, session.trie.digest
        session.propose(Proposal(SessionId(1), 4, position, digest, (4,), (ANCHOR,)))
        session.offer(session.candidates(8))
        leads.append(session.commit([5, 5][: len(session._offer.nodes) + 1]).verification.lead)
    assert leads[0] > 0
    assert 0 in leads
    assert leads[leads.index(0) :].count(0) < len(leads[leads.index(0) :])


def grow(session: DraftSession, *tokens: int) -> list[Proposal]:
    """Draft a chain, pushing after every token."""
    proposals = []
    for token in tokens:
        (node, *_) = session.frontier()
        assert session.expand(node, [Candidate(token, 0.9)]) == 1
        proposals += session.pushes()
    return proposals


def test_a_drafter_runs_ahead_until_its_lead_is_spent():
    session = draft(lead=3)
    proposals = grow(session, 4, 5, 6)
    assert session.frontier() == []
    assert [proposal.anchor_position for proposal in proposals] == [3, 4, 5]
    assert proposals[2].anchor_digest == digests.of((*PROMPT, 4, 5))


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


def test_pushes_keep_to_the_bytes_that_committed_tokens_earn_and_the_likeliest_go_first():
    session = DraftSession(
        opened(end=1000), vocabulary=10**6, limits=DraftLimits(nodes=10**4, lead=10**3, hold=1, least=0.0, width=8)
    )
    sent, position, rounds = 0, len(PROMPT), 60
    for _ in range(rounds):
        for step in range(8):
            for rank, node in enumerate(session.frontier()):
                tokens = range(1000 * step + 10 * rank, 1000 * step + 10 * rank + 3)
                session.expand(node, [Candidate(token, 0.5 / (1 + i)) for i, token in enumerate(tokens)])
            for proposal in session.pushes():
                sent += len(encode_to_worker(proposal)) + 2  # and its place in the frame
        tokens = (*session.tokens[len(PROMPT) :], 999_999)  # never what was drafted
        digest = digests.of((*PROMPT, *tokens))
        session.verified(Verification(SessionId(1), 4, position, (999_999,), digest, 0, 1))
        position += 1
    assert 0.5 * 58 * rounds < sent <= 58 * (rounds + MOST_CREDIT)


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
    assert (knows.propose(proposal).added, new.propose(proposal).added) == (2, 4)


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
        assert verifying.propose(proposal).added == 1
    assert verifying.offer(verifying.candidates(8)).tokens == (4, 5, 6)
    verification = verifying.commit([4, 5, 6, 7]).verification
    assert drafting.verified(verification) is Sync.ADVANCED
    assert drafting.tokens == verifying.tokens
    assert drafting.frontier() == [drafting.trie.root]


def test_a_drafter_keeps_what_survives_a_verification():
    drafting, verifying = draft(), target()
    for proposal in grow(drafting, 4, 5, 6):
        verifying.propose(proposal)
    verifying.offer(verifying.candidates(1))
    drafting.verified(verifying.commit([4, 5]).verification)
    assert [node.token for node in drafting.trie] == [6]


def test_a_drafter_ignores_repeats_and_says_when_it_lost_the_thread():
    drafting, verifying = draft(), target()
    verifying.offer(verifying.candidates(0))
    first = verifying.commit([4]).verification
    verifying.offer(verifying.candidates(0))
    second = verifying.commit([5]).verification
    assert drafting.verified(second) is Sync.LOST
    assert drafting.verified(first) is Sync.ADVANCED
    assert drafting.verified(first) is Sync.IGNORED


def test_drafts_that_the_target_seems_not_to_have_are_sent_again():
    drafting, verifying = draft(lead=12), target()
    grow(drafting, *range(4, 4 + PATIENCE + 3))  # all lost on the way
    pushed = []
    for token in range(4, 4 + PATIENCE):
        assert pushed == []
        verifying.offer(verifying.candidates(8))
        drafting.verified(verifying.commit([token]).verification)
        pushed = drafting.pushes()
    (again,) = pushed
    assert verifying.propose(again).added == len(again.tokens) == 3


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
    verifying.offer(verifying.candidates(2))
    drafting.verified(verifying.commit([4, 5, 6]).verification)
    assert len(drafting.trie) == 0
    assert drafting.frontier() == [drafting.trie.root]


def test_a_parallel_drafter_goes_on_but_drops_all_at_a_refusal():
    speculation = Speculation(max_depth=2, schedule=Schedule.PARALLEL)
    drafting, verifying = draft(speculation=speculation), target(speculation=speculation)
    for proposal in grow(drafting, 4, 5, 6):
        verifying.propose(proposal)
    verifying.offer(verifying.candidates(2))
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
