"""How many replicas the work of a pool would keep as busy as wanted, and why: the policies, one for each role.

Pure arithmetic over what the workers and routers of a pool report (:mod:`speculation.demand`), totals as their growth a
second. The answers are fractions of replicas, and take no account of bounds, delays or what was decided before: that is
:mod:`cluster.autoscaling.hysteresis`.

* Targets: the most that any of four amounts takes. Tokens computed, against the measured speed; prompt tokens that
  wait, against the time in which they would be computed; sessions, against the places of a step; tokens held, against
  the cache. A queue says little before there is too much work, and then too much: it only ever adds to what there is,
  as many as work it off in time. Whether fewer would do, the others tell.
* Drafters: the lead that targets ask for, which is how far ahead drafting is worth its while (ADR 0009), against the
  lead that is there when a verification comes. Nothing asked for: none are wanted. With none there, sessions that would
  have drafts if they could want one; with some there, as many more as such sessions are more than the others.
* Routers: open streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from statistics import fmean

from cluster.config.config import AutoscalingConfig
from speculation.demand import DraftDemand, RouterDemand, TargetDemand

NEGLIGIBLE = 0.05
"""Drafters' worth of work below which none is wanted: sessions at rest try drafts again every now and then."""


class Why(StrEnum):
    """What decides how many replicas are wanted. Stable names; also used in metrics."""

    WORK = "work"
    """Tokens computed."""
    QUEUE = "queue"
    """Prompt tokens that wait."""
    SESSIONS = "sessions"
    CACHE = "cache"
    LEAD = "lead"
    """Lead asked for and delivered."""
    DEMAND = "demand"
    """Sessions that want a drafter and have none."""
    RESTING = "resting"
    """Targets have told the drafters of all sessions to rest."""
    STREAMS = "streams"
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class DesiredReplicas:
    """Replicas that the work amounts to, and why: one of few words, and a sentence for people."""

    replicas: float
    why: Why
    says: str


def targets(reports: Sequence[TargetDemand], settings: AutoscalingConfig) -> DesiredReplicas:
    """Target workers for what ``reports``, one of each replica that runs, add up to."""
    speeds = [report.speed for report in reports if report.speed > 0]
    count, goal = _count(len(reports), "target"), f"goal {settings.load:.0%}"
    queued, sessions = fsum(report.queued_tokens for report in reports), fsum(report.sessions for report in reports)
    running = fsum(report.running_tokens for report in reports)
    choices: list[DesiredReplicas] = []
    if speeds:
        speed = fmean(speeds)
        computed = fsum(report.computed for report in reports)
        share = computed / speed / len(reports)
        says = f"{computed:,.0f} tokens a second = {share:.0%} of what {count} can compute; {goal}"
        choices.append(DesiredReplicas(computed / speed / settings.load, Why.WORK, says))
        choices += _for_queue(queued, speed, len(reports), settings)
    for amount, rooms, why, unit in (
        (sessions, [report.places for report in reports], Why.SESSIONS, "places"),
        (running, [report.capacity_tokens for report in reports], Why.CACHE, "tokens of cache"),
    ):
        room = fsum(rooms)
        if room > 0:
            says = f"{amount:,.0f} of {room:,.0f} {unit} taken on {count} = {amount / room:.0%}; {goal}"
            choices.append(DesiredReplicas(amount / fmean(rooms) / settings.load, why, says))
    if not choices:
        return DesiredReplicas(0.0, Why.UNKNOWN, "no target has reported yet")
    if not queued and not sessions:
        return DesiredReplicas(0.0, Why.IDLE, "no sessions")
    return max(choices, key=lambda wanted: wanted.replicas)


def _for_queue(queued: float, speed: float, replicas: int, settings: AutoscalingConfig) -> list[DesiredReplicas]:
    """More replicas while it takes these too long to compute what is queued."""
    seconds, count = queued / speed / replicas, _count(replicas, "target")
    says = f"queued {queued:,.0f} tokens = {seconds:.1f} s of work for {count}; limit {settings.queue_s:g} s"
    more = (seconds - settings.queue_s) / settings.clear_s
    return [DesiredReplicas(replicas * (1.0 + more), Why.QUEUE, says)] if more > 0 else []


def drafters(
    reports: Sequence[DraftDemand], routers: Iterable[RouterDemand], settings: AutoscalingConfig
) -> DesiredReplicas:
    """Draft workers. ``reports``: one of each replica that runs; ``routers``: of each, about the model drafted for.

    Below full delivery what is delivered is in proportion to the time spent drafting; so is what is wanted.
    """
    routers = list(routers)
    undrafted = fsum(router.undrafted for router in routers)
    resting = fsum(router.resting for router in routers)
    asked, used = fsum(report.asked for report in reports), fsum(report.busy for report in reports)
    demand = _demand(len(reports), fsum(router.streams for router in routers), undrafted)
    delivered = fsum(report.delivered for report in reports)
    if reports and asked:
        # Nothing delivered at all is far too little, by an amount that nobody knows.
        share = max(delivered / asked, 1 / (1 + asked))
        busy = f"{_count(len(reports), 'drafter')}, busy {min(used / len(reports), 1.0):.0%} of the time"
        says = f"{busy}, delivered {share:.0%} of the lead asked for; goal {settings.delivery:.0%}"
        lead = DesiredReplicas(used * settings.delivery / share, Why.LEAD, says)
        if lead.replicas >= NEGLIGIBLE and lead.replicas >= demand.replicas:
            return lead
    if demand.replicas:
        return demand
    if resting >= 0.5 or asked:
        return DesiredReplicas(0.0, Why.RESTING, f"targets have no use for drafts in {max(resting, 1.0):.0f} sessions")
    return DesiredReplicas(0.0, Why.IDLE, "no session wants drafts")


def _demand(drafters: int, streams: float, undrafted: float) -> DesiredReplicas:
    """One drafter to begin with; then, for sessions without one, as many more as serve the others."""
    if undrafted < 0.5:
        return DesiredReplicas(0.0, Why.IDLE, "every session that wants drafts has a drafter")
    wanted = drafters * (1 + undrafted / max(streams - undrafted, 1.0)) if drafters else 1.0
    return DesiredReplicas(wanted, Why.DEMAND, f"{undrafted:.0f} sessions want drafts and have no drafter")


def routers(reports: Sequence[RouterDemand], settings: AutoscalingConfig) -> DesiredReplicas:
    """Routers."""
    if not reports:
        return DesiredReplicas(0.0, Why.UNKNOWN, "no router has reported yet")
    streams = fsum(report.streams for report in reports)
    if not streams:
        return DesiredReplicas(0.0, Why.IDLE, "no streams")
    says = f"{streams:,.0f} streams on {_count(len(reports), 'router')}; {settings.streams} are enough for one"
    return DesiredReplicas(streams / settings.streams, Why.STREAMS, says)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
