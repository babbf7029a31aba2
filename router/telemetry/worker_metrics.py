"""What workers say of themselves, as metrics with the label ``worker``.

Every router hears the same of a worker, with each of its heartbeats, and tells it on: take the maximum over routers
before adding up workers. The exceptions say "per router". What a worker counts comes under names of its own
(:mod:`target_service.step_account`, :mod:`draft_service.sequence`); :data:`COUNTERS` gives each its metric.

For the endpoint picker of an inference gateway, which takes a router and the targets behind it for one model server,
there are three gauges more, under names of vLLM's (docs/plugin-metric-protocol.md of github.com/llm-d/llm-d-router).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.sessions.snapshot import Snapshot, WorkerState, WorkerView
from router.sessions.tally import Buckets
from speculation.events import Role
from speculation.messages import Source, SourceName, Welcome
from speculation.trie import InsertResult

PREFIX = "paceline_"
K = TypeVar("K", bound=tuple[str, ...])
"""The values of the labels, in the order of their names."""


def gauge(name: str, about: str, labels: Sequence[str], values: Mapping[K, float], *, prefix: str = PREFIX) -> Metric:
    """A family of gauges."""
    family = GaugeMetricFamily(prefix + name, about, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family


def counter(name: str, about: str, labels: Sequence[str], values: Mapping[K, float]) -> Metric:
    """A family of counters; its samples are named ``<name>_total``."""
    family = CounterMetricFamily(PREFIX + name, about, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family


def histogram(name: str, about: str, labels: Sequence[str], values: Mapping[K, Buckets]) -> Metric:
    """A family of histograms."""
    family = HistogramMetricFamily(PREFIX + name, about, labels=labels)
    for label_values, buckets in values.items():
        bounds = [*map(str, buckets.bounds), "+Inf"]
        cumulative = list(zip(bounds, accumulate(buckets.counts), strict=True))
        family.add_metric(label_values, cumulative, buckets.total)
    return family


LABELS = ("model", "role", "worker")
PER_WORKER = " Per worker: take the maximum of routers."
MICROSECONDS = 1e-6
FOR_PICKERS = "vllm:"


@dataclass(frozen=True, slots=True)
class Counted:
    """The metric of something that workers count."""

    name: str
    about: str
    sources: tuple[str, ...]
    """Names in :attr:`speculation.messages.Load.counters`; their values are added up."""
    scale: float = 1.0
    role: Role | None = None
    """None: either counts it."""


COUNTERS = (
    Counted("worker_steps", "Steps computed.", ("steps",)),
    Counted("worker_step_seconds", "Time in steps.", ("step_microseconds",), MICROSECONDS),
    Counted("worker_forward_seconds", "Time in the model.", ("forward_microseconds",), MICROSECONDS, Role.TARGET),
    Counted("worker_committed_tokens", "Tokens committed.", ("committed",), role=Role.TARGET),
    Counted("worker_sessions_refused", "Sessions refused or given up.", ("refused",), role=Role.TARGET),
    Counted("num_preemptions", "Sessions set back for want of cache.", ("preempted",), role=Role.TARGET),
    Counted(
        "grammar_waits",
        "Steps that sessions sat out since their callers' grammars had taken too long.",
        ("grammar_waits",),
        role=Role.TARGET,
    ),
    Counted("draft_waits", "Steps put off because drafts were expected.", ("waits",), role=Role.TARGET),
    Counted("draft_wait_seconds", "Time steps were put off so.", ("wait_microseconds",), MICROSECONDS, Role.TARGET),
    Counted(
        "prefix_cache_queries",
        "Tokens of prompts and re-opened sessions that the cache was asked for.",
        ("prefilled", "reused"),
        role=Role.TARGET,
    ),
    Counted("prefix_cache_hits", "Tokens of these that it held.", ("reused",), role=Role.TARGET),
    Counted(
        "draft_model_seconds",
        "Time that draft models and EAGLE heads in targets' processes took, part of the time in steps.",
        ("draft_microseconds",),
        MICROSECONDS,
        Role.TARGET,
    ),
    Counted(
        "draft_model_left_out",
        "Times a session had no room in, or text unknown to, the draft model or EAGLE head in its target's process.",
        ("draft_left_out",),
        role=Role.TARGET,
    ),
    Counted(
        "draft_model_faults",
        "Sessions that go on without the draft model or EAGLE head in their target's process since it failed.",
        ("draft_faults",),
        role=Role.TARGET,
    ),
    Counted("suffix_indexed_tokens", "Tokens of outputs kept to draft from.", ("suffix_indexed",), role=Role.TARGET),
    Counted("feature_tokens", "Tokens whose features went to drafters with a head.", ("features",), role=Role.TARGET),
    Counted(
        "features_refused",
        "Features wanted for a head that the target does not have, or of no session.",
        ("features_refused",),
        role=Role.TARGET,
    ),
    Counted(
        "features_received_tokens", "Tokens whose features came for an EAGLE head.", ("features",), role=Role.DRAFT
    ),
    Counted(
        "features_dropped",
        "Messages with features that were late, or none for the head.",
        ("features_late", "features_refused"),
        role=Role.DRAFT,
    ),
    Counted("suffix_forgotten_tokens", "Of these, those no longer kept.", ("suffix_forgotten",), role=Role.TARGET),
    Counted(
        "draft_source_faults", "Sessions without a registered source that failed.", ("source_faults",), role=Role.TARGET
    ),
    Counted(
        "suffix_queries", "Times earlier outputs were asked how a text goes on.", ("suffix_asked",), role=Role.TARGET
    ),
    Counted("suffix_hits", "Times these had an answer.", ("suffix_found",), role=Role.TARGET),
    Counted("drafter_computed_tokens", "Tokens a drafter computed.", ("computed",), role=Role.DRAFT),
    Counted("drafter_reused_tokens", "Tokens a drafter found in its cache.", ("reused",), role=Role.DRAFT),
    Counted("drafter_guessed_tokens", "Guesses that a drafter's forwards verified.", ("guessed",), role=Role.DRAFT),
    Counted("drafter_followed_guesses", "Guesses that became drafts so.", ("followed",), role=Role.DRAFT),
    Counted("drafter_proposed_tokens", "Draft tokens a drafter found and proposes.", ("proposed",), role=Role.DRAFT),
    Counted("drafter_verifications", "Verifications a drafter was told of.", ("verified",), role=Role.DRAFT),
    Counted("drafter_accepted_tokens", "Draft tokens accepted in its sessions.", ("accepted",), role=Role.DRAFT),
    Counted("drafter_asked_lead_tokens", "Lead that targets asked for.", ("asked",), role=Role.DRAFT),
    Counted("drafter_delivered_lead_tokens", "What there was of it.", ("delivered",), role=Role.DRAFT),
    Counted("drafter_sessions_lost", "Sessions whose thread a drafter lost.", ("lost",), role=Role.DRAFT),
)
BY_SOURCE = (
    ("worker_offered_tokens", "Draft tokens verified, by draft source.", "offered_from_"),
    ("worker_accepted_tokens", "Draft tokens accepted, by draft source.", "accepted_from_"),
)
INSERT_RESULTS = "proposals_"
TOTALS_OF_SOURCES = frozenset({"offered", "accepted"})
"""Of a target: what :data:`BY_SOURCE` tells in more detail."""


def collect_workers(snapshot: Snapshot) -> Iterator[Metric]:
    """All families about workers."""
    states = Counter((view.role.value, view.state.value) for view in snapshot.workers)
    yield gauge(
        "workers",
        "Workers listed, by what this router can do with them. Per worker: take the minimum of routers.",
        ("role", "state"),
        {(role, state): states[role, state] for role in Role for state in WorkerState},
    )
    yield counter(
        "worker_bytes",
        "Bytes of frames to workers (sent) and from them (received). Per router: add routers up.",
        ("role", "direction"),
        {
            (role.value, direction): count
            for role, traffic in snapshot.traffic.items()
            for direction, count in (("sent", traffic.sent), ("received", traffic.received))
        },
    )
    yield gauge(
        "worker_round_trip_seconds",
        "Time to a worker and back. Per router.",
        LABELS,
        {_labels(view): view.round_trip for view in snapshot.workers if view.round_trip is not None},
    )
    views = [view for view in snapshot.workers if view.state is not WorkerState.DOWN]
    yield from _loads(views)
    yield from _counters(views)


def _loads(views: list[WorkerView]) -> Iterator[Metric]:
    for name, about, values in (
        ("num_requests_running", "Sessions a worker computes.", {_labels(v): v.load.sessions for v in views}),
        ("num_requests_waiting", "Sessions queued at a worker.", {_labels(v): v.load.waiting for v in views}),
        ("kv_cache_capacity_tokens", "Room of a worker's cache.", {_labels(v): v.load.capacity_tokens for v in views}),
        (
            "kv_cache_usage_perc",
            "Part of a worker's cache in use, 0 to 1.",
            {_labels(v): 1 - v.load.free_tokens / v.load.capacity_tokens for v in views if v.load.capacity_tokens},
        ),
        (
            "suffix_stored_tokens",
            "Tokens of earlier outputs that a target drafts from.",
            {
                _labels(v): v.load.counters["suffix_indexed"] - v.load.counters.get("suffix_forgotten", 0)
                for v in views
                if "suffix_indexed" in v.load.counters
            },
        ),
    ):
        yield gauge(name, about + PER_WORKER, LABELS, values)
    yield gauge(
        "worker_exact",
        "Whether a token has the same bits at a target however it is computed, as measured at its start." + PER_WORKER,
        LABELS,
        {_labels(v): float(v.described.exact) for v in views if v.described and v.described.exact is not None},
    )
    yield gauge(
        "pipeline_efficiency",
        "Part of a target's working time since its start that it computed rather than waited for drafts: its tokens/s "
        "against those at the same tokens a step without waiting. Over a time range: rate(step_seconds) / "
        "(rate(step_seconds) + rate(draft_wait_seconds))." + PER_WORKER,
        LABELS,
        {_labels(view): value for view in views if (value := efficiency(view)) is not None},
    )


def collect_for_pickers(snapshot: Snapshot) -> Iterator[Metric]:
    """Queue and cache of all targets that are up, the same at every router, and the sessions that only this one has.

    One sample each, since pickers read one: models are not told apart.
    """
    loads = [each.load for each in snapshot.workers if each.role is Role.TARGET and each.state is WorkerState.UP]
    waiting = snapshot.placing + sum(load.waiting for load in loads)
    capacity = sum(load.capacity_tokens for load in loads)
    used = 1 - sum(load.free_tokens for load in loads) / capacity if capacity else 1.0
    for name, about, value in (
        ("num_requests_waiting", "Sessions queued at all targets, or in this router for want of one.", waiting),
        ("num_requests_running", "Sessions of this router that are open at a target.", snapshot.running),
        ("kv_cache_usage_perc", "Part of all targets' caches in use, 0 to 1; 1 while there is none.", used),
    ):
        yield gauge(name, f"{about} For endpoint pickers; see paceline_{name}.", (), {(): value}, prefix=FOR_PICKERS)


def efficiency(view: WorkerView) -> float | None:
    """Part of a target's working time that it computed, 0 to 1; None while it has not worked, and of a drafter."""
    computing = view.load.counters.get("step_microseconds", 0)
    waiting = view.load.counters.get("wait_microseconds")
    return computing / (computing + waiting) if computing and waiting is not None else None


def _counters(views: list[WorkerView]) -> Iterator[Metric]:
    for entry in COUNTERS:
        values = {
            _labels(view): sum(view.load.counters[source] for source in entry.sources) * entry.scale
            for view in views
            if entry.role in (None, view.role) and view.load.counters.keys() >= set(entry.sources)
        }
        yield counter(entry.name, entry.about + PER_WORKER, LABELS, values)
    names = draft_sources(view.described for view in views)
    for name, about, prefix in BY_SOURCE:
        yield _split(name, about, "source", prefix, names, views)
    about = "Proposals that came to a target, by what became of them."
    yield _split("proposals", about, "fate", INSERT_RESULTS, [result.value for result in InsertResult], views)


def draft_sources(workers: Iterable[Welcome | None]) -> list[SourceName]:
    """Names of all that may draft at these workers: the built-in ones, then those registered there."""
    named = {name for welcome in workers if welcome is not None for name in welcome.sources}
    return [*Source, *sorted(named - set(Source))]


def _split(name: str, about: str, label: str, prefix: str, keys: Sequence[str], views: list[WorkerView]) -> Metric:
    """One family from counters whose names differ in their end."""
    values = {
        (*_labels(view), key): view.load.counters[prefix + key]
        for view in views
        for key in keys
        if prefix + key in view.load.counters
    }
    return counter(name, about + PER_WORKER, (*LABELS, label), values)


def _labels(view: WorkerView) -> tuple[str, str, str]:
    return view.model, view.role.value, view.worker
