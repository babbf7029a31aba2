"""The last decision about every pool, and why: posted by the policy, for every process of the Ray cluster to read.

Kept in the key-value store of Ray's head, which outlives Serve's controller; that is a private interface of Ray, so
nothing depends on it but what people see. The same figures go to Ray's own metrics.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from time import monotonic
from typing import Any

from cluster.autoscaling.hysteresis import Decision

log = logging.getLogger("ray.serve")

KEY, NAMESPACE = b"autoscaling", b"paceline"
RETRY_SECONDS = 10.0
"""After a post that failed, if nothing new is decided before."""


@dataclass(frozen=True, slots=True)
class Posted:
    """What is decided about a pool."""

    replicas: int
    """As decided; some may still be starting."""
    running: int
    why: str
    """One of :class:`cluster.autoscaling.policy.Why`: what the wanted number follows from."""
    says: str
    held: str
    """One of :class:`cluster.autoscaling.hysteresis.HoldReason`.

    What keeps the pool from that number; empty: nothing.
    """
    changed: str = ""
    """The decision that last changed the pool, as a sentence."""

    @classmethod
    def of(cls, decision: Decision, before: int, running: int) -> Posted:
        """The decision about a pool that had ``before`` replicas."""
        changes = decision.replicas != before
        changed = f"{before} -> {decision.replicas}, {decision.why}: {decision.says}" if changes else ""
        return cls(decision.replicas, running, decision.why.value, decision.says, decision.held.value, changed)


class DecisionStore:
    """Posts decisions; only what differs in more than its sentence is written. What fails is tried again."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Nothing is known yet."""
        self._known: dict[str, Posted] = {}
        self._measured: dict[str, Posted] = {}
        """What Ray's metrics were set to."""
        self._clock, self._retry_at = clock, inf
        self._gauges: tuple[Any, Any] | None = None

    def post(self, decisions: Mapping[str, Posted]) -> None:
        """Tell what was decided, by deployment. Never raises."""
        fresh = {name: self._with_history(name, posted) for name, posted in decisions.items()}
        known = {name: _essence(one) for name, one in self._known.items()}
        if {name: _essence(one) for name, one in fresh.items()} == known and self._clock() < self._retry_at:
            return
        self._known = fresh
        try:
            self._measure()
            _write({name: asdict(posted) for name, posted in fresh.items()})
        except Exception as error:  # whatever Ray raises: a decision is no worse for not being told
            log.warning("cannot post autoscaling decisions: %s", error)
            self._retry_at = self._clock() + RETRY_SECONDS
        else:
            self._retry_at = inf

    def _with_history(self, name: str, posted: Posted) -> Posted:
        known = self._known.get(name)
        if posted.changed or known is None:
            return posted
        return Posted(posted.replicas, posted.running, posted.why, posted.says, posted.held, known.changed)

    def _measure(self) -> None:
        from ray.util.metrics import Gauge

        if self._gauges is None:
            self._gauges = (
                Gauge("paceline_autoscaling_replicas", "Replicas of a pool, decided and running.", ("pool", "state")),
                Gauge("paceline_autoscaling_decision_info", "1 for the last decision.", ("pool", "why", "held")),
            )
        replicas, info = self._gauges
        before, self._measured = self._measured, self._known
        for name, posted in before.items():
            info.set(0, {"pool": name, "why": posted.why, "held": posted.held})
        for name, posted in self._known.items():
            replicas.set(posted.replicas, {"pool": name, "state": "decided"})
            replicas.set(posted.running, {"pool": name, "state": "running"})
            info.set(1, {"pool": name, "why": posted.why, "held": posted.held})


def read() -> dict[str, Posted]:
    """The last decisions by deployment, in a process that Ray knows; none where nothing was decided yet."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(KEY, namespace=NAMESPACE)
    return {name: Posted(**entry) for name, entry in json.loads(found).items()} if found else {}


def _write(entries: Mapping[str, Mapping[str, Any]]) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(KEY, json.dumps(entries).encode(), overwrite=True, namespace=NAMESPACE)


def _essence(posted: Posted) -> tuple[Any, ...]:
    return posted.replicas, posted.running, posted.why, posted.held, posted.changed
