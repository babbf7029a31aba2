"""The router's state machine, one event at a time."""

from dataclasses import replace

import pytest

from speculation import digest as digests
from speculation.events import (
    Available,
    Draining,
    Emit,
    Fail,
    FailureCode,
    Faulted,
    Finish,
    Lost,
    PeerId,
    Place,
    Placed,
    PoisonRequest,
    Received,
    Relay,
    Role,
    Send,
    Start,
    Stays,
    Stop,
    Tick,
    Wake,
)
from speculation.messages import (
    ANCHOR,
    MAX_PRIORITY,
    Close,
    FinishReason,
    Limits,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    RequestOptions,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Support,
    TokenLogprobs,
    Verification,
)
from speculation.request.record import MAX_AGE_MS
from speculation.request.session import Phase, Session, SessionLimits

ID = SessionId(7)
PROMPT = (1, 2, 3)
REQUEST = Open(ID, 0, PROMPT, Sampling(), Limits(20))
T0, T1, D0, D1 = PeerId("t0"), PeerId("t1"), PeerId("d0"), PeerId("d1")


def new(limits: SessionLimits = SessionLimits(stall_timeout=10.0), **speculation) -> Session:
    return Session(replace(REQUEST, speculation=Speculation(**speculation)), limits)


def failures(effects):
    return [effect.code for effect in effects if isinstance(effect, Fail)]


def sent(effects, kind):
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def running(session: Session | None = None) -> Session:
    """A session open at t0 (epoch 1) and d0 (epoch 2)."""
    session = session or new()
    assert session.handle(0.0, Start()) == [Place(Role.TARGET, frozenset())]
    effects = session.handle(0.0, Placed(Role.TARGET, T0))
    assert [effect.message.epoch for effect in sent(effects, Open)] == [1]
    assert Place(Role.DRAFT, frozenset()) in effects
    effects = session.handle(0.0, Placed(Role.DRAFT, D0))
    assert [effect.message.epoch for effect in sent(effects, Open)] == [2]
    return session


def verified(session: Session, *tokens: int, epoch: int = 1, accepted: int = 0, finish=None) -> Verification:
    prefix = (*PROMPT, *session.output)
    digest = digests.of((*prefix, *tokens))
    return Verification(ID, epoch, len(prefix), tokens, digest, accepted, accepted, finish)


def test_every_opening_carries_the_priority():
    session = Session(replace(REQUEST, priority=-5))
    session.handle(0.0, Start())
    openings = sent(session.handle(0.0, Placed(Role.TARGET, T0)), Open)
    session.handle(0.0, Lost(T0))
    openings += sent(session.handle(0.0, Placed(Role.TARGET, T1)), Open)
    assert [(opening.message.epoch, opening.message.priority) for opening in openings] == [(1, -5), (2, -5)]


def test_every_opening_has_the_digest_of_its_tokens():
    session = running(Session(REQUEST, digest=digests.of(PROMPT)))
    session.handle(0.1, Received(T0, verified(session, 4, 5)))
    openings = sent(session.handle(0.2, Lost(D0)) + session.handle(0.2, Placed(Role.DRAFT, D1)), Open)
    session.handle(0.3, Lost(T0))
    openings += sent(session.handle(0.3, Placed(Role.TARGET, T1)), Open)
    assert [opening.message.tokens for opening in openings] == [(*PROMPT, 4, 5)] * 2
    assert {opening.message.digest for opening in openings} == {digests.of((*PROMPT, 4, 5))}
    first = Session(REQUEST)
    first.handle(0.0, Start())
    assert sent(first.handle(0.0, Placed(Role.TARGET, T0)), Open)[0].message.digest == digests.of(PROMPT)


def test_a_verification_is_emitted_and_relayed_under_the_drafters_epoch():
    session = running()
    message = replace(verified(session, 4, 5, accepted=1), lead=9)
    effects = session.handle(0.1, Received(T0, message))
    assert effects == [Emit((4, 5), 1, 1), Relay(D0, message, 2)]
    assert session.output == (4, 5)


def test_a_drafter_is_not_told_logprobs_which_only_clients_want_to_know():
    session = running()
    message = replace(
        verified(session, 4, 5, accepted=1),
        offered=2,
        sources=(Source.PREDICTION,),
        refused=(Source.LOOKUP,),
        recovered=True,
        logprobs=(TokenLogprobs(-1.0), TokenLogprobs(-2.0)),
        took_us=30,
        waited_us=5,
    )
    emit, relayed = session.handle(0.1, Received(T0, message))
    metadata = emit.metadata
    assert (metadata.sources, metadata.refused, metadata.recovered) == (message.sources, message.refused, True)
    assert (metadata.took_us, metadata.waited_us, metadata.logprobs) == (30, 5, message.logprobs)
    assert relayed == Send(D0, replace(message, epoch=2, logprobs=()))
    passed = replace(verified(session, 6), logprobs=(TokenLogprobs(-1.0),))
    object.__setattr__(passed, "passed", 2)  # as it came
    assert session.handle(0.2, Received(T0, passed))[1] == Relay(D0, passed, 2)


def test_a_prediction_goes_to_every_target_and_to_no_drafter():
    request_options = RequestOptions(prediction=(4, 5, 6), grammar="g", request="r")
    session = Session(replace(REQUEST, request_options=request_options))
    session.handle(0.0, Start())
    openings = sent(session.handle(0.0, Placed(Role.TARGET, T0)), Open)
    openings += sent(session.handle(0.0, Placed(Role.DRAFT, D0)), Open)
    session.handle(0.1, Received(T0, verified(session, 4)))
    session.handle(0.2, Lost(T0))
    openings += sent(session.handle(0.2, Placed(Role.TARGET, T1)), Open)
    assert [opening.message.request_options for opening in openings] == [
        request_options,
        replace(request_options, prediction=()),
        request_options,
    ]
    assert (openings[-1].message.prompt, openings[-1].message.tokens[3:]) == (3, (4,))


def test_drafts_that_were_committed_before_count_once():
    session = running()
    session.handle(0.1, Received(T0, verified(session, 4)))
    late = Verification(ID, 1, 3, (4, 5, 6), digests.of((*PROMPT, 4, 5, 6)), accepted=2, offered=4)
    late = replace(late, sources=(Source.DRAFT, Source.LOOKUP), refused=(Source.LOOKUP, Source.DRAFT))
    late = replace(late, logprobs=tuple(TokenLogprobs(-token) for token in late.tokens))
    (emit, _) = session.handle(0.2, Received(T0, late))
    assert (emit.tokens, emit.accepted, emit.offered) == ((5, 6), 1, 3)
    assert (emit.metadata.sources, emit.metadata.refused) == ((Source.LOOKUP,), (Source.LOOKUP, Source.DRAFT))
    assert emit.metadata.logprobs == (TokenLogprobs(-5), TokenLogprobs(-6))
    later = Verification(ID, 1, 4, (5, 6, 7), digests.of((*PROMPT, 4, 5, 6, 7)), accepted=1, offered=2)
    (emit, _) = session.handle(0.3, Received(T0, later))
    assert (emit.tokens, emit.accepted, emit.offered) == ((7,), 0, 1)


def test_what_was_cached_counts_for_the_prompt_only():
    session = running()
    assert session.handle(0.1, Received(T0, replace(verified(session, 4), cached=2)))[0] == Emit((4,), 0, 0, 2)
    session.handle(0.2, Lost(T0))
    (opening,) = sent(session.handle(0.2, Placed(Role.TARGET, T1)), Open)
    message = replace(verified(session, 5, epoch=opening.message.epoch), cached=3)
    message = replace(message, prompt_logprobs=(TokenLogprobs(-1.0),))
    assert session.handle(0.3, Received(T1, message))[0] == Emit((5,), 0, 0)


def test_a_proposal_is_relayed_under_the_targets_epoch():
    session = running()
    proposal = Proposal(ID, 2, 3, digests.of(PROMPT), (4,), (ANCHOR,))
    assert session.handle(0.1, Received(D0, proposal)) == [Relay(T0, proposal, 1)]
    assert session.handle(0.1, Received(D0, replace(proposal, epoch=1))) == []
    assert session.handle(0.1, Received(PeerId("d9"), proposal)) == []


def test_repeated_and_old_verifications_change_nothing():
    session = running()
    message = verified(session, 4)
    session.handle(0.1, Received(T0, message))
    assert session.handle(0.2, Received(T0, message)) == []
    assert session.handle(0.2, Received(T0, verified(session, 5, epoch=0))) == []
    assert session.handle(0.2, Received(T1, verified(session, 5))) == []
    assert session.output == (4,)


def test_a_gap_or_a_wrong_digest_opens_the_session_again_from_what_is_committed():
    for bad in (
        replace(verified(new(), 9), position=5),
        replace(verified(new(), 9), digest=123),
    ):
        session = running()
        effects = session.handle(0.1, Received(T0, bad))
        assert [effect.peer for effect in sent(effects, Close)] == [T0, D0]
        assert Place(Role.TARGET, frozenset({T0})) in effects
        assert session.output == ()


def test_losing_the_target_moves_the_session_under_a_new_epoch_and_opens_the_drafter_again():
    session = running()
    session.handle(0.1, Received(T0, verified(session, 4, 5)))
    effects = session.handle(0.2, Lost(T0))
    assert [effect.peer for effect in sent(effects, Close)] == [D0]
    effects = session.handle(0.2, Placed(Role.TARGET, T1))
    opened = sent(effects, Open)[0].message
    assert (opened.epoch, opened.tokens) == (3, (*PROMPT, 4, 5))
    effects = session.handle(0.2, Placed(Role.DRAFT, D0))
    assert sent(effects, Open)[0].message.epoch == 4
    assert session.handle(0.3, Received(T0, verified(session, 9))) == []  # believed dead, not heard
    assert session.handle(0.3, Received(T1, verified(session, 6, epoch=3)))[0] == Emit((6,), 0, 0)
    assert session.reopened == 1


def test_losing_the_drafter_never_touches_the_target():
    session = running()
    assert session.handle(0.1, Lost(D0)) == [Place(Role.DRAFT, frozenset())]
    assert session.handle(0.1, Placed(Role.DRAFT, None)) == []
    assert session.handle(0.1, Received(T0, verified(session, 4))) == [Emit((4,), 0, 0)]
    assert session.handle(0.2, Available(Role.DRAFT)) == [Place(Role.DRAFT, frozenset())]


@pytest.mark.parametrize("speculation", [{"enabled": False}, {"sources": frozenset({Source.LOOKUP})}])
def test_a_session_that_wants_no_draft_model_asks_for_no_drafter(speculation):
    session = new(**speculation)
    session.handle(0.0, Start())
    effects = session.handle(0.0, Placed(Role.TARGET, T0))
    assert not [effect for effect in effects if isinstance(effect, Place)]
    assert session.handle(0.0, Available(Role.DRAFT)) == []


def test_a_drafter_that_refuses_is_not_asked_again_until_another_comes():
    session = running()
    refused = Refused(ID, 2, RefusalCode.DRAINING)
    assert session.handle(0.1, Received(D0, refused)) == [Place(Role.DRAFT, frozenset({D0}))]
    assert session.handle(0.1, Placed(Role.DRAFT, D0)) == []


def test_drafters_that_are_full_are_asked_again_for_as_long_as_they_are():
    session, now, pauses = running(), 0.0, []
    for epoch in range(2, 9):
        place, wake = session.handle(now, Received(D0, Refused(ID, epoch, RefusalCode.OVERLOADED)))
        assert place == Place(Role.DRAFT, frozenset({D0}))
        assert session.handle(now, Placed(Role.DRAFT, None)) == []
        assert session.undrafted
        pauses.append(wake.at - now)
        now = wake.at
        session.handle(now, Received(T0, verified(session, 4)))  # text goes on meanwhile
        assert Place(Role.DRAFT, frozenset()) in session.handle(now, Tick())
        assert len(sent(session.handle(now, Placed(Role.DRAFT, D0)), Open)) == 1
    assert 0.5 <= pauses[0] <= 1.0
    assert 5.0 <= pauses[-1] <= 10.0
    prefix = (*PROMPT, *session.output)
    session.handle(now, Received(D0, Proposal(ID, 9, len(prefix), digests.of(prefix), (5,), (ANCHOR,))))
    _, wake = session.handle(now, Received(D0, Refused(ID, 9, RefusalCode.OVERLOADED)))
    assert wake.at - now <= 1.0


def test_a_timer_for_something_sooner_does_not_put_off_asking_full_drafters_again():
    session = running()
    session.handle(0.1, Draining(T0))
    (sooner,) = session.handle(0.1, Placed(Role.TARGET, None))
    assert session.handle(0.1, Received(D0, Refused(ID, 2, RefusalCode.OVERLOADED))) == [
        Place(Role.DRAFT, frozenset({D0, T0}))
    ]
    session.handle(0.1, Stays(T0))
    (again,) = session.handle(sooner.at, Tick())
    assert sooner.at < again.at <= 1.1
    assert Place(Role.DRAFT, frozenset()) in session.handle(again.at, Tick())


def test_a_text_that_begins_where_a_target_drains_looks_for_its_revision_elsewhere():
    session = running()
    session.handle(0.1, Draining(T0))
    session.handle(0.1, Placed(Role.TARGET, T1))  # of any revision: nothing was said yet
    effects = session.handle(0.2, Received(T0, verified(session, 4)))
    assert isinstance(effects[0], Emit)  # who hears this knows the revision when asked for a place
    assert effects[-2:] == [Send(T1, Close(ID, 3)), Place(Role.TARGET, frozenset({T0}))]
    assert session.workers == (T0, D0)


def test_a_text_that_has_not_begun_goes_to_whoever_is_ready_first():
    session = running()
    session.handle(0.1, Draining(T0))
    session.handle(0.1, Placed(Role.TARGET, T1))
    session.handle(0.2, Received(T1, verified(session, 4, epoch=3)))
    assert session.workers == (T1, None)
    assert session.output == ()


def test_a_drafter_that_keeps_losing_the_thread_is_given_up():
    session = running()
    for epoch in (2, 3, 4):
        effects = session.handle(0.1, Received(D0, Refused(ID, epoch, RefusalCode.UNKNOWN_SESSION)))
        if effects:
            session.handle(0.1, Placed(Role.DRAFT, D0))
    assert effects == []
    assert session.handle(0.2, Available(Role.DRAFT)) == [Place(Role.DRAFT, frozenset())]  # another has come
    session.handle(0.2, Placed(Role.DRAFT, D0))
    assert session.handle(0.2, Received(D0, Refused(ID, 5, RefusalCode.UNKNOWN_SESSION))) == []


def test_a_proposal_of_nothing_goes_nowhere_and_proves_nothing():
    session = running()
    for epoch in (2, 3, 4):
        assert session.handle(0.1, Received(D0, Proposal(ID, epoch, 3, digests.of(PROMPT), (), ()))) == []
        effects = session.handle(0.1, Received(D0, Refused(ID, epoch, RefusalCode.UNKNOWN_SESSION)))
        if effects:
            session.handle(0.1, Placed(Role.DRAFT, D0))
    assert effects == []
    assert not session.drafting.strikes


def test_a_drafter_that_breaks_the_protocol_is_replaced_and_never_asked_again():
    session = running()
    assert session.handle(0.1, Faulted(D0, 2, "first")) == []
    assert session.handle(0.1, Faulted(D0, 2, "second")) == []
    assert session.handle(0.1, Faulted(D0, 2, "third")) == [
        Send(D0, Close(ID, 2)),
        Place(Role.DRAFT, frozenset({D0})),
    ]
    assert session.handle(0.1, Placed(Role.DRAFT, D0)) == []
    assert sent(session.handle(0.1, Placed(Role.DRAFT, D1)), Open)[0].message.epoch == 3
    session.handle(0.2, Lost(D1))
    assert session.handle(0.3, Available(Role.DRAFT)) == [Place(Role.DRAFT, frozenset({D0}))]
    assert session.drafting.strikes == {D0: ["first", "second", "third"]}
    assert session.drafting.quarantined == {D0}
    assert session.handle(0.4, Received(T0, verified(session, 4))) == [Emit((4,), 0, 0)]


def test_strikes_are_kept_when_the_target_moves():
    session = running()
    session.handle(0.1, Faulted(D0, 2, "first"))
    session.handle(0.1, Faulted(D0, 2, "second"))
    session.handle(0.2, Lost(T0))
    session.handle(0.2, Placed(Role.TARGET, T1))
    session.handle(0.2, Placed(Role.DRAFT, D0))
    assert sent(session.handle(0.3, Faulted(D0, 4, "third")), Close)[0].peer == D0


def test_a_drafter_that_does_what_its_session_did_not_ask_for_is_struck():
    proposal = Proposal(ID, 2, 3, digests.of(PROMPT), (4,), (ANCHOR,))
    branching = replace(proposal, tokens=(4, 5), parents=(ANCHOR, ANCHOR))
    drawn = replace(proposal, q=(Support((4,), (65536,)),))
    for session, wrong in (
        (new(), drawn),
        (new(rule=Rule.REJECTION), proposal),
        (new(schedule=Schedule.SEQUENTIAL), branching),
        (new(), verified(new(), 4, epoch=2)),
    ):
        running(session)
        assert session.handle(0.1, Received(D0, wrong)) == []
        assert list(session.drafting.strikes) == [D0]
        assert session.output == ()
    for session, right in ((new(), branching), (new(rule=Rule.REJECTION), drawn)):
        running(session)
        assert session.handle(0.1, Received(D0, right)) == [Relay(T0, right, 1)]
        assert not session.drafting.strikes


def test_what_is_late_is_counted_and_held_against_nobody():
    session = running()
    proposal = Proposal(ID, 1, 3, digests.of(PROMPT), (4,), (ANCHOR,))
    late = [Received(D0, proposal), Received(D1, proposal), Received(T0, verified(session, 5, epoch=0))]
    for event in (
        *late,
        Faulted(D0, 1, "old"),
        Faulted(D1, 2, "other"),
        Received(T1, Refused(ID, 1, RefusalCode.INVALID)),
    ):
        assert session.handle(0.1, event) == []
    assert session.stale == 6
    assert not session.drafting.strikes


def test_a_target_that_breaks_the_protocol_is_left_for_another():
    session = running()
    effects = session.handle(0.1, Faulted(T0, 1, "garbage"))
    assert Place(Role.TARGET, frozenset({T0})) in effects
    for target, epoch in ((T1, 3), (T0, 4)):
        session.handle(0.1, Placed(Role.TARGET, target))
        effects = session.handle(0.1, Faulted(target, epoch, "garbage"))
    assert isinstance(effects[-1], Fail)
    assert "garbage" in effects[-1].message


def test_an_invalid_request_fails_at_once():
    session = running()
    effects = session.handle(0.1, Received(T0, Refused(ID, 1, RefusalCode.INVALID, "too long")))
    assert effects[-1] == Fail(FailureCode.INVALID, "too long")
    assert session.phase is Phase.ENDED
    assert session.handle(0.2, Received(T0, verified(session, 4))) == []


def test_losses_alone_never_fail_a_session_but_a_verdict_does():
    session = running()
    for now in range(40):
        session.handle(now, Lost(T0))
        session.handle(now, Placed(Role.TARGET, T0))
    assert session.phase is Phase.RUNNING
    assert session.handle(40.0, PoisonRequest(2)) == []  # not what it had asked
    session.handle(40.0, Lost(T0))
    effects = session.handle(40.0, PoisonRequest(2))
    assert isinstance(effects[-1], Fail)
    assert effects[-1].code is FailureCode.FAULTY
    assert "2 target workers" in effects[-1].message


def leaving(priority: int = 0) -> Session:
    """A session open at t0, which drains, and warming up at t1 (epoch 3)."""
    session = running(Session(replace(REQUEST, priority=priority)))
    session.handle(0.1, Received(T0, verified(session, 4)))
    assert session.handle(0.2, Draining(T0)) == [Place(Role.TARGET, frozenset({T0}))]
    effects = session.handle(0.2, Placed(Role.TARGET, T1))
    assert [(e.peer, e.message.epoch, e.message.tokens) for e in sent(effects, Open)] == [(T1, 3, (*PROMPT, 4))]
    assert not sent(effects, Close)
    return session


def test_a_session_leaves_a_target_that_drains_once_another_is_warm():
    session = leaving()
    assert session.handle(0.3, Received(T0, verified(session, 5, 6)))[0] == Emit((5, 6), 0, 0)
    effects = session.handle(0.4, Received(T1, replace(verified(session, 9), epoch=3)))
    assert not [effect for effect in effects if isinstance(effect, Emit)]
    assert [(e.peer, e.message.epoch) for e in sent(effects, Close)] == [(T0, 1), (D0, 2)]
    assert [(e.peer, e.message.epoch, e.message.tokens) for e in sent(effects, Open)] == [(T1, 4, (*PROMPT, 4, 5, 6))]
    assert session.handle(0.5, Received(T0, verified(session, 9))) == []
    assert session.handle(0.5, Lost(T0)) == []
    assert session.handle(0.5, Received(T1, verified(session, 7, epoch=4)))[0] == Emit((7,), 0, 0)
    assert (session.moved, session.reopened) == (1, 0)


def test_a_migration_target_that_is_far_behind_computes_more_before_the_session_moves():
    session = leaving()
    warm = replace(verified(session, 9), epoch=3)
    session.handle(0.3, Received(T0, verified(session, *range(5, 25))))
    again = session.handle(0.4, Received(T1, warm))
    assert [(e.peer, e.message.epoch, len(e.message.tokens)) for e in sent(again, Open)] == [(T1, 4, len(PROMPT) + 21)]
    assert len(again) == 1
    assert session.handle(0.5, Received(T1, warm)) == []
    nearly = replace(verified(session, 9), epoch=4)
    assert session.handle(0.6, Received(T0, verified(session, 30)))[0] == Emit((30,), 0, 0)
    (moved,) = sent(session.handle(0.7, Received(T1, nearly)), Open)
    assert (moved.peer, moved.message.epoch) == (T1, 5)
    assert session.moved == 1


@pytest.mark.parametrize("further", [0, 1])
def test_a_migration_target_takes_over_once_it_is_near(further):
    session = leaving()
    warm = replace(verified(session, 9), epoch=3)
    session.handle(0.3, Received(T0, verified(session, *range(SessionLimits().max_migration_lag + further))))
    session.handle(0.4, Received(T1, warm))
    assert session.moved == 1 - further


@pytest.mark.parametrize(("own", "warming"), [(0, 1), (-3, -2), (MAX_PRIORITY, MAX_PRIORITY)])
def test_a_migration_target_prefills_behind_those_whose_clients_wait(own, warming):
    """Each time; where it takes over, its client waits as well."""
    session = leaving(own)
    warm = replace(verified(session, 9), epoch=3)
    session.handle(0.3, Received(T0, verified(session, *range(5, 25))))
    (again,) = sent(session.handle(0.4, Received(T1, warm)), Open)
    (moved,) = sent(session.handle(0.5, Received(T1, replace(verified(session, 9), epoch=4))), Open)
    assert (again.message.priority, moved.message.priority) == (warming, own)


def test_a_migration_target_that_never_catches_up_takes_over_at_last():
    session = leaving()
    for epoch in range(3, 3 + SessionLimits().max_prefills):
        late = replace(verified(session, 9), epoch=epoch)
        session.handle(epoch, Received(T0, verified(session, *range(50))))
        assert session.moved == 0
        effects = session.handle(epoch, Received(T1, late))
    assert sent(effects, Close)
    assert session.moved == 1


@pytest.mark.parametrize(("now", "age_ms"), [(2.5, 2500), (1e8, MAX_AGE_MS)])
def test_where_a_session_is_opened_again_it_keeps_its_age(now, age_ms):
    session = running()
    (opening,) = sent(session.handle(now, Lost(T0)) + session.handle(now, Placed(Role.TARGET, T1)), Open)[:1]
    assert opening.message.age_ms == age_ms


def test_who_is_condemned_where_it_still_runs_asks_again():
    session = running()
    session.handle(0.1, Draining(T0))
    (wake,) = session.handle(0.1, PoisonRequest(2))
    assert session.phase is Phase.RUNNING
    assert session.handle(wake.at, Tick())[-1] == Place(Role.TARGET, frozenset({T0}))
    session.handle(wake.at, Lost(T0))
    assert isinstance(session.handle(wake.at, PoisonRequest(2))[-1], Fail)


def test_a_target_that_stays_after_all_is_not_left():
    session = leaving()
    assert session.handle(0.3, Stays(T0)) == [Send(T1, Close(ID, 3))]
    assert session.handle(0.4, Received(T1, replace(verified(session, 9), epoch=3))) == []
    assert session.workers == (T0, D0)
    session.handle(0.5, Lost(T0))
    assert (session.moved, session.reopened) == (0, 1)


def test_a_target_that_drains_is_used_for_as_long_as_there_is_no_other():
    session = running()
    session.handle(0.1, Draining(T0))
    (wake,) = session.handle(0.1, Placed(Role.TARGET, None))
    assert session.handle(0.15, Received(T0, verified(session, 4)))[0] == Emit((4,), 0, 0)
    assert Place(Role.TARGET, frozenset({T0})) in session.handle(wake.at, Tick())
    assert session.handle(0.5, Available(Role.TARGET)) == [Place(Role.TARGET, frozenset({T0}))]
    effects = session.handle(0.6, Lost(T0))
    assert Place(Role.TARGET, frozenset({T0})) in effects
    assert (session.moved, session.reopened) == (1, 0)


def test_what_becomes_of_a_migration_target():
    session = leaving()
    session.handle(0.3, Lost(T0))  # before the migration target was warm: it takes over as it is
    assert session.phase is Phase.RUNNING
    assert session.handle(0.4, Received(T1, verified(session, 5, epoch=4)))[0] == Emit((5,), 0, 0)
    refused = Received(T1, Refused(ID, 3, RefusalCode.OVERLOADED))
    for fate, closed in ((Lost(T1), []), (refused, [T1]), (Faulted(T1, 3, "garbage"), [T1])):
        session = leaving()
        *effects, wake = session.handle(0.3, fate)
        assert [effect.peer for effect in sent(effects, Close)] == closed
        assert session.handle(0.3, Received(T0, verified(session, 5)))[0] == Emit((5,), 0, 0)
        assert isinstance(session.handle(wake.at, Tick())[-1], Place)
    session = leaving()
    effects = session.handle(0.3, Stop())
    assert {effect.peer for effect in sent(effects, Close)} == {T0, T1, D0}
    session = leaving()
    effects = session.handle(0.3, Draining(T1))
    assert effects == [Send(T1, Close(ID, 3)), Place(Role.TARGET, frozenset({T0, T1}))]


def test_who_could_not_take_over_is_not_asked_first_after_a_loss():
    session = leaving()
    session.handle(0.3, Received(T1, Refused(ID, 3, RefusalCode.OVERLOADED)))
    assert Place(Role.TARGET, frozenset({T0, T1})) in session.handle(0.3, Lost(T0))


def asked_again(session: Session, now: float, epoch: int, code: RefusalCode | None, *commits: int):
    """When t1, which refuses or breaks the protocol, is asked once more to take over, and under which epoch."""
    refused = Faulted(T1, epoch, "garbage") if code is None else Received(T1, Refused(ID, epoch, code))
    session.handle(now, refused)
    while True:
        if commits:
            session.handle(now, Received(T0, verified(session, *commits)))
        assert session._wake_at is not None
        now = session._wake_at
        place = session.handle(now, Tick())[-1]
        found = T1 not in place.avoid
        effects = session.handle(now, Placed(Role.TARGET, T1 if found else None))
        if found:
            return now, sent(effects, Open)[0].message.epoch


@pytest.mark.parametrize("code", [RefusalCode.INTERNAL, RefusalCode.OVERLOADED, RefusalCode.DRAINING, None])
def test_who_cannot_take_over_is_asked_less_and_less_although_the_target_that_drains_goes_on(code):
    def asked(*commits: int) -> list[float]:
        session, now, epoch, when = leaving(), 0.2, 3, []
        while now < 8.0:
            now, epoch = asked_again(session, now, epoch, code, *commits)
            when.append(now)
        return when

    assert asked(5) == asked()
    assert len(asked()) < 6


@pytest.mark.parametrize("how", ["moves", "stays"])
def test_who_is_to_move_once_more_begins_anew(how):
    session, now, epoch = leaving(), 0.2, 3
    for _ in range(4):
        now, epoch = asked_again(session, now, epoch, RefusalCode.OVERLOADED, 5)
    session.handle(now, Received(T1, Refused(ID, epoch, RefusalCode.OVERLOADED)))
    drains = T0
    if how == "stays":
        session.handle(now, Stays(T0))
        session.handle(now, Received(T0, verified(session, 6)))
    else:
        session.handle(now, Available(Role.TARGET))
        session.handle(now, Placed(Role.TARGET, T1))
        session.handle(now, Received(T1, replace(verified(session, 9), epoch=epoch + 1)))
        drains = T1
        session.handle(now, Lost(T0))
    assert session.handle(now, Draining(drains))[-1] == Place(Role.TARGET, frozenset({drains}))
    session._wake_at = None
    (wake,) = session.handle(now, Placed(Role.TARGET, None))
    assert wake.at - now <= SessionLimits().backoff


def test_a_drafter_that_drains_is_left_for_another_if_there_is_one():
    session = running()
    assert session.handle(0.1, Draining(D0)) == [Place(Role.DRAFT, frozenset({D0}))]
    assert session.handle(0.1, Placed(Role.DRAFT, None)) == []
    message = verified(session, 4)
    assert session.handle(0.2, Received(T0, message)) == [Emit((4,), 0, 0), Relay(D0, message, 2)]
    assert session.handle(0.3, Available(Role.DRAFT)) == [Place(Role.DRAFT, frozenset({D0}))]
    effects = session.handle(0.3, Placed(Role.DRAFT, D1))
    assert [effect.peer for effect in sent(effects, Close)] == [D0]
    assert [effect.peer for effect in sent(effects, Open)] == [D1]


def test_pauses_grow_and_no_two_sessions_keep_step():
    def pauses(number: int) -> list[float]:
        session, now, found = Session(replace(REQUEST, session=SessionId(number))), 0.0, []
        session.handle(now, Start())
        for _ in range(6):
            (wake,) = session.handle(now, Placed(Role.TARGET, None))
            found.append(wake.at - now)
            now = wake.at
            session.handle(now, Tick())
        return found

    first, second = pauses(1), pauses(2)
    assert first == pauses(1)
    assert not set(first) & set(second)
    for i, pause in enumerate(first):
        longest = min(0.2 * 2**i, 2.0)
        assert longest / 2 <= pause <= longest


@pytest.mark.parametrize(("begun", "code"), [(False, FailureCode.OVERLOADED), (True, None)])
def test_full_targets_refuse_what_was_not_begun_and_nothing_else(begun, code):
    session = running()
    if begun:
        session.handle(0.1, Received(T0, verified(session, 4)))
    session.handle(0.2, Received(T0, Refused(ID, 1, RefusalCode.OVERLOADED)))
    effects = session.handle(99.0, Placed(Role.TARGET, None))
    failed = [effect.code for effect in effects if isinstance(effect, Fail)]
    assert failed == ([code] if code else [])


@pytest.mark.parametrize(("begun", "min_wait"), [(False, 30.0), (True, 120.0)])
def test_no_session_waits_for_ever_for_targets_that_were_full_and_are_gone(begun, min_wait):
    session, now = running(), 0.2
    if begun:
        session.handle(0.1, Received(T0, verified(session, 4)))
    session.handle(now, Received(T0, Refused(ID, 1, RefusalCode.OVERLOADED)))
    while session.phase is Phase.PLACING:
        assert now < min_wait + 10.0
        *effects, last = session.handle(now, Placed(Role.TARGET, None))
        if isinstance(last, Wake):
            now = last.at
            session.handle(now, Tick())
    assert now > min_wait
    assert [effect.code for effect in [*effects, last]] == [
        FailureCode.UNAVAILABLE if begun else FailureCode.OVERLOADED
    ]


def test_a_target_that_goes_on_refusing_is_asked_less_and_less():
    session, now, epochs = running(), 0.0, [1]
    while now < 29.0:
        session.handle(now, Received(T0, Refused(ID, epochs[-1], RefusalCode.OVERLOADED)))
        (wake,) = session.handle(now, Placed(Role.TARGET, None))
        now = wake.at
        session.handle(now, Tick())
        (opening,) = sent(session.handle(now, Placed(Role.TARGET, T0)), Open)
        epochs.append(opening.message.epoch)
    assert 10 < len(epochs) < 40


def test_a_session_whose_turn_will_come_is_not_given_up():
    session = new()
    session.handle(0.0, Start())
    for now in range(0, 300, 20):
        effects = session.handle(now, Placed(Role.TARGET, None, queued=True))
        assert not [effect for effect in effects if isinstance(effect, Fail)]
        session.handle(now + 19.9, Tick())


def test_progress_between_losses_keeps_the_session_going():
    session = running()
    target, epoch = T0, 1
    for round_ in range(6):
        session.handle(round_, Received(target, verified(session, 4, epoch=epoch)))
        assert not any(isinstance(effect, Fail) for effect in session.handle(round_, Lost(target)))
        target = T1 if target == T0 else T0
        effects = session.handle(round_, Placed(Role.TARGET, target))
        epoch = sent(effects, Open)[0].message.epoch
    assert session.phase is Phase.RUNNING


def test_without_any_target_it_waits_and_then_says_so():
    session = new()
    session.handle(0.0, Start())
    (wake,) = session.handle(0.0, Placed(Role.TARGET, None))
    assert 0.1 <= wake.at <= 0.2
    assert session.handle(0.2, Tick()) == [Place(Role.TARGET, frozenset())]
    assert session.handle(31.0, Placed(Role.TARGET, None)) == [
        Fail(FailureCode.UNAVAILABLE, "no target worker is available")
    ]


@pytest.mark.parametrize("event", [Lost(T0), Faulted(T0, 1, "garbage")])
def test_after_a_loss_or_a_fault_a_target_is_looked_for_as_long_as_at_first(event):
    session = running()
    session.handle(29.0, event)
    assert not failures(session.handle(58.0, Placed(Role.TARGET, None)))
    assert failures(session.handle(59.0, Placed(Role.TARGET, None))) == [FailureCode.UNAVAILABLE]


def test_a_token_ends_the_search_before_it():
    session = running()
    session.handle(0.1, Received(T0, verified(session, 4)))
    session.handle(1.0, Lost(T0))
    session.handle(2.0, Placed(Role.TARGET, T1))
    session.handle(2.1, Received(T1, verified(session, 5, epoch=3)))
    session.handle(119.0, Received(T1, Refused(ID, 3, RefusalCode.DRAINING)))
    assert not failures(session.handle(123.0, Placed(Role.TARGET, None)))


def test_a_text_that_has_begun_waits_longer_for_a_target_to_be_started_again():
    session = running()
    session.handle(0.1, Received(T0, verified(session, 4)))
    session.handle(1.0, Lost(T0))
    for now in (1.0, 31.0, 120.9):
        assert isinstance(session.handle(now, Placed(Role.TARGET, None))[-1], Wake)
        session.handle(now + 2.0, Tick())
    assert session.handle(123.0, Placed(Role.TARGET, None)) == [
        Fail(FailureCode.UNAVAILABLE, "no target worker is available")
    ]


@pytest.mark.parametrize("begun", [False, True])
def test_where_there_is_no_target_a_request_waits_as_long_as_it_said_and_for_full_ones_as_ever(begun):
    session = new(SessionLimits(unavailable_timeout=500.0, stall_timeout=10.0))
    session.handle(0.0, Start())
    if begun:
        session.handle(0.0, Placed(Role.TARGET, T0))
        session.handle(0.0, Received(T0, verified(session, 4)))
        session.handle(0.0, Lost(T0))
    for now in (31.0, 121.0, 499.0):
        assert failures(session.handle(now, Placed(Role.TARGET, None))) == []
    (opening,) = sent(session.handle(499.0, Placed(Role.TARGET, T1)), Open)
    session.handle(499.5, Received(T1, Refused(ID, opening.message.epoch, RefusalCode.OVERLOADED)))
    for now in (499.5, 529.0):  # there are targets now, and their room is what it waits for
        assert failures(session.handle(now, Placed(Role.TARGET, None))) == []
    session.handle(529.5, Tick())
    assert failures(session.handle(531.0, Placed(Role.TARGET, None))) == ([] if begun else [FailureCode.OVERLOADED])


def test_a_request_that_said_how_long_is_failed_then_and_not_before():
    session = new(SessionLimits(unavailable_timeout=2.0))
    session.handle(0.0, Start())
    assert failures(session.handle(1.9, Placed(Role.TARGET, None))) == []
    assert failures(session.handle(2.1, Placed(Role.TARGET, None))) == [FailureCode.UNAVAILABLE]


@pytest.mark.parametrize("code", [RefusalCode.OVERLOADED, RefusalCode.DRAINING])
def test_a_busy_target_is_left_for_another_and_does_not_count_as_a_fault(code):
    session = running()
    effects = session.handle(0.1, Received(T0, Refused(ID, 1, code)))
    assert Place(Role.TARGET, frozenset({T0})) in effects
    assert isinstance(session.handle(0.1, Placed(Role.TARGET, None))[0], Wake)
    assert session.reopened == 0
    assert session.handle(0.4, Tick()) == [Place(Role.TARGET, frozenset())]


def test_silence_opens_the_session_again_with_growing_patience():
    session = running()
    assert session.handle(5.0, Tick()) == []  # the wake-up for second 10 is still to come
    effects = session.handle(10.0, Tick())
    assert Place(Role.TARGET, frozenset()) in effects
    effects = session.handle(10.0, Placed(Role.TARGET, T0))
    assert Wake(30.0) in effects


def test_who_is_silent_twice_in_a_row_is_left_for_another_and_silence_ends_a_session_at_last():
    session, now, placed = running(), 0.0, []
    while session.phase is Phase.RUNNING:
        assert session.workers.target is not None
        now += 10.0 * 2 ** len(placed)
        *_, last = session.handle(now, Tick())
        if isinstance(last, Place):
            placed.append(last.avoid)
            session.handle(now, Placed(Role.TARGET, T1 if T0 in last.avoid else T0))
    assert placed == [frozenset(), frozenset({T0}), frozenset({T0, T1}), frozenset({T0, T1})]
    assert isinstance(last, Fail)
    assert last.code is FailureCode.FAULTY
    assert "5 times" in last.message


def test_a_token_forgives_silence():
    session = running()
    session.handle(10.0, Tick())
    (opening,) = sent(session.handle(10.0, Placed(Role.TARGET, T0)), Open)
    session.handle(11.0, Received(T0, verified(session, 4, epoch=opening.message.epoch)))
    assert session.handle(21.0, Tick())[-1] == Place(Role.TARGET, frozenset())


def test_who_was_silent_is_not_what_was_waited_for_before():
    """A text that found a target late, and then only silence, has all the time again to find another."""
    session, now = new(), 0.0
    session.handle(now, Start())
    while now < 25.0:
        (wake,) = session.handle(now, Placed(Role.TARGET, None))
        now = wake.at
        session.handle(now, Tick())
    session.handle(now, Placed(Role.TARGET, T0))
    now += 10.0
    session.handle(now, Tick())
    assert isinstance(session.handle(now, Placed(Role.TARGET, None))[-1], Wake)


def test_finish_and_stop_close_both_sides_and_end_the_session():
    session = running()
    effects = session.handle(0.1, Received(T0, verified(session, 4, finish=FinishReason.LENGTH)))
    assert effects[0] == Emit((4,), 0, 0)
    assert {effect.peer for effect in sent(effects, Close)} == {T0, D0}
    assert effects[-1] == Finish(FinishReason.LENGTH)
    session = running()
    effects = session.handle(0.1, Stop())
    assert {effect.peer for effect in sent(effects, Close)} == {T0, D0}
    assert effects[-1] == Finish(None)
    assert session.handle(0.2, Stop()) == []
