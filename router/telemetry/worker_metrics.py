"""What workers say of themselves, as metrics with the label ``worker``.

Every router hears the same of a worker, with each of its heartbeats, and tells it on: take the maximum over routers
before adding up workers. The exceptions say "per router". What a worker counts comes under names of its own
(:mod:`target_service.step_account`, :mod:`draft_service.sequence`); :data:`COUNTERS` gives each its metric.

For the endpoint picker of an inference gateway, which takes a router and the targets behind it for one model server,
there are three gauges more, under names of vLLM's (docs/plugin-metric-protocol.md of github.com/llm-d/llm-d-router).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric

from router.sessions.snapshot import Snapshot, WorkerState, WorkerView
from router.telemetry.families import counter, gauge
from speculation.events import Role
from speculation.messages import Source, SourceName, Welcome
from speculation.trie import InsertResult

LABELS = ("model", "role", "worker")
PER_WORKER = " Per worker: take the maximum of routers."
MICROSECONDS = "_microseconds"
"""How a worker's counters of time end; their metrics are in seconds."""
FOR_PICKERS = "vllm:"

COUNTERS: Mapping[Role | None, Sequence[tuple[str, ...]]] = {
    None: (
        ("worker_steps", "Steps computed.", "steps"),
        ("worker_step_seconds", "Time in steps.", "step_microseconds"),
    ),
    Role.TARGET: (
        ("worker_forward_seconds", "Time in the model.", "forward_microseconds"),
        ("worker_committed_tokens", "Tokens committed.", "committed"),
        ("worker_sessions_refused", "Sessions refused or given up.", "refused"),
        ("num_preemptions", "Sessions set back for want of cache.", "preempted"),
        ("grammar_waits", "Steps that sessions sat out since their grammars had taken too long.", "grammar_waits"),
        ("draft_waits", "Steps put off because drafts were expected.", "waits"),
        ("draft_wait_seconds", "Time steps were put off so.", "wait_microseconds"),
        ("prefix_cache_queries", "Tokens of prompts that the cache was asked for.", "prefilled", "reused"),
        ("prefix_cache_hits", "Tokens of these that the cache held.", "reused"),
        ("draft_model_seconds", "Time in steps for a draft model or head at the target.", "draft_microseconds"),
        ("draft_model_left_out", "Times a target's draft model or head left a session out.", "draft_left_out"),
        ("draft_model_faults", "Sessions left without a target's draft model or head, which failed.", "draft_faults"),
        ("suffix_indexed_tokens", "Tokens of outputs kept to draft from.", "suffix_indexed"),
        ("feature_tokens", "Tokens whose features went to drafters with a head.", "features"),
        ("features_refused", "Features wanted for an unknown head, or of no session.", "features_refused"),
        ("suffix_forgotten_tokens", "Of these, those no longer kept.", "suffix_forgotten"),
        ("draft_source_faults", "Sessions without a registered source that failed.", "source_faults"),
        ("suffix_queries", "Times earlier outputs were asked how a text goes on.", "suffix_asked"),
        ("suffix_hits", "Times these had an answer.", "suffix_found"),
    ),
    Role.DRAFT: (
        ("features_received_tokens", "Tokens whose features came for an EAGLE head.", "features"),
        ("features_dropped", "Features that were late, or not for the head.", "features_late", "features_refused"),
        ("drafter_computed_tokens", "Tokens a drafter computed.", "computed"),
        ("drafter_reused_tokens", "Tokens a drafter found in its cache.", "reused"),
        ("drafter_guessed_tokens", "Guesses that a drafter's forwards verified.", "guessed"),
        ("drafter_followed_guesses", "Guesses that became drafts so.", "followed"),
        ("drafter_proposed_tokens", "Draft tokens a drafter found and proposes.", "proposed"),
        ("drafter_verifications", "Verifications a drafter was told of.", "verified"),
        ("drafter_accepted_tokens", "Draft tokens accepted in its sessions.", "accepted"),
        ("drafter_asked_lead_tokens", "Lead that targets asked for.", "asked"),
        ("drafter_delivered_lead_tokens", "What there was of it.", "delivered"),
        ("drafter_sessions_lost", "Sessions whose thread a drafter lost.", "lost"),
    ),
}
"""By the role that counts it (None: either does): names of metrics, what they are, and names in
:attr:`speculation.messages.Load.counters`, whose values are added up."""
BY_SOURCE = (
    ("worker_offered_tokens", "Draft tokens verified, by draft source.", "offered_from_"),
    ("worker_accepted_tokens", "Draft tokens accepted, by draft source.", "accepted_from_"),
)
INSERT_RESULTS = "proposals_"


def collect_workers(snapshot: Snapshot) -> Iterator[Metric]:
    """All families about workers."""
    states = Counter((view.role.value, view.state.value) for view in snapshot.workers)
    yield gauge(
        "workers",
        "Workers listed, by what this router can do with them." + PER_WORKER,
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
    for name, about, value in _LOADS:
        values = {_labels(view): float(known) for view in views if (known := value(view)) is not None}
        yield gauge(name, about + PER_WORKER, LABELS, values)
    yield from _counters(views)


def _used(view: WorkerView) -> float | None:
    load = view.load
    return 1 - load.free_tokens / load.capacity_tokens if load.capacity_tokens else None


def _stored(view: WorkerView) -> int | None:
    counters = view.load.counters
    return counters["suffix_indexed"] - counters.get("suffix_forgotten", 0) if "suffix_indexed" in counters else None


def efficiency(view: WorkerView) -> float | None:
    """Part of a target's working time that it computed, 0 to 1; None while it has not worked, and of a drafter."""
    computing = view.load.counters.get("step_microseconds", 0)
    waiting = view.load.counters.get("wait_microseconds")
    return computing / (computing + waiting) if computing and waiting is not None else None


_LOADS: tuple[tuple[str, str, Callable[[WorkerView], float | None]], ...] = (
    ("num_requests_running", "Sessions a worker computes.", lambda view: view.load.sessions),
    ("num_requests_waiting", "Sessions queued at a worker.", lambda view: view.load.waiting),
    ("kv_cache_capacity_tokens", "Room of a worker's cache.", lambda view: view.load.capacity_tokens),
    ("kv_cache_usage_perc", "Part of a worker's cache in use, 0 to 1.", _used),
    ("suffix_stored_tokens", "Tokens of earlier outputs that a target drafts from.", _stored),
    (
        "worker_exact",
        "Whether a token has the same bits at a target however it is computed, as measured at its start.",
        lambda view: view.described.exact if view.described else None,
    ),
    (
        "pipeline_efficiency",
        "Part of a target's working time since its start that it computed rather than waited for drafts: its tokens/s "
        "against those at the same tokens a step without waiting. Over a time range: rate(step_seconds) / "
        "(rate(step_seconds) + rate(draft_wait_seconds)).",
        efficiency,
    ),
)


def collect_for_pickers(snapshot: Snapshot) -> Iterator[Metric]:
    """Queue and cache of all targets that are up, and this router's sessions: one sample each, as pickers read one."""
    loads = [target.load for target in snapshot.targets if target.state is WorkerState.UP]
    waiting = snapshot.placing + sum(load.waiting for load in loads)
    capacity = sum(load.capacity_tokens for load in loads)
    used = 1 - sum(load.free_tokens for load in loads) / capacity if capacity else 1.0
    for name, about, value in (
        ("num_requests_waiting", "Sessions queued at all targets, or in this router for want of one.", waiting),
        ("num_requests_running", "Sessions of this router that are open at a target.", snapshot.running),
        ("kv_cache_usage_perc", "Part of all targets' caches in use, 0 to 1; 1 while there is none.", used),
    ):
        yield gauge(name, f"{about} For endpoint pickers; see paceline_{name}.", (), {(): value}, prefix=FOR_PICKERS)


def _counters(views: list[WorkerView]) -> Iterator[Metric]:
    for role, rows in COUNTERS.items():
        counting = [view for view in views if role in (None, view.role)]
        for name, about, *sources in rows:
            scale = 1e-6 if sources[0].endswith(MICROSECONDS) else 1
            values = {
                _labels(view): sum(view.load.counters[source] for source in sources) * scale
                for view in counting
                if view.load.counters.keys() >= set(sources)
            }
            yield counter(name, about + PER_WORKER, LABELS, values)
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
