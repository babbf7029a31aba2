"""A worker's end of the wire: accepts streams of routers and keeps each apart.

The worker sees a :class:`Link` per stream. A malformed opening is refused for its session alone, and any other
malformed message is dropped: it may come from another worker, and the router will see what it is. A router that falls
silent, reads too slowly, or sends garbage of its own, loses its link, and with it its sessions, even while a frame
waits to be written. With TLS, who is no router gets none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc

from protos.paceline.v1 import worker_pb2 as pb
from protos.paceline.v1 import worker_pb2_grpc as rpc
from speculation.messages import FromWorker, Load, Loading, RefusalCode, Refused, ToWorker, Welcome
from transport import address as addresses
from transport import codec
from transport.outbox import MAX_FRAME_ENTRIES, MAX_MESSAGE_BYTES, Outbox, PeerTooSlow
from transport.tls import Identity, objection_to

log = logging.getLogger(__name__)

ROUTER_SILENCE_SECONDS = 10.0
"""A router that sends nothing for this long, not even a heartbeat, is gone."""

DECODED_AT_ONCE = 64
"""Messages of one frame decoded in one turn of the event loop."""
MAX_GARBAGE = 16
"""Unreadable messages of a router's own that a stream survives."""

SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # otherwise two workers share a port silently
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.server_handshake_timeout_ms", 10_000),
]


class Link:
    """One router's stream, as a worker sees it. Compared by identity; used from the event loop only."""

    def __init__(self, peer: str, lost: Callable[[], None]) -> None:
        """``peer`` is for logs; ``lost`` is called when the router turns out to be none any more."""
        self.peer = peer
        self.alive = True
        self._lost = lost
        self.outbox = Outbox()
        self.malformed = 0
        """Messages of it that could not be read ..."""
        self.garbage = 0
        """... and were no relayed ones either."""
        self.newer = False
        """Whether it sent any of a kind not known here."""
        self._counter_names: tuple[str, ...] = ()

    def send(self, message: FromWorker | Loading) -> None:
        """Queue a message; dropped when the link is gone."""
        if self.alive:
            entry = codec.encode_from_worker(message, self._counter_names)
            if isinstance(message, Load):
                self._counter_names = tuple(message.counters)
            self.put(entry)

    def put(self, entry: bytes) -> None:
        """Queue an encoded message; dropped when the link is gone."""
        if not self.alive:
            return
        try:
            self.outbox.put(entry, hint=codec.is_features(entry))
        except PeerTooSlow as error:
            log.warning("router %s does not read: %s", self.peer, error)
            self.cut()

    def cut(self) -> None:
        """Give the router up. Nobody waits until it has read what is queued: that is lost."""
        self.alive = False
        self.outbox.close(lose=True)
        self._lost()

    def close(self) -> None:
        """End the stream once what is queued was sent."""
        self.alive = False
        self.outbox.close()


class Handler(Protocol):
    """A worker. All calls come from the event loop and must not block."""

    def connected(self, link: Link) -> Welcome | Loading:
        """A router came; the answer introduces the worker to it, or says what it does before it can."""

    def received(self, link: Link, messages: Sequence[ToWorker]) -> None:
        """A router sent these, in one frame."""

    def disconnected(self, link: Link) -> None:
        """A router went; its sessions are to be forgotten."""


class WorkerServer(rpc.TargetServicer, rpc.DraftServicer):
    """A listening worker. Both services have the same shape; the role decides which one is registered."""

    address: str

    def __init__(self, handler: Handler, server: grpc.aio.Server, *, secure: bool) -> None:
        self._handler, self._server, self._secure = handler, server, secure
        self._links: set[Link] = set()

    def hand_over(self, handler: Handler) -> None:
        """From now on this is the worker, and introduces itself to routers that are there."""
        self._handler = handler
        for link in list(self._links):
            link.send(handler.connected(link))

    def tell(self, loading: Loading) -> None:
        """Say to all routers what is done before the worker can introduce itself."""
        for link in list(self._links):
            link.send(loading)

    async def stop(self, grace: float = 1.0) -> None:
        """End all streams and stop listening."""
        for link in list(self._links):
            link.close()
        await self._server.stop(grace)

    async def Run(  # noqa: N802 - named by the proto
        self, request_iterator: AsyncIterator[pb.Frame], context: grpc.aio.ServicerContext[pb.Frame, pb.Frame]
    ) -> AsyncIterator[pb.Frame]:
        """The stream of one router."""
        if self._secure and (objection := objection_to(context.auth_context())):
            log.warning("refused %s: %s", context.peer(), objection)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, objection)
        link = Link(str(context.peer()), lambda: self._forget(link))
        self._links.add(link)
        reader = asyncio.create_task(self._read(link, request_iterator))
        try:
            link.send(self._handler.connected(link))
            while (frame := await link.outbox.next_frame()) is not None:
                yield frame
        finally:
            self._forget(link)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def _forget(self, link: Link) -> None:
        """The router is gone, whether what was queued for it has been sent or not."""
        link.close()
        if link in self._links:
            self._links.remove(link)
            self._handler.disconnected(link)

    async def _read(self, link: Link, frames: AsyncIterator[pb.Frame]) -> None:
        """Pass messages on until the router is done, silent or broken; then it is forgotten."""
        iterator = aiter(frames)
        try:
            while True:
                async with asyncio.timeout(ROUTER_SILENCE_SECONDS):
                    frame = await anext(iterator)
                if frame.HasField("ping"):
                    link.outbox.probe(pong=frame.ping)
                if len(frame.messages) > MAX_FRAME_ENTRIES:
                    self._break(link, f"a frame of {len(frame.messages)} messages")
                messages = await self._decoded_all(link, frame)
                if messages and link.alive:
                    self._handler.received(link, messages)
        except StopAsyncIteration:
            pass
        except TimeoutError:
            log.warning("router %s sent nothing for %.0f s", link.peer, ROUTER_SILENCE_SECONDS)
            link.cut()
        except grpc.RpcError as error:
            log.info("stream of router %s broke: %s", link.peer, error)
        finally:
            self._forget(link)

    async def _decoded_all(self, link: Link, frame: pb.Frame) -> list[ToWorker]:
        """What a frame says. In slices: a long one does not keep the event loop from others."""
        messages: list[ToWorker] = []
        for number, entry in enumerate(frame.messages):
            if number and not number % DECODED_AT_ONCE:
                await asyncio.sleep(0)
            if not link.alive:
                break
            if (message := self._decoded(link, entry)) is not None:
                messages.append(message)
        return messages

    def _decoded(self, link: Link, entry: bytes) -> ToWorker | None:
        try:
            return codec.decode_to_worker(entry)
        except codec.MalformedMessage as error:
            if isinstance(error, codec.UnknownKind):
                if not link.newer:
                    log.info("router %s sends messages of kinds that are not known here: it is newer", link.peer)
                link.newer = True
                return None
            link.malformed += 1
            if link.malformed.bit_count() == 1:  # the 1st, 2nd, 4th ...: a broken drafter must not flood the log
                log.warning("malformed message %d from router %s: %s", link.malformed, link.peer, error)
            if error.session is not None and error.opening:
                link.send(Refused(error.session, error.epoch or 0, RefusalCode.INVALID, str(error)))
            elif entry[:1] not in codec.MAYBE_RELAYED:
                link.garbage += 1
                if link.garbage > MAX_GARBAGE:
                    self._break(link, f"{link.garbage} messages that are none")
            return None

    @staticmethod
    def _break(link: Link, why: str) -> None:
        if link.alive:
            log.warning("router %s breaks the protocol: %s", link.peer, why)
            link.cut()


async def serve(handler: Handler, role: str, listen: str, identity: Identity | None = None) -> WorkerServer:
    """Listen on ``HOST:PORT`` (port 0: any), in plain text without an ``identity``.

    Raises :class:`transport.address.AddressError`.
    """
    addresses.check_free(listen)
    host, _ = addresses.parse(listen)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker = WorkerServer(handler, server, secure=identity is not None)
    add = rpc.add_TargetServicer_to_server if role == "target" else rpc.add_DraftServicer_to_server
    add(worker, server)  # type: ignore[no-untyped-call]
    try:
        if identity is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, identity.server_credentials())
    except RuntimeError as error:
        raise addresses.AddressError(f"cannot listen on {listen}: {error}") from error
    await server.start()
    worker.address = addresses.join(host, port)
    return worker
