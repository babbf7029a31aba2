"""What a draft session costs in steps in which nothing becomes of it: a worker has many of them."""

from typing import Any

import pytest

from speculation import digest as digests
from speculation.drafting import draft_session
from speculation.drafting.draft_session import Candidate, DraftLimits, DraftSession
from speculation.messages import Limits, Open, Sampling, SessionId, Verification

PROMPT = (1, 2, 3)


def test_a_session_that_cannot_afford_its_drafts_is_not_looked_through_again_before_a_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Open(SessionId(1), 4, PROMPT, Sampling(), Limits(1000))
    limits = DraftLimits(lead=3, min_weight=0.0, hold=1, bytes_a_token=8.0)
    session = DraftSession(opened, vocabulary=1000, limits=limits)
    while session.frontier():
        for place in session.frontier():
            session.expand(place, [Candidate(token, 0.3) for token in (4, 5, 6)])
        session.pushes()
    assert session.pushes() == []

    sorts = []

    def counting(*given: Any, **key: Any) -> list[Any]:
        sorts.append(given)
        return sorted(*given, **key)

    monkeypatch.setattr(draft_session, "sorted", counting, raising=False)
    for _ in range(3):
        assert (list(session.frontier()), session.pushes()) == ([], [])
    assert not sorts
    session.verified(Verification(SessionId(1), 4, len(PROMPT), (4,), digests.of((*PROMPT, 4)), 1, 1))
    assert session.frontier()
    assert session.pushes()
    assert sorts
