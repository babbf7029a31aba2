"""The table of a session's states: what it refuses, and what the error says."""

from __future__ import annotations

import pytest

from speculation.events import Available, Draining, Lost, PeerId, Placed, Received, Role, Start, Stays, Stop, Tick
from speculation.messages import Limits, Open, RefusalCode, Refused, Sampling, SessionId, Verification
from speculation.request.placement import Opening
from speculation.request.record import HISTORY, KINDS, TRANSITIONS, IllegalTransition, SessionState
from speculation.request.session import Session

ID = SessionId(7)
PROMPT = (1, 2, 3)
T0, T1, D0 = PeerId("t0"), PeerId("t1"), PeerId("d0")


def decoding() -> Session:
    """Open at t0 (epoch 1) and d0 (epoch 2)."""
    session = Session(Open(ID, 0, PROMPT, Sampling(), Limits(20)))
    session.handle(0.0, Start())
    session.handle(0.0, Placed(Role.TARGET, T0))
    session.handle(0.0, Placed(Role.DRAFT, D0))
    return session


def migrating() -> Session:
    """The same, and to move to t1 (epoch 3)."""
    session = decoding()
    session.handle(0.1, Draining(T0))
    session.handle(0.1, Placed(Role.TARGET, T1))
    return session


def test_every_state_can_be_reached_and_only_the_last_is_final():
    reached = {SessionState.NEW}
    for _ in SessionState:
        reached |= {after for state in reached for states in TRANSITIONS[state].values() for after in states}
    assert reached == set(SessionState) == set(TRANSITIONS)
    assert [state for state, row in TRANSITIONS.items() if not row] == [SessionState.ENDED]
    for state, row in TRANSITIONS.items():
        assert row.keys() <= set(KINDS)
        assert state is SessionState.ENDED or row[Stop] == {SessionState.ENDED}, "a client may go away at any time"


def test_the_states_on_the_way_of_a_session_that_moves():
    session = Session(Open(ID, 0, PROMPT, Sampling(), Limits(20)))
    said = Verification(ID, 3, 3, (9,), 0, 0, 0)
    states = [session._state]
    for event in (
        Start(),
        Placed(Role.TARGET, None),
        Placed(Role.TARGET, T0),
        Placed(Role.DRAFT, D0),
        Draining(T0),
        Placed(Role.TARGET, T1),
        Received(T1, said),
        Lost(T1),
        Stop(),
    ):
        session.handle(0.0, event)
        session.validate()
        states.append(session._state)
    placing, open_there = [SessionState.PLACING] * 2, [SessionState.DECODING] * 2
    moved = [
        SessionState.LEAVING,
        SessionState.MIGRATING,
        SessionState.DECODING,
        SessionState.PLACING,
        SessionState.ENDED,
    ]
    assert states == [SessionState.NEW, *placing, *open_there, *moved]


@pytest.mark.parametrize(
    ("event", "kind"),
    [(Placed(Role.TARGET, T0), "Placed"), (Received(T0, Refused(ID, 1, RefusalCode.INTERNAL)), "Refused")],
)
def test_a_session_that_has_not_begun_has_asked_nobody_and_is_open_nowhere(event, kind):
    session = Session(Open(ID, 0, PROMPT, Sampling(), Limits(20)))
    session.handle(0.0, Available(Role.TARGET))
    with pytest.raises(IllegalTransition, match=f"session 7 was told {kind} while new"):
        session.handle(0.0, event)


def test_what_cannot_come_is_refused_with_what_came_before():
    session = decoding()
    with pytest.raises(IllegalTransition) as caught:
        session.handle(0.1, Start())
    assert caught.value.history == (
        ("Start", SessionState.NEW),
        ("Placed", SessionState.PLACING),
        ("Placed", SessionState.DECODING),
        ("Start", SessionState.DECODING),
    )
    assert str(caught.value) == (
        "session 7 was told Start while decoding; its latest events, and when they came: "
        "Start (new), Placed (placing), Placed (decoding), Start (decoding)"
    )


def test_a_move_that_the_table_does_not_have_is_refused(monkeypatch):
    def forgets(self: Session, peer: PeerId):
        self._state = SessionState.PLACING
        return []

    monkeypatch.setattr(Session, "_stay", forgets)
    session = migrating()
    with pytest.raises(IllegalTransition, match="went from migrating to placing on Stays"):
        session.handle(0.2, Stays(T0))


def test_it_can_be_ended_after_that():
    session = decoding()
    with pytest.raises(IllegalTransition):
        session.handle(0.1, Start())
    assert {effect.peer for effect in session.handle(0.1, Stop())[:-1]} == {T0, D0}
    assert session.handle(0.2, Start()) == []


def test_the_history_is_short():
    session = decoding()
    for _ in range(2 * HISTORY):
        session.handle(0.1, Tick())
    with pytest.raises(IllegalTransition) as caught:
        session.handle(0.1, Start())
    assert len(caught.value.history) == HISTORY


def set_to(name: str, value: object):
    return lambda session: setattr(session, name, value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (set_to("_target", None), "migrating, with the target None"),
        (set_to("_migration_target", None), "migrating, with None to move to"),
        (set_to("_migration_target", Opening(T1, 1)), "two openings have one epoch"),
        (set_to("_migration_target", Opening(T1, 9)), "of 3 that were given out"),
        (set_to("_draining", frozenset()), "migrating, while the target stays"),
        (set_to("_draining", frozenset({T0, T1})), "which drains"),
        (lambda session: session._tokens.append(4), "the digest is not that of the 4 tokens"),
        (lambda session: session.drafting.strikes.update({D0: ["wrong"] * 3}), "it is done with its drafter"),
    ],
)
def test_a_session_that_contradicts_itself_says_how(spoil, words):
    session = migrating()
    session.validate()
    spoil(session)
    with pytest.raises(AssertionError, match=words):
        session.validate()
