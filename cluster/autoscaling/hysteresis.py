"""When a pool takes another size: bounds, delays, steps and rests between what is wanted and what is done.

The same for every pool. A pool grows as soon as it has been too small for ``up_s``, to at most twice its size, and not
again before its new replicas run and ``pause_s`` have passed: until then what is on its way counts as if it were there.
It shrinks when it was too large all through ``down_s``, to the most that was wanted in that time, and only if what
remains still has ``margin`` to spare. So a load that wavers about a bound changes nothing, and a size is held for
``down_s`` at least before it is taken back.

The state goes in and comes out. One that was lost, with the process that kept it, costs a fresh ``down_s``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.autoscaling.policy import DesiredReplicas, Why
from cluster.config.config import AutoscalingConfig

PATIENCE = 600.0
"""Seconds after which replicas that have still not started no longer keep the others from growing."""
LONGEST_REST = 16
"""Times ``rest_s``."""
ROUNDING = 1e-9


class HoldReason(StrEnum):
    """What keeps a pool from the size that is wanted. Stable names; also used in metrics."""

    NOTHING = ""
    BOUNDS = "bounds"
    """It is as small or as large as it may be."""
    DELAY = "delay"
    """It was not wanted for long enough."""
    STARTING = "starting"
    """Replicas are on their way."""
    PAUSE = "pause"
    """It has only just grown."""
    REST = "rest"
    """Drafts were of no use a short while ago."""


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """What there is of a pool, and may be."""

    replicas: int
    """Those decided on: some may still be starting."""
    running: int
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered of a pool from one decision to the next. Times are in seconds, of any one clock."""

    small_since: float | None = None
    """Since when it is too small ..."""
    fewest: int = 0
    """... and the least that was wanted since."""
    large_since: float | None = None
    """Since when it is too large ..."""
    most: int = 0
    """... and the most that was wanted since."""
    grown_at: float | None = None
    rest_until: float | None = None
    """Not woken before, since drafts were of no use."""
    rest_s: float = 0.0
    """How long the last such rest was."""


def steer(
    now: float, pool: ScaledPool, wanted: DesiredReplicas, state: State, settings: AutoscalingConfig
) -> tuple[int, HoldReason, State]:
    """Replicas it shall have, what keeps it from those wanted, and what to remember. ``now`` never goes back."""
    bounded = min(max(pool.replicas, pool.min_replicas), pool.max_replicas)
    if bounded != pool.replicas:
        return bounded, HoldReason.BOUNDS, State()
    if wanted.why is Why.UNKNOWN:
        return pool.replicas, HoldReason.NOTHING, replace(state, small_since=None, large_since=None)
    needed = _whole(wanted.replicas)
    if needed > pool.replicas:
        return _grow(now, pool, needed, replace(state, large_since=None), settings)
    state = replace(state, small_since=None)
    roomy = _whole(wanted.replicas / (1.0 - settings.margin))
    if roomy < pool.replicas:
        return _shrink(now, pool, roomy, wanted.why, state, settings)
    return pool.replicas, HoldReason.NOTHING, replace(state, large_since=None)


def _grow(
    now: float, pool: ScaledPool, needed: int, state: State, settings: AutoscalingConfig
) -> tuple[int, HoldReason, State]:
    if pool.replicas == pool.max_replicas:
        return pool.replicas, HoldReason.BOUNDS, replace(state, small_since=None)
    since_growth = math.inf if state.grown_at is None else now - state.grown_at
    waits = replace(state, small_since=None)
    if not pool.replicas and state.rest_until is not None and now < state.rest_until:
        return 0, HoldReason.REST, waits
    if pool.running < pool.replicas and since_growth < PATIENCE:
        return pool.replicas, HoldReason.STARTING, waits
    if since_growth < settings.pause_s:
        return pool.replicas, HoldReason.PAUSE, waits
    since = now if state.small_since is None else state.small_since
    fewest = needed if state.small_since is None else min(state.fewest, needed)
    if now - since < settings.up_s:
        return pool.replicas, HoldReason.DELAY, replace(state, small_since=since, fewest=fewest)
    larger = min(fewest, pool.max_replicas, max(2 * pool.replicas, pool.replicas + 1))
    return larger, HoldReason.NOTHING, State(grown_at=now, rest_s=state.rest_s)


def _shrink(
    now: float, pool: ScaledPool, roomy: int, why: Why, state: State, settings: AutoscalingConfig
) -> tuple[int, HoldReason, State]:
    if pool.replicas == pool.min_replicas:
        return pool.replicas, HoldReason.BOUNDS, replace(state, large_since=None)
    since = now if state.large_since is None else state.large_since
    largest = roomy if state.large_since is None else max(state.most, roomy)
    state = replace(state, large_since=since, most=largest)
    if now - since < settings.down_s:
        return pool.replicas, HoldReason.DELAY, state
    smaller = max(largest, pool.min_replicas)
    after = State(grown_at=state.grown_at)
    if smaller == 0 and why is Why.RESTING:
        after = _rest(now, state, settings)
    return smaller, HoldReason.NOTHING, after


def _rest(now: float, state: State, settings: AutoscalingConfig) -> State:
    """The pool goes to sleep since it was of no use: for longer than before, if that was why it last slept too."""
    awake = math.inf if state.grown_at is None else now - state.grown_at
    in_a_row = state.rest_s > 0 and awake < settings.down_s + state.rest_s
    rest = min(2 * state.rest_s, LONGEST_REST * settings.rest_s) if in_a_row else settings.rest_s
    return State(grown_at=state.grown_at, rest_until=now + rest, rest_s=rest)


def _whole(replicas: float) -> int:
    return math.ceil(replicas - ROUNDING)
