"""What is kept of the proposals that pass through a router."""

from router.sessions.run import MAX_NUMBERS, MAX_TOKENS, SpeculationTrace
from speculation import digest as digests
from speculation.events import PeerId
from speculation.messages import ANCHOR, Proposal, SessionId

TARGET, DRAFT = PeerId("t"), PeerId("d")


def proposal(size: int) -> Proposal:
    return Proposal(SessionId(1), 1, 3, 9, tuple(range(size)), (ANCHOR,) * size)


def test_what_passed_since_the_last_commit_comes_with_the_next_one_in_its_own_time() -> None:
    speculation_trace = SpeculationTrace(began=100.0)
    speculation_trace.proposed(100.5, proposal(2))
    speculation_trace.proposed(100.75, proposal(3))
    first = speculation_trace.committed(101.0, TARGET, DRAFT, 0)
    assert [(passed.at, len(passed.proposal.tokens)) for passed in first.passed] == [(0.5, 2), (0.75, 3)]
    assert (first.at, first.target, first.draft, first.reopened) == (1.0, TARGET, DRAFT, 0)
    assert speculation_trace.committed(101.5, TARGET, None, 1).passed == ()


def test_no_more_is_kept_than_a_client_could_want() -> None:
    speculation_trace = SpeculationTrace(began=0.0)
    for _ in range(100):
        speculation_trace.proposed(1.0, proposal(100))
    assert len(speculation_trace.committed(2.0, TARGET, DRAFT, 0).passed) == MAX_TOKENS // 100
    speculation_trace.proposed(3.0, proposal(100))
    assert len(speculation_trace.committed(4.0, TARGET, DRAFT, 0).passed) == 1


def test_a_proposal_names_the_draft_token_that_it_continues() -> None:
    speculation_trace = SpeculationTrace(began=0.0)
    text = digests.of((1, 2, 3))

    def hang(after: int, tokens: tuple[int, ...], *parents: int) -> Proposal:
        return Proposal(SessionId(1), 1, 3, after, tokens, parents)

    speculation_trace.proposed(0.1, hang(text, (7, 8, 8), ANCHOR, 0, ANCHOR))
    speculation_trace.proposed(0.2, hang(digests.of((1, 2, 3, 8)), (9,), ANCHOR))
    speculation_trace.committed(0.3, TARGET, DRAFT, 0)
    speculation_trace.proposed(0.4, hang(text, (7, 8), ANCHOR, 0))
    speculation_trace.proposed(0.5, hang(digests.of((1, 2, 3, 5)), (9,), ANCHOR))
    again, unseen = speculation_trace.committed(0.6, TARGET, DRAFT, 0).passed
    assert (again.numbers, again.after) == ((1, 2), None)
    assert (unseen.numbers, unseen.after) == ((5,), None)
    speculation_trace.proposed(0.7, hang(digests.of((1, 2, 3, 8)), (9, 4), ANCHOR, 0))
    (known,) = speculation_trace.committed(0.8, TARGET, DRAFT, 0).passed
    assert (known.numbers, known.after) == ((4, 6), 3)


def test_only_the_newest_places_keep_their_numbers() -> None:
    speculation_trace = SpeculationTrace(began=0.0)
    for i in range(MAX_NUMBERS + 10):
        speculation_trace.proposed(0.1, Proposal(SessionId(1), 1, 3, i, (1,), (ANCHOR,)))
        speculation_trace.committed(0.2, TARGET, DRAFT, 0)
    speculation_trace.proposed(0.3, Proposal(SessionId(1), 1, 4, digests.extend(0, 1), (1,), (ANCHOR,)))
    speculation_trace.proposed(0.3, Proposal(SessionId(1), 1, 4, digests.extend(11, 1), (1,), (ANCHOR,)))
    forgotten, known = speculation_trace.committed(0.4, TARGET, DRAFT, 0).passed
    assert (forgotten.after, known.after) == (None, 12)
