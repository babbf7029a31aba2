"""What workers and routers report for autoscaling."""

from speculation import digest
from speculation.drafting.draft_session import Candidate, DraftSession
from speculation.events import Available, Lost, PeerId, Placed, Received, Role, Start
from speculation.messages import Limits, Open, Sampling, SessionId, Speculation, Verification
from speculation.request.session import Session

TARGET, DRAFTER = PeerId("t"), PeerId("d")
PROMPT = (1, 2, 3)


def session(**speculation) -> Session:
    made = Session(Open(SessionId(1), 0, PROMPT, Sampling(), Limits(100), Speculation(**speculation)))
    made.handle(0.0, Start())
    made.handle(0.0, Placed(Role.TARGET, TARGET))
    return made


def verification(position: int, token: int, lead: int | None, prefix=PROMPT) -> Verification:
    return Verification(SessionId(1), 1, position, (token,), digest.of((*prefix, token)), lead=lead)


def test_a_session_without_a_drafter_says_so_only_if_it_may_have_one():
    one = session()
    assert (one.undrafted, one.resting) == (True, False)
    one.handle(0.0, Placed(Role.DRAFT, DRAFTER))
    assert not one.undrafted
    one.handle(0.0, Lost(DRAFTER))
    assert one.undrafted
    assert not session(enabled=False).undrafted
    assert not session(sources=frozenset()).undrafted


def test_a_session_rests_while_its_target_asks_for_no_lead():
    one = session()
    one.handle(0.0, Available(Role.DRAFT))
    one.handle(0.0, Placed(Role.DRAFT, DRAFTER))
    assert not one.resting
    one.handle(0.0, Received(TARGET, verification(3, 4, lead=0)))
    assert one.resting
    one.handle(0.0, Received(TARGET, verification(4, 5, lead=7, prefix=(*PROMPT, 4))))
    assert not one.resting


def test_lead_is_what_a_verification_would_find_of_what_was_asked_for():
    opened = Open(SessionId(1), 1, PROMPT, Sampling(), Limits(100))
    drafting = DraftSession(opened, vocabulary=100)
    assert drafting.lead == (48, 0)
    drafting.expand(drafting.trie.root, [Candidate(4, 0.9)])
    (leaf,) = drafting.frontier()
    drafting.expand(leaf, [Candidate(5, 0.9)])
    assert drafting.lead == (48, 2)
    drafting.verified(verification(3, 4, lead=1))
    assert drafting.lead == (1, 1)
    drafting.verified(verification(4, 5, lead=0, prefix=(*PROMPT, 4)))
    assert drafting.lead == (0, 0)
