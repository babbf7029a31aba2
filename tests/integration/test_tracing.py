"""Spans of requests across router, target and drafter: in memory, and through OTLP to a receiver in the test."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from draft_service.service import DraftSettings, start_draft
from router.service import Router, RouterSettings
from speculation.messages import Open, RequestOptions, Sampling, SessionId, Verification
from speculation.settings import Limits
from target_service.service import TargetSettings, start_target
from tests.cluster.processes import CHECKOUT
from tests.stack import MODELS, settings
from transport import client as connections
from transport.tracing import NO_PROXY, SequenceTimings, TraceSettings, Tracing, channel_options
from transport.worker import Door, Worker

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "req-7"}


@asynccontextmanager
async def stack(trace: TraceSettings | None = None, drafts: int = 1) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """Workers, and a router over them, each started as a process of its own would."""
    target = await start_target(
        TargetSettings(settings("target"), trace=trace), await Door.open("target", "127.0.0.1:0")
    )
    drafting = DraftSettings(settings("draft"), trace=trace)
    drafters = [await start_draft(drafting, await Door.open("draft", "127.0.0.1:0")) for _ in range(drafts)]
    addresses = {"targets": (target.address,), "drafts": tuple(draft.address for draft in drafters)}
    router = Router(RouterSettings(**addresses, port=0, tokenizer=str(MODELS / "target"), trace=trace))
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=router.address, timeout=30) as client:
            async with asyncio.timeout(60):
                while any(peer.welcome is None for peer in router.dispatcher.pool.peers.values()):
                    await asyncio.sleep(0.01)
            yield router, client
    finally:
        await router.stop()
        await stopped(target, *drafters)


async def stopped(*workers: Worker) -> None:
    for worker in workers:
        await worker.stop()


class Spans:
    """What became of it, by name."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

    def tracing(self, sampler: Sampler) -> Tracing:
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return Tracing(provider)

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """All processes of the stack make their spans here, every one of them unless the caller decided otherwise."""
    monkeypatch.setattr(
        connections, "WORKER_SILENCE_SECONDS", 30.0
    )  # openings are counted, on machines that may be busy
    found = Spans()
    monkeypatch.setattr(Tracing, "to", lambda settings, role: found.tracing(ParentBased(ALWAYS_ON)))
    return found


def children(spans: Spans, parent: ReadableSpan) -> Counter[str]:
    return Counter(span.name for span in spans.all if span.parent and span.parent.span_id == parent.context.span_id)


async def workers_done(spans: Spans, sessions: int) -> None:
    """Wait until the workers have told of so many sessions each."""
    async with asyncio.timeout(60):
        while len(spans.named("target session")) < sessions or len(spans.named("draft session")) < sessions:
            await asyncio.sleep(0.01)


async def test_a_request_is_one_tree_of_spans(spans: Spans) -> None:
    async with stack(TraceSettings()) as (_, client):
        fields = {"prompt": "def fib(n):", "max_tokens": 40, "n": 2, "temperature": 0.5, "stop": ["zzz"]}
        answer = (await client.post("/v1/completions", json=fields, headers=GIVEN)).json()
        usage = answer["usage"]
        await workers_done(spans, 2)
    request = spans.one("text_completion target")
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.parent.is_remote
    attributes = dict(request.attributes or {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "target",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ("zzz",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "http.response.status_code": 200,
        "paceline.request": "req-7",
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert children(spans, request) == {"session": 2}
    for session in spans.named("session"):
        assert children(spans, session) == {
            **dict.fromkeys(("queue", "prefill", "decode", "target opening", "draft opening"), 1),
            **dict.fromkeys(("target session", "draft session"), 1),
        }
        assert session.attributes["gen_ai.response.finish_reasons"] in (("stop",), ("length",))
    reasons = tuple(choice["finish_reason"] for choice in answer["choices"])
    assert attributes["gen_ai.response.finish_reasons"] == reasons
    assert sum(span.attributes["paceline.tokens"] for span in spans.named("session")) == usage["completion_tokens"]
    for role in ("target", "draft"):
        for worker in spans.named(f"{role} session"):
            assert worker.attributes["paceline.request"] == "req-7"
            assert children(spans, worker) == {f"{role} {part}": 1 for part in ("queue", "prefill", "decode")}
            parts = [s for s in spans.all if s.parent and s.parent.span_id == worker.context.span_id]
            parts.sort(key=lambda span: span.start_time)
            assert abs(parts[0].start_time - worker.start_time) < 1e6
            assert abs(parts[-1].end_time - worker.end_time) < 1e6
            assert all(span.start_time <= span.end_time for span in parts)
    committed = sum(span.attributes["paceline.committed"] for span in spans.named("target session"))
    assert committed == usage["completion_tokens"]
    assert len({span.context.trace_id for span in spans.all}) == 1
    assert len(spans.all) < 30, "no span for every token"


async def test_an_opening_elsewhere_is_an_event(spans: Spans) -> None:
    async with stack(TraceSettings(), drafts=2) as (router, client):
        fields = {"prompt": "def fib(n):", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=fields) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            (run,) = router.dispatcher._runs.values()
            drafter = run.session.workers.draft
            task = router.dispatcher.pool.peers[drafter].task
            assert task is not None
            task.cancel()
            assert [line async for line in lines][-2] == "data: [DONE]"
    session = spans.one("session")
    (event,) = session.events
    assert event.name == "reopened at a draft"
    assert event.attributes["paceline.worker"] != drafter
    closed = Counter(span.attributes["paceline.closed"] for span in spans.named("draft opening"))
    assert closed["lost"] == 1


async def test_failures_are_told(spans: Spans) -> None:
    async with stack(TraceSettings()) as (_, client):
        assert (await client.post("/v1/chat/completions", json={"messages": 5})).status_code == 400
        fields = {"prompt": "def fib(n):", "max_tokens": 900, "ignore_eos": True, "timeout": 0.05}
        assert (await client.post("/v1/completions", json=fields)).status_code == 504
    refused, late = spans.one("chat"), spans.one("text_completion target")
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.status.is_unset
    assert (late.attributes["http.response.status_code"], late.attributes["error.type"]) == (504, "timeout")
    assert not late.status.is_ok
    assert late.attributes["gen_ai.response.finish_reasons"] == ("error",)
    stopped = spans.one("session").attributes
    assert "gen_ai.response.finish_reasons" not in stopped
    assert stopped["paceline.closed"] == "stopped"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_ends_at_a_stop_string_is_told_as_its_answer_says(spans: Spans, stream: bool) -> None:
    async with stack(TraceSettings()) as (_, client):
        fields = {"prompt": "def fib(n):", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        text = (await client.post("/v1/completions", json=fields)).json()["choices"][0]["text"]
        fields |= {"stop": [text[8:12]], "stream": stream}
        answer = await client.post("/v1/completions", json=fields)
        assert '"finish_reason":"stop"' in answer.text.replace(" ", "")
    told = [span.attributes["gen_ai.response.finish_reasons"] for span in spans.named("text_completion target")]
    assert told == [("length",), ("stop",)]


async def test_a_choice_that_its_client_gave_up_is_told_as_such(spans: Spans) -> None:
    async with stack(TraceSettings()) as (_, client):
        fields = {"prompt": "def fib(n):", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=fields) as answer:
            await anext(answer.aiter_lines())
    request = spans.one("text_completion target")
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert request.status.is_unset


async def test_a_request_that_is_not_sampled_leaves_no_spans(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = GIVEN | {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    async with stack(TraceSettings()) as (_, client):
        fields = {"prompt": "def fib(n):", "max_tokens": 8}
        assert (await client.post("/v1/completions", json=fields, headers=headers)).status_code == 200
    assert spans.all == ()


def test_what_never_began_has_only_waited() -> None:
    timings = SequenceTimings(1.0)
    assert list(timings.parts(3.0)) == [("queue", 1.0, 3.0)]
    timings.begins(2.0)
    timings.begins(2.5)
    assert list(timings.parts(3.0)) == [("queue", 1.0, 2.0), ("prefill", 2.0, 3.0)]
    timings.draws(2.6)
    timings.draws(2.7)
    assert list(timings.parts(3.0)) == [("queue", 1.0, 2.0), ("prefill", 2.0, 2.6), ("decode", 2.6, 3.0)]
    timings.counts(Verification(SessionId(1), 1, 4, (5, 6, 7), 0, accepted=2, offered=4))
    assert (timings.steps, timings.committed, timings.accepted, timings.offered) == (2, 3, 2, 4)


def test_a_worker_makes_no_spans_of_sessions_that_are_not_traced() -> None:
    found = Spans()
    for trace in ("", "nonsense", f"00-{TRACE}-{PARENT}-00"):
        opened = Open(SessionId(1), 1, (1, 2), Sampling(), Limits(5), request_options=RequestOptions(trace=trace))
        found.tracing(ParentBased(ALWAYS_ON)).session("target", opened, SequenceTimings(0), "")
    assert found.all == ()


# Over the network


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """A real OTLP receiver, and where it is."""
    server, found = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield found, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1).wait()


async def test_spans_of_all_three_reach_a_collector_as_one_trace() -> None:
    with collector() as (found, endpoint):
        async with stack(TraceSettings(endpoint)) as (_, client):
            fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
            await client.post("/v1/chat/completions", json=fields, headers=GIVEN)
            body = {"prompt": "def fib(n):", "max_tokens": 20}
            assert (await client.post("/v1/completions", json=body, headers=GIVEN)).status_code == 200
        told = Counter((service, span.name) for service, span in found.spans)
    assert {span.trace_id.hex() for _, span in found.spans} == {TRACE}
    for expected in (
        ("paceline-router", "text_completion target"),
        ("paceline-router", "session"),
        ("paceline-target", "target session"),
        ("paceline-draft", "draft session"),
    ):
        assert told[expected] >= 1, told
    ids = {span.span_id: span.name for _, span in found.spans}
    assert all(
        ids[s.parent_span_id] == "session" for _, s in found.spans if s.name in ("target session", "draft session")
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_of_the_environment_stands_before_a_collector_on_this_machine(host, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with collector() as (found, endpoint):
        tracing = Tracing.to(TraceSettings(endpoint.replace("127.0.0.1", host)), "router")
        tracing.tracer.start_span("one").end()
        tracing.close()
    assert [service for service, _ in found.spans] == ["paceline-router"]


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("http://localhost:4317", True),
        ("https://[::1]:4317", True),
        ("localhost:4317", True),
        ("http://collector:4317", False),
        ("collector:4317", False),
        ("http://10.0.0.1:4317", False),
    ],
)
def test_a_collector_elsewhere_may_be_behind_a_proxy(endpoint, local) -> None:
    assert (NO_PROXY in channel_options(endpoint)) == local


async def test_a_collector_that_is_not_there_costs_nothing_but_spans(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    async with stack(TraceSettings("http://127.0.0.1:9")) as (_, client):
        body = {"prompt": "def fib(n):", "max_tokens": 20}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


def test_nothing_of_opentelemetry_is_imported_while_tracing_is_off() -> None:
    code = (
        "import sys; import cluster.config.serving, router.service, transport.worker; "
        "from cluster.config.config import Config; "
        "s = cluster.config.serving.router_settings(Config()); router.service.Router(s); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
