"""Whether drafting pays at a distance: what the simulator says for the round trips that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from cluster.doctor.finding import Finding, ok, warning
from cluster.doctor.workers import Met
from simulation.agreement import made_up
from simulation.costs import Costs, Curve
from simulation.simulate import Bounds, SimulationSettings, simulate
from speculation.events import Role
from speculation.messages import Schedule

PAYS = 1.05
"""Below this speed-up drafters are not worth their machines."""
TOKENS = 600
SUBJECT = "distance"


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps take, in seconds, and how often a draft token is right."""

    target: float
    draft: float
    acceptance: float


def speedup(steps: StepCosts, rtt: float) -> float:
    """Of one request over plain decoding, with ``rtt`` seconds from drafter to target and back."""
    costs = Costs(
        verify={1: Curve.straight(steps.target, 0.01)},
        draft=Curve.straight(steps.draft, 0.04),
        to_target=rtt / 2,
        to_draft=rtt / 2,
    )
    outcomes = made_up(Random(0), steps.acceptance, None)
    rates = [
        simulate(SimulationSettings(schedule), costs, outcomes, Random(0), tokens=TOKENS, bounds=Bounds()).rate
        for schedule in (Schedule.TRIE, None)
    ]
    return rates[0] / rates[1]


def judge(met: Sequence[Met], steps: StepCosts) -> Iterator[Finding]:
    """For the farthest drafter and the farthest target; drafts take the way through the router, where this runs."""
    far = {role: max((met_.trip for met_ in met if met_.role is role and met_.trips), default=None) for role in Role}
    to_target, to_draft = far[Role.TARGET], far[Role.DRAFT]
    if to_target is None or to_draft is None:
        return
    rtt = to_target + to_draft
    gain = speedup(steps, rtt)
    text = (
        f"{1000 * rtt:.1f} ms from drafter to target and back make drafting {gain:.2f} times as fast as plain decoding "
        f"(simulated: steps of {1000 * steps.target:g} and {1000 * steps.draft:g} ms, acceptance {steps.acceptance:g})"
    )
    if gain < PAYS:
        yield warning(SUBJECT, text, "put drafters nearer, or do without them")
    else:
        yield ok(SUBJECT, text)
