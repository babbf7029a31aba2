"""The policies inside Ray Serve: what its controller calls, with what replicas report, to size all deployments at once.

One policy for the whole application, since drafters without replicas can only be woken by what routers report. Replicas
report figures by name (``record_autoscaling_stats``; see :func:`figures`), Serve passes them on as time series. Serve's
own bounds are those of the pools and its own delays are 0, so that ours decide. The state of the steering is Serve's to
keep; it forgets it with its controller.

Runs in the controller's process, and must never raise there: all applications of the cluster would suffer. What it
decides is told by Ray's metrics, and what it changes by the log as well.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.autoscaling import policy
from cluster.autoscaling.hysteresis import HoldReason, ScaledPool, State, steer
from cluster.autoscaling.policy import DesiredReplicas, Why
from cluster.config.config import AutoscalingConfig, Config
from cluster.placement import ROUTER
from speculation.demand import PRESENT, TOTALS, DraftDemand, RouterDemand, TargetDemand, WorkerDemand
from speculation.events import Role

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

log = logging.getLogger("ray.serve")

STATE = "paceline"
"""Key of our state beside Serve's own."""
PERIOD_SECONDS = 2.0
"""After which Ray is told metrics again: it forgets a series some seconds after it was told the last time."""
IMPORT_PATH = "cluster.autoscaling.serve_policy:ServePolicy"

Demand = TypeVar("Demand", TargetDemand, DraftDemand, RouterDemand)
Told = tuple[int, int, Why, HoldReason]
"""Of a pool: replicas as decided, of which some may be starting, and those that run; why, and what holds it."""


def figures(demand: WorkerDemand | RouterDemand, model: str = "") -> dict[str, float]:
    """What a replica reports, by name: ``streams``, or ``llama:streams`` of one of a router's models."""
    return {f"{model}:{name}" if model else name: float(value) for name, value in asdict(demand).items()}


def options(min_replicas: int, max_replicas: int, settings: AutoscalingConfig) -> dict[str, Any]:
    """A deployment whose number of replicas is decided here, as Serve's declaration has it."""
    bounds = {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "metrics_interval_s": settings.interval_s,
        "look_back_period_s": settings.window_s,
    }
    return {"num_replicas": "auto", "autoscaling_config": bounds}


def declared(config: Config) -> dict[str, Any]:
    """The policy of the application, as Serve's declaration has it."""
    names = ("deployment", "role", "model")
    pools = [dict(zip(names, (one.deployment, one.role.value, one.model), strict=True)) for one in config.pools()]
    return {"policy_function": IMPORT_PATH, "policy_kwargs": {"pools": pools, "settings": asdict(config.autoscaling)}}


class ServePolicy:
    """Made once by Serve's controller, then called every tenth of a second or so."""

    def __init__(
        self,
        pools: Sequence[Mapping[str, str]],
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pools``: as :func:`declared`; ``settings``: of :class:`cluster.config.config.AutoscalingConfig`.

        ``clock`` never goes back, which the time in Serve's contexts does whenever the machine's clock is set back.
        """
        self._pools = {pool["deployment"]: pool for pool in pools}
        self._settings = AutoscalingConfig(**(settings or {}))
        self._clock = clock
        self._metrics = DecisionMetrics()
        self._strangers: set[str] = set()

    def __call__(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Replicas, and what to remember, of every deployment."""
        try:
            return self._decide(contexts)
        except Exception:  # see the module's docstring
            log.exception("the autoscaling policy failed; every pool stays as it is")
            kept = {key: {STATE: ctx.policy_state.get(STATE, {})} for key, ctx in contexts.items()}
            return {key: ctx.target_num_replicas for key, ctx in contexts.items()}, kept

    def _decide(self, contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        sizes: dict[Any, int] = {}
        states: dict[Any, dict[str, Any]] = {}
        decided: dict[str, Told] = {}
        now = self._clock()
        routers = next((ctx for ctx in contexts.values() if ctx.deployment_name == ROUTER), None)
        for key, ctx in contexts.items():
            wanted = self._wanted(ctx, routers)
            replicas, held, state = self._steer(now, ctx, wanted)
            sizes[key], states[key] = replicas, {STATE: asdict(state)}
            decided[ctx.deployment_name] = replicas, ctx.current_num_replicas, wanted.why, held
            if replicas != ctx.target_num_replicas:
                change = f"{ctx.target_num_replicas} -> {replicas} replicas"
                log.warning("%s: %s; %s: %s", ctx.deployment_name, change, wanted.why, wanted.says)
        self._metrics.tell(decided)
        return sizes, states

    def _steer(self, now: float, ctx: AutoscalingContext, wanted: DesiredReplicas) -> tuple[int, HoldReason, State]:
        min_replicas, max_replicas = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        pool = ScaledPool(ctx.target_num_replicas, ctx.current_num_replicas, min_replicas, max_replicas)
        return steer(now, pool, wanted, State(**ctx.policy_state.get(STATE, {})), self._settings)

    def _wanted(self, ctx: AutoscalingContext, routers: AutoscalingContext | None) -> DesiredReplicas:
        name = ctx.deployment_name
        if name == ROUTER:
            streams: defaultdict[Any, float] = defaultdict(float)  # of each router, of all models together
            for model in {pool["model"] for pool in self._pools.values()}:
                for replica, one in _reports(RouterDemand, ctx, model).items():
                    streams[replica] += one.streams
            return policy.routers([RouterDemand(count) for count in streams.values()], self._settings)
        pool = self._pools.get(name)
        if pool is None:  # it stays as it is, and the others go on
            if name not in self._strangers:
                self._strangers.add(name)
                told = "%s is not in policy_kwargs.pools, so it stays as it is; there are %s"
                log.warning(told, name, [*self._pools])
            return DesiredReplicas(0.0, Why.UNKNOWN, "policy_kwargs.pools does not list it")
        if pool["role"] == Role.TARGET:
            return policy.targets([*_reports(TargetDemand, ctx).values()], self._settings)
        reports = [*_reports(DraftDemand, ctx).values()]
        present = PRESENT if reports else frozenset()
        asking = _reports(RouterDemand, routers, pool["model"], present).values() if routers is not None else ()
        if not asking or len(reports) < ctx.current_num_replicas:
            return DesiredReplicas(0.0, Why.UNKNOWN, "not every router and drafter has reported yet")
        return policy.drafters(reports, asking, self._settings)


def _reports(
    kind: type[Demand], ctx: AutoscalingContext, model: str = "", present: Set[str] = frozenset()
) -> dict[Any, Demand]:
    """What every replica has reported, of one model: averages, and totals as their growth a second.

    Of what is ``present``, no more than the last figure.
    """
    series: Mapping[str, Mapping[Any, Sequence[Any]]] = ctx.raw_metrics or {}
    averages: Mapping[str, Mapping[Any, float]] = ctx.aggregated_metrics or {}
    names = {entry.name: f"{model}:{entry.name}" if model else entry.name for entry in fields(kind)}
    replicas = set.intersection(*(set(averages.get(reported, ())) for reported in names.values()))

    def figure(name: str, reported: str, replica: Any) -> float:
        if name not in TOTALS | present:
            return averages[reported][replica]
        first, last = series[reported][replica][0], series[reported][replica][-1]
        if name in present:
            return float(min(averages[reported][replica], last.value))
        seconds = last.timestamp - first.timestamp
        return float((last.value - first.value) / seconds) if seconds > 0 else 0.0

    return {
        replica: kind(**{name: figure(name, reported, replica) for name, reported in names.items()})
        for replica in sorted(replicas, key=str)
    }


class DecisionMetrics:
    """The last decision about every pool, in Ray's own metrics."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._told: Mapping[str, Told] = {}
        """By deployment."""
        self._gauges: tuple[Any, Any] | None = None
        self._clock, self._due = clock, 0.0

    def tell(self, fresh: Mapping[str, Told]) -> None:
        """What is decided, by deployment; said again before Ray forgets it. Never raises."""
        if fresh == self._told and self._clock() < self._due:
            return
        self._due = self._clock() + PERIOD_SECONDS
        try:
            self._set(fresh)
        except Exception as error:  # whatever Ray raises: a decision is no worse for not being told
            log.warning("cannot tell autoscaling decisions: %s", error)
        self._told = fresh

    def _set(self, fresh: Mapping[str, Told]) -> None:
        from ray.util.metrics import Gauge

        if self._gauges is None:
            self._gauges = (
                Gauge("paceline_autoscaling_replicas", "Replicas of a pool, decided and running.", ("pool", "state")),
                Gauge("paceline_autoscaling_decision_info", "1 for the last decision.", ("pool", "why", "held")),
            )
        replicas, info = self._gauges
        for name, (_, _, why, held) in self._told.items():
            info.set(0, {"pool": name, "why": why.value, "held": held.value})
        for name, (decided, running, why, held) in fresh.items():
            replicas.set(decided, {"pool": name, "state": "decided"})
            replicas.set(running, {"pool": name, "state": "running"})
            info.set(1, {"pool": name, "why": why.value, "held": held.value})
