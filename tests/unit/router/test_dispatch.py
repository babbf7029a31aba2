"""What the shell around sessions adds: timers, and who is credited with what."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest
import uvloop

from router.dispatch import Dispatcher, DispatchLimits
from router.generation import Committed, Details, Ended, Generation, GenerationError, Passed
from router.sessions.choice import StandbyTargets
from router.sessions.pool import Peer
from router.sessions.run import EventKind, session_of, weight
from speculation import digest as digests
from speculation.events import Event, Fail, PeerId, Placed, PoisonRequest, Role, Start, StepMetadata, Tick
from speculation.messages import (
    Close,
    FinishReason,
    FromWorker,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    RequestOptions,
    Sampling,
    SessionId,
    Subscribe,
    TokenLogprobs,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.request.poison_detector import WELL_PAST
from speculation.request.record import SessionState
from speculation.request.session import SessionLimits
from transport.client import Traffic
from transport.codec import MalformedMessage, UnknownKind
from transport.codec_parts import AskedLogprobs
from transport.incoming import Route

PROMPT = (1, 2, 3)
HASTY = DispatchLimits(session=SessionLimits(placement_timeout=0.5, backoff=0.004, longest_backoff=0.004))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_no_timer_is_lost_whatever_the_steps_of_the_clock(run):
    """uvloop's clock has steps of a millisecond, and its timers may be that early."""

    async def fail(dispatcher: Dispatcher) -> str:
        with pytest.raises(GenerationError) as caught:
            async for _ in dispatcher.generate(Generation(PROMPT, Sampling(), 8)):
                pass
        return caught.value.code.name

    async def main() -> Counter[str]:
        dispatcher = Dispatcher(HASTY)
        async with asyncio.timeout(60):
            codes = await asyncio.gather(*(fail(dispatcher) for _ in range(20)))
        await dispatcher.pool.close()
        return Counter(codes)

    assert run(main()) == {"unavailable": 20}


class Wire:
    """A connection that remembers what is sent."""

    round_trip = None
    traffic = Traffic()

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.routes: dict[SessionId, Route] = {}

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    @property
    def last(self) -> Open:
        return next(message for message in reversed(self.sent) if isinstance(message, Open))


class Served:
    """A router with workers that say what a test has them say, and one text under way."""

    def __init__(self, limits: DispatchLimits = DispatchLimits()) -> None:
        self.dispatcher = Dispatcher(limits)
        self.wires: dict[str, Wire] = {}
        self.commits: list[Committed] = []

    def up(
        self,
        name: str,
        revision: int = 1,
        role: Role = Role.TARGET,
        started: float | None = None,
        head: int = 0,
        context: int = 1000,
    ) -> None:
        peer = Peer(PeerId(name), role, self.dispatcher.pool)
        self.wires[name] = peer.connection = Wire()  # type: ignore[assignment]
        self.dispatcher.pool.peers[peer.peer] = peer
        started = started or float(revision)
        peer.up(Welcome(role.value, "m", 100, context, 1, instance=name, revision=revision, started=started, head=head))

    def hear(self, name: str, message: FromWorker) -> None:
        self.dispatcher.pool.peers[PeerId(name)].received(message)

    def drain(self, name: str) -> None:
        self.hear(name, Load(draining=True))

    def verify(
        self,
        name: str,
        *tokens: int,
        finish: FinishReason | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Go on after what was opened there last and committed since."""
        opened = self.wires[name].last
        before = (*PROMPT, *(token for commit in self.commits for token in commit.tokens))
        before = before if len(before) > len(opened.tokens) else opened.tokens
        digest = digests.of((*before, *tokens))
        self.hear(
            name,
            Verification(opened.session, opened.epoch, len(before), tokens, digest, finish=finish, logprobs=logprobs),
        )

    async def read(self, commits: int) -> None:
        """Until the client has had so many."""
        async with asyncio.timeout(60):
            while len(self.commits) < commits:
                await asyncio.sleep(0)

    def die(self, name: str) -> None:
        self.dispatcher.pool.peers[PeerId(name)].down("died")

    async def serve(self, max_tokens: int = 8, request_options: RequestOptions = RequestOptions()) -> None:
        model = self.dispatcher.models["m"]
        async for item in self.dispatcher.generate(
            Generation(PROMPT, Sampling(), max_tokens, model=model, details=True, request_options=request_options)
        ):
            if isinstance(item, Committed):
                self.commits.append(item)

    async def begins(self, *arguments: int, **options: RequestOptions) -> asyncio.Task[None]:
        """A text is under way."""
        serving = asyncio.create_task(self.serve(*arguments, **options))
        await asyncio.sleep(0)
        return serving


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.dispatcher.pool.close()


async def begun(served: Served, max_tokens: int = 100) -> AsyncGenerator[Committed | Ended]:
    """A text whose client has read its first token."""
    reading = served.dispatcher.generate(
        Generation(PROMPT, Sampling(), max_tokens, model=served.dispatcher.models["m"])
    )
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    served.verify("a", 11)
    served.commits.append(await first)
    return reading


async def test_a_text_that_begins_while_its_target_is_replaced_stays_with_its_revision(served):
    served.up("old")
    serving = await served.begins()
    served.up("new", revision=2)
    served.drain("old")
    migration_target = served.wires["new"].last
    assert migration_target.tokens == PROMPT
    served.verify("old", 11)
    await served.read(1)
    served.hear(
        "new", Verification(migration_target.session, migration_target.epoch, 3, (22,), digests.of((*PROMPT, 22)))
    )
    served.verify("old", 12)
    await served.read(2)
    assert served.wires["new"].last is migration_target  # never opened there with what revision 1 has said
    served.up("other")
    assert served.wires["other"].last.tokens == (*PROMPT, 11, 12)
    served.verify("old", 13)
    await served.read(3)
    served.verify("other", 99)  # warm
    served.verify("other", 14, finish=FinishReason.LENGTH)
    await serving
    assert [commit.tokens for commit in served.commits] == [(11,), (12,), (13,), (14,)]
    named = [commit.details.target for commit in served.commits if commit.details]
    assert named == ["old", "old", "old", "other"]


async def test_targets_that_compute_differently_are_told_of_and_take_over_no_text(served, caplog):
    caplog.set_level(logging.WARNING, "router.sessions.pool")  # which benchmarks in this process may have silenced
    served.up("a")
    served.up("like a")
    assert not caplog.messages
    served.up("split", revision=2)
    assert caplog.messages == ["targets of m are of different revisions: no text moves from one to another"]
    serving = await served.begins()
    assert served.wires["split"].last.tokens == PROMPT  # the newest
    served.verify("split", 11)
    await served.read(1)
    served.die("split")
    assert not any(wire.sent for name, wire in served.wires.items() if name != "split")
    served.up("split too", revision=2)
    assert served.wires["split too"].last.tokens == (*PROMPT, 11)
    served.verify("split too", 12, finish=FinishReason.LENGTH)
    await serving


async def test_a_router_that_stops_misses_nobody(served, caplog):
    caplog.set_level(logging.WARNING, "router.sessions.pool")  # which benchmarks in this process may have silenced
    served.up("a")
    await served.dispatcher.pool.close()
    assert not caplog.messages
    assert served.dispatcher.pool.event_log.lines[-1].text == "worker a is gone: this router stops"


async def test_a_target_that_stands_by_takes_over_at_once_and_its_successor_stands_by():
    served = Served(DispatchLimits(standby={"": StandbyTargets(active=1, idle=1)}))
    served.up("first", started=1.0)
    served.up("second", started=2.0)
    serving = await served.begins()
    served.verify("first", 11)
    await served.read(1)
    assert not served.wires["second"].sent
    assert {view.worker: view.standby for view in served.dispatcher.snapshot().workers} == {
        "first": False,
        "second": True,
    }
    served.die("first")
    assert served.wires["second"].last.tokens == (*PROMPT, 11)
    served.up("first", started=3.0)  # started again
    served.verify("second", 12)
    await served.read(2)
    other = asyncio.create_task(served.serve())
    await asyncio.sleep(0)
    assert [opened.tokens for opened in served.wires["second"].sent if isinstance(opened, Open)][1:] == [PROMPT]
    assert not served.wires["first"].sent
    other.cancel()
    serving.cancel()
    await asyncio.gather(serving, other, return_exceptions=True)
    await served.dispatcher.pool.close()


async def test_a_target_may_tell_of_tokens_only_what_it_was_asked_for_and_of_the_prompt_once(served):
    served.up("a")
    serving = await served.begins(request_options=RequestOptions(logprobs=1, prompt_logprobs=0))
    opened, peer = served.wires["a"].last, served.dispatcher.pool.peers[PeerId("a")]
    assert peer.asked(opened.session, opened.epoch) == AskedLogprobs(tokens=1, prompt=0, prompt_tokens=len(PROMPT))
    assert peer.asked(opened.session, opened.epoch + 1) is None
    prompt, one = (TokenLogprobs(-1.0),) * (len(PROMPT) - 1), (TokenLogprobs(-1.0, (11,), (-1.0,)),)
    digest = digests.of((*PROMPT, 11))
    said = Verification(opened.session, opened.epoch, len(PROMPT), (11,), digest, logprobs=one, prompt_logprobs=prompt)
    served.hear("a", said)
    await served.read(1)
    assert peer.asked(opened.session, opened.epoch) == AskedLogprobs(tokens=1, prompt_tokens=len(PROMPT))
    served.verify("a", 12, finish=FinishReason.LENGTH)
    await serving
    assert peer.asked(opened.session, opened.epoch) is None


async def test_a_target_that_refused_to_take_over_keeps_no_account_of_the_session(served):
    served.up("a")
    serving = await served.begins()
    served.verify("a", 11)
    await served.read(1)
    served.up("b")
    served.drain("a")
    migration_target = served.wires["b"].last
    served.hear("b", Refused(migration_target.session, migration_target.epoch, RefusalCode.OVERLOADED, "full"))
    assert served.wires["b"].sent[-1] is not migration_target
    served.die("b")
    served.verify("a", 12, finish=FinishReason.LENGTH)
    await serving
    assert served.dispatcher._poison_detector._suspicions == {}


async def test_a_text_that_ends_targets_ends_few_though_the_one_it_is_to_leave_goes_on():
    served = Served(DispatchLimits(session=SessionLimits(backoff=0.001, longest_backoff=0.001)))
    served.up("a")
    serving = await served.begins(1000)
    served.verify("a", 11)
    await served.read(1)
    for name in "bcdefg":
        served.up(name)
    served.drain("a")
    deaths = 0
    for commits in range(2, 200):
        for name in "bcdefg":
            if served.dispatcher.pool.peers[PeerId(name)].opened:
                served.die(name)
                deaths += 1
        served.verify("a", 11)
        await served.read(commits)
        await asyncio.sleep(0.001)
    assert deaths == 2
    served.verify("a", 12, finish=FinishReason.STOP)
    await serving
    await served.dispatcher.pool.close()


async def test_a_drafter_that_says_what_targets_say_throws_suspicion_on_nobody(served):
    served.up("a")
    served.up("d", role=Role.DRAFT)
    serving = await served.begins(100)
    served.verify("a", 11)
    await served.read(1)
    opened = served.wires["d"].last
    served.hear("d", Verification(opened.session, opened.epoch, 10**6, (12,), 0, lead=5))
    served.die("a")
    served.up("b")
    served.verify("b", *range(20, 20 + WELL_PAST))
    await served.read(2)
    served.die("b")  # the text has gone well past the place where the one before died
    assert served.dispatcher._poison_detector._suspicions == {}
    served.up("c")
    served.verify("c", 50, finish=FinishReason.STOP)
    await serving


async def test_a_target_that_comes_back_to_the_list_keeps_its_texts(served):
    served.up("target@a:1")
    serving = await served.begins()
    served.up("target@b:1")
    served.dispatcher.pool.set_workers(Role.TARGET, ["b:1"])
    served.dispatcher.pool.set_workers(Role.TARGET, ["a:1", "b:1"])
    (run,) = served.dispatcher._runs.values()
    opened = served.wires["target@b:1"].last
    assert served.wires["target@b:1"].sent[-1] == Close(opened.session, opened.epoch)
    served.verify("target@a:1", 11, finish=FinishReason.LENGTH)
    await serving
    assert (run.session.moved, run.session.reopened) == (0, 0)


async def test_a_text_whose_target_comes_back_to_the_list_keeps_no_other_target_free(served):
    served.up("target@a:1")
    serving = await served.begins()
    served.up("target@b:1")
    served.die("target@a:1")  # of this text, as far as is known
    served.up("target@c:1")
    opened = served.wires["target@b:1"].last
    served.dispatcher._poison_detector.opened(SessionId(99), PeerId("target@c:1"), 1)  # which has said nothing yet
    served.dispatcher.pool.set_workers(Role.TARGET, ["c:1"])
    assert served.dispatcher._poison_detector._reserved == {"target@c:1": opened.session}
    served.dispatcher.pool.set_workers(Role.TARGET, ["b:1", "c:1"])
    assert not served.dispatcher._poison_detector._reserved
    served.verify("target@b:1", 11, finish=FinishReason.LENGTH)
    await serving


@pytest.mark.parametrize("fails", [False, True])
async def test_a_text_waits_for_a_target_that_takes_it_while_only_too_small_ones_are_up(fails):
    served = Served(HASTY)
    served.up("large")
    served.up("small", context=50)
    serving = await served.begins(100)
    served.verify("large", 11)
    await served.read(1)
    first = served.wires["large"].last
    if fails:
        served.hear("large", Refused(first.session, first.epoch, RefusalCode.INTERNAL, "broken"))
        async with asyncio.timeout(60):
            while served.wires["large"].last is first:
                await asyncio.sleep(0.001)
    else:
        served.die("large")
        await asyncio.sleep(0.02)
        served.up("large")
    assert not served.wires["small"].sent
    assert served.wires["large"].last.tokens == (*PROMPT, 11)
    served.verify("large", 12, finish=FinishReason.LENGTH)
    await serving
    await served.dispatcher.pool.close()


async def test_a_text_that_only_a_target_that_is_away_takes_is_told_so_in_the_end():
    served = Served(HASTY)
    served.up("large")
    served.up("small", context=50)
    served.die("large")
    with pytest.raises(
        GenerationError, match=r"no target worker .* that takes the \d+ tokens asked of model m; ask for"
    ):
        await (await served.begins(100))
    assert not served.wires["small"].sent
    await served.dispatcher.pool.close()


async def test_a_text_whose_target_drains_has_one_timer_however_long_there_is_no_other(served):
    served.up("a")
    serving = await served.begins()
    served.drain("a")
    (run,) = served.dispatcher._runs.values()
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    for second in range(50):
        served.dispatcher._handle(run, Tick(), at=asyncio.get_running_loop().time() + second)
        assert sum(not timer.cancelled() for timer in scheduled) <= 1
    served.verify("a", 11, finish=FinishReason.LENGTH)
    await serving


async def test_who_is_condemned_where_it_still_runs_does_not_count_as_failed(served, monkeypatch):
    served.up("a")
    serving = await served.begins()
    monkeypatch.setattr(served.dispatcher._poison_detector, "place", lambda *_: PoisonRequest(2))
    served.drain("a")
    assert served.dispatcher.snapshot().totals.condemned == 0
    served.verify("a", 11, finish=FinishReason.LENGTH)
    await serving
    assert served.dispatcher.snapshot().totals.failed == 0


@pytest.mark.parametrize(("code", "moved"), [(RefusalCode.OVERLOADED, 0), (RefusalCode.DRAINING, 1)])
async def test_who_waits_for_room_at_its_target_has_not_moved(code, moved):
    served = Served(HASTY)
    served.up("a")
    serving = await served.begins()
    first = served.wires["a"].last
    served.hear("a", Refused(first.session, first.epoch, code, "not now"))
    async with asyncio.timeout(60):
        while served.wires["a"].last is first:
            await asyncio.sleep(0.001)
    served.verify("a", 11, finish=FinishReason.LENGTH)
    await serving
    told = [line.kind for line in served.dispatcher.pool.event_log.lines].count(EventKind.SESSION_MOVED)
    assert (served.dispatcher.totals.moved, told) == (moved, moved)
    await served.dispatcher.pool.close()


async def test_a_refusal_of_an_older_opening_leaves_the_account_of_the_newer(served):
    served.up("a")
    serving = await served.begins()
    first = served.wires["a"].last
    served.up("b")
    served.hear("a", Refused(first.session, first.epoch, RefusalCode.INTERNAL, "broken"))
    second = served.wires["b"].last
    served.hear("b", Refused(second.session, first.epoch, RefusalCode.INTERNAL, "broken"))
    assert len(served.dispatcher.pool.peers[PeerId("b")].opened) == 1
    served.verify("b", 11, finish=FinishReason.LENGTH)
    await serving
    assert len(served.dispatcher.pool.peers[PeerId("b")].opened) == 0


async def test_a_text_that_nobody_reads_waits_for_no_target(served):
    served.up("a")
    reading = await begun(served, 2)
    opened = served.wires["a"].last
    digest = digests.of((*PROMPT, 11, 12))
    served.hear("a", Verification(opened.session, opened.epoch, 4, (12,), digest, finish=FinishReason.LENGTH))
    snapshot = served.dispatcher.snapshot()
    assert (snapshot.running, snapshot.placing) == (0, 0)
    served.die("a")
    assert served.dispatcher._poison_detector._suspicions == {}
    assert not served.dispatcher._poison_detector._opened
    served.dispatcher.give_up("this router ends")
    assert served.dispatcher.snapshot().totals.failed == 0
    await reading.aclose()


async def test_a_text_that_has_ended_takes_no_place_however_slowly_it_is_read(served):
    served.up("a")
    reading = await begun(served, 3)
    opened = served.wires["a"].last
    for at, token, finish in ((4, 12, None), (5, 13, FinishReason.LENGTH)):
        digest = digests.of((*PROMPT, *range(11, token + 1)))
        served.hear("a", Verification(opened.session, opened.epoch, at, (token,), digest, finish=finish))
    dispatcher = served.dispatcher
    assert dispatcher.demand().streams == dispatcher.demand("m").streams == 0
    assert dispatcher.snapshot().totals.sessions == 1
    assert dispatcher.reading == 1  # a router that drains waits for it
    assert dispatcher.metrics.tally.committed == 3
    items = [item async for item in reading]
    assert [getattr(item, "tokens", item) for item in items] == [(12,), (13,), Ended(FinishReason.LENGTH)]
    assert dispatcher.demand().streams == 0
    assert (dispatcher.snapshot().totals.sessions, dispatcher.snapshot().totals.failed) == (1, 0)
    assert dispatcher.reading == 0


async def test_the_last_text_of_a_target_that_is_no_longer_listed_ends_as_any_other(served, monkeypatch):
    served.up("a")
    reading = await begun(served, 2)
    ended: list[bool] = []
    detector = served.dispatcher._poison_detector
    monkeypatch.setattr(detector, "ended", lambda _session, *, finished: ended.append(finished))
    served.dispatcher.pool.set_workers(Role.TARGET, [])
    served.verify("a", 12, finish=FinishReason.LENGTH)
    items = [item async for item in reading]
    assert [getattr(item, "tokens", item) for item in items] == [(12,), Ended(FinishReason.LENGTH)]
    assert ended == [True]


async def test_a_router_that_ends_lets_go_of_texts_that_nobody_reads(served):
    served.up("a")
    reading = await begun(served, 3)
    served.dispatcher.give_up("this router had to stop")
    assert served.dispatcher.demand().streams == 0
    assert isinstance(served.wires["a"].sent[-1], Close)
    with pytest.raises(GenerationError, match="had to stop"):
        await anext(reading)
    assert served.dispatcher.snapshot().totals.failed == 1


async def test_workers_of_a_session_hear_each_other_at_once_for_as_long_as_it_is_open_at_both(served):
    served.up("a")
    served.up("d", role=Role.DRAFT)
    serving = await served.begins(100)
    a, d = served.wires["a"], served.wires["d"]
    session, epoch, there = a.last.session, a.last.epoch, d.last.epoch
    assert a.routes == {session: Route(epoch, d, there)}
    assert d.routes == {session: Route(there, a, epoch)}
    served.die("d")
    served.up("e", role=Role.DRAFT)
    e = served.wires["e"]
    assert a.routes == {session: Route(epoch, e, e.last.epoch)}
    assert not d.routes
    served.verify("a", 11, finish=FinishReason.STOP)
    await serving
    assert not a.routes and not e.routes


@pytest.mark.parametrize("fate", ["refuses", "dies", "breaks the protocol"])
async def test_nothing_goes_to_a_drafter_that_has_no_session_any_more_though_there_is_no_other(served, fate):
    served.up("a", head=77)
    served.up("d", role=Role.DRAFT, head=77)
    serving = await served.begins(100)
    a, opened = served.wires["a"], served.wires["d"].last
    match fate:
        case "refuses":
            served.hear("d", Refused(opened.session, opened.epoch, RefusalCode.OVERLOADED, "full"))
        case "dies":
            served.die("d")
        case _:
            for _ in range(SessionLimits().draft_strikes):
                served.dispatcher._malformed(PeerId("d"), MalformedMessage("odd", opened.session, opened.epoch))
    assert not a.routes and not served.wires["d"].routes
    assert [message.head for message in a.sent if isinstance(message, Subscribe)] == [77, 0]
    served.verify("a", 11, finish=FinishReason.STOP)
    await serving
    assert not any(isinstance(message, Verification) for message in served.wires["d"].sent)


async def test_messages_of_kinds_yet_to_come_are_not_counted_as_malformed(served):
    served.up("a")
    for error in (UnknownKind(), MalformedMessage("odd"), UnknownKind()):
        served.dispatcher.pool.peers[PeerId("a")].malformed(error)
    assert served.dispatcher.totals.malformed == 1


async def test_what_was_passed_on_is_not_relayed_again(served):
    served.up("a")
    served.up("d", role=Role.DRAFT)
    serving = await served.begins(100)
    opened, drafted = served.wires["a"].last, served.wires["d"].last
    for position, (token, passed) in enumerate([(11, 0), (12, drafted.epoch), (13, drafted.epoch - 1)], len(PROMPT)):
        digest = digests.of((*PROMPT, 11, 12, 13)[: position + 1])
        message = Verification(opened.session, opened.epoch, position, (token,), digest)
        object.__setattr__(message, "passed", passed)
        served.hear("a", message)
    heard = [message.tokens for message in served.wires["d"].sent if isinstance(message, Verification)]
    assert heard == [(11,), (13,)], "and not what went to this opening; what went to another one, it has not heard"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_session_goes_on_elsewhere_after_all_that_its_worker_said(served):
    served.up("a")
    serving = await served.begins(100)
    served.verify("a", 11)
    served.die("a")
    assert served.dispatcher.metrics.tally.committed == 1
    served.up("b")
    assert served.wires["b"].last.tokens == (*PROMPT, 11)
    await served.read(1)
    served.verify("b", 12, finish=FinishReason.STOP)
    await serving
    assert [commit.tokens for commit in served.commits] == [(11,), (12,)]


async def test_a_full_router_tells_each_whom_it_sends_away_a_later_turn():
    dispatcher = Dispatcher(DispatchLimits(sessions=1))
    dispatcher._turns.durations.add(10.0)
    waiting = asyncio.create_task(anext(aiter(dispatcher.generate(Generation(PROMPT, Sampling(), 8)))))
    await asyncio.sleep(0)
    told = []
    for _ in range(3):
        with pytest.raises(GenerationError) as caught:
            await anext(aiter(dispatcher.generate(Generation(PROMPT, Sampling(), 8))))
        assert caught.value.code.name == "overloaded"
        told.append(caught.value.retry_after)
    assert 10.0 < told[0] <= 20.0 and told[0] < told[1] < told[2] <= 40.0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await dispatcher.pool.close()


def test_a_session_waits_for_a_target_as_long_as_its_request_does():
    within = Generation(PROMPT, Sampling(), 8, timeout=500.0)
    for generation, waits in ((within, True), (replace(within, timeout=None), False)):
        session = session_of(SessionId(1), generation, SessionLimits(), "")
        session.handle(0.0, Start())
        effects = session.handle(31.0, Placed(Role.TARGET, None))
        assert any(isinstance(effect, Fail) for effect in effects) is not waits


async def test_a_session_that_contradicts_itself_ends_with_a_clear_failure_and_alone(served, caplog):
    served.up("first")
    broken, sound = [asyncio.create_task(served.serve()) for _ in range(2)]
    await asyncio.sleep(0)
    run, other = served.dispatcher._runs.values()
    run.session._state = SessionState.MIGRATING  # and to nowhere
    served.die("first")
    with pytest.raises(GenerationError) as caught:
        await broken
    assert (caught.value.code.name, caught.value.message) == (
        "internal",
        "the router lost track of this request, by a fault of its own",
    )
    assert "went from migrating to placing on Lost" in caplog.text
    assert list(served.dispatcher._runs.values()) == [other]
    served.up("second")
    served.verify("second", 11, finish=FinishReason.LENGTH)
    await sound
    assert [commit.tokens for commit in served.commits] == [(11,)]
    assert served.dispatcher.totals.failed == 1
    assert not served.dispatcher.demand().streams


async def test_a_client_that_is_too_far_behind_is_cut_off_with_what_there_was():
    served = Served(DispatchLimits(unread=3))
    served.up("a")
    texts = await begun(served)
    for token in (12, 13):  # so far behind it may be
        served.verify("a", token)
        served.commits.append(Committed((token,), 0, 0))
    await asyncio.sleep(0)
    assert served.dispatcher.demand().streams == 1
    served.verify("a", 14)
    await asyncio.sleep(0)
    assert served.dispatcher.demand().streams == 0
    assert isinstance(served.wires["a"].sent[-1], Close)
    read = [(await anext(texts)).tokens for _ in range(3)]
    with pytest.raises(GenerationError, match="3 commits behind") as caught:
        await anext(texts)
    assert (read, caught.value.code.name) == ([(12,), (13,), (14,)], "slow_reader")
    await served.dispatcher.pool.close()


LIKELIEST = TokenLogprobs(-1.0, tuple(range(20)), (-1.0,) * 20)
"""As much as can be asked for of a token."""


async def test_log_probabilities_that_wait_for_a_client_count_by_their_number():
    served = Served(DispatchLimits(unread=9))
    served.up("a")
    texts = await begun(served)
    for token in (12, 13):
        served.verify("a", token, logprobs=(LIKELIEST,))
        served.commits.append(Committed((token,), 0, 0))
    assert (await anext(texts)).metadata.logprobs == (LIKELIEST,)
    served.verify("a", 14, logprobs=(LIKELIEST,))
    served.commits.append(Committed((14,), 0, 0))
    await asyncio.sleep(0)
    assert served.dispatcher.demand().streams == 1, "what was read counts no more"
    served.verify("a", 15, logprobs=(LIKELIEST,))
    await asyncio.sleep(0)
    assert served.dispatcher.demand().streams == 0
    with pytest.raises(GenerationError, match="3 commits behind"):
        async for _ in texts:
            pass
    await served.dispatcher.pool.close()


def test_a_commit_weighs_what_it_says_of_its_tokens_and_drafts():
    proposal = Proposal(SessionId(1), 1, 3, 0, tuple(range(16)), tuple(range(-1, 15)))
    details = Details(0.0, (Passed(0.0, proposal),) * 2, "t", "d", 0)
    prompts = StepMetadata(prompt_logprobs=(LIKELIEST,) * 1000)
    assert weight(Committed((1, 2), 1, 1, metadata=prompts)) == 1
    assert weight(Committed((1, 2), 1, 1, metadata=StepMetadata(logprobs=(LIKELIEST,) * 8))) == 22
    assert weight(Committed((1, 2), 1, 1, details=details)) == 5


async def test_a_client_that_is_behind_a_text_that_has_ended_reads_it_to_its_end():
    served = Served(DispatchLimits(unread=2))
    served.up("a")
    texts = await begun(served)
    served.verify("a", 12)
    served.commits.append(Committed((12,), 0, 0))
    served.verify("a", 13, finish=FinishReason.STOP)
    await asyncio.sleep(0)
    assert [type(item) for item in [item async for item in texts]] == [Committed, Committed, Ended]
    await served.dispatcher.pool.close()


async def test_no_worker_keeps_a_session_that_the_router_lost_track_of(served, monkeypatch):
    served.up("a")
    served.up("d", role=Role.DRAFT)
    serving = await served.begins()
    (run,) = served.dispatcher._runs.values()
    target, drafter = served.wires["a"], served.wires["d"]
    opened = [Close(wire.last.session, wire.last.epoch) for wire in (target, drafter)]

    react = run.session._react

    def planted(event: Event) -> None:
        react(event)
        monkeypatch.undo()
        raise AssertionError("what was to be done is lost")

    monkeypatch.setattr(run.session, "_react", planted)
    served.hear("a", Verification(opened[0].session, opened[0].epoch, 99, (1,), 0))  # connects to nothing
    with pytest.raises(GenerationError, match="lost track"):
        await serving
    assert [target.sent[-1], drafter.sent[-1]] == opened
    assert not any(peer.opened for peer in served.dispatcher.pool.peers.values())
