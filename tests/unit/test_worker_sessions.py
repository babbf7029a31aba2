"""One session at either worker, without models."""

from speculation import digest as digests
from speculation.draft_session import Candidate, DraftLimits, DraftSession, Sync
from speculation.messages import ANCHOR, FinishReason, Limits, Open, Proposal, Sampling, SessionId, Speculation
from speculation.target_session import TargetSession
from speculation.trie import Fate, Offer

PROMPT = (1, 2, 3)


def opened(end: int = 20, stop: frozenset[int] = frozenset(), speculation: Speculation = Speculation()) -> Open:
    return Open(SessionId(1), 4, PROMPT, Sampling(), Limits(end, stop), speculation)


def chain(*tokens: int, epoch: int = 4) -> Proposal:
    return Proposal(SessionId(1), epoch, len(PROMPT), digests.of(PROMPT), tokens, tuple(range(ANCHOR, len(tokens) - 1)))


def target(**kwargs) -> TargetSession:
    return TargetSession(opened(**kwargs), vocabulary=100)


def draft(lead: int = 8, **kwargs) -> DraftSession:
    return DraftSession(opened(**kwargs), vocabulary=100, limits=DraftLimits(lead=lead))


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


def grow(session: DraftSession, *tokens: int) -> list[Proposal]:
    proposals = []
    for token in tokens:
        node = session.frontier()
        assert node is not None
        proposals.append(session.expand(node, [Candidate(token, 0.5)]))
    return proposals


def test_a_drafter_runs_ahead_until_its_lead_is_spent():
    session = draft(lead=3)
    proposals = grow(session, 4, 5, 6)
    assert session.frontier() is None
    assert [proposal.anchor_position for proposal in proposals] == [3, 4, 5]
    assert proposals[2].anchor_digest == digests.of((*PROMPT, 4, 5))


def test_what_a_drafter_pushes_is_understood_by_a_target():
    drafting, verifying = draft(), target()
    for proposal in grow(drafting, 4, 5, 6):
        assert verifying.propose(proposal).added == 1
    assert verifying.offer(verifying.candidates(8)).tokens == (4, 5, 6)
    verification = verifying.commit([4, 5, 6, 7]).verification
    assert drafting.verified(verification) is Sync.ADVANCED
    assert drafting.tokens == verifying.tokens
    assert drafting.frontier() is drafting.trie.root


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
    drafting, verifying = draft(), target()
    grow(drafting, 4, 5, 6)  # all lost on the way
    verifying.offer(verifying.candidates(8))
    drafting.verified(verifying.commit([4]).verification)
    assert drafting.unsent is not None
    assert drafting.unsent.tokens == (5, 6)
    assert verifying.propose(drafting.unsent).added == 2


def test_nothing_is_drafted_after_a_stop_token_or_past_the_end():
    session = draft(stop=frozenset({5}))
    grow(session, 4, 5)
    assert session.frontier() is None
    session = draft(end=5)
    grow(session, 4)
    assert session.frontier() is None
