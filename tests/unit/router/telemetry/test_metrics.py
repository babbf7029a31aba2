"""What a router counts, how it tells it, and when it calls itself ready."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from prometheus_client.parser import text_string_to_metric_families

from draft_service.sequence import DraftCounters
from router.answers.choice_reader import PromptShown, TextChunk
from router.errors import CODES
from router.generation import Committed
from router.sessions.snapshot import Snapshot, WorkerState, WorkerView
from router.sessions.tally import BLOCK, AcceptanceRecord, Buckets, RouterCounters
from router.telemetry.families import UNREADABLE
from router.telemetry.metrics import RouterMetrics
from router.telemetry.worker_metrics import BY_SOURCE, COUNTERS, INSERT_RESULTS
from speculation.events import PeerId, Role
from speculation.messages import FinishReason, Load
from target_service.step_account import TargetCounters

TARGET, DRAFT = PeerId("target@10.0.0.1:7001"), PeerId("draft@10.0.0.2:7002")


def scraped(metrics: RouterMetrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels, read back from the text."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(metrics: RouterMetrics, name: str, **labels: str) -> float:
    return scraped(metrics)[f"paceline_{name}"][tuple(sorted(labels.items()))]


def test_commits_become_the_counters_that_vllm_has() -> None:
    tally = RouterCounters()
    metrics = RouterMetrics(tally, Snapshot)
    record = tally.session("m", prompt=7)
    for now, tokens, accepted, offered in ((1.0, 1, 0, 0), (1.375, 3, 2, 4), (1.5, 1, 0, 3), (1.75, 4, 3, 3)):
        record.committed(now, tokens, accepted, offered, cached=5)
    expected = {
        "prompt_tokens_total": 7,
        "prompt_tokens_cached_total": 5,
        "generation_tokens_total": 9,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 10,
        "spec_decode_num_accepted_tokens_total": 5,
        "spec_decode_mean_acceptance_length": 1 + 5 / 3,
        "inter_token_latency_seconds_count": 8,
        "commit_interval_seconds_count": 3,
    }
    assert {name: value(metrics, name, model="m") for name in expected} == pytest.approx(expected)
    places = [
        value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", model="m", position=str(i)) for i in range(3)
    ]
    assert places == [2, 2, 1]
    assert value(metrics, "inter_token_latency_seconds_sum", model="m") == 0.75
    # Four tokens of 125 ms each, then four of 62.5 ms.
    below = {"0.05": 0.0, "0.075": 4.0, "0.15": 8.0, "+Inf": 8.0}
    assert {le: value(metrics, "inter_token_latency_seconds_bucket", model="m", le=le) for le in below} == below


def test_a_bound_belongs_to_its_own_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    for seen in (0.5, 1.0, 1.5, 2.0, 3.0):
        buckets.add(seen)
    assert buckets.counts == [2, 2, 1]


def test_choices_are_counted_by_how_they_end() -> None:
    times = iter([1.5, 2.5, 3.0, 4.0])
    tally = RouterCounters(clock=lambda: next(times))
    request = tally.request("m", 1, 1.0)
    for chunk in (TextChunk(0, (), tokens=1), TextChunk(0, (), finish=FinishReason.LENGTH)):
        request.add(chunk)
    request.given_up()  # as whoever listens does when all has come
    counts = tally.model("m")
    assert (counts.first_token.total, counts.latency.total) == (0.5, 1.5)
    left = tally.request("m", 2, 1.0)
    left.add(TextChunk(0, (), tokens=1))
    left.given_up()
    assert counts.finished == {"length": 1, "stop": 0, "abort": 2}


def test_a_prompt_that_the_router_echoes_alone_is_no_first_token() -> None:
    tally, shown = RouterCounters(lambda: 1.5), PromptShown("hi")
    request = tally.request("m", 2, 1.0)
    request.add(TextChunk(0, prompt=shown, finish=FinishReason.LENGTH))
    counts = tally.model("m")
    assert (sum(counts.first_token.counts), sum(counts.latency.counts), counts.finished["length"]) == (0, 1, 1)
    request.add(TextChunk(1, prompt=shown))  # tokens come behind it
    request.add(TextChunk(1, tokens=1))
    of_target = TextChunk(0, prompt=shown, finish=FinishReason.LENGTH, commit=Committed((5,), 0, 0))
    tally.request("m", 1, 1.0).add(of_target)  # which computed the prompt
    assert sum(counts.first_token.counts) == 2


def test_errors_of_ours_and_refusals_are_told_apart_and_begin_at_zero() -> None:
    tally = RouterCounters()
    metrics = RouterMetrics(tally, Snapshot)
    assert value(metrics, "requests_refused_total", code="overloaded") == 0
    tally.answered(CODES["overloaded"])
    tally.answered(CODES["faulty"])
    assert value(metrics, "requests_refused_total", code="overloaded") == 1
    assert value(metrics, "request_failure_total", code="faulty") == 1
    assert (("code", "faulty"),) not in scraped(metrics)["paceline_requests_refused_total"]


# Workers


def worker(role: Role, state: WorkerState = WorkerState.UP, **counters: int) -> WorkerView:
    load = Load(sessions=3, waiting=2, free_tokens=25, capacity_tokens=100, counters=counters)
    name = TARGET if role is Role.TARGET else DRAFT
    return WorkerView(name, role, state, f"{role.value} model", load, round_trip=0.002)


def test_a_worker_is_told_of_in_the_words_of_vllm() -> None:
    counters = {"prefilled": 60, "reused": 40, "preempted": 2, "step_microseconds": 3_000_000}
    target = worker(Role.TARGET, **counters, wait_microseconds=1_000_000)
    metrics = RouterMetrics(RouterCounters(), lambda: Snapshot(workers=(target,)))
    labels = {"model": "target model", "role": "target", "worker": TARGET}
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.75,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "num_preemptions_total": 2,
        "worker_step_seconds_total": 3.0,
        "draft_wait_seconds_total": 1.0,
        "pipeline_efficiency": 0.75,
        "worker_round_trip_seconds": 0.002,
    }
    assert {name: value(metrics, name, **labels) for name in expected} == pytest.approx(expected)
    assert value(metrics, "generation_tokens_total", model="target model") == 0  # before any request


def test_a_worker_that_is_down_is_listed_and_says_nothing() -> None:
    down = WorkerView(TARGET, Role.TARGET, WorkerState.DOWN)
    metrics = RouterMetrics(RouterCounters(), lambda: Snapshot(workers=(down,)))
    assert value(metrics, "workers", role="target", state="down") == 1
    assert value(metrics, "workers", role="target", state="up") == 0
    assert "paceline_num_requests_running" not in scraped(metrics)


@pytest.mark.parametrize(
    ("role", "counted"), [(Role.TARGET, TargetCounters().flat()), (Role.DRAFT, asdict(DraftCounters()))]
)
def test_everything_that_workers_count_has_a_metric(role: Role, counted: dict[str, int]) -> None:
    rows = [row for of in (None, role) for row in COUNTERS[of]]
    told = {source for _, _, *sources in rows for source in sources}
    prefixes = (INSERT_RESULTS, *(prefix for _, _, prefix in BY_SOURCE))
    untold = {name for name in counted if name not in told and not name.startswith(prefixes)}
    assert untold == ({"offered", "accepted"} if role is Role.TARGET else set()), "told in more detail"
    metrics = RouterMetrics(RouterCounters(), lambda: Snapshot(workers=(worker(role, **dict.fromkeys(counted, 1)),)))
    names = scraped(metrics)
    assert {f"paceline_{name}_total" for name, *_ in rows} <= names.keys()


# Endpoint pickers


def for_pickers(snapshot: Snapshot) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    told = RouterMetrics(RouterCounters(), lambda: snapshot).exposition()[0].decode()
    families = [family for family in text_string_to_metric_families(told) if family.name.startswith("vllm:")]
    assert {family.type for family in families} == {"gauge"}
    return {
        sample.name: {tuple(sample.labels.items()): sample.value} for family in families for sample in family.samples
    }


def test_endpoint_pickers_find_one_number_for_all_targets() -> None:
    """Drafters, and targets that take nothing, do not count; what others have in the same targets does."""
    full = replace(worker(Role.TARGET), load=Load(sessions=9, waiting=4, free_tokens=0, capacity_tokens=300))
    others = (worker(Role.DRAFT), worker(Role.TARGET, WorkerState.DRAINING), worker(Role.TARGET, WorkerState.DOWN))
    snapshot = Snapshot(workers=(worker(Role.TARGET), full, *others), placing=1, running=7)
    assert for_pickers(snapshot) == {
        "vllm:num_requests_waiting": {(): 1 + 2 + 4},
        "vllm:num_requests_running": {(): 7},
        "vllm:kv_cache_usage_perc": {(): pytest.approx(1 - 25 / 400)},
    }


def test_endpoint_pickers_find_a_router_without_targets_full() -> None:
    assert for_pickers(Snapshot(placing=3)) == {
        "vllm:num_requests_waiting": {(): 3},
        "vllm:num_requests_running": {(): 0},
        "vllm:kv_cache_usage_perc": {(): 1.0},
    }


def test_names_of_others_are_not_copied_to_ray() -> None:
    """It puts its own prefix before every name, and takes no colon."""
    names = [family.name for family in RouterMetrics(RouterCounters(), Snapshot).collect()]
    assert all(name.startswith("paceline_") for name in names)


def test_what_is_told_of_workers_says_how_dashboard_and_alerts_take_it() -> None:
    (workers,) = [
        family for family in RouterMetrics(RouterCounters(), Snapshot).collect() if family.name.endswith("_workers")
    ]
    assert workers.documentation.endswith("take the maximum of routers.")


# Ready


@pytest.mark.parametrize(
    ("snapshot", "reason"),
    [
        (Snapshot(), "no target worker is known"),
        (Snapshot(workers=(worker(Role.DRAFT),)), "no target worker is known"),
        (Snapshot(workers=(worker(Role.TARGET, WorkerState.DOWN),)), "no target worker is connected, of 1 known"),
        (
            Snapshot(workers=(worker(Role.TARGET, WorkerState.DRAINING),)),
            "every target worker that is connected is draining",
        ),
        (Snapshot(workers=(worker(Role.TARGET),), draining=True), "this router is draining"),
        (Snapshot(workers=(worker(Role.TARGET, WorkerState.DOWN), worker(Role.TARGET))), None),
        (
            Snapshot(workers=(worker(Role.TARGET),), unreadable=frozenset({"target model", "gone"})),
            "the tokenizer of target model cannot be read; this router's log says why",
        ),
        (Snapshot(workers=(worker(Role.TARGET),), unreadable=frozenset({"gone"})), None),
    ],
)
def test_ready(snapshot: Snapshot, reason: str | None) -> None:
    metrics = RouterMetrics(RouterCounters(), lambda: snapshot)
    assert snapshot.unready == reason
    assert value(metrics, "router_ready") == (reason is None)


# Certificates


def test_the_end_of_certificates_is_told(tmp_path) -> None:
    ends = datetime(2031, 5, 1, tzinfo=UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(ends - timedelta(days=90)).not_valid_after(ends)
    good, broken = tmp_path / "tls.crt", tmp_path / "broken.crt"
    good.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    broken.write_text("nothing of the kind")
    metrics = RouterMetrics(RouterCounters(), Snapshot)
    metrics.certificates = (good, broken, tmp_path / "missing.crt")
    told = scraped(metrics)["paceline_certificate_expiry_timestamp_seconds"]
    assert {labels[0][1]: at for labels, at in told.items()} == {
        str(good): ends.timestamp(),
        str(broken): UNREADABLE,
        str(tmp_path / "missing.crt"): UNREADABLE,
    }


# Acceptance


def blocks(record: AcceptanceRecord, rates: list[float], draft: PeerId = DRAFT) -> None:
    for rate in rates:
        for _ in range(10):
            record.add(TARGET, "t", draft, "d", round(rate * BLOCK / 10), BLOCK // 10)


def test_a_collapse_is_told_once_per_episode(caplog: pytest.LogCaptureFixture) -> None:
    record = AcceptanceRecord()
    with caplog.at_level(logging.INFO):
        blocks(record, [0.5, 0.6, 0.5])
        assert not caplog.records
        blocks(record, [0.1, 0.1, 0.0, 0.1])
        assert [line.levelname for line in caplog.records] == ["WARNING"]
        assert caplog.records[0].getMessage() == (
            f"acceptance of drafts from {DRAFT} at {TARGET} collapsed to 0.100 (0.506 is usual)"
        )
        blocks(record, [0.5])
        blocks(record, [0.0])
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert record.collapses == 2


def test_drafts_that_were_never_accepted_are_told_too() -> None:
    record = AcceptanceRecord()
    blocks(record, [0.0, 0.0])
    (pair,) = record.watched.values()
    assert (record.collapses, pair.collapsed, pair.latest) == (1, True, 0.0)


def test_a_low_value_that_stays_becomes_the_usual_one() -> None:
    record = AcceptanceRecord()
    blocks(record, [0.8] * 3 + [0.2] * 40)
    (pair,) = record.watched.values()
    assert (record.collapses, pair.collapsed) == (1, False)


def test_pairs_are_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.sessions.tally.MAX_PAIRS", 8)
    record = AcceptanceRecord()
    for i in range(50):
        blocks(record, [0.5], PeerId(f"draft@{i}"))
    blocks(record, [0.0], PeerId("draft@49"))
    assert [draft for (_, draft), pair in record.watched.items() if pair.collapsed] == ["draft@49"]
    assert [draft for _, draft in record.watched] == [f"draft@{i}" for i in range(42, 50)]


def test_a_collapse_is_over_once_its_drafter_is_no_longer_listed() -> None:
    record = AcceptanceRecord()
    other = PeerId("draft@10.0.0.3:7002")
    metrics = RouterMetrics(RouterCounters(), lambda: Snapshot(record=record))
    blocks(record, [0.0])
    blocks(record, [0.5], other)
    assert value(metrics, "acceptance_collapsed", target=TARGET, draft=DRAFT) == 1
    record.forget(DRAFT)
    told = scraped(metrics)
    for name, expected in (("acceptance_collapsed", 0), ("acceptance_ratio", 0.5)):
        assert told[f"paceline_{name}"] == {(("draft", other), ("target", TARGET)): expected}
    assert value(metrics, "acceptance_collapses_total") == 1
    blocks(record, [0.5])
    assert value(metrics, "acceptance_collapsed", target=TARGET, draft=DRAFT) == 0, "it comes back as another"
