"""The spans of a request: at the door, of each session, and of each opening at a worker.

::

    chat MODEL                     a request, from its headers to the end of its answer (GenAI semantic conventions)
      session                      one choice; every opening but the first is an event
        queue  prefill  decode     until it was first opened at a target, had its first tokens, had its last
        target opening  draft opening

What a worker says of a session (:mod:`transport.tracing`) belongs to ``session``. A request that comes with a
``traceparent`` continues that trace. Only imported where tracing is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context, use_span
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.generation import GenerationError
from router.schema.requests import ApiRequest
from router.sessions.run import NullTracer
from router.sessions.tally import ABORTED, FAILURE
from speculation.events import PeerId, Role
from speculation.messages import FinishReason, Open, SessionId
from transport.tracing import Tracing, traceparent_of

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
"""Paths that are traced, with the name of what they do."""


class TraceRequests:
    """Middleware: a span for every request that generates, and the context for all below it."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request in the span."""
        operation = OPERATIONS.get(scope.get("path", ""))
        if scope["type"] != "http" or operation is None:
            await self._app(scope, receive, send)
            return
        tracing, status = self._tracing, 0
        parent = tracing.propagator.extract(Headers(scope=scope))
        state = scope["state"]
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "paceline.request": state["request_id"],
        }
        if name := state.get("api_key_name"):
            about["paceline.api_key"] = name
        span = tracing.tracer.start_span(operation, parent, SpanKind.SERVER, about)

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with use_span(span):
                await self._app(scope, receive, send_noting_status)
        finally:
            _note_answer(span, operation, state, status)
            span.end()


def _note_answer(span: Span, operation: str, state: Mapping[str, Any], status: int) -> None:
    """What the request asked for, as far as it was understood, and what came of it."""
    request, error = state.get("parsed"), state.get("error") or (str(status) if status >= FAILURE else None)
    if isinstance(request, ApiRequest):
        span.update_name(f"{operation} {request.model}")
        usage, otherwise = state["usage"], "error" if error else ABORTED
        first, sampling = request.generations[0], request.generations[0].sampling
        asked: dict[str, Any] = {
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
            "gen_ai.request.choice.count": len(request.generations),
            "gen_ai.request.max_tokens": first.max_tokens,
            "gen_ai.request.stop_sequences": request.stop,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion,
            "gen_ai.response.finish_reasons": [usage.ended.get(index, otherwise) for index in range(usage.choices)],
            "paceline.stream": request.stream,
        }
        drawn = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
        span.set_attributes(asked | {f"gen_ai.request.{name}": getattr(sampling, name) for name in drawn})
    span.set_attribute("http.response.status_code", status)
    if error:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))


class SessionSpans(NullTracer):
    """The spans of one session, below the request's, which is the context where this is made."""

    def __init__(self, tracing: Tracing, session: SessionId) -> None:
        self._tracer = tracing.tracer
        self._span = self._tracer.start_span("session", attributes={"paceline.session": session})
        self._within = set_span_in_context(self._span)
        self._phase = self._below("queue")
        self._openings: dict[PeerId, Span] = {}
        self._seen: set[Role] = set()
        self._tokens = self._accepted = self._offered = 0
        self.traceparent = traceparent_of(self._span)

    def opened(self, peer: PeerId, role: Role, opening: Open) -> None:
        """A span for every opening; an event for every one but the first of a role."""
        about: dict[str, str | int] = {
            "paceline.worker": peer,
            "paceline.epoch": opening.epoch,
            "paceline.opened_tokens": len(opening.tokens),
        }
        if role in self._seen:
            self._span.add_event(f"reopened at a {role.value}", about)
        elif role is Role.TARGET:
            self._enter("prefill")
        self._seen.add(role)
        self.closed(peer, "opened again")
        self._openings[peer] = self._tracer.start_span(f"{role.value} opening", self._within, attributes=about)

    def closed(self, peer: PeerId, why: str) -> None:
        """Says why."""
        if span := self._openings.pop(peer, None):
            span.set_attribute("paceline.closed", why)
            span.end()

    def committed(self, tokens: int, accepted: int, offered: int) -> None:
        """The first ones end the prompt's span."""
        if not self._tokens:
            self._enter("decode")
        self._tokens += tokens
        self._accepted += accepted
        self._offered += offered

    def ended(self, why: FinishReason | GenerationError | None) -> None:
        """Ends all spans."""
        for peer in list(self._openings):
            self.closed(peer, "the session ended")
        self._phase.end()
        counts = {"tokens": self._tokens, "accepted": self._accepted, "offered": self._offered}
        self._span.set_attributes({f"paceline.{name}": count for name, count in counts.items()})
        if isinstance(why, GenerationError):
            self._span.set_attribute("error.type", why.code.name)
            self._span.set_status(Status(StatusCode.ERROR, why.message))
        elif why is not None:
            self._span.set_attribute("gen_ai.response.finish_reasons", [why.value])
        else:  # at a stop string, at the end of its time, or its client went: the request's span knows
            self._span.set_attribute("paceline.closed", "stopped")
        self._span.end()

    def _enter(self, phase: str) -> None:
        self._phase.end()
        self._phase = self._below(phase)

    def _below(self, name: str) -> Span:
        return self._tracer.start_span(name, self._within)
