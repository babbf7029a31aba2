"""The router's end of the wire: one stream to one worker, watched.

A connection is up from the worker's ``Welcome`` until the stream ends or nothing, not even a heartbeat, was heard for
:data:`WORKER_SILENCE_SECONDS`. gRPC's own keepalive would not do: pings are answered by a thread that runs on when the
worker's own loop is stuck.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from speculation.messages import FromWorker, RefusalCode, Refused, ToWorker, Welcome
from transport.codec import MalformedMessage, decode_from_worker, encode_to_worker
from transport.outbox import MAX_MESSAGE_BYTES, Outbox, PeerTooSlow

log = logging.getLogger(__name__)

WORKER_SILENCE_SECONDS = 2.0
CONNECT_SECONDS = 5.0
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0)
"""Pauses between attempts to connect; the last one repeats."""

CHANNEL_OPTIONS = [
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

    def down(self, why: str) -> None:
        """The worker is lost, and with it everything opened there. Connecting goes on in the background."""
        ...


class WorkerConnection:
    """Keeps a stream to one worker, for as long as ``run`` runs."""

    def __init__(self, address: str, role: str, listener: Listener) -> None:
        """Nothing happens before ``run``."""
        self.address, self._role, self._listener = address, role, listener
        self._outbox: Outbox | None = None
        self._reset: Callable[[str], None] = lambda _: None

    def send(self, message: ToWorker) -> None:
        """Queue a message; dropped while the worker is down."""
        if self._outbox is None:
            return
        try:
            self._outbox.put(encode_to_worker(message))
        except PeerTooSlow as error:
            self._reset(str(error))

    async def run(self) -> None:
        """Connect, serve, and connect again, until cancelled."""
        failures = 0
        while True:
            was_up = await self._attempt()
            failures = 0 if was_up else failures + 1
            await asyncio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])

    async def _attempt(self) -> bool:
        """One stream from start to end; whether it was ever up."""
        up = False
        why = "the stream ended"
        outbox = Outbox()
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = (rpc.TargetStub if self._role == "target" else rpc.DraftStub)(channel)
            call = stub.Run(_frames(outbox))

            def reset(reason: str) -> None:
                nonlocal why
                why = reason
                call.cancel()

            try:
                async for message in self._messages(call):
                    if isinstance(message, Welcome):
                        up, self._outbox, self._reset = True, outbox, reset
                        self._listener.up(message)
                    elif up:
                        self._listener.received(message)
            except TimeoutError:
                why = f"nothing heard for {WORKER_SILENCE_SECONDS:.0f} s"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                if not call.cancelled() or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
            finally:
                self._outbox = None
                outbox.close()
                call.cancel()
                if up:
                    self._listener.down(why)
        return up

    async def _messages(self, call: grpc.aio.StreamStreamCall[pb.Frame, pb.Frame]) -> AsyncIterator[FromWorker]:
        """Decoded messages; raises TimeoutError on silence.

        A malformed message becomes a refusal of its session, which is then opened again; others do not notice.
        """
        patience = CONNECT_SECONDS
        while True:
            async with asyncio.timeout(patience):  # not wait_for, which can swallow a cancellation before Python 3.12
                frame = await call.read()
            if not isinstance(frame, pb.Frame):
                return
            patience = WORKER_SILENCE_SECONDS
            for entry in frame.messages:
                try:
                    yield decode_from_worker(entry)
                except MalformedMessage as error:
                    log.warning("malformed message from worker %s: %s", self.address, error)
                    if error.session is not None:
                        yield Refused(error.session, error.epoch or 0, RefusalCode.INTERNAL, str(error))


async def _frames(outbox: Outbox) -> AsyncIterator[pb.Frame]:
    while (frame := await outbox.next_frame()) is not None:
        yield frame
