"""OpenTelemetry tracing, for routers and workers: where spans go, and the spans of a session at a worker.

Off unless asked for, and then nothing of OpenTelemetry is imported. A worker makes the spans of a session when it has
ended, from a few moments that were noted: a step costs nothing, and there is no span for every token. They belong to
the span that the router names in the session's ``Open`` (W3C ``traceparent``), and are made if that is sampled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from speculation.messages import Open, SessionId, Verification
from transport.address import is_loopback

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SCOPE = "paceline"
FLUSH_SECONDS = 5.0
"""How long spans that were not sent yet may hold up the end of a process."""
EXPORT_SECONDS = 2.0
"""How long a collector has to take a batch."""
NO_PROXY = ("grpc.enable_http_proxy", 0)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go."""

    endpoint: str = "http://localhost:4317"
    """Of an OTLP receiver for gRPC."""
    sample: float = 1.0
    """Share of requests traced, of those that come without a ``traceparent``; that decides for the others."""


@dataclass(slots=True)
class SequenceTimings:
    """How a session at a worker went. Moments are in seconds of ``time.perf_counter``."""

    opened: float
    begun: float | None = None
    """The first step that computed something of it began."""
    prefilled: float | None = None
    """All that it was opened with was computed."""
    steps: int = 0
    """That drew or drafted something for it."""
    committed: int = 0
    accepted: int = 0
    offered: int = 0

    def begins(self, now: float) -> None:
        """A step that computes something of it began at ``now``."""
        if self.begun is None:
            self.begun = now

    def draws(self, now: float) -> None:
        """A step has drawn or drafted something for it."""
        self.steps += 1
        if self.prefilled is None:
            self.prefilled = now

    def counts(self, verification: Verification) -> None:
        """So much of it was committed."""
        self.committed += len(verification.tokens)
        self.accepted += verification.accepted
        self.offered += verification.offered

    def parts(self, now: float) -> Iterator[tuple[str, float, float]]:
        """What it did from when to when, until it ended at ``now``."""
        moments = ("queue", self.opened), ("prefill", self.begun), ("decode", self.prefilled)
        begun = [(name, at) for name, at in moments if at is not None]
        ends = [*(at for _, at in begun[1:]), now]
        return ((name, at, end) for (name, at), end in zip(begun, ends, strict=True))


class Tracing:
    """Makes the spans of one process. May be used from several threads."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self.tracer = provider.get_tracer(SCOPE)
        self.propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, settings: TraceSettings, role: str) -> Tracing:
        """Send spans away in the background. A receiver that cannot be reached costs spans, nothing else."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create({SERVICE_NAME: f"paceline-{role}"})
        provider = TracerProvider(ParentBased(TraceIdRatioBased(settings.sample)), resource, shutdown_on_exit=False)
        options = channel_options(settings.endpoint)
        exporter = OTLPSpanExporter(settings.endpoint, timeout=EXPORT_SECONDS, channel_options=options)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)

    def session(self, role: str, opened: Open, timings: SequenceTimings, why: str) -> None:
        """The spans of a session that has just ended at this worker, and why."""
        if not opened.request_options.trace:
            return
        from opentelemetry.trace import get_current_span, set_span_in_context

        parent = self.propagator.extract({"traceparent": opened.request_options.trace})
        if not get_current_span(parent).get_span_context().is_valid:
            return
        now = time.perf_counter()
        about: dict[str, str | int] = {
            "paceline.request": opened.request_options.request,
            "paceline.session": opened.session,
            "paceline.epoch": opened.epoch,
            "paceline.opened_tokens": len(opened.tokens),
            "paceline.steps": timings.steps,
            "paceline.committed": timings.committed,
            "paceline.accepted": timings.accepted,
            "paceline.offered": timings.offered,
            "paceline.closed": why,
        }
        zero = time.time_ns() - round(time.perf_counter() * 1e9)  # read once: parts begin and end where the whole does

        def since_epoch(at: float) -> int:
            """The time of day of a moment of ``time.perf_counter``, in nanoseconds since 1970."""
            return zero + round(at * 1e9)

        start = since_epoch(timings.opened)
        span = self.tracer.start_span(f"{role} session", parent, attributes=about, start_time=start)
        if span.is_recording():
            within = set_span_in_context(span)
            for name, begins, ends in timings.parts(now):
                part = self.tracer.start_span(f"{role} {name}", within, start_time=since_epoch(begins))
                part.end(since_epoch(ends))
        span.end(since_epoch(now))


def channel_options(endpoint: str) -> Any:
    """What gRPC is told of a receiver: to go round a proxy of the environment, which cannot get to this machine."""
    address = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    return (NO_PROXY,) if is_loopback(address.hostname or "") else ()


def traceparent_of(span: Span) -> str:
    """How others name a span (W3C Trace Context)."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class SessionLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records have ``session`` and ``request``."""

    def __init__(self, log: logging.Logger, session: SessionId, request_id: str) -> None:
        super().__init__(log, {"session": int(session), "request": request_id})
