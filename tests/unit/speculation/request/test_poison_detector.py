"""Who may be opened where after targets died, and who is condemned for it."""

from __future__ import annotations

import pytest

from speculation.events import PeerId, Placed, PoisonRequest, Role
from speculation.messages import SessionId, Verification
from speculation.request.poison_detector import WELL_PAST, PoisonDetector, PoisonLimits

T0, T1 = PeerId("t0"), PeerId("t1")
WATCH = PoisonLimits().watch


class Router:
    """Two targets and the sessions that are opened there, one epoch after another."""

    def __init__(self, limits: PoisonLimits = PoisonLimits()) -> None:
        self.known = PoisonDetector(limits)
        self.now = 0.0
        self.up = [T0, T1]
        self.at: dict[int, tuple[PeerId, int]] = {}
        self.end: dict[int, int] = {}

    def ask(self, session: int, avoid: frozenset[PeerId] = frozenset()) -> Placed | PoisonRequest:
        def choose(avoid: frozenset[PeerId]) -> PeerId | None:
            return next((peer for peer in self.up if peer not in avoid), None)

        answer = self.known.place(self.now, SessionId(session), avoid, choose)
        if isinstance(answer, Placed) and answer.peer is not None:
            epoch = self.at[session][1] + 1 if session in self.at else 1
            self.at[session] = answer.peer, epoch
            self.known.opened(SessionId(session), answer.peer, epoch)
        return answer

    def open(self, session: int, peer: PeerId) -> None:
        other = frozenset({T0, T1} - {peer})
        assert self.ask(session, other) == Placed(Role.TARGET, peer)

    def commit(self, session: int, tokens: int = 1) -> None:
        peer, epoch = self.at[session]
        start = self.end.get(session, 3)
        self.end[session] = start + tokens
        self.known.heard(peer, Verification(SessionId(session), epoch, start, (7,) * tokens, 0))

    def die(self, peer: PeerId, seconds: float = 1.0, *, expected: bool = False) -> None:
        self.now += seconds
        self.known.lost(self.now, peer, expected=expected)


def test_who_has_committed_is_no_suspect_and_moves_freely():
    router = Router()
    for session in range(5):
        router.open(session, T0)
        router.commit(session)
    router.die(T0)
    router.up = [T1]
    for session in range(5):
        router.open(session, T1)
    assert not router.known._suspicions


def test_who_goes_on_elsewhere_is_no_suspect_of_a_target_it_has_left():
    router = Router()
    router.open(1, T0)
    router.commit(1)
    router.known.opened(SessionId(1), T1, 2)  # it would have moved there, was refused, and stayed
    router.known.closed(SessionId(1), T1)
    router.die(T1)
    assert router.known._suspicions  # it might have been that
    router.commit(1)
    assert not router.known._suspicions


def test_who_goes_on_where_it_was_before_remains_a_suspect_of_what_died_under_a_newer_opening():
    router = Router()
    router.open(1, T0)
    for death in (1, 2):
        router.known.draining(T0)
        router.known.opened(SessionId(1), T1, 1 + death)  # it is to move there
        router.die(T1)
        router.commit(1, 2 * WELL_PAST)  # all the while T0 goes on
        assert router.known._suspicions[SessionId(1)].deaths == death
        assert not router.known._unproven  # nobody has to wait for T0
    router.now += WATCH
    assert router.ask(1) == PoisonRequest(2)


def test_who_goes_on_under_a_newer_opening_than_that_which_died_is_no_suspect():
    router = Router()
    router.open(1, T0)
    router.commit(1)
    router.known.opened(SessionId(1), T1, 2)
    router.die(T1)
    router.die(T0)
    router.at[1] = T0, 2
    router.open(1, T0)
    router.commit(1, WELL_PAST)
    assert not router.known._suspicions
    assert not router.known._implicated


def test_suspects_are_tried_one_at_a_time_with_nobody_else_there():
    router = Router()
    router.open(1, T0)
    router.open(2, T0)
    router.die(T0)
    router.up = [T1]
    router.open(1, T1)
    assert router.ask(2) == Placed(Role.TARGET, None, queued=True)  # another suspect is being tried
    assert router.ask(3) == Placed(Role.TARGET, None, queued=True)  # and nobody else shall become one
    assert 2 in router.known.due()
    assert router.known.due() == []
    router.commit(1)
    assert 2 in router.known.due()
    router.open(2, T1)
    router.commit(2)
    router.open(3, T1)
    assert not router.known._suspicions


def keeping_a_target_free() -> Router:
    """T1 is kept free for 1, a suspect, once 2 has committed there."""
    router = Router()
    router.open(1, T0)
    router.open(2, T1)
    router.die(T0)
    router.up = [T1]
    assert router.ask(1) == Placed(Role.TARGET, None, queued=True)
    return router


def test_a_target_is_kept_free_until_a_suspect_can_be_tried_there():
    router = keeping_a_target_free()
    assert router.ask(3) == Placed(Role.TARGET, None, queued=True)
    router.commit(2)
    assert router.known.due()[0] == 1
    router.open(1, T1)


@pytest.mark.parametrize("leaves", ["ended", "opened elsewhere"])
def test_what_a_suspect_had_reserved_is_free_again(leaves):
    router = keeping_a_target_free()
    if leaves == "ended":
        router.known.ended(SessionId(1), finished=False)
    else:
        router.up = [T0]
        router.open(1, T0)
    router.up = [T1]
    router.open(3, T1)


def test_a_suspect_is_kept_one_target_free_however_often_it_asks():
    router = keeping_a_target_free()
    router.known.opened(SessionId(3), T0, 1)
    router.at[3] = T0, 1
    router.up = [T0]
    assert router.ask(1) == Placed(Role.TARGET, None, queued=True)
    router.commit(3)
    router.open(4, T0)


def test_a_suspect_is_kept_another_target_free_when_the_first_drains():
    router = keeping_a_target_free()
    router.known.due()
    router.known.draining(T1)
    router.up = [T0]
    router.known.opened(SessionId(3), T0, 1)
    assert 1 in router.known.due()
    assert router.ask(1) == Placed(Role.TARGET, None, queued=True)  # 3 has not committed there yet
    assert router.ask(4) == Placed(Role.TARGET, None, queued=True)  # and nobody else goes there before it
    router.at[3] = T0, 1
    router.commit(3)
    assert router.known.due()[0] == 1
    router.open(1, T0)


def test_who_need_not_leave_its_target_after_all_keeps_no_other_free_and_waits_for_none():
    router = Router()
    router.open(1, T0)
    router.die(T0)
    router.up = [T1]
    router.open(1, T1)
    router.up = [T0]
    router.known.opened(SessionId(2), T0, 1)
    router.known.draining(T1)
    assert router.ask(1) == Placed(Role.TARGET, None, queued=True)  # T0 is kept free for it, once 2 has committed there
    router.known.due()
    router.known.stays(T1)
    assert (router.known._reserved, router.known._waiting) == ({}, {})
    assert router.known.changed
    router.commit(1)
    assert router.ask(3) == Placed(Role.TARGET, T0)


def test_many_suspects_are_tried_an_eighth_at_a_time():
    router = Router()
    for session in range(32):
        router.open(session, T0)
    router.die(T0)
    router.up = [T1]
    answers = [router.ask(session) for session in range(32)]
    assert sum(answer == Placed(Role.TARGET, T1) for answer in answers) == 4
    assert len(router.known._waiting) == 28


def test_who_was_alone_with_two_deaths_is_condemned_after_a_while():
    router = Router()
    router.open(1, T0)
    router.die(T0)
    router.up = [T1]
    router.open(1, T1)
    router.die(T1)
    router.up = [T0, T1]
    assert router.ask(1) == Placed(Role.TARGET, None, queued=True)
    router.now += WATCH
    assert router.ask(1) == PoisonRequest(2)


def test_a_drain_is_no_death():
    router = Router()
    for peer in (T0, T1, T0, T1):
        router.open(1, peer)
        router.die(peer, expected=True)
    assert not router.known._suspicions
    router.open(1, T0)


def test_deaths_that_nobody_is_guilty_of_speak_for_the_suspects():
    router = Router()
    router.die(T1)  # it was idle
    router.open(1, T0)
    router.die(T0)
    router.open(1, T1)
    router.die(T1)
    router.open(1, T0)  # a third try
    router.die(T0)
    router.now += WATCH
    assert router.ask(1) == PoisonRequest(3)


def test_a_death_speaks_for_the_suspects_of_later_ones_for_a_while_and_nobody_who_had_finished_is_guilty():
    def condemned(later: float) -> bool:
        router = Router()
        router.open(1, T1)
        router.commit(1)
        router.known.ended(SessionId(1), finished=True)
        router.die(T1)
        router.now += later
        for _ in range(2):
            router.open(2, T0)
            router.die(T0)
        router.now += WATCH
        return isinstance(router.ask(2), PoisonRequest)

    assert not condemned(0.0)
    assert condemned(PoisonLimits().memory)


def test_however_often_workers_die_of_nobody_a_suspect_has_only_so_many_tries():
    router = Router(PoisonLimits(max_tries=3))
    for _ in range(5):
        router.die(T1)
    for _ in range(3):
        router.open(1, T0)
        router.die(T0)
    router.now += WATCH
    assert router.ask(1) == PoisonRequest(3)


def test_a_death_is_blameless_once_all_who_were_there_are_well_past_it():
    def condemned_after(tokens: int) -> bool:
        router = Router()
        router.open(2, T0)
        router.commit(2)
        router.die(T0)
        router.open(2, T1)
        router.commit(2, tokens)
        router.open(1, T0)
        router.die(T0)
        router.open(1, T0)
        router.die(T0)
        router.now += WATCH
        return isinstance(router.ask(1), PoisonRequest)

    assert condemned_after(WELL_PAST - 1)
    assert not condemned_after(WELL_PAST)


def test_who_is_near_the_place_of_a_death_is_a_suspect_of_the_next():
    """A target may have been a few tokens further than the router knew, so the guilty one may commit some again."""
    router = Router()
    router.open(2, T0)
    router.commit(2)
    router.die(T0)
    router.open(2, T1)
    router.commit(2, 2)
    router.open(1, T1)
    router.die(T1)
    router.open(1, T0)
    router.commit(1)
    assert len(router.known._suspicions) == 1
    router.open(2, T1)
    router.commit(2, WELL_PAST)
    assert router.known._suspicions == {}


def test_who_shared_the_last_death_is_tried_again():
    router = Router(PoisonLimits(share=1))  # both at once
    for peer in (T0, T1):
        router.open(1, peer)
        router.open(2, peer)
        router.die(peer)
    router.now += WATCH
    assert isinstance(router.ask(1), Placed)
    assert isinstance(router.ask(2), Placed)


def test_deaths_of_a_condemned_session_are_explained():
    router = Router()
    for session in (1, 2, 3, 4, 5, 6):
        for _ in range(2):
            router.open(session, T0)
            router.die(T0)
        router.now += WATCH
        assert router.ask(session) == PoisonRequest(2)
        router.known.ended(SessionId(session), finished=False)


def test_a_crowd_is_opened_again_in_portions():
    router = Router(PoisonLimits(per_target=4))
    for session in range(10):
        router.open(session, T0)
        router.commit(session)
    router.die(T0)
    router.up = [T1]
    answers = [router.ask(session) for session in range(10)]
    assert sum(answer == Placed(Role.TARGET, T1) for answer in answers) == 4
    assert answers[-1] == Placed(Role.TARGET, None, queued=True)
    router.open(10, T1)  # new requests wait in the target's own queue
    for session in range(4):
        router.commit(session, WELL_PAST)
    assert router.known.due()[:2] == [4, 5]


def test_who_left_a_target_that_said_nothing_since_is_a_suspect_of_its_death():
    router = Router()
    router.open(1, T0)  # and it hangs
    router.known.closed(SessionId(1), T0)
    router.open(2, T0)
    router.die(T0)
    assert len(router.known._suspicions) == 2
    router = Router()
    router.open(1, T0)
    router.open(2, T0)
    router.known.closed(SessionId(1), T0)
    router.commit(2)  # so it did not hang of 1
    router.die(T0)
    assert router.known._suspicions == {}


def test_nothing_is_remembered_of_sessions_that_are_over():
    router = Router()
    router.open(1, T0)
    router.open(2, T1)
    router.die(T0)
    router.up = [T1]
    router.open(3, T1)
    router.commit(3)
    router.ask(1)
    for session in (1, 2, 3):
        router.known.ended(SessionId(session), finished=False)
    router.die(T1)  # they had left it
    assert (router.known._waiting, router.known._suspicions, router.known._implicated) == ({}, {}, {})
    assert not any(
        getattr(router.known, name) for name in ("_opened", "_unproven", "_reserved", "_reached", "_died_under")
    )
