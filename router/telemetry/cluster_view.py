"""``GET /cluster``: a snapshot of the router and what it counts, as JSON for people and ``paceline top``.

docs/alerts.md says what the fields mean.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from router.generation import ServedModel
from router.sessions.snapshot import Snapshot, WorkerState, WorkerView
from router.sessions.tally import WINDOW_SECONDS, Buckets, ModelCounts
from router.telemetry.metrics import RouterMetrics, own_version
from router.telemetry.worker_metrics import draft_sources, efficiency
from speculation.events import Role
from speculation.messages import Loading, Welcome

Json = dict[str, Any]


class ClusterView:
    """The view of one router."""

    def __init__(self, metrics: RouterMetrics, wall_clock: Callable[[], float] = time.time) -> None:
        """Counts its uptime from now; ``wall_clock`` gives seconds since 1970."""
        self._metrics, self._tally, self._wall_clock = metrics, metrics.tally, wall_clock
        self._started, self._since = wall_clock(), self._tally.clock()
        self._instance = uuid.uuid4().hex[:12]

    def __call__(self) -> Json:
        """As of now."""
        now, wall = self._tally.clock(), self._wall_clock()
        snapshot = self._metrics.snapshot()
        targets = snapshot.targets
        in_order = sorted(snapshot.workers, key=lambda worker: (worker.role is not Role.TARGET, worker.worker))
        return {
            "object": "cluster",
            "time": wall,
            "router": self._router(snapshot, targets, now),
            "totals": self._totals(snapshot),
            "models": [self._model(model, targets) for model in snapshot.models],
            "workers": [_worker(worker, wall - now) for worker in in_order],
            "events": [asdict(line) for line in snapshot.logged_events],
        }

    def _router(self, snapshot: Snapshot, targets: list[WorkerView], now: float) -> Json:
        requests, tokens, _, _ = self._tally.recent.rates(now) or (0.0, 0.0, 0.0, 0.0)
        _, _, accepted, offered = self._tally.recent.growth(now)
        queued = sum(worker.load.waiting for worker in targets)
        return {
            "version": own_version(),
            "instance": self._instance,
            "started": self._started,
            "uptime_seconds": now - self._since,
            "ready": snapshot.unready is None,
            "unready": snapshot.unready,
            "draining": snapshot.draining,
            "sessions": {"running": snapshot.running, "placing": snapshot.placing, "queued": queued},
            "now": {
                "window_seconds": WINDOW_SECONDS,
                "requests_per_second": requests,
                "tokens_per_second": tokens,
                "acceptance": _share(accepted, offered),
            },
        }

    def _totals(self, snapshot: Snapshot) -> Json:
        counts, totals = list(self._tally.models.values()), snapshot.totals
        requests, committed, accepted, offered = self._tally.recent.totals
        verifications = sum(c.drafts for c in counts)
        return {
            "requests": requests,
            "sessions": totals.sessions,
            "prompt_tokens": sum(c.prompt_tokens for c in counts),
            "cached_prompt_tokens": sum(c.cached_prompt_tokens for c in counts),
            "generated_tokens": committed,
            "verifications": verifications,
            "draft_tokens": offered,
            "accepted_tokens": accepted,
            "acceptance": _share(accepted, offered),
            "mean_acceptance_length": _length(accepted, verifications),
            "reopened": totals.reopened,
            "moved": totals.moved,
            "condemned": totals.condemned,
            "quarantined": totals.quarantined,
            "failed": self._tally.failed.total(),
            "refused": self._tally.refused.total(),
            "malformed_messages": totals.malformed,
            "stale_messages": totals.stale,
            "acceptance_collapses": snapshot.record.collapses,
        }

    def _model(self, model: ServedModel, targets: list[WorkerView]) -> Json:
        counts = self._tally.models.get(model.name, ModelCounts())
        return {
            "name": model.name,
            "context": model.context,
            "vocabulary": model.vocabulary,
            "targets_up": sum(each.state is WorkerState.UP and each.model == model.name for each in targets),
            "prompt_tokens": counts.prompt_tokens,
            "generated_tokens": counts.generated_tokens,
            "acceptance": _share(counts.accepted_tokens, counts.draft_tokens),
            "mean_acceptance_length": _length(counts.accepted_tokens, counts.drafts),
            "acceptance_by_position": [kept / counts.drafts for kept in counts.accepted_by_position()],
            "first_token": _latency(counts.first_token),
            "inter_token": _latency(counts.inter_token),
        }


def _worker(view: WorkerView, epoch: float) -> Json:
    """``epoch``: what to add to times of the pool's clock."""
    load, counters, loading = view.load, view.load.counters, view.loading or Loading("")
    described = view.described or Welcome(view.role.value, loading.model, 0, 0)
    steps, tokens = view.rates or (None, None)
    acceptance = view.acceptance
    if view.role is Role.TARGET and acceptance is None:  # its drafts, if any, are made in its own process
        acceptance = _share(counters.get("accepted", 0), counters.get("offered", 0))
    return {
        "id": view.worker,
        "address": view.worker.partition("@")[2],
        "role": view.role.value,
        "model": described.model,
        "state": _state(view),
        "doing": loading.doing,
        "fraction": loading.fraction,
        "standby": view.standby,
        "since": view.since + epoch,
        "sessions": load.sessions,
        "waiting": load.waiting,
        "router_sessions": view.sessions,
        "cache": {"free": load.free_tokens, "capacity": load.capacity_tokens},
        "round_trip_ms": _ms(view.round_trip),
        "acceptance": acceptance,
        "steps_per_second": steps,
        "tokens_per_second": tokens,
        "efficiency": efficiency(view),
        "sources": {
            str(source): {"offered": offered, "accepted": counters.get(f"accepted_from_{source}", 0)}
            for source in draft_sources([view.described])
            if (offered := counters.get(f"offered_from_{source}", 0))
        },
        "dtype": described.dtype,
        "exactness": described.exactness,
        "revision": f"{described.revision:016x}" if view.described else "",
        "instance": described.instance,
        "started": described.started or None,
    }


def _state(view: WorkerView) -> str:
    if view.loading:
        return "loading"
    if view.state is WorkerState.DOWN:
        return "lost" if view.described else "connecting"
    return view.state.value


def _latency(buckets: Buckets) -> Json:
    return {"median_ms": _ms(buckets.quantile(0.5)), "p90_ms": _ms(buckets.quantile(0.9))}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _length(accepted: int, verifications: int) -> float | None:
    return 1 + accepted / verifications if verifications else None
