"""Streams between router and worker: greetings, faults, silence."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from speculation.messages import (
    Close,
    FromWorker,
    Limits,
    Load,
    Open,
    RefusalCode,
    Refused,
    Sampling,
    SessionId,
    ToWorker,
    Verification,
    Welcome,
)
from transport import client, server
from transport.address import AddressError, check_free, is_loopback, parse
from transport.client import WorkerConnection
from transport.codec import decode_from_worker, encode_to_worker
from transport.outbox import MAX_WAITING, Outbox, PeerTooSlow
from transport.worker import Worker

WELCOME = Welcome("target", "fake", 100, 64)
OPEN = Open(SessionId(1), 1, (1, 2), Sampling(), Limits(9))


@dataclass
class Echo:
    """A machine that commits one token for each opening it hears of."""

    held: dict[tuple[Hashable, int], Open] = field(default_factory=dict)
    fail: bool = False

    def welcome(self) -> Welcome:
        return WELCOME

    def load(self) -> Load:
        return Load(sessions=len(self.held))

    def receive(self, link: Hashable, message: ToWorker) -> list[tuple[Hashable, FromWorker]]:
        if isinstance(message, Open):
            self.held[link, message.session] = message
            return [(link, Verification(message.session, message.epoch, len(message.tokens), (7,), 0))]
        if isinstance(message, Close):
            del self.held[link, message.session]
        return []

    def forget(self, link: Hashable) -> None:
        self.held = {key: value for key, value in self.held.items() if key[0] is not link}

    def step(self) -> None:
        if self.fail:
            raise RuntimeError("planted")


@dataclass
class Heard:
    """A router's side that writes down what it hears."""

    events: asyncio.Queue[object] = field(default_factory=asyncio.Queue)

    def up(self, welcome: Welcome) -> None:
        self.events.put_nowait(welcome)

    def received(self, message: FromWorker) -> None:
        if not isinstance(message, Load):
            self.events.put_nowait(message)

    def down(self, why: str) -> None:
        self.events.put_nowait(why)

    async def next(self) -> object:
        return await asyncio.wait_for(self.events.get(), 10)


@asynccontextmanager
async def echo_worker(machine: Echo):
    worker = Worker(machine, "target")
    await worker.start("127.0.0.1:0")
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
        async with asyncio.timeout(5):
            while machine.held:
                await asyncio.sleep(0.01)


async def test_a_worker_that_stops_is_noticed_and_one_that_returns_is_used_again():
    async with echo_worker(Echo()) as first:
        address = first.address
        async with connected(address) as (connection, heard):
            await first.stop()
            assert isinstance(await heard.next(), str)
            again = Worker(Echo(), "target")
            await again.start(address)
            try:
                assert await heard.next() == WELCOME
                connection.send(OPEN)
                assert isinstance(await heard.next(), Verification)
            finally:
                await again.stop()


async def test_a_malformed_message_fails_its_session_and_no_other():
    async with echo_worker(Echo()) as worker, grpc.aio.insecure_channel(worker.address) as channel:
        bad = pb.ToWorker(open=pb.Open(session=5, epoch=2)).SerializeToString()
        frame = pb.Frame(messages=[b"\xff\xff garbage", bad, encode_to_worker(OPEN)])
        call = rpc.TargetStub(channel).Run()
        await call.write(frame)
        messages: list[FromWorker] = []
        async with asyncio.timeout(5):
            while len(messages) < 3:
                entries = (await call.read()).messages
                messages += [m for m in map(decode_from_worker, entries) if not isinstance(m, Load)]
        call.cancel()
    assert messages[0] == WELCOME
    refused = next(message for message in messages if isinstance(message, Refused))
    assert (refused.session, refused.epoch, refused.code) == (5, 2, RefusalCode.INVALID)
    assert any(isinstance(message, Verification) and message.session == 1 for message in messages)


class Silent(rpc.TargetServicer):
    """Greets, and then hangs as a stopped process does."""

    async def Run(self, request_iterator, context):
        yield pb.Frame(messages=[pb.FromWorker(welcome=pb.Welcome(role="target", model="fake")).SerializeToString()])
        await asyncio.Event().wait()


async def test_a_worker_that_falls_silent_is_lost(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 0.3)
    hanging = grpc.aio.server()
    rpc.add_TargetServicer_to_server(Silent(), hanging)
    port = hanging.add_insecure_port("127.0.0.1:0")
    await hanging.start()
    heard = Heard()
    task = asyncio.create_task(WorkerConnection(f"127.0.0.1:{port}", "target", heard).run())
    try:
        assert isinstance(await heard.next(), Welcome)
        assert "nothing heard" in str(await heard.next())
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await hanging.stop(0)


async def test_a_router_that_falls_silent_is_forgotten(monkeypatch):
    monkeypatch.setattr(server, "ROUTER_SILENCE_SECONDS", 0.3)
    machine = Echo()
    async with echo_worker(machine) as worker, grpc.aio.insecure_channel(worker.address) as channel:
        call = rpc.TargetStub(channel).Run()
        await call.write(pb.Frame(messages=[encode_to_worker(OPEN)]))
        async with asyncio.timeout(5):
            while not machine.held:
                await asyncio.sleep(0.01)
            while machine.held:
                await asyncio.sleep(0.01)
        call.cancel()


async def test_a_machine_that_fails_ends_its_worker():
    async with echo_worker(Echo(fail=True)) as worker:
        async with connected(worker.address) as (connection, _):
            connection.send(OPEN)
            with pytest.raises(RuntimeError, match="planted"):
                await asyncio.wait_for(worker.wait(), 5)


async def test_a_taken_port_is_one_clear_line():
    async with echo_worker(Echo()) as worker:
        with pytest.raises(AddressError, match=f"cannot listen on {worker.address}"):
            await Worker(Echo(), "target").start(worker.address)
        with pytest.raises(AddressError):
            check_free(worker.address)


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
    outbox = Outbox()
    for entry in (b"a", b"b"):
        outbox.put(entry)
    outbox.put(b"x" * 2_000_000)
    outbox.put(b"c")
    assert list((await outbox.next_frame()).messages)[:2] == [b"a", b"b"]
    assert list((await outbox.next_frame()).messages) == [b"c"]
    assert list((await outbox.next_frame()).messages) == []  # a heartbeat
    for _ in range(MAX_WAITING):
        outbox.put(b"d")
    with pytest.raises(PeerTooSlow):
        outbox.put(b"e")
    outbox.close()
    while (frame := await outbox.next_frame()) is not None:
        assert frame.messages
