"""The shell of a worker: an event loop that talks to routers, and one thread that computes.

The computing side is a :class:`Machine`: messages in, messages out, one step at a time, no threads and no sockets, so
that tests drive it directly. Its messages are handed over in batches at both ends, once per step.

A worker that shall end drains first: it says so in its load, takes no new sessions, and goes on with those it has until
they are gone or its time is up. Until it has loaded it is a :class:`Door`. One that does not finish loading ends
itself, and so does one whose thread is stuck in a step, with a kernel or a collective that never returns: its event
loop would go on telling routers that all is well.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from speculation.demand import WorkerDemand
from speculation.messages import (
    Close,
    Features,
    FromWorker,
    Load,
    Loading,
    Open,
    Progress,
    RefusalCode,
    Refused,
    SessionId,
    ToWorker,
    Welcome,
)
from transport.codec import encode_from_worker
from transport.outbox import HEARTBEAT_SECONDS
from transport.server import Handler, Link, WorkerServer, serve
from transport.tls import Identity

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02
CHECK_SECONDS, ANSWER_SECONDS = 5.0, 10.0
"""After how long without work a worker sees whether all that it computes with answers, and how long that may take."""
SWITCH_SECONDS = 1e-4
"""After which the computing thread lets the event loop have the GIL. Python's own 5 ms are longer than most steps."""

T = TypeVar("T")
Key = tuple[Hashable, SessionId]
"""A session, at a worker: the link it was opened on and its number there."""
Outgoing = list[tuple[Hashable, FromWorker | Features]]


class Machine(Protocol):
    """What a worker computes."""

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        """Take one message of a router, which arrived ``at`` (``time.perf_counter``). Must not compute."""

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""

    def step(self) -> Outgoing | None:
        """Compute once; None if there is nothing to do until the next message."""

    def due(self) -> float | None:
        """When to step again although no message came (``time.perf_counter``); None: not before one comes."""

    def validate(self) -> None:
        """Raise AssertionError where its books contradict each other. Slow."""

    def load(self) -> Load:
        """How busy it is. Called from another thread: reads only."""

    def demand(self) -> WorkerDemand:
        """What whoever decides how many workers there are should know. Called from another thread: reads only."""


def end_process(why: str) -> None:
    """Say why, and end at once: nothing that is stuck can be waited for."""
    log.critical("%s", why)
    os._exit(1)


class Door(Handler):
    """Where a worker listens before it has loaded: routers that come hear what it does, and wait.

    A context that leaves by an error closes it.
    """

    server: WorkerServer

    def __init__(self, role: str) -> None:
        self._role, self._now, self._loop = role, Loading("starting"), asyncio.get_running_loop()

    @classmethod
    async def open(cls, role: str, listen: str, identity: Identity | None = None) -> Door:
        """Listen on ``HOST:PORT``, with TLS as ``identity``; raises :class:`transport.address.AddressError`."""
        door = cls(role)
        door.server = await serve(door, role, listen, identity)
        return door

    async def __aenter__(self) -> Door:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            await self.server.stop(0.0)

    async def load(
        self,
        load: Callable[[Progress], T],
        model: str,
        seconds: float,
        progress: Progress | None = None,
        stuck: Callable[[str], None] = end_process,
    ) -> T:
        """What ``load`` returns, which runs in a thread and says what it does: ``progress`` hears it as well.

        ``model``: what the worker will call it. ``stuck`` is called if it takes more than so many seconds.
        """

        def report(loading: Loading) -> None:
            self._loop.call_soon_threadsafe(self._tell, replace(loading, model=model))
            if progress is not None:
                progress(loading)

        why = f"the {self._role} worker ends: it has not loaded within {seconds:g} s (load_timeout)"
        late = self._loop.call_later(seconds, stuck, why)
        try:
            return await asyncio.to_thread(load, report)
        finally:
            late.cancel()

    def _tell(self, loading: Loading) -> None:
        self._now = loading
        self.server.tell(loading)

    def connected(self, _link: Link) -> Loading:
        """A router came."""
        return self._now


class Watchdog:
    """Notices a step that never ends. Told of steps by the computing thread, asked at every heartbeat.

    It counts heartbeats, not time: a process that was stopped for a while, or had no CPU, has not been stuck.
    """

    def __init__(self, step_timeout: float, longest: Callable[[], float | None] = lambda: None) -> None:
        """``step_timeout`` in seconds; 0: off. ``longest``: what the step under way may take, by those measured."""
        self._step_timeout, self._longest = step_timeout, longest
        self._step = 0
        self._computing = False
        self._seen = (0, 0)  # the step under way at the last heartbeats, and how many of them it has lasted
        self._limit: float | None = None

    def begins(self, limit: float | None = None) -> None:
        """A step begins, or what may take ``limit`` seconds."""
        self._limit = limit
        self._step += 1
        self._computing = True

    def ends(self) -> None:
        """The step has ended."""
        self._computing = False

    def bites(self) -> str:
        """How the step under way has taken too long; empty: it has not. To be asked once a heartbeat."""
        step, beats = self._seen
        self._seen = (self._step, beats + 1 if self._computing and step == self._step else 0)
        longest = self._longest() if self._limit is None else self._limit
        measured = longest is not None and longest < self._step_timeout
        seconds = longest if longest is not None and measured else self._step_timeout
        if not 0 < seconds / HEARTBEAT_SECONDS < self._seen[1]:
            return ""
        if self._limit is not None:
            return f"not all that it computes with has answered within {seconds:g} s"
        return f"a step has taken more than {seconds:g} s ({'by far the longest' if measured else 'step_timeout'})"


class Worker:
    """A machine that listens."""

    def __init__(
        self,
        machine: Machine,
        role: str,
        ended: Callable[[], None] | None = None,
        step_timeout: float = 0.0,
        stuck: Callable[[str], None] = end_process,
        *,
        longest_step: Callable[[], float | None] = lambda: None,
        check: Callable[[], None] | None = None,
        validate: bool = False,
    ) -> None:
        """Nothing happens before ``start``.

        ``ended`` is called when nothing is computed any more. ``stuck`` is called when a step has taken more than
        ``step_timeout`` seconds (0: never), or than ``longest_step`` says of the one under way, which is asked from
        another thread. ``check`` is called now and then while there is nothing to do, and returns if all that the
        machine computes with answers. ``validate``: whenever there is nothing to do, see whether the machine's books
        are right; where they are not, the worker fails.
        """
        self._machine, self._role, self._ended = machine, role, ended
        self._stuck, self._check, self._validate = stuck, check, validate
        self._watchdog = Watchdog(step_timeout, longest_step)
        self._draining = False
        self._wake = threading.Condition()
        self._inbox: list[tuple[Link, ToWorker | None, float]] = []
        self._taking = False  # what was in the inbox is in no session yet
        self._stopping = False
        self._links: set[Link] = set()
        self._thread = threading.Thread(target=self._compute, name=f"{role}-steps", daemon=True)

    @property
    def welcome(self) -> Welcome:
        """How it introduces itself."""
        return self._machine.welcome()

    async def start(self, door: Door) -> None:
        """Take over a door that is open."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._server = door.server
        self._server.hand_over(self)
        self.address = self._server.address
        self._thread.start()
        self._heart = asyncio.create_task(self._beat())

    @staticmethod
    def freeze_loaded() -> None:
        """Where the process is the worker's alone: what is loaded stays, and the collector passes it by."""
        gc.collect()
        gc.freeze()

    @property
    def demand(self) -> WorkerDemand:
        """What whoever decides how many workers there are should know."""
        return self._machine.demand()

    async def wait(self) -> None:
        """Return only by raising what ended the computing thread."""
        await asyncio.shield(self.failed)  # who gives up waiting must not cancel it for everybody

    async def drain(self, seconds: float) -> None:
        """Take no new sessions, wait until those there are gone, but no longer than so many seconds, and stop."""
        self._draining = True
        self._push_load()
        deadline = self._loop.time() + seconds
        while self._loop.time() < deadline and not self.failed.done():
            with self._wake:
                taken = not (self._inbox or self._taking)
            load = self._machine.load()  # in this order, so that no session is in neither
            if taken and not (load.sessions or load.waiting):
                break
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """End all streams, the thread and the server."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._heart.cancel()
        await self._server.stop()  # first: whoever stays connected believes that it lives
        if self._ended is not None:
            await asyncio.to_thread(self._ended)

    # -- transport.server.Handler, on the event loop -------------------------------------------------------------------

    def connected(self, link: Link) -> Welcome:
        """A router came."""
        self._links.add(link)
        if self._draining:
            self._loop.call_soon(self._push_load)
        return self._machine.welcome()

    def received(self, link: Link, messages: Sequence[ToWorker]) -> None:
        """A router sent these."""
        if self._draining:
            messages = [self._unless_open(link, message) for message in messages]
        self._post(link, messages)

    def disconnected(self, link: Link) -> None:
        """A router went."""
        self._links.discard(link)
        self._post(link, (None,))

    def _unless_open(self, link: Link, message: ToWorker) -> ToWorker:
        if not isinstance(message, Open):
            return message
        link.send(Refused(message.session, message.epoch, RefusalCode.DRAINING, f"the {self._role} worker drains"))
        return Close(message.session, message.epoch)  # of what it would have replaced

    def _post(self, link: Link, messages: Sequence[ToWorker | None]) -> None:
        """Hand over what came at once at once: the computing thread is not to wake for the first of it alone."""
        at = time.perf_counter()
        with self._wake:
            self._inbox += [(link, message, at) for message in messages]
            self._wake.notify()

    def _deliver(self, entries: Sequence[tuple[Link, bytes]]) -> None:
        for link, entry in entries:
            link.put(entry)

    async def _beat(self) -> None:
        while True:
            self._push_load()
            if why := self._watchdog.bites():
                self._stuck(f"the {self._role} worker ends: {why}")
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _push_load(self) -> None:
        load = replace(self._machine.load(), draining=self._draining)
        for link in list(self._links):
            link.send(load)

    # -- the computing thread ------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        try:
            idle = False
            while True:
                while idle and not self._awaits_work(self._machine.due()):
                    self._see_to_others()
                with self._wake:
                    if self._stopping:
                        return
                    inbox, self._inbox = self._inbox, []
                    self._taking = bool(inbox)
                self._watchdog.begins()
                answers: Outgoing = []
                for link, message, at in inbox:
                    if message is None:
                        self._machine.forget(link)
                    else:
                        answers += self._machine.receive(link, message, at)
                self._taking = False
                self._send(answers)
                computed = self._machine.step()
                self._watchdog.ends()
                idle = computed is None
                self._send(computed or [])
                if idle and self._validate:
                    self._machine.validate()
        except Exception as error:  # the process boundary: whatever it was, the worker is of no use any more
            log.exception("the %s worker failed", self._role)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _send(self, outgoing: Outgoing) -> None:
        """Encoded here: the event loop, which has to get hold of the GIL first, has only to write."""
        entries: list[tuple[Link, bytes]] = []
        for link, message in outgoing:
            assert isinstance(link, Link)
            entries.append((link, encode_from_worker(message)))
        if entries:
            self._loop.call_soon_threadsafe(self._deliver, entries)

    def _awaits_work(self, due: float | None) -> bool:
        """Until a message comes, or it is time; whether so. Else there was nothing to do for a while."""
        check = None if self._check is None else time.perf_counter() + CHECK_SECONDS
        until = min((at for at in (due, check) if at is not None), default=None)
        with self._wake:
            while not self._inbox and not self._stopping:
                left = None if until is None else until - time.perf_counter()
                if left is not None and left <= 0:
                    return until == due
                self._wake.wait(left)
        return True

    def _see_to_others(self) -> None:
        assert self._check is not None, "a worker without others looks after them"
        self._watchdog.begins(ANSWER_SECONDS)
        self._check()
        self._watchdog.ends()

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
