"""The shell of a worker: an event loop that talks to routers, and one thread that computes.

The computing side is a :class:`Machine`: messages in, messages out, one step at a time, no threads and no sockets, so
that tests drive it directly. Its messages are handed over in batches at both ends, once per step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from speculation.demand import WorkerDemand
from speculation.messages import FromWorker, Load, ToWorker, Welcome
from transport.outbox import HEARTBEAT_SECONDS
from transport.server import Link, WorkerServer, serve
from transport.tls import Identity

log = logging.getLogger(__name__)

Outgoing = list[tuple[Hashable, FromWorker]]
"""Messages with the link each goes to."""


class Machine(Protocol):
    """What a worker computes. A session is named by the link it was opened on and its number there."""

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""
        ...

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        """Take one message of a router, which arrived ``at`` (``time.perf_counter``). Must not compute."""
        ...

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""
        ...

    def step(self) -> Outgoing | None:
        """Compute once; None if there is nothing to do until the next message."""
        ...

    def due(self) -> float | None:
        """When to step again although no message came (``time.perf_counter``); None: not before one comes."""
        ...

    def load(self) -> Load:
        """How busy it is. Called from another thread: reads only."""
        ...

    def demand(self) -> WorkerDemand:
        """What whoever decides how many workers there are should know. Called from another thread: reads only."""
        ...


class Worker:
    """A machine that listens."""

    def __init__(self, machine: Machine, role: str, ended: Callable[[], None] | None = None) -> None:
        """Nothing happens before ``start``. ``ended`` is called when nothing is computed any more."""
        self._machine, self._role, self._ended = machine, role, ended
        self._wake = threading.Condition()
        self._inbox: list[tuple[Link, ToWorker | None, float]] = []
        self._stopping = False
        self._links: set[Link] = set()
        self._thread = threading.Thread(target=self._compute, name=f"{role}-steps", daemon=True)
        self._server: WorkerServer | None = None
        self.address = ""

    @property
    def welcome(self) -> Welcome:
        """How it introduces itself."""
        return self._machine.welcome()

    async def start(self, listen: str, identity: Identity | None = None) -> None:
        """Listen on ``HOST:PORT``, with TLS as ``identity``; raises :class:`transport.address.AddressError`."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._server = await serve(self, self._role, listen, identity)
        self.address = self._server.address
        self._thread.start()
        self._heart = asyncio.create_task(self._beat())

    @property
    def demand(self) -> WorkerDemand:
        """What whoever decides how many workers there are should know."""
        return self._machine.demand()

    async def wait(self) -> None:
        """Return only by raising what ended the computing thread."""
        await self.failed

    async def stop(self) -> None:
        """End all streams, the thread and the server."""
        self._heart.cancel()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        if self._ended is not None:
            await asyncio.to_thread(self._ended)
        if self._server is not None:
            await self._server.stop()

    # -- transport.server.Handler, on the event loop -------------------------------------------------------------------

    def connected(self, link: Link) -> Welcome:
        """A router came."""
        self._links.add(link)
        return self._machine.welcome()

    def received(self, link: Link, message: ToWorker) -> None:
        """A router sent a message."""
        self._post(link, message)

    def disconnected(self, link: Link) -> None:
        """A router went."""
        self._links.discard(link)
        self._post(link, None)

    def _post(self, link: Link, message: ToWorker | None) -> None:
        with self._wake:
            self._inbox.append((link, message, time.perf_counter()))
            self._wake.notify()

    def _deliver(self, outgoing: Sequence[tuple[Hashable, FromWorker]]) -> None:
        for link, message in outgoing:
            assert isinstance(link, Link)
            link.send(message)

    async def _beat(self) -> None:
        while True:
            load = self._machine.load()
            for link in list(self._links):
                link.send(load)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # -- the computing thread ------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        try:
            idle = False
            while True:
                with self._wake:
                    if idle:
                        self._await_work(self._machine.due())
                    if self._stopping:
                        return
                    inbox, self._inbox = self._inbox, []
                answers: Outgoing = []
                for link, message, at in inbox:
                    if message is None:
                        self._machine.forget(link)
                    else:
                        answers += self._machine.receive(link, message, at)
                self._send(answers)
                computed = self._machine.step()
                idle = computed is None
                self._send(computed or [])
        except Exception as error:  # the process boundary: whatever it was, the worker is of no use any more
            log.exception("the %s worker failed", self._role)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _send(self, outgoing: Outgoing) -> None:
        if outgoing:
            self._loop.call_soon_threadsafe(self._deliver, outgoing)

    def _await_work(self, due: float | None) -> None:
        """Until a message comes, or it is time."""
        while not self._inbox and not self._stopping:
            left = None if due is None else due - time.perf_counter()
            if left is not None and left <= 0:
                return
            self._wake.wait(left)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
