"""Starting a router: connections to workers, the tokenizer of the served model, the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from router.dispatch import Dispatcher, DispatchLimits
from router.generation import ServedModel
from router.http.api import ApiSettings, build_app
from router.http.asgi import BoundedHttp
from router.http.exhaustion import ExhaustionLog
from router.http.prompt_recorder import PromptRecorder, RecordingError, RecordSettings
from router.sessions.run import NullTracer
from router.text.tokenizer import TokenizerError, Tokenizers
from speculation.events import Role
from speculation.messages import SessionId
from transport import address as addresses
from transport.tls import Identity
from transport.tracing import TraceSettings, Tracing

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.05
KEEP_ALIVE_SECONDS = 75
"""For the next request of a connection: longer than load balancers keep theirs, or they send into a closing one."""
YOUNG_OBJECTS = 50_000
"""How many more there are before the collector looks for garbage among them; some MB."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_MEMORY = {M_MMAP_THRESHOLD: 4 << 20, M_TRIM_THRESHOLD: 8 << 20}
"""By option of mallopt(3): bytes of a frame, at most, whose memory is kept, and of all that is kept so."""
LAST_SECONDS = 5
"""In which clients must have read the ends of their answers once the router stops."""
LOOK_SECONDS = 1.0
"""Between two looks whether there is a model whose tokenizer is still to be read."""


class RouterError(Exception):
    """The router cannot start. One line, for the operator."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """A router."""

    targets: Sequence[str] = ()
    drafts: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer: str = ""
    """Folder or hub id to read tokenizers from where it is that of a model; else they come from ``models``."""
    models: Sequence[str] | None = None
    """Folders and hub ids that may be read besides; None: any that a target names."""
    ready_timeout: float = 30.0
    """Seconds to wait for a first target worker; HTTP is served meanwhile, and says what is waited for."""
    drain_timeout: float = 30.0
    """Seconds in which running requests may end once the router is told to stop; then they fail."""
    api: ApiSettings = ApiSettings()
    limits: DispatchLimits = DispatchLimits()
    identity: Identity | None = None
    """Who the router is to the workers; None: connections are in plain text."""
    trace: TraceSettings | None = None
    """Where spans go; None: tracing is off."""
    record: RecordSettings | None = None
    """Where prompts are kept; None: nowhere."""


def server_config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    """How HTTP is served."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        http=BoundedHttp,
        ws="none",  # or an offer of it takes the connection from under the answer to what came before
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,
    )


def freeze_loaded() -> None:
    """Where the process is the router's alone: the collector passes by what is loaded, and seldom looks for garbage.

    What a commit makes lives until the next one of its stream. By default, the collector would look at all of it, of
    all streams, for every 700 objects more: a tenth of the router's time at 1,000 streams. And the memory of frames is
    kept for the next ones. By default glibc gives it back after each that holds the features of a few sessions, and
    every page of it has to be had again: a third of a router's time at 50 MB/s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in KEPT_MEMORY.items():
            mallopt(option, size)


class Router:
    """A running router. Where another server carries HTTP to it, that has :meth:`app`, and calls :meth:`close`."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self._tracing: Tracing | None = None
        traced: Callable[[SessionId], NullTracer] = NullTracer
        if settings.trace is not None:
            from router.http.tracing import SessionSpans

            self._tracing = Tracing.to(settings.trace, "router")
            traced = partial(SessionSpans, self._tracing)
        self.dispatcher = Dispatcher(settings.limits, settings.identity, traced)
        self.tokenizers = Tokenizers(settings.tokenizer, settings.models)
        self._recorder: PromptRecorder | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self.address = ""

    def app(self) -> Starlette:
        """Its HTTP side. Raises :class:`RouterError`."""
        try:
            self._recorder = PromptRecorder(self.settings.record) if self.settings.record else None
        except RecordingError as error:
            raise RouterError(f"{error}; see --record-prompts") from error
        metrics = self.dispatcher.metrics
        return build_app(self.dispatcher, self.tokenizers, self.settings.api, metrics, self._tracing, self._recorder)

    async def connect(self) -> None:
        """Connect to the workers and read the models' tokenizers, if a target answers. Raises :class:`RouterError`."""
        self.dispatcher.pool.set_workers(Role.TARGET, self.settings.targets)
        self.dispatcher.pool.set_workers(Role.DRAFT, self.settings.drafts)
        try:
            async with asyncio.timeout(self.settings.ready_timeout):
                await self.dispatcher.ready.wait()
        except TimeoutError:
            if starting := self.dispatcher.snapshot().loading:
                log.info("%s; requests get 503 until one is up", starting)
                return
            listed = ", ".join(self.settings.targets) or "no address given"
            wait = f"{self.settings.ready_timeout:.0f} s"
            log.warning("no target worker answered within %s (%s); requests get 503 until one does", wait, listed)
        for model in self.dispatcher.models.values():
            try:
                await self.tokenizers.of(model)
            except TokenizerError as error:
                raise RouterError(
                    f"no tokenizer for {model.source or model.name!r}: {error}; give it by --tokenizer"
                ) from error

    async def start(self) -> None:
        """Serve HTTP, and return once a target is up or has had ``ready_timeout``; raises RouterError, AddressError."""
        host, port = self.settings.host, self.settings.port
        self._server = uvicorn.Server(server_config(self.app(), host, port))
        listener = addresses.bound(host, port)
        asyncio.get_running_loop().set_exception_handler(ExhaustionLog().handle)
        self.address = f"http://{addresses.join(host, listener.getsockname()[1])}"
        self._serving = asyncio.create_task(self._serve(self._server, listener))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done() and (error := self._serving.exception()) is not None:
            self._serving = None
            raise addresses.AddressError(f"cannot listen on {addresses.join(host, port)}: {error}") from error
        await self.connect()
        self.read_tokenizers()

    def read_tokenizers(self) -> None:
        """From now on, read that of each model once it has a target, so that readiness knows what cannot be read."""
        self._reading = asyncio.create_task(self._read_tokenizers())

    async def _read_tokenizers(self) -> None:
        looks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                models = self.dispatcher.models
                for name in self.dispatcher.unreadable.keys() - models.keys():
                    del self.dispatcher.unreadable[name]
                looks = {name: look for name, look in looks.items() if not look.done()}
                for name, model in models.items():
                    if name not in looks:
                        looks[name] = group.create_task(self._read_tokenizer(model))
                await asyncio.sleep(LOOK_SECONDS)

    async def _read_tokenizer(self, model: ServedModel) -> None:
        try:
            await self.tokenizers.of(model)
        except Exception as error:  # whatever it is, requests would meet it as well
            why = f"cannot read the tokenizer of {model.name}: {error}"
            if self.dispatcher.unreadable.get(model.name) != why:
                log.error(why)
            self.dispatcher.unreadable[model.name] = why
        else:
            self.dispatcher.unreadable.pop(model.name, None)

    @staticmethod
    async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
        with contextlib.closing(listener):
            await server._serve(sockets=[listener])  # not serve(): signals belong to whoever started the router

    async def wait(self) -> None:
        """Return when the server has stopped."""
        if self._serving is not None:
            await self._serving

    async def stop(self) -> None:
        """Refuse what is new, let what runs end within ``drain_timeout``, then stop serving and leave the workers.

        Meanwhile HTTP is served, so that probes and clients learn that they should go elsewhere.
        """
        self.dispatcher.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.drain_timeout
        while self.dispatcher.reading and loop.time() < end:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self.dispatcher.give_up(f"this router had to stop after {self.settings.drain_timeout:g} s")
        if self._server is not None:
            self._server.should_exit = True
        await self.wait()
        await self.close()

    async def close(self) -> None:
        """Leave the workers, and write what prompts and spans are left."""
        if self._reading is not None:
            self._reading.cancel()
        await self.dispatcher.pool.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
