"""The OpenAI-compatible HTTP API: a Starlette application over a :class:`router.generation.Generator`.

Decides which endpoint does what, when the headers of a stream are sent (with its first commit, so a refusal
before it still has its own status), and how errors are answered. The shapes stand in :mod:`router.answers.responses`,
the fields in :mod:`router.schema.requests`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router import page
from router.answers.choice_reader import Usage, run_choices
from router.answers.responses import INTERNAL_ERROR, Envelope, Json, error_body, events
from router.errors import ApiError, ErrorCode, code_of_status
from router.generation import GenerationError, Generator, ServedModel
from router.http import asgi, openapi
from router.http.admission import RATE_HEADERS, AdmissionSettings, Admit, seconds_allowed
from router.http.auth import PICKER_PATH, ApiKeys, RequireKey
from router.http.exhaustion import ExhaustionLog, is_exhausted
from router.http.prompt_recorder import PromptRecorder, RecordedPrompt
from router.http.request_reader import RequestReader
from router.limits import admitted, in_time
from router.schema.request_schema import Kind
from router.schema.requests import ApiRequest, ModelEntry
from router.sessions.snapshot import Snapshot
from router.sessions.tally import RouterCounters
from router.telemetry.cluster_view import ClusterView
from router.telemetry.metrics import RouterMetrics, own_version
from router.text.tokenizer import Tokenizers
from speculation.messages import Speculation
from transport.tracing import Tracing

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody receives (nginx's number); seen in access logs only."""

CLOSING = frozenset({"body_too_large", "request_timeout", "draining"})
"""Refusals after which a connection is of no use: a body is not read to its end, or the router stops."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Bounds and names of the API."""

    model_name: str | None = None
    """Public name of the model where there is one only; by default, and otherwise, the name its workers give it."""
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 256 << 20
    """Of all bodies that are being read or parsed, half of it for one key; what goes beyond is refused."""
    max_choices: int = 16
    """Prompts times ``n`` of one request."""
    retry_after_s: float = 1.0
    """What a refused client is told to wait where nobody knows better."""
    speculation: Speculation = Speculation()
    """How drafting goes where a request does not say."""
    api_keys: ApiKeys | None = None
    """Who may use the API; None: everybody."""
    admission: AdmissionSettings = AdmissionSettings()


_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"),
    "allow_headers": ("*",),  # keys come in a header, never in a cookie, so no header needs to be kept out
    "expose_headers": (asgi.REQUEST_ID_HEADER, "retry-after", "x-should-retry", *RATE_HEADERS),
}


def build_app(
    generator: Generator,
    tokenizers: Tokenizers,
    settings: ApiSettings | None = None,
    metrics: RouterMetrics | None = None,
    tracing: Tracing | None = None,
    recorder: PromptRecorder | None = None,
) -> Starlette:
    """The application. It owns nothing: ``generator`` is started and stopped by the caller.

    ``metrics`` are those of the router behind ``generator``; without them only requests are counted, and nothing is
    known of workers. ``tracing`` makes a span of every request; without it there are none. ``recorder`` keeps prompts;
    without it none are kept.
    """
    settings = settings or ApiSettings()
    metrics = metrics or RouterMetrics(RouterCounters(), Snapshot)
    middleware = [Middleware(asgi.HttpEdge)]
    if origins := settings.admission.cors_origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, **_CORS))
    if settings.api_keys is not None:
        middleware.append(Middleware(RequireKey, settings.api_keys, metrics.tally.answered))
    if tracing is not None:
        from router.http.tracing import TraceRequests

        middleware.append(Middleware(TraceRequests, tracing))
    allowance, pages = settings.admission.allowance, origins if settings.api_keys is None else None
    middleware.append(Middleware(Admit, allowance, metrics.accounts, metrics.tally.answered, pages))
    api = _Api(generator, tokenizers, settings, metrics, recorder)
    served = Starlette(
        routes=[
            *page.ROUTES,
            Route("/v1/completions", partial(api.generate, "completion"), methods=["POST"]),
            Route("/v1/chat/completions", partial(api.generate, "chat"), methods=["POST"]),
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/v1/models/{name:path}", api.model, methods=["GET"]),
            Route("/health", api.health, methods=["GET"]),
            Route("/ready", api.ready, methods=["GET"]),
            Route("/metrics", api.exposition, methods=["GET"]),
            Route(PICKER_PATH, api.exposition, methods=["GET"]),
            Route("/openapi.json", api.description, methods=["GET"]),
            Route("/cluster", api.cluster, methods=["GET"]),
        ],
        middleware=middleware,
        exception_handlers={
            **dict.fromkeys((ApiError, OSError, RuntimeError, HTTPException, ClientDisconnect), api.on_error),
            Exception: api.on_crash,
        },
    )
    served.router.redirect_slashes = False  # to http, where TLS ends before the router
    return served


class _Api:
    """The endpoints, and how errors are answered: all coroutines, since others are run in threads."""

    def __init__(
        self,
        generator: Generator,
        tokenizers: Tokenizers,
        settings: ApiSettings,
        metrics: RouterMetrics,
        recorder: PromptRecorder | None,
    ) -> None:
        self._generator = generator
        offered = partial(
            ModelEntry,
            max_choices=settings.max_choices,
            speculation=settings.speculation,
            records=recorder is not None,
        )
        self._reader = RequestReader(generator, tokenizers, offered, settings.model_name)
        self._settings = settings
        self._metrics = metrics
        self._tally = metrics.tally
        self._recorder = recorder
        self._bodies = asgi.BodyBudget(settings.max_bodies_bytes)
        self._cluster = ClusterView(metrics)
        self._description = openapi.description(own_version())  # at once: it brings modules and reads files
        self._exhaustion = ExhaustionLog()
        self._started = int(time.time())

    async def models(self, _request: Request) -> Response:
        """What is served now: none while no target worker was connected."""
        models = [self._model_body(*named) for named in self._reader.models().items()]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._reader.check_served()
        return JSONResponse(self._model_body(name, self._reader.served(name, self._reader.models())))

    async def health(self, _request: Request) -> Response:
        """200 as long as the process serves, whatever the workers do."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """200 while requests can be served, 503 with the reason while not; and what workers do that are not up yet."""
        readiness = self._metrics.snapshot().readiness
        return JSONResponse(readiness, 200 if readiness["status"] == "ready" else 503)

    async def exposition(self, request: Request) -> Response:
        """The metrics of this router, for Prometheus."""
        body, content_type = self._metrics.exposition(for_pickers=request.scope["path"] == PICKER_PATH)
        return Response(body, headers={"content-type": content_type})

    async def description(self, _request: Request) -> Response:
        """What this API takes and gives, in OpenAPI's terms."""
        return JSONResponse(self._description)

    async def cluster(self, _request: Request) -> Response:
        """What this router knows of the cluster; see :mod:`router.telemetry.cluster_view`."""
        return JSONResponse(self._cluster(), headers={"cache-control": "no-store"})

    def _model_body(self, name: str, model: ServedModel) -> Json:
        entry = {"id": name, "object": "model", "created": self._started, "owned_by": "paceline"}
        return entry | {"max_model_len": model.context}  # vLLM's name for it

    async def generate(self, kind: Kind, request: Request) -> Response:
        arrived = self._tally.clock()
        with self._bodies.share(getattr(request.state, "api_key_name", "")) as take:
            body = await asgi.read_body(request, self._settings.max_body_bytes, take)
            parsed, served = await asgi.while_connected(request.receive, self._parse(request, kind, body))
            del body
        async with AsyncExitStack() as unless_answered:
            answering = self._answer(request, parsed, served, arrived, unless_answered)
            answer = await asgi.while_connected(request.receive, answering)
            unless_answered.pop_all()
        return answer

    async def _parse(self, request: Request, kind: Kind, body: bytes) -> tuple[ApiRequest, ModelEntry]:
        lease, admission = request.state.lease, self._settings.admission
        longest = seconds_allowed(None, request.headers, admission)
        caller = getattr(request.state, "api_key_name", "")
        reading = self._reader.read(kind, body, request.state.request_id, caller)
        parsed, served = await in_time(reading, longest, lease.end(longest))
        seconds = seconds_allowed(parsed.timeout, request.headers, admission)
        scope = getattr(request.state, "api_key_scope", "")
        parsed = parsed.within(scope, seconds, admission.target_timeout or seconds)
        if self._recorder is not None and parsed.store:
            self._recorder.take(RecordedPrompt(parsed.model, body, parsed.prompts, served.tokenizer))
        return parsed, served

    async def _answer(
        self,
        request: Request,
        parsed: ApiRequest,
        served: ModelEntry,
        arrived: float,
        unless_answered: AsyncExitStack,
    ) -> Response:
        """The answer, or one that has begun if it is streamed; ``unless_answered`` ends it."""
        lease = request.state.lease
        lease.take_sessions(len(parsed.generations))
        lease.take_prompt(parsed.prompt_tokens, time.monotonic())
        prefix = "chatcmpl" if parsed.kind == "chat" else "cmpl"
        envelope = Envelope(parsed, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), served.tokenizer)
        tally = self._tally.request(served.model.name, len(parsed.generations), arrived)
        chunks = admitted(run_choices(parsed, self._generator, served.tokenizer), lease, parsed.timeout, tally)
        usage = Usage(parsed.prompt_tokens, parsed.n, len(parsed.generations))
        request.state.parsed, request.state.usage = parsed, usage
        if parsed.stream:
            failed = partial(self._failed_midway, request)
            unless_answered.push_async_callback(chunks.aclose)
            first = await anext(chunks)
            return asgi.EventStream(events(first, chunks, envelope, usage, failed), chunks, lease.end(parsed.timeout))
        return Response(await envelope.whole(chunks, usage), media_type="application/json")

    def _failed_midway(self, request: Request, code: ErrorCode, error: Exception) -> None:
        """A stream that had begun ends with an error."""
        self._tally.answered(code)
        request.state.error = code.name
        crash = None if isinstance(error, GenerationError) else error
        log.error(
            "a stream failed (%s): %s", code.name, error, exc_info=crash, extra={"request": request.state.request_id}
        )

    async def on_error(self, request: Request, error: Exception) -> Response:
        """All that is foreseen."""
        asked = f"{request.method} {request.scope['path']}"
        match error:
            case ApiError():
                if isinstance(error, GenerationError):
                    request.state.error = error.code.name
                return self._refusal(error)
            case HTTPException():
                code = code_of_status(error.status_code)
                return self._refusal(ApiError(code.name, f"{asked}: {code.meaning}"), error.headers)
            case ClientDisconnect():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            case _ if is_exhausted(error):
                self._exhaustion.add(f"cannot answer {asked}", error)
                message = "this server has no room for a request now; try again soon"
                return self._refusal(ApiError("resource_exhausted", message))
            case _:
                raise error

    async def on_crash(self, request: Request, _error: Exception) -> Response:
        """The framework raises the error again afterwards, so that the server logs it."""
        # The handler of last resort stands outside the middleware that adds the id.
        headers = {asgi.REQUEST_ID_HEADER: str(getattr(request.state, "request_id", ""))}
        self._tally.answered(INTERNAL_ERROR.code)
        return JSONResponse(error_body(INTERNAL_ERROR), INTERNAL_ERROR.code.status, headers)

    def _refusal(self, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        self._tally.answered(error.code)
        return asgi.refusal(error, headers, self._settings.retry_after_s, closing=error.code.name in CLOSING)
