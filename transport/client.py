"""The router's end of the wire: one stream to one worker, watched.

A connection is up from the worker's ``Welcome`` until the stream ends or the worker is given up, because for
:data:`WORKER_SILENCE_SECONDS` nothing, not even a heartbeat, was heard, or a ping was not answered: then messages reach
the router and none reach the worker. One that does not introduce itself in that time is given up, and tried again, but
for one that says that it is loading. gRPC's own keepalive would not do: its pings are answered by a thread that runs on
when the worker's own loop is stuck.

Silence is judged by ticks of the router's own clock, not by time: a router that was stopped, or had no CPU, has not
read what came meanwhile, so a tick that comes late counts for little. So does a tick while a ping has yet to be
written. A drafter that is given up and turns out to be the same one when it is back was slow, and not gone. It gets
twice the time from then on (:class:`Patience`): to open its sessions again costs a busy machine more than to wait.

Where more comes than :mod:`transport.incoming` reads, no more is taken from the stream, and the worker has to wait. One
that breaks the protocol is let go of, and not asked again for a while. A worker that cannot be reached, for instance
because of its certificate, is logged once for every reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from speculation.messages import Features, Proposal, SessionId, ToWorker
from transport.codec import MAX_PROPOSAL_BYTES, encode_to_worker
from transport.incoming import Incoming, Listener, Route
from transport.outbox import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Outbox, PeerTooSlow
from transport.tls import Identity

log = logging.getLogger(__name__)

WORKER_SILENCE_SECONDS = 2.0
RETRY_SECONDS = (0.1, 0.2, 0.5, *[1.0] * 300, 5.0)  # for each attempt that fails gRPC keeps some memory for good
"""Pauses between attempts to connect; the last one repeats."""
BROKEN_SECONDS = (1.0, 5.0, 30.0, 60.0)
"""Pauses after streams in a row that were ended because the worker broke the protocol; the last one repeats."""
MAX_REASONS = 8
"""Reasons told why a worker cannot be reached, until it was reached."""
TICKS = 20
"""Ticks in the time after which a worker is given up."""
DOUBTFUL_TICK = 0.25
"""What a tick counts for that came late, or that says little for another reason."""
MAX_PATIENCE = 5.0
"""How many times as long as others a slow drafter may be silent."""
PING_SECONDS = 0.5
LOST_SECONDS = 5.0
"""A ping not answered for this long is given up."""
SMOOTHING = 0.2

CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    # Our own retry decides when to try again; gRPC's would double the pauses up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", int(1000 * WORKER_SILENCE_SECONDS)),  # how long connecting may take, that is
    ("grpc.max_reconnect_backoff_ms", 1000),
    # One that the environment names is for the web; gRPC would ask it for workers too, on this machine as well.
    ("grpc.enable_http_proxy", 0),
]


def pause_after(failures: int, broken: int) -> float:
    """Seconds until the next attempt, after so many in a row that failed, or that the worker ``broke``."""
    pauses, number = (BROKEN_SECONDS, broken - 1) if broken else (RETRY_SECONDS, failures)
    return pauses[min(number, len(pauses) - 1)]


@dataclass(slots=True)
class Traffic:
    """Bytes of frames to and from workers, as serialised; gRPC and HTTP/2 add some 14 per frame."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


class Patience:
    """How many times as long as others a worker may be silent: it grows where one was given up that was not gone."""

    def __init__(self, longest: float = MAX_PATIENCE) -> None:
        """Once. ``longest``: the most it grows to."""
        self.factor = 1.0
        self._longest, self._given_up = longest, ""

    def given_up(self, instance: str) -> None:
        """It was silent for too long."""
        self._given_up = instance

    def came(self, instance: str) -> None:
        """It introduced itself."""
        slow = instance != "" and instance == self._given_up
        self.factor = min(2 * self.factor, self._longest) if slow else 1.0
        self._given_up = ""


class Liveness:
    """Of one stream: whether its worker is there, and how long pings take there and back. Clocks are in seconds.

    That is the way of a message between the two event loops, so a peer that is slow to react looks far away; which is
    what whoever sends it work wants to know.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._silent = 0.0  # ticks in which nothing was heard
        self._unanswered = 0.0  # ticks since the last ping, if it has not been answered
        self._pinged = self._written = self._answers = False
        self.round_trip: float | None = None
        """Smoothed over some seconds; None before the first answer."""
        self._number, self._waiting, self._sent_at = 0, False, float("-inf")

    def heard(self) -> None:
        """Something came."""
        self._silent = 0.0

    def due(self, now: float) -> int | None:
        """The number to ping with now, if it is time to; an answer is waited for, once that is written."""
        if now - self._sent_at < (LOST_SECONDS if self._waiting else PING_SECONDS):
            return None
        self._number += 1
        self._waiting, self._sent_at = True, now
        self._unanswered = self._unanswered if self._pinged else 0.0
        self._pinged, self._written = True, False
        return self._number

    def written(self) -> None:
        """The ping is on its way."""
        self._written = True

    def answered(self, number: int, now: float) -> None:
        """A ping came back: this worker answers. Any but the one waited for says nothing of how far it is."""
        self._pinged, self._answers = False, True
        if self._waiting and number == self._number:
            self._waiting, taken = False, now - self._sent_at
            known = taken if self.round_trip is None else self.round_trip
            self.round_trip = known + SMOOTHING * (taken - known)

    def held_back(self) -> None:
        """What comes is not read for a while, for want of time here."""
        self._silent = self._unanswered = 0.0

    def tick(self, *, late: bool) -> str | None:
        """Another tick has passed, ``late`` by one more at least: why the worker is to be given up, if so."""
        weight, limit = DOUBTFUL_TICK if late else 1.0, TICKS * self._patience.factor
        seconds = f"{WORKER_SILENCE_SECONDS * self._patience.factor:.0f} s"
        self._silent += weight
        if self._pinged and self._answers:
            self._unanswered += weight if self._written else DOUBTFUL_TICK
        if self._silent >= limit:
            return f"nothing heard for {seconds}"
        if self._unanswered >= limit and self._pinged:
            return f"it talks, but has not answered for {seconds}"
        return None


class WorkerConnection:
    """Keeps a stream to one worker, for as long as ``run`` runs."""

    def __init__(self, address: str, role: str, listener: Listener, identity: Identity | None = None) -> None:
        """Nothing happens before ``run``. Without an ``identity`` the connection is in plain text."""
        self.address, self._role, self._listener, self._identity = address, role, listener, identity
        self.reasons: list[str] = []
        """Why attempts failed since one succeeded, each once."""
        self.traffic = Traffic()
        """Of all streams so far."""
        self.routes: dict[SessionId, Route] = {}
        """Of the sessions of which others wait for what this worker says."""
        self._patience = Patience(MAX_PATIENCE if role == "draft" else 1.0)
        # Of the stream now open, and what is known of how it ended:
        self._incoming: Incoming | None = None
        self._outbox = Outbox()
        self._liveness = Liveness(self._patience)
        self._call: grpc.aio.StreamStreamCall[pb.Frame, pb.Frame] | None = None
        self._why = ""

    @property
    def round_trip(self) -> float | None:
        """Seconds for a message to the worker and its answer, smoothed; None while unknown."""
        return self._liveness.round_trip

    def send(self, message: ToWorker) -> None:
        """Queue a message; dropped while the worker is down."""
        self.put(encode_to_worker(message), hint=isinstance(message, Proposal | Features))

    def put(self, entry: bytes, *, hint: bool = False) -> bool:
        """Queue an encoded message, or a ``hint`` that may be dropped; whether it was, and not dropped."""
        if self._incoming is None or not self._incoming.up:
            return False
        try:
            return self._outbox.put(entry, hint=hint)
        except PeerTooSlow as error:
            self._reset(str(error))
            return False

    def _reset(self, why: str) -> None:
        """Give the stream up."""
        self._why = why
        if self._call is not None:
            self._call.cancel()

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        failures, broken, task = 0, 0, asyncio.current_task()
        assert task is not None
        while True:
            incoming = await self._attempt()
            if task.cancelling():  # while a call begins, gRPC may take that for its own, and only say that it failed
                raise asyncio.CancelledError
            failures = 0 if incoming.up else failures + 1
            broken = broken + 1 if incoming.broken else 0
            await asyncio.sleep(pause_after(failures, broken))

    async def _attempt(self) -> Incoming:
        """One stream from start to end, and what became of it."""
        self._why, later = "", asyncio.get_running_loop().call_soon
        self._outbox, self._liveness = Outbox(), Liveness(self._patience)
        async with self._channel() as channel:
            stub = (rpc.TargetStub if self._role == "target" else rpc.DraftStub)(channel)
            call = self._call = stub.Run(self._frames(self._outbox, self._liveness))
            incoming = Incoming(self.address, self._role, self._listener, self.routes, later, self._reset)
            self._incoming = incoming
            watching = asyncio.create_task(self._watch(incoming))
            try:
                ended = await self._read(call, incoming)
                self._why = self._why or ended
            finally:
                self._incoming = None
                watching.cancel()
                incoming.finish()
                self._outbox.close()
                call.cancel()
                if incoming.up:
                    self._listener.down(self._why)
                elif incoming.loading:
                    self._listener.loading(None)
        self._note(self._why, was_up=incoming.up)
        return incoming

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.Frame, pb.Frame], incoming: Incoming) -> str:
        """All that comes, and why no more does."""
        ended, liveness, clock = "the stream ended", self._liveness, asyncio.get_running_loop().time
        was_up = False
        try:
            while isinstance(frame := await call.read(), pb.Frame):
                self.traffic.received += frame.ByteSize()
                if frame.HasField("pong"):
                    liveness.answered(frame.pong, clock())
                incoming.take(frame)
                if incoming.up or incoming.loading:
                    liveness.heard()
                if incoming.up and not was_up:
                    was_up = True
                    self._patience.came(incoming.instance)
                while incoming.behind:  # what it says meanwhile is not lost, nor is it silent
                    liveness.held_back()
                    await asyncio.sleep(0)
            if frame is None:  # gRPC's word for what it cannot read
                incoming.take(None)
        except grpc.aio.AioRpcError as error:
            ended = f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # it serves the streams of its own role alone
                ended += f" (it is no {self._role} worker)"
        except asyncio.CancelledError:
            if not call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
        while incoming.unread:
            await asyncio.sleep(0)
        return ended

    def _channel(self) -> grpc.aio.Channel:
        longest = MAX_MESSAGE_BYTES if self._role == "target" else MAX_FRAME_BYTES + MAX_PROPOSAL_BYTES
        options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", longest)]
        if self._identity is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return self._identity.channel(self.address, self._role, options)

    def _note(self, why: str, *, was_up: bool) -> None:
        """Log why an attempt failed, unless one since the worker was last up failed for the same reason.

        One fault has several reasons in turn: gRPC tells what it saw last, a handshake refused or its end only.
        """
        if was_up:
            self.reasons.clear()
        elif why not in self.reasons and len(self.reasons) < MAX_REASONS:
            self.reasons.append(why)
            log.warning("cannot reach %s worker %s: %s", self._role, self.address, why)

    async def _watch(self, incoming: Incoming) -> None:
        """Ping it now and then, and see whether it is there."""
        clock, pause = asyncio.get_running_loop().time, WORKER_SILENCE_SECONDS / TICKS
        while True:
            if incoming.up and (number := self._liveness.due(clock())) is not None:
                self._outbox.probe(ping=number)
            slept_at = clock()
            await asyncio.sleep(pause)
            late = clock() - slept_at > 2 * pause
            if why := self._liveness.tick(late=late):
                if incoming.up:
                    self._patience.given_up(incoming.instance)
                self._reset(why)
                return

    async def _frames(self, outbox: Outbox, liveness: Liveness) -> AsyncIterator[pb.Frame]:
        while (frame := await outbox.next_frame()) is not None:
            self.traffic.sent += frame.ByteSize()
            if frame.HasField("ping"):
                liveness.written()
            yield frame
