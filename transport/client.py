"""The router's end of the wire: one stream to one worker, watched.

A connection is up from the worker's ``Welcome`` until the stream ends or nothing, not even a heartbeat, was heard for
:data:`WORKER_SILENCE_SECONDS`. A worker that does not introduce itself in that time, whatever else it sends, is given
up, and tried again. gRPC's own keepalive would not do: pings are answered by a thread that runs on when the worker's
own loop is stuck. Only time in which the router itself listened counts: one that was stopped for a while, or had no
CPU, has not read what came meanwhile.

A worker that cannot be reached, for instance because of its certificate, is logged once for every reason.

What one worker says of a session and another waits for is passed on before it is read (:class:`Route`), and reading
lets the event loop write and hear others in between.

A malformed message is reported to the listener and otherwise skipped. A worker that sends nothing else stays connected:
what to think of it is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from speculation.messages import FromWorker, Load, Proposal, SessionId, ToWorker, Verification, Welcome
from transport.codec import MalformedMessage, decode_from_worker, encode_to_worker
from transport.outbox import MAX_MESSAGE_BYTES, DelayLine, Outbox, PeerTooSlow, Probe, no_delay
from transport.relayed import heading, relayed
from transport.round_trip import RoundTrip
from transport.tls import Identity

log = logging.getLogger(__name__)

WORKER_SILENCE_SECONDS = 2.0
LISTENED = 20
"""Times in this that a router has to have listened and heard nothing."""
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to connect; the last one repeats."""
READ_AT_ONCE = 4
"""Messages read in one turn of the event loop, in which nothing is written and nobody else is heard."""
MAX_UNREAD = 4096
"""Messages that wait to be read; with more, all are read before any other is taken."""
MAX_REASONS = 8
"""Reasons told why a worker cannot be reached, until it was reached."""

CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Our own retry decides when to try again; gRPC's would double the pauses up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Listener(Protocol):
    """The router's view of a worker's stream. All calls come from the event loop and must not block."""

    def up(self, welcome: Welcome) -> None:
        """The worker introduced itself; sessions may be opened."""
        ...

    def received(self, message: FromWorker) -> None:
        """The worker sent a message (never a Welcome)."""
        ...

    def malformed(self, error: MalformedMessage) -> None:
        """The worker, while up, sent a message that breaks the protocol. It is dropped; the stream goes on."""
        ...

    def down(self, why: str) -> None:
        """The worker is lost, and with it everything opened there. Connecting goes on in the background."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """Where to pass on what a worker says of a session under ``epoch``, and under which epoch."""

    epoch: int
    onto: WorkerConnection
    there: int


class _Unread(NamedTuple):
    """One entry that came."""

    entry: bytes
    passed: int = 0
    """Under which epoch it was passed on; 0: it was not."""
    held: SessionId | None = None
    """Whose it is, if it may have to be passed on once it is read."""


Later = Callable[[Callable[[], None]], object]
"""Has something done in the next turn of the event loop."""


class Incoming:
    """Reads what a worker says on one stream, whatever it says."""

    def __init__(
        self, worker: str, role: str, listener: Listener, routes: Mapping[SessionId, Route], later: Later | None = None
    ) -> None:
        """``worker`` is for logs. Without ``later`` nothing is put off."""
        self.up = False
        """Whether the worker introduced itself."""
        self._worker, self._role, self._listener, self._routes, self._later = worker, role, listener, routes, later
        self._unread: deque[_Unread] = deque()
        self._held: Counter[SessionId] = Counter()
        """Of each session, what is unread and was not passed on: nothing may overtake it."""
        self._counter_names: tuple[str, ...] = ()
        self._malformed = 0

    def take(self, frame: pb.Frame) -> None:
        """Pass on what another worker waits for, now; tell the listener what the messages say, in order, soon."""
        idle = not self._unread
        for entry in frame.messages:
            self._unread.append(self._relay(entry) if self.up else _Unread(entry))
        if self._later is None or not self.up or len(self._unread) > MAX_UNREAD:
            self.finish()
        elif idle and self._unread:
            self._later(self._read_some)

    def finish(self) -> None:
        """Read all that has come."""
        while self._unread:
            self._read()

    def _relay(self, entry: bytes) -> _Unread:
        head = heading(entry)
        if head is None or head.role != self._role:
            return _Unread(entry)
        route = self._routes.get(head.session)
        known = route is not None and route.epoch == head.epoch and not self._held[head.session]
        if route is not None and known and route.onto.put(relayed(entry, head, route.there)):
            return _Unread(entry, route.there)
        self._held[head.session] += 1
        return _Unread(entry, held=head.session)

    def _read_some(self) -> None:
        assert self._later is not None
        try:
            for _ in range(min(READ_AT_ONCE, len(self._unread))):
                self._read()
        finally:
            if self._unread:
                self._later(self._read_some)

    def _read(self) -> None:
        entry, passed, held = self._unread.popleft()
        if held is not None:
            self._held[held] -= 1
            if not self._held[held]:
                del self._held[held]
        try:
            message = decode_from_worker(entry, self._counter_names)
            if passed and isinstance(message, Proposal | Verification):
                object.__setattr__(message, "passed", passed)  # a value that nobody else has seen yet
            self._pass_on(message)
        except MalformedMessage as error:
            self._report(error)

    def _pass_on(self, message: FromWorker) -> None:
        match message:
            case Welcome() if self.up:
                raise MalformedMessage("a second Welcome")
            case Welcome():
                self.up = True
                self._listener.up(message)
                return
            case Load():
                self._counter_names = tuple(message.counters)
        if self.up:
            self._listener.received(message)

    def _report(self, error: MalformedMessage) -> None:
        self._malformed += 1
        if self._malformed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a broken worker must not flood the log
            log.warning("malformed message %d from worker %s: %s", self._malformed, self._worker, error)
        if self.up:
            self._listener.malformed(error)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The parts of the stream now open."""

    incoming: Incoming
    outbox: Outbox
    reset: Callable[[str], None]


class _Silence:
    """Notices that nothing is heard. It counts how often it could have heard something, not time."""

    def __init__(self, seconds: float, silent: Callable[[], None]) -> None:
        """From now on; ``silent`` is called once, after ``seconds`` or more."""
        self._pause = WORKER_SILENCE_SECONDS / LISTENED
        self._left = seconds / self._pause
        self._silent = silent
        self._task = asyncio.create_task(self._count())

    def broken(self) -> None:
        """Something was heard: begin again."""
        self._left = LISTENED

    def close(self) -> None:
        """Listen no more."""
        self._task.cancel()

    async def _count(self) -> None:
        while self._left > 0:
            await asyncio.sleep(self._pause)
            self._left -= 1
        self._silent()


class WorkerConnection:
    """Keeps a stream to one worker, for as long as ``run`` runs."""

    def __init__(
        self,
        address: str,
        role: str,
        listener: Listener,
        delay: Callable[[], float] = no_delay,
        identity: Identity | None = None,
    ) -> None:
        """Nothing happens before ``run``. Without an ``identity`` the connection is in plain text.

        ``delay`` is for experiments: everything in both directions, heartbeats too, comes that many seconds late. It is
        asked at every message.
        """
        self.address, self._role, self._listener, self._delay = address, role, listener, delay
        self._identity = identity
        self._said: set[str] = set()
        """Why the last attempt failed, until one succeeds."""
        self.sent_bytes = 0
        """Bytes of all frames sent so far, as serialised; gRPC and HTTP/2 add some 14 per frame."""
        self.received_bytes = 0
        self.routes: dict[SessionId, Route] = {}
        """Of the sessions of which others wait for what this worker says."""
        self._stream: _Stream | None = None
        self._round_trip = RoundTrip()

    @property
    def round_trip(self) -> float | None:
        """Seconds for a message to the worker and its answer, smoothed; None while unknown."""
        return self._round_trip.seconds

    def send(self, message: ToWorker) -> None:
        """Queue a message; dropped while the worker is down."""
        self.put(encode_to_worker(message))

    def put(self, entry: bytes) -> bool:
        """Queue an encoded message; whether it was, and not dropped."""
        stream = self._stream
        if stream is None or not stream.incoming.up:
            return False
        try:
            stream.outbox.put(entry)
        except PeerTooSlow as error:
            stream.reset(str(error))
            return False
        return True

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        failures = 0
        while True:
            was_up = await self._attempt()
            failures = 0 if was_up else failures + 1
            await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])

    async def _attempt(self) -> bool:
        """One stream from start to end; whether it was ever up."""
        why = "the stream ended"
        outbox = Outbox(self._delay)
        self._round_trip = RoundTrip()
        later = asyncio.get_running_loop().call_soon
        incoming = Incoming(self.address, self._role, self._listener, self.routes, later)
        async with self._channel() as channel:
            stub = (rpc.TargetStub if self._role == "target" else rpc.DraftStub)(channel)
            call = stub.Run(self._frames(outbox))

            def reset(reason: str) -> None:
                nonlocal why
                why = reason
                call.cancel()

            def hear(frame: pb.Frame) -> None:
                self._measure(frame, outbox)
                incoming.take(frame)
                if incoming.up:
                    silence.broken()

            line = DelayLine(hear, self._delay)
            silence = _Silence(
                WORKER_SILENCE_SECONDS + self._delay(),
                lambda: reset(f"nothing heard for {WORKER_SILENCE_SECONDS:.0f} s"),
            )
            self._stream = _Stream(incoming, outbox, reset)
            try:
                while isinstance(frame := await call.read(), pb.Frame):
                    self.received_bytes += frame.ByteSize()
                    line.put(frame)
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                if not call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            finally:
                self._stream = None
                silence.close()
                line.close()
                incoming.finish()
                outbox.close()
                call.cancel()
                if incoming.up:
                    self._listener.down(why)
        self._note(why, was_up=incoming.up)
        return incoming.up

    def _channel(self) -> grpc.aio.Channel:
        if self._identity is None:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return self._identity.channel(self.address, self._role, CHANNEL_OPTIONS)

    def _note(self, why: str, *, was_up: bool) -> None:
        """Log why an attempt failed, unless one since the worker was last up failed for the same reason.

        One fault has several reasons in turn: gRPC tells what it saw last, a handshake refused or its end only.
        """
        if was_up:
            self._said.clear()
        elif why not in self._said and len(self._said) < MAX_REASONS:
            self._said.add(why)
            log.warning("cannot reach %s worker %s: %s", self._role, self.address, why)

    def _measure(self, frame: pb.Frame, outbox: Outbox) -> None:
        """Take the answer to a ping, and send the next when it is due: frames come in at least every heartbeat."""
        now = asyncio.get_running_loop().time()
        if frame.HasField("pong"):
            self._round_trip.answered(frame.pong, now)
        number = self._round_trip.due(now)
        if number is not None:
            outbox.probe(Probe(ping=number))

    async def _frames(self, outbox: Outbox) -> AsyncIterator[pb.Frame]:
        while (frame := await outbox.next_frame()) is not None:
            self.sent_bytes += frame.ByteSize()
            yield frame
