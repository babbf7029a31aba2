"""Streams between router and worker: greetings, faults, silence."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest

from benchmarks.harness.proxy import Proxy
from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from router.dispatch import Dispatcher
from router.generation import Generation
from router.sessions.pool import PoolEvents, WorkerPool
from speculation import digest as digests
from speculation.events import Available, PeerId, Role
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Close,
    FinishReason,
    FromWorker,
    Limits,
    Load,
    Loading,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Sampling,
    SessionId,
    Support,
    ToWorker,
    Verification,
    Welcome,
)
from transport import client, outbox, server
from transport.address import AddressError, check_free, is_loopback, parse
from transport.client import Traffic, WorkerConnection
from transport.codec import MalformedMessage, decode_from_worker, encode_from_worker, encode_to_worker
from transport.incoming import Incoming, Listener
from transport.outbox import MAX_WAITING, Outbox, PeerTooSlow
from transport.worker import Door, Worker

WELCOME = Welcome("target", "fake", 100, 64)
OPEN = Open(SessionId(1), 1, (1, 2), Sampling(), Limits(9))


@dataclass
class Echo:
    """A machine that commits one token for each opening it hears of."""

    held: dict[tuple[Hashable, int], Open] = field(default_factory=dict)
    fail: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    welcome_of: Welcome = WELCOME

    def welcome(self) -> Welcome:
        return self.welcome_of

    def load(self) -> Load:
        return Load(sessions=len(self.held), counters=self.counters)

    def receive(self, link: Hashable, message: ToWorker, at: float) -> list[tuple[Hashable, FromWorker]]:
        if isinstance(message, Open):
            self.held[link, message.session] = message
            return [(link, Verification(message.session, message.epoch, len(message.tokens), (7,), 0))]
        if isinstance(message, Close):
            self.held.pop((link, message.session), None)
        return []

    def forget(self, link: Hashable) -> None:
        self.held = {key: value for key, value in self.held.items() if key[0] is not link}

    def step(self) -> None:
        if self.fail:
            raise RuntimeError("planted")

    def due(self) -> None:
        return None


@dataclass
class Heard(Listener):
    """A router's side that writes down what it hears."""

    events: asyncio.Queue[object] = field(default_factory=asyncio.Queue)

    def up(self, welcome: Welcome) -> None:
        self.events.put_nowait(welcome)

    def loading(self, loading: Loading | None) -> None:
        self.events.put_nowait(loading)

    def received(self, message: FromWorker) -> None:
        if not isinstance(message, Load):
            self.events.put_nowait(message)

    def malformed(self, error: MalformedMessage) -> None:
        self.events.put_nowait(error)

    def down(self, why: str) -> None:
        self.events.put_nowait(why)

    async def next(self) -> object:
        return await asyncio.wait_for(self.events.get(), 30)


@asynccontextmanager
async def echo_worker(machine: Echo, listen: str = "127.0.0.1:0"):
    worker = Worker(machine, "target")
    await worker.start(await Door.open("target", listen))
    try:
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def connected(address: str):
    heard = Heard()
    connection = WorkerConnection(address, "target", heard)
    task = asyncio.create_task(connection.run())
    try:
        assert await heard.next() == WELCOME
        yield connection, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_router_is_greeted_heard_and_forgotten():
    machine = Echo()
    async with echo_worker(machine) as worker:
        async with connected(worker.address) as (connection, heard):
            connection.send(OPEN)
            answer = await heard.next()
            assert isinstance(answer, Verification)
            assert len(machine.held) == 1
        async with asyncio.timeout(60):
            while machine.held:
                await asyncio.sleep(0.01)


async def test_a_worker_is_met_over_ipv6():
    try:
        check_free("[::1]:0")
    except AddressError:
        pytest.skip("no ::1 on this machine")
    async with echo_worker(Echo(), "[::1]:0") as worker:
        assert worker.address.startswith("[::1]:")
        async with connected(worker.address) as (connection, heard):
            connection.send(OPEN)
            assert isinstance(await heard.next(), Verification)


async def test_a_worker_that_stops_is_noticed_and_one_that_returns_is_used_again():
    async with echo_worker(Echo()) as first:
        address = first.address
        async with connected(address) as (connection, heard):
            await first.stop()
            assert isinstance(await heard.next(), str)
            again = Worker(Echo(), "target")
            await again.start(await Door.open("target", address))
            try:
                assert await heard.next() == WELCOME
                connection.send(OPEN)
                assert isinstance(await heard.next(), Verification)
            finally:
                await again.stop()


async def test_a_connection_that_is_told_to_end_does_though_grpc_takes_that_for_its_own(monkeypatch):
    asked = asyncio.Event()

    async def read(*_):
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "UNAVAILABLE: failed to connect"  # what a call says that could not begin, one time in a hundred

    monkeypatch.setattr(WorkerConnection, "_read", read)
    running = asyncio.create_task(WorkerConnection("127.0.0.1:1", "target", Heard()).run())
    await asked.wait()
    running.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait({running})
    assert running.cancelled()


async def test_a_malformed_opening_fails_its_session_and_no_other():
    async with echo_worker(Echo()) as worker, grpc.aio.insecure_channel(worker.address) as channel:
        bad = pb.ToWorker(open=pb.Open(session=5, epoch=2)).SerializeToString()
        proposal = pb.ToWorker(propose=pb.Proposal(session=6, epoch=2, tokens=[1], parents=[0])).SerializeToString()
        frame = pb.Frame(messages=[b"\xff\xff garbage", proposal, bad, encode_to_worker(OPEN)])
        call = rpc.TargetStub(channel).Run()
        await call.write(frame)
        messages: list[FromWorker] = []
        async with asyncio.timeout(60):
            while len(messages) < 3:
                entries = (await call.read()).messages
                messages += [m for m in map(decode_from_worker, entries) if not isinstance(m, Load)]
        call.cancel()
    assert messages[0] == WELCOME
    (refused,) = (message for message in messages if isinstance(message, Refused))
    assert (refused.session, refused.epoch, refused.code) == (5, 2, RefusalCode.INVALID), "and not what a drafter said"
    assert any(isinstance(message, Verification) and message.session == 1 for message in messages)


async def test_a_router_hears_of_malformed_messages_and_goes_on():
    heard = Heard()
    incoming = Incoming("fake", "target", heard, {})
    welcome = encode_from_worker(WELCOME)
    bad = pb.FromWorker(proposed=pb.Proposal(session=5, epoch=2, tokens=[1], parents=[0])).SerializeToString()
    good = Verification(SessionId(1), 1, 2, (7,), 0)
    incoming.take(pb.Frame(messages=[b"\xff\xff before the welcome", encode_from_worker(good), welcome]))
    incoming.take(pb.Frame(messages=[b"\xff\xff garbage", bad, welcome, encode_from_worker(good)]))
    assert await heard.next() == WELCOME
    errors = [await heard.next() for _ in range(3)]
    assert [(error.session, error.epoch) for error in errors] == [(None, None), (5, 2), (None, None)]
    assert await heard.next() == good
    assert heard.events.empty()


@dataclass
class Bare:
    """The worker's end of a stream, without a machine."""

    links: asyncio.Queue[server.Link] = field(default_factory=asyncio.Queue)
    frames: list[Sequence[ToWorker]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def connected(self, link: server.Link) -> Welcome:
        self.links.put_nowait(link)
        return WELCOME

    def received(self, link: server.Link, messages: Sequence[ToWorker]) -> None:
        self.frames.append(messages)

    def disconnected(self, link: server.Link) -> None:
        self.gone.set()


@asynccontextmanager
async def bare_worker():
    bare = Bare()
    listening = await server.serve(bare, "target", "127.0.0.1:0")
    try:
        yield bare, listening.address
    finally:
        await listening.stop(0)


async def test_a_worker_that_sends_garbage_is_let_go_of_and_left_alone_for_a_while(monkeypatch):
    monkeypatch.setattr(client, "BROKEN_SECONDS", (0.0,))
    async with bare_worker() as (bare, address), connected(address) as (_, heard):
        link = await bare.links.get()
        for _ in range(1000):
            link.put(b"\xff")
        said = [await heard.next() for _ in range(18)]
        assert [type(each) for each in said] == [MalformedMessage] * 17 + [str]
        assert "messages are malformed" in said[-1]
        assert await heard.next() == WELCOME
    monkeypatch.undo()
    assert client.pause_after(0, broken=1) == 1.0
    assert client.pause_after(0, broken=9) == 60.0
    assert client.pause_after(9, broken=0) == client.pause_after(300, broken=0) == 1.0
    assert client.pause_after(999, broken=0) == 5.0, "what stays away costs memory with each attempt"


async def test_a_worker_that_sends_what_is_no_frame_is_left_alone_for_a_while():
    asked, cut_short = [], b"\x0a\x50abc"

    async def run(_frames: object, context: object) -> AsyncIterator[bytes]:
        asked.append(context)
        yield pb.Frame(messages=[encode_from_worker(WELCOME)]).SerializeToString()
        yield cut_short
        await asyncio.Event().wait()

    handlers = {"Run": grpc.stream_stream_rpc_method_handler(run)}
    worker = grpc.aio.server()
    worker.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("paceline.v1.Target", handlers),))
    port = worker.add_insecure_port("127.0.0.1:0")
    await worker.start()
    try:
        async with connected(f"127.0.0.1:{port}") as (_, heard):
            assert await heard.next() == "what came is no frame"
            await asyncio.sleep(0.5)
            assert len(asked) == 1
    finally:
        await worker.stop(0)


@pytest.mark.parametrize("entries", [[b"\xff"] * 17, [b""] * (outbox.MAX_FRAME_ENTRIES + 1)], ids=["garbage", "long"])
async def test_a_router_that_breaks_the_protocol_loses_its_link(entries):
    async with bare_worker() as (bare, address), grpc.aio.insecure_channel(address) as channel:
        call = rpc.TargetStub(channel).Run()
        await call.write(pb.Frame(messages=entries))
        await asyncio.wait_for(bare.gone.wait(), 60)
        assert not bare.frames


async def test_what_drafters_got_wrong_costs_no_router_its_link():
    async with bare_worker() as (bare, address), grpc.aio.insecure_channel(address) as channel:
        call = rpc.TargetStub(channel).Run()
        wrong = pb.ToWorker(propose=pb.Proposal(session=1, epoch=1, tokens=[7], parents=[-7])).SerializeToString()
        await call.write(pb.Frame(messages=[wrong, b"\x12\x01\xff", b"\xfa\x01\x00"] * 100))
        await call.write(pb.Frame(messages=[encode_to_worker(OPEN)]))
        async with asyncio.timeout(60):
            while not bare.frames:
                await asyncio.sleep(0.01)
        assert bare.frames == [[OPEN]] and not bare.gone.is_set()


async def test_a_long_frame_is_decoded_while_others_are_heard():
    servicer = server.WorkerServer(Bare(), grpc.aio.server(), secure=False)
    link = server.Link("router", lambda: None)
    close = Close(SessionId(1), 1)
    frame = pb.Frame(messages=[encode_to_worker(close)] * (3 * server.DECODED_AT_ONCE))
    decoding = asyncio.create_task(servicer._decoded_all(link, frame))
    turns = 0
    while not decoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns == 3 and decoding.result() == [close] * len(frame.messages)


async def test_a_worker_that_does_not_read_is_lost(monkeypatch):
    async with echo_worker(Echo()) as worker, connected(worker.address) as (connection, heard):
        monkeypatch.setattr(outbox, "MAX_WAITING", 0)
        connection.send(OPEN)
        assert await heard.next() == "0 messages wait to be sent"
        monkeypatch.undo()
        assert await heard.next() == WELCOME


async def test_bytes_are_counted_and_a_heartbeat_is_small():
    async with echo_worker(Echo()) as worker, connected(worker.address) as (connection, heard):
        received = connection.traffic.received
        assert received >= len(encode_from_worker(WELCOME))
        connection.send(OPEN)
        answer = await heard.next()
        assert connection.traffic.sent >= len(encode_to_worker(OPEN))
        assert connection.traffic.received - received >= len(encode_from_worker(answer))


async def test_the_names_of_counters_cross_a_stream_once():
    machine = Echo(counters={f"a_rather_long_name_{i}": i for i in range(20)})
    async with echo_worker(machine) as worker, grpc.aio.insecure_channel(worker.address) as channel:
        call = rpc.TargetStub(channel).Run()
        loads: list[pb.Load] = []
        async with asyncio.timeout(60):
            while len(loads) < 3:
                messages = [pb.FromWorker.FromString(entry) for entry in (await call.read()).messages]
                loads += [message.load for message in messages if message.HasField("load")]
        call.cancel()
    assert [len(load.counter_names) for load in loads[:3]] == [20, 0, 0]
    assert [list(load.counters) for load in loads[:3]] == [list(range(20))] * 3


async def test_a_delayed_peer_is_late_in_both_directions_and_keeps_the_order():
    delay = 0.15
    async with (
        echo_worker(Echo()) as worker,
        Proxy(worker.address, lambda: delay) as proxy,
        connected(proxy.address) as (connection, heard),
    ):
        clock = asyncio.get_running_loop().time
        started = clock()
        connection.send(OPEN)
        await heard.next()
        assert clock() - started >= 2 * delay
        for session in (2, 3, 4):
            connection.send(replace(OPEN, session=SessionId(session)))
            delay = 0.0  # from here on: later messages must not overtake
        assert [(await heard.next()).session for _ in range(3)] == [2, 3, 4]


async def test_an_outbox_sends_heartbeats_until_it_is_closed():
    waiting = Outbox()
    clock = asyncio.get_running_loop().time
    started = clock()
    assert await waiting.next_frame() == pb.Frame()
    assert clock() - started >= outbox.HEARTBEAT_SECONDS
    waiting.put(b"lost")
    waiting.close(lose=True)
    assert await waiting.next_frame() is None


class Silent(rpc.TargetServicer):
    """Greets, and then hangs as a stopped process does."""

    async def Run(self, request_iterator, context):
        yield pb.Frame(messages=[pb.FromWorker(welcome=pb.Welcome(role="target", model="fake")).SerializeToString()])
        await asyncio.Event().wait()


@asynccontextmanager
async def connected_to(servicer: rpc.TargetServicer) -> AsyncIterator[Heard]:
    """What a router hears of this target."""
    target = grpc.aio.server()
    rpc.add_TargetServicer_to_server(servicer, target)
    port = target.add_insecure_port("127.0.0.1:0")
    await target.start()
    heard = Heard()
    task = asyncio.create_task(WorkerConnection(f"127.0.0.1:{port}", "target", heard).run())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await target.stop(0)


async def test_a_worker_that_falls_silent_is_lost(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 0.3)
    async with connected_to(Silent()) as heard:
        assert isinstance(await heard.next(), Welcome)
        assert "nothing heard" in str(await heard.next())


class Deaf(rpc.TargetServicer):
    """Hears one ping and nothing after it, but goes on with its heartbeats: as if one direction were cut."""

    async def Run(self, request_iterator, context):
        yield pb.Frame(messages=[pb.FromWorker(welcome=pb.Welcome(role="target", model="fake")).SerializeToString()])
        async for frame in request_iterator:
            if frame.HasField("ping"):
                yield pb.Frame(pong=frame.ping)
                break
        while True:
            yield pb.Frame()
            await asyncio.sleep(0.02)


async def test_a_worker_that_talks_and_does_not_hear_is_lost(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 0.3)
    async with connected_to(Deaf()) as heard:
        assert isinstance(await heard.next(), Welcome)
        assert await heard.next() == "it talks, but has not answered for 0 s"
        assert isinstance(await heard.next(), Welcome)


async def test_a_router_that_falls_silent_is_forgotten(monkeypatch):
    monkeypatch.setattr(server, "ROUTER_SILENCE_SECONDS", 3.0)
    machine = Echo()
    async with echo_worker(machine) as worker, grpc.aio.insecure_channel(worker.address) as channel:
        call = rpc.TargetStub(channel).Run()
        await call.write(pb.Frame(messages=[encode_to_worker(OPEN)]))
        async with asyncio.timeout(60):
            while not machine.held:
                await asyncio.sleep(0.01)
            while machine.held:
                await asyncio.sleep(0.01)
        call.cancel()


class Keen:
    """A worker that has more to say than anybody reads, and remembers whose router went."""

    def __init__(self, messages: int) -> None:
        self.messages, self.links, self.gone = messages, [], []

    def connected(self, link: server.Link) -> Welcome:
        self.links.append(link)
        entry = encode_from_worker(Verification(SessionId(1), 1, 3, tuple(range(2000)), 7))
        for _ in range(self.messages):
            link.outbox.put(entry)
        return WELCOME

    def received(self, link: server.Link, messages: Sequence[ToWorker]) -> None:
        assert link not in self.gone

    def disconnected(self, link: server.Link) -> None:
        assert link not in self.gone
        self.gone.append(link)


@pytest.mark.parametrize("silent", [True, False])
async def test_a_router_that_does_not_read_is_forgotten_while_a_frame_waits_to_be_written(monkeypatch, silent):
    monkeypatch.setattr(server, "ROUTER_SILENCE_SECONDS", 0.3 if silent else 60.0)
    keen = Keen(MAX_WAITING // 8)  # some 30 MB, much more than is under way on a stream
    listening = await server.serve(keen, "target", "127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(listening.address) as channel:
            call = rpc.TargetStub(channel).Run()
            await call.write(pb.Frame())
            async with asyncio.timeout(60):
                while not keen.links:
                    await asyncio.sleep(0.01)
                (link,) = keen.links
                if not silent:
                    await asyncio.sleep(0.1)
                    while link.alive:
                        link.send(Load())
                while not keen.gone:
                    await asyncio.sleep(0.01)
            await call.write(pb.Frame(messages=[encode_to_worker(OPEN)]))
            read = 0
            async with asyncio.timeout(60):
                while isinstance(frame := await call.read(), pb.Frame):
                    read += len(frame.messages)
            assert read < keen.messages, "it waited until all was read"
    finally:
        await listening.stop(0)


async def test_a_router_that_was_stopped_for_a_while_has_lost_no_worker(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 1.0)
    addresses: queue.Queue[str] = queue.Queue()
    ended = threading.Event()

    async def work() -> None:
        async with echo_worker(Echo()) as worker:
            addresses.put(worker.address)
            await asyncio.to_thread(ended.wait)

    working = asyncio.create_task(asyncio.to_thread(asyncio.run, work()))
    try:
        address = await asyncio.to_thread(addresses.get)
        async with connected(address) as (connection, heard):
            for _ in range(2):
                time.sleep(2.0)  # noqa: ASYNC251 - as if by SIGSTOP: of this thread only
                await asyncio.sleep(0.3)
            assert heard.events.empty()
            connection.send(OPEN)
            assert isinstance(await heard.next(), Verification)
    finally:
        ended.set()
        await working


async def test_a_machine_that_fails_ends_its_worker():
    async with echo_worker(Echo(fail=True)) as worker:
        async with connected(worker.address) as (connection, _):
            connection.send(OPEN)
            with pytest.raises(RuntimeError, match="planted"):
                await asyncio.wait_for(worker.wait(), 30)


async def test_a_taken_port_is_one_clear_line():
    async with echo_worker(Echo()) as worker:
        with pytest.raises(AddressError, match=f"cannot listen on {worker.address}"):
            await Door.open("target", worker.address)
        with pytest.raises(AddressError):
            check_free(worker.address)


@asynccontextmanager
async def pooled():
    """A pool that writes down what it hears, by role."""
    heard: asyncio.Queue[object] = asyncio.Queue()

    def note(*event: object) -> None:
        heard.put_nowait(event)

    pool = WorkerPool(PoolEvents(changed=note, lost=note, received=note, malformed=note))
    try:
        yield pool, lambda: asyncio.wait_for(heard.get(), 30)
    finally:
        await pool.close()


async def test_a_pool_counts_what_goes_to_a_role():
    async with echo_worker(Echo()) as worker, pooled() as (pool, heard):
        pool.set_workers(Role.TARGET, [worker.address])
        assert await heard() == (Available(Role.TARGET),)
        name = PeerId(f"target@{worker.address}")
        pool.send(name, OPEN)
        peer, answer = await heard()
        assert (peer, answer.session) == (name, OPEN.session)
        before = pool.traffic(Role.TARGET)
        assert before.sent >= len(encode_to_worker(OPEN))
        assert before.received >= len(encode_from_worker(answer))
        assert pool.traffic(Role.DRAFT) == Traffic()
        pool.set_workers(Role.TARGET, [])
        assert pool.traffic(Role.TARGET) == before


@dataclass
class Counting(Echo):
    """A target that commits one token, its position, at each opening and at each proposal, wrong ones as well."""

    proposals: list[Proposal] = field(default_factory=list)

    def receive(self, link: Hashable, message: ToWorker, at: float) -> list[tuple[Hashable, FromWorker]]:
        key = (link, message.session)
        if isinstance(message, Close):
            self.held.pop(key, None)
        if isinstance(message, Open):
            self.held[key] = message
        if isinstance(message, Proposal):
            self.proposals.append(message)
        if isinstance(message, Close) or key not in self.held:
            return []
        opened = self.held[key]
        position = len(opened.tokens)
        tokens = (*opened.tokens, position)
        finish = FinishReason.LENGTH if len(tokens) == opened.limits.end else None
        self.held[key] = replace(opened, tokens=tokens)
        return [
            (link, Verification(opened.session, opened.epoch, position, (position,), digests.of(tokens), finish=finish))
        ]


@dataclass
class Drafter(Echo):
    """Proposes the right token at every verification; or, if it lies, three wrong things at every opening."""

    lies: bool = False

    def welcome(self) -> Welcome:
        return replace(WELCOME, role="draft")

    def receive(self, link: Hashable, message: ToWorker, at: float) -> list[tuple[Hashable, FromWorker]]:
        if isinstance(message, Close):
            self.held.pop((link, message.session), None)
            return []
        tokens = message.tokens
        proposal = Proposal(message.session, message.epoch, len(tokens), digests.of(tokens), (5,), (ANCHOR,))
        if isinstance(message, Open):
            self.held[link, message.session] = message
            wrong = (
                replace(proposal, tokens=(WELCOME.vocabulary,)),
                replace(proposal, q=(Support((5,), (SUPPORT_TOTAL,)),)),
                Verification(message.session, message.epoch, len(tokens), (9,), 0),
            )
            return [(link, lie) for lie in wrong] if self.lies else [(link, proposal)]
        if self.lies:
            return []
        return [(link, replace(proposal, anchor_position=message.end, anchor_digest=message.digest))]


@asynccontextmanager
async def drafting_worker(machine: Drafter):
    worker = Worker(machine, "draft")
    await worker.start(await Door.open("draft", "127.0.0.1:0"))
    try:
        yield worker
    finally:
        await worker.stop()


async def test_a_lying_drafter_is_replaced_and_the_text_does_not_notice():
    target, liar, honest = Counting(), Drafter(lies=True), Drafter()
    dispatcher = Dispatcher()
    async with echo_worker(target) as t, drafting_worker(liar) as bad, drafting_worker(honest) as good:
        try:
            dispatcher.pool.set_workers(Role.TARGET, [t.address])
            await asyncio.wait_for(dispatcher.ready.wait(), 60)
            dispatcher.pool.set_workers(Role.DRAFT, [bad.address])
            items = []
            async with asyncio.timeout(60):
                async for item in dispatcher.generate(Generation((1, 2), Sampling(), 8)):
                    items.append(item)
                    if len(items) == 1:  # it waits now, for a drafter
                        while liar.held or not dispatcher.totals.malformed:
                            await asyncio.sleep(0.01)
                        dispatcher.pool.set_workers(Role.DRAFT, [bad.address, good.address])
        finally:
            await dispatcher.pool.close()
    assert [token for item in items[:-1] for token in item.tokens] == list(range(2, 10))
    assert (5,) in {proposal.tokens for proposal in target.proposals}
    totals = dispatcher.totals
    assert (totals.malformed, totals.strikes, totals.quarantined, totals.reopened) == (1, 3, 1, 0)


class Garbling(Bare):
    """A drafter whose every proposal has a parent that there is not."""

    def connected(self, link: server.Link) -> Welcome:
        return replace(super().connected(link), role="draft")

    def received(self, link: server.Link, messages: Sequence[ToWorker]) -> None:
        super().received(link, messages)
        for told in messages:
            if isinstance(told, Open | Verification):
                where = {"session": told.session, "epoch": told.epoch, "anchor_position": 2}
                wrong = pb.Proposal(**where, tokens=[5] * 16, parents=[-1] * 15 + [-7])
                link.put(pb.FromWorker(proposed=wrong).SerializeToString())


async def test_a_malformed_proposal_that_was_passed_on_costs_the_text_nothing():
    target, dispatcher = Counting(), Dispatcher()
    async with echo_worker(target) as t:
        drafter = Garbling()
        listening = await server.serve(drafter, "draft", "127.0.0.1:0")
        try:
            dispatcher.pool.set_workers(Role.DRAFT, [listening.address])
            await asyncio.wait_for(drafter.links.get(), 60)
            dispatcher.pool.set_workers(Role.TARGET, [t.address])
            await asyncio.wait_for(dispatcher.ready.wait(), 60)
            async with asyncio.timeout(60):
                text = [item async for item in dispatcher.generate(Generation((1, 2), Sampling(), 1))]
                held = asyncio.create_task(anext(aiter(dispatcher.generate(Generation((1, 2), Sampling(), 2)))))
                await held
                while not dispatcher.totals.malformed or len(drafter.frames) < 2:
                    await asyncio.sleep(0.01)
                dispatcher.give_up("the test ends")
                while target.held:
                    await asyncio.sleep(0.01)
        finally:
            await dispatcher.pool.close()
            await listening.stop(0)
    assert text[0].tokens == (2,)
    assert not target.proposals and dispatcher.totals.reopened == 0


def test_addresses():
    assert parse("[::1]:80") == ("::1", 80)
    assert is_loopback("127.0.0.9")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    for wrong in ("127.0.0.1", ":80", "host:", "host:99999", "host:x"):
        with pytest.raises(AddressError, match="is not HOST:PORT"):
            parse(wrong)


async def test_an_outbox_hands_out_what_waits_in_frames_and_is_bounded():
    box = Outbox()
    for entry in (b"a", b"b"):
        box.put(entry)
    box.put(b"x" * 2_000_000)
    box.put(b"c")
    assert list((await box.next_frame()).messages)[:2] == [b"a", b"b"]
    assert list((await box.next_frame()).messages) == [b"c"]
    assert list((await box.next_frame()).messages) == []  # a heartbeat
    for _ in range(MAX_WAITING):
        box.put(b"d")
    with pytest.raises(PeerTooSlow):
        box.put(b"e")
    box.close()
    while (frame := await box.next_frame()) is not None:
        assert frame.messages
