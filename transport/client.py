"""The router's end of the wire: one stream to one worker, watched.

A connection is up from the worker's ``Welcome`` until the stream ends or nothing, not even a heartbeat, was heard for
:data:`WORKER_SILENCE_SECONDS`. A worker that does not introduce itself in that time, whatever else it sends, is given
up, and tried again. gRPC's own keepalive would not do: pings are answered by a thread that runs on when the worker's
own loop is stuck. Only time in which the router itself listened counts: one that was stopped for a while, or had no
CPU, has not read what came meanwhile.

A worker that cannot be reached, for instance because of its certificate, is logged once for every reason.

A malformed message is reported to the listener and otherwise skipped. A worker that sends nothing else stays connected:
what to think of it is not decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from speculation.messages import FromWorker, Load, Proposal, ToWorker, Verification, Welcome
from transport.codec import MalformedMessage, decode_from_worker, encode_to_worker, relayed
from transport.outbox import MAX_MESSAGE_BYTES, DelayLine, Outbox, PeerTooSlow, Probe, no_delay
from transport.round_trip import RoundTrip
from transport.tls import Identity

log = logging.getLogger(__name__)

WORKER_SILENCE_SECONDS = 2.0
LISTENED = 20
"""Times in this that a router has to have listened and heard nothing."""
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to connect; the last one repeats."""
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


class Incoming:
    """Reads what a worker says on one stream, whatever it says."""

    def __init__(self, worker: str, listener: Listener) -> None:
        """``worker`` is for logs."""
        self.up = False
        """Whether the worker introduced itself."""
        self._worker, self._listener = worker, listener
        self._counter_names: tuple[str, ...] = ()
        self._malformed = 0

    def take(self, frame: pb.Frame) -> None:
        """Tell the listener what the messages of a frame say."""
        for entry in frame.messages:
            try:
                self._pass_on(decode_from_worker(entry, self._counter_names))
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
        self._stream: _Stream | None = None
        self._round_trip = RoundTrip()

    @property
    def round_trip(self) -> float | None:
        """Seconds for a message to the worker and its answer, smoothed; None while unknown."""
        return self._round_trip.seconds

    def send(self, message: ToWorker) -> None:
        """Queue a message; dropped while the worker is down."""
        if (outbox := self._outbox) is not None:
            self._put(outbox, encode_to_worker(message))

    def relay(self, message: Proposal | Verification, epoch: int) -> None:
        """As ``send``, of what another worker sent, under the epoch that the session has here."""
        if (outbox := self._outbox) is not None:
            self._put(outbox, relayed(message, epoch))

    @property
    def _outbox(self) -> Outbox | None:
        """Where messages go while the worker is up."""
        stream = self._stream
        return stream.outbox if stream is not None and stream.incoming.up else None

    def _put(self, outbox: Outbox, entry: bytes) -> None:
        try:
            outbox.put(entry)
        except PeerTooSlow as error:
            assert self._stream is not None
            self._stream.reset(str(error))

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
        incoming = Incoming(self.address, self._listener)
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
