"""Workers that drain, get stuck, or die of a request: real streams and a real router over toy models."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from router.dispatch import Dispatcher, DispatchLimits
from router.generation import Committed, Ended, Generation, GenerationError
from speculation.events import Role
from speculation.messages import Close, Load, RefusalCode, Refused, Sampling, SessionId, ToWorker, Verification, Welcome
from speculation.request.poison_detector import PoisonLimits
from speculation.request.session import SessionLimits
from tests.faults.toy_workers import VOCABULARY, ToyDraftWorker, ToyTargetWorker, target_only
from tests.integration.test_transport import OPEN, Echo, Heard, connected
from tests.stack import decode, dispatcher, held_out_prompts, target_worker
from transport import client
from transport import worker as worker_module
from transport.worker import DRAIN_POLL_SECONDS, Door, Machine, Outgoing, Watchdog, Worker

POISON = 23
"""A prompt that begins with this token ends the target that computes it."""
STEP_SECONDS = 0.004


class Deadly(Exception):
    """What a machine raises when it dies of a session."""


@dataclass
class ToyMachine:
    """Toy sessions behind a real stream, at a steady pace."""

    role: str = "target"
    stuck: threading.Event | None = None
    """Set it to free a machine that does not come back from its step."""
    links: dict[Hashable, ToyTargetWorker | ToyDraftWorker] = field(default_factory=dict)

    def welcome(self) -> Welcome:
        return Welcome(self.role, "toy", VOCABULARY, 4096)

    def load(self) -> Load:
        return Load(sessions=sum(len(worker.sessions) for worker in list(self.links.values())))

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        if link not in self.links:
            self.links[link] = ToyTargetWorker() if self.role == "target" else ToyDraftWorker(0.8)
        return [(link, reply) for reply in self.links[link].receive(message)]

    def forget(self, link: Hashable) -> None:
        self.links.pop(link, None)

    def step(self) -> Outgoing | None:
        if self.stuck is not None:
            self.stuck.wait()
        outgoing: Outgoing = []
        busy = False
        for link, worker in self.links.items():
            if self.role == "target" and any(held.tokens[0] == POISON for held in worker.sessions.values()):
                raise Deadly
            sent = worker.step()
            busy = busy or sent is not None
            outgoing += [(link, message) for message in sent or []]
        if busy:
            time.sleep(STEP_SECONDS)
        return outgoing if busy else None

    def due(self) -> None:
        return None


@dataclass
class Supervised:
    """A worker that is started again at its address whenever it dies."""

    address: str = "127.0.0.1:0"
    deaths: int = 0

    async def start(self) -> None:
        self.worker = Worker(ToyMachine(), "target")
        await self.worker.start(await Door.open("target", self.address))
        self.address = self.worker.address

    async def supervise(self) -> None:
        while True:
            try:
                await self.worker.wait()
            except Deadly:
                self.deaths += 1
            await self.worker.stop()
            await self.start()


async def begun(machine: Machine, role: str = "target", **options) -> Worker:
    """A worker with this machine, listening."""
    worker = Worker(machine, role, **options)
    await worker.start(await Door.open(role, "127.0.0.1:0"))
    return worker


@asynccontextmanager
async def toy_worker(role: str = "target", **options):
    worker = await begun(ToyMachine(role), role, **options)
    try:
        yield worker
    finally:
        if worker._thread.is_alive():
            await worker.stop()


async def generate(serving: Dispatcher, prompt: tuple[int, ...], seed: int, length: int) -> tuple[list[int], Ended]:
    tokens: list[int] = []
    async for item in serving.generate(Generation(prompt, Sampling(seed=seed), length)):
        if isinstance(item, Committed):
            tokens += item.tokens
        else:
            ended = item
    assert tuple(tokens) == target_only(prompt, seed, len(prompt) + length)
    return tokens, ended


async def test_a_target_and_a_drafter_drain_under_streams_that_do_not_notice():
    async with toy_worker() as one, toy_worker() as two, toy_worker("draft") as first, toy_worker("draft") as second:
        targets = {worker.address: worker for worker in (one, two)}
        drafts = {worker.address: worker for worker in (first, second)}
        async with dispatcher([one.address], list(drafts)) as serving:
            streams = [asyncio.create_task(generate(serving, (i, 2, 3), i, 400)) for i in range(4)]
            async with asyncio.timeout(60):
                while serving.metrics.tally.committed < 100:
                    await asyncio.sleep(0.01)
                serving.pool.set_workers(Role.TARGET, list(targets))
                while any(peer.welcome is None for peer in serving.pool.peers.values()):
                    await asyncio.sleep(0.01)
                streams += [asyncio.create_task(generate(serving, (i, 2, 3), i, 400)) for i in range(4, 8)]
                while serving.metrics.tally.committed < 200:
                    await asyncio.sleep(0.01)
            started = time.monotonic()
            await asyncio.gather(one.drain(120), first.drain(120))
            assert time.monotonic() - started < 100, "it had left to wait for its sessions"
            async with asyncio.timeout(60):
                ends = [ended for _, ended in await asyncio.gather(*streams)]
        assert [ended.reopened for ended in ends] == [0] * 8
        assert 0 < serving.totals.moved < 8
        assert serving.totals.reopened == serving.totals.failed == 0


async def test_sessions_stay_where_there_is_no_other_and_move_when_there_is():
    async with toy_worker() as one, toy_worker() as two:
        async with dispatcher([one.address]) as serving:
            stream = asyncio.create_task(generate(serving, (1, 2), 5, 400))
            async with asyncio.timeout(60):
                while not serving.metrics.tally.committed:
                    await asyncio.sleep(0.01)
                draining = asyncio.create_task(one.drain(30))
                before = serving.metrics.tally.committed
                while serving.metrics.tally.committed < before + 20:
                    await asyncio.sleep(0.01)
                assert not draining.done()
                serving.pool.set_workers(Role.TARGET, [one.address, two.address])
                await draining
                _, ended = await stream
        assert (ended.reopened, serving.totals.moved) == (0, 1)


async def test_a_target_that_left_the_list_is_let_go_of_when_its_sessions_have_left():
    async with toy_worker() as one, toy_worker() as two, dispatcher([one.address, two.address]) as serving:
        streams = [asyncio.create_task(generate(serving, (i, 2), i, 200)) for i in range(4)]
        async with asyncio.timeout(60):
            while serving.metrics.tally.committed < 40:
                await asyncio.sleep(0.01)
            serving.pool.set_workers(Role.TARGET, [two.address])
            ends = [ended for _, ended in await asyncio.gather(*streams)]
        assert [ended.reopened for ended in ends] == [0] * 4
        assert [peer.connection.address for peer in serving.pool.peers.values()] == [two.address]


async def test_a_worker_that_drains_refuses_and_says_so_and_waits_for_its_sessions():
    machine = Echo()
    worker = await begun(machine)
    async with connected(worker.address) as (connection, heard):
        loads: list[Load] = []
        heard.received = lambda message: (  # type: ignore[method-assign]
            loads.append(message) if isinstance(message, Load) else heard.events.put_nowait(message)
        )
        connection.send(OPEN)
        assert isinstance(await heard.next(), Verification)
        draining = asyncio.create_task(worker.drain(60))
        async with asyncio.timeout(60):
            while not (loads and loads[-1].draining):
                await asyncio.sleep(0.005)
        connection.send(replace(OPEN, session=SessionId(2)))
        refused = await heard.next()
        assert isinstance(refused, Refused)
        assert (refused.session, refused.code) == (2, RefusalCode.DRAINING)
        assert not draining.done()
        connection.send(Close(OPEN.session, OPEN.epoch))
        await asyncio.wait_for(draining, 30)
        assert isinstance(await heard.next(), str)


async def test_a_worker_that_drains_waits_no_longer_than_it_may():
    worker = await begun(Echo())
    async with connected(worker.address) as (connection, heard):
        connection.send(OPEN)
        assert isinstance(await heard.next(), Verification)
        await asyncio.wait_for(worker.drain(0.3), 30)
        assert isinstance(await heard.next(), str)


@dataclass
class Slow(Echo):
    """A machine that takes a session in only when it may, as it does with a long prompt."""

    begun: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        self.begun.set()
        assert self.may.wait(60)
        return super().receive(link, message, at)


async def test_a_worker_that_drains_waits_also_for_a_session_that_it_is_just_taking_in():
    machine = Slow()
    worker = await begun(machine)
    async with connected(worker.address) as (connection, heard):
        connection.send(OPEN)
        assert await asyncio.to_thread(machine.begun.wait, 60)
        draining = asyncio.create_task(worker.drain(60))
        await asyncio.sleep(3 * DRAIN_POLL_SECONDS)
        machine.may.set()
        assert isinstance(await heard.next(), Verification)
        await asyncio.sleep(3 * DRAIN_POLL_SECONDS)
        assert not draining.done()
        connection.send(Close(OPEN.session, OPEN.epoch))
        await asyncio.wait_for(draining, 30)


async def test_a_poison_request_in_a_crowd_is_failed_alone():
    limits = DispatchLimits(session=SessionLimits(), poison=PoisonLimits(watch=0.3))
    workers = [Supervised(), Supervised()]
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
        supervisors = [asyncio.create_task(worker.supervise()) for worker in workers]

        async def end() -> None:
            for task in supervisors:
                task.cancel()
            await asyncio.gather(*supervisors, return_exceptions=True)
            for worker in workers:
                await worker.worker.stop()

        stack.push_async_callback(end)
        serving = await stack.enter_async_context(dispatcher([w.address for w in workers], limits=limits))
        crowd = [asyncio.create_task(generate(serving, (i % 20, 2), i, 120)) for i in range(24)]
        async with asyncio.timeout(60):
            while serving.metrics.tally.committed < 100:
                await asyncio.sleep(0.01)
            with pytest.raises(GenerationError) as failure:
                await generate(serving, (POISON, 1), 1, 20)
            assert failure.value.code.name == "faulty"
            await asyncio.gather(*crowd)
        assert 2 <= sum(worker.deaths for worker in workers) <= 3
        assert (serving.totals.condemned, serving.totals.failed) == (1, 1)


async def test_a_step_that_does_not_end_ends_the_worker():
    freed = threading.Event()
    said: asyncio.Queue[str] = asyncio.Queue()
    machine = ToyMachine(stuck=freed)
    worker = await begun(machine, step_timeout=0.05, stuck=said.put_nowait)
    try:
        why = await asyncio.wait_for(said.get(), 60)
        assert "0.05 s (step_timeout)" in why
        assert "\n" not in why
    finally:
        freed.set()
        await worker.stop()


class Muddled(Echo):
    """A machine whose books are wrong once it has a session."""

    validated = 0

    def validate(self) -> None:
        self.validated += 1
        assert not self.held, "two sessions hold one block"


async def test_a_worker_that_validates_fails_once_its_books_are_wrong_and_it_is_idle():
    worker = await begun(Muddled(), validate=True)
    async with connected(worker.address) as (connection, _):
        connection.send(OPEN)
        with pytest.raises(AssertionError, match="two sessions hold one block"):
            await asyncio.wait_for(worker.wait(), 60)
    await worker.stop()


async def test_other_workers_do_not_look():
    machine = Muddled()
    worker = await begun(machine)
    async with connected(worker.address) as (connection, heard):
        connection.send(OPEN)
        assert isinstance(await heard.next(), Verification)
    await worker.stop()
    assert not machine.validated


async def test_a_worker_that_waits_for_work_ends_when_what_it_computes_with_does_not_answer(monkeypatch):
    monkeypatch.setattr(worker_module, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "ANSWER_SECONDS", 5.0)
    said: asyncio.Queue[str] = asyncio.Queue()
    asked, hangs, freed = [], threading.Event(), threading.Event()

    def check() -> None:
        asked.append(1)
        if hangs.is_set():
            freed.wait(60)

    async with toy_worker(step_timeout=60.0, stuck=said.put_nowait, check=check) as worker:
        async with asyncio.timeout(60):
            while len(asked) < 3:
                await asyncio.sleep(0.01)
            async with dispatcher([worker.address]) as serving:
                await generate(serving, (1, 2), 5, 40)
            assert said.empty()
            hangs.set()
            assert await said.get() == ("the target worker ends: not all that it computes with has answered within 5 s")
        freed.set()


def test_a_watchdog_counts_heartbeats_of_one_step():
    dog = Watchdog(1.0)  # four heartbeats
    dog.begins()
    assert bites_at(dog, 7) >= 4  # the first step as well
    dog.ends()
    assert not any(dog.bites() for _ in range(100))  # idle
    for _ in range(20):  # busy, but every step ends
        dog.begins()
        assert not any(dog.bites() for _ in range(3))
        dog.ends()
    dog.begins()
    assert bites_at(dog, 7) >= 4
    assert not any(Watchdog(0.0).bites() for _ in range(100))


def bites_at(dog: Watchdog, beats: int) -> int:
    """At which heartbeat; fails where it does not."""
    return [bool(dog.bites()) for _ in range(beats)].index(True)


def test_a_watchdog_goes_by_what_steps_take_once_that_is_known():
    known: list[float | None] = [None]
    dog = Watchdog(60.0, lambda: known[0])
    dog.begins()
    assert bites_at(dog, 243) >= 240
    known[0] = 10.0
    assert dog.bites() == "a step has taken more than 10 s (by far the longest)"
    dog.begins()
    assert bites_at(dog, 43) >= 40
    known[0] = 1000.0  # steps that may take longer than the setting says
    dog.begins()
    assert bites_at(dog, 243) >= 240
    assert dog.bites() == "a step has taken more than 60 s (step_timeout)"
    off = Watchdog(0.0, lambda: 10.0)
    off.begins()
    assert not any(off.bites() for _ in range(300))


async def test_a_worker_that_does_not_finish_loading_ends():
    said: asyncio.Queue[str] = asyncio.Queue()
    freed, door = threading.Event(), await Door.open("target", "127.0.0.1:0")
    loading = asyncio.create_task(door.load(lambda _: freed.wait(), "m", 0.01, stuck=said.put_nowait))
    assert await asyncio.wait_for(said.get(), 60) == (
        "the target worker ends: it has not loaded within 0.01 s (load_timeout)"
    )
    freed.set()
    assert await loading
    assert await door.load(lambda _: 7, "m", 3600.0, stuck=said.put_nowait) == 7
    assert said.empty()
    await door.server.stop(0.0)


class Mute(rpc.TargetServicer):
    """Takes streams and sends heartbeats, but never says who it is."""

    def __init__(self) -> None:
        self.streams = 0

    async def Run(self, request_iterator, context):
        self.streams += 1
        while True:
            yield pb.Frame()
            await asyncio.sleep(0.05)


async def test_a_worker_that_never_introduces_itself_is_given_up_and_tried_again(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 0.3)
    mute, hanging = Mute(), grpc.aio.server()
    rpc.add_TargetServicer_to_server(mute, hanging)
    port = hanging.add_insecure_port("127.0.0.1:0")
    await hanging.start()
    heard = Heard()
    task = asyncio.create_task(client.WorkerConnection(f"127.0.0.1:{port}", "target", heard).run())
    try:
        async with asyncio.timeout(60):
            while mute.streams < 3:
                await asyncio.sleep(0.02)
        assert heard.events.empty()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await hanging.stop(0)


async def test_a_port_that_accepts_and_says_nothing_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(client, "WORKER_SILENCE_SECONDS", 0.3)
    came = asyncio.Semaphore(0)
    silent = await asyncio.start_server(lambda _reader, _writer: came.release(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    task = asyncio.create_task(client.WorkerConnection(f"127.0.0.1:{port}", "target", Heard()).run())
    try:
        async with asyncio.timeout(60):
            for _ in range(3):
                await came.acquire()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        silent.close()


async def test_another_router_gives_the_same_text_from_the_same_cache():
    prompt, sampling = held_out_prompts()[0], Sampling(temperature=0.8, seed=7)
    async with target_worker() as up:
        async with dispatcher([up.worker.address]) as serving:
            first = await decode(serving, prompt, 24, sampling)
        await up.quiescent()
        async with dispatcher([up.worker.address]) as serving:
            again = await decode(serving, prompt, 24, sampling)
    assert again.tokens == first.tokens
    assert first.cached == 0
    assert again.cached > 0


async def test_who_gave_up_watching_a_worker_does_not_cut_its_drain_short():
    """As a supervisor does: it stops waiting for a failure, then drains."""
    worker = await begun(Echo())
    watching = asyncio.create_task(worker.wait())
    async with connected(worker.address) as (connection, heard):
        connection.send(OPEN)
        assert isinstance(await heard.next(), Verification)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        draining = asyncio.create_task(worker.drain(60))
        await asyncio.sleep(0.3)
        assert not draining.done()
        connection.send(Close(OPEN.session, OPEN.epoch))
        await asyncio.wait_for(draining, 30)
