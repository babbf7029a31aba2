"""The autoscaling policies on a simulated fleet: bounds, no flapping, queues that drain, pools that sleep and wake."""

from itertools import pairwise
from random import Random

import pytest

from cluster.autoscaling.hysteresis import HoldReason, State, _whole
from cluster.autoscaling.policy import Why
from cluster.config.config import AutoscalingConfig
from simulation.costs import Costs, Curve
from tests.scaled_fleet import Arrival, Fleet, FleetLimits, Speculating, made_up
from tests.scaled_run import LONGEST_TAIL, POOLS, ScalingOutcome, Setup, Size, simulate
from tests.thorough import mostly_thorough

SIZES = {"target": Size(1, 8), "draft": Size(0, 8), "router": Size(1, 4)}
SETTLING = 300.0
"""Seconds after which a pool that was started cold has found its size."""
SOON = AutoscalingConfig().down_s


def costs(slope: float = 0.01, jitter: float = 0.2) -> Costs:
    verify, draft = Curve.straight(0.03, slope), Curve.straight(0.002, 0.04)
    return Costs(verify={1: verify}, draft=draft, to_target=0.001, to_draft=0.001, jitter=jitter)


def run(arrivals, *, seed: int = 0, sizes=SIZES, **options) -> ScalingOutcome:
    return simulate(arrivals, Setup(costs(), 0.8, sizes, seed=seed, tail=4 * SOON, **options))


def changes(outcome: ScalingOutcome, pool: str) -> list[int]:
    return [change.replicas for change in outcome.changes if change.pool == pool]


def noisy(rng: Random, rate: float, seconds: float) -> list[Arrival]:
    """Arrivals of one rate, more uneven than chance alone: in groups, of very different lengths."""
    found: list[Arrival] = []
    at = 0.0
    while (at := at + rng.expovariate(rate / 2)) < seconds:
        for _ in range(rng.choice([1, 1, 2, 4])):
            found.append(Arrival(at, max(round(400 * rng.lognormvariate(0, 1)), 1), rng.randint(1, 400)))
    return found


@pytest.mark.parametrize("seed", mostly_thorough(range(6), quick=[0, 1]))
def test_bounds_are_kept_whatever_comes(seed):
    rng = Random(seed)
    min_replicas = {"target": rng.randint(1, 3), "draft": rng.randint(0, 2), "router": rng.randint(1, 2)}
    sizes = {pool: Size(count, count + rng.randint(0, 3)) for pool, count in min_replicas.items()}
    outcome = run(made_up(rng.choice(["ramp", "burst"]), rng, rng.uniform(0.2, 1.5)), seed=seed, sizes=sizes)
    for sample in outcome.samples:
        for pool in POOLS:
            assert sizes[pool].min_replicas <= sample.replicas[pool] <= sizes[pool].max_replicas, (seed, pool, sample)
            assert sample.running[pool] <= sample.replicas[pool], (seed, pool, sample)
    for change in outcome.changes:
        assert change.replicas <= max(2 * change.before, change.before + 1), (seed, change)


@pytest.mark.parametrize("seed", range(6))
def test_a_steady_load_settles_and_noise_makes_nothing_flap(seed):
    rng = Random(seed)
    arrivals = noisy(rng, rng.uniform(0.5, 4.0), 1200)
    outcome = run(arrivals, seed=seed)
    assert flaps(outcome, arrivals) == [], seed
    settled = [change for change in outcome.changes if SETTLING < change.at < arrivals[-1].at]
    assert len(settled) <= 4, (seed, settled)


def flaps(outcome: ScalingOutcome, arrivals: list[Arrival]):
    """Changes taken back soon, while the load was the same."""
    return [pair for pair in outcome.reversals(SOON) if pair[0].at > SETTLING and pair[1].at < arrivals[-1].at]


def thoughtless(now, pool, wanted, state, settings):
    """A policy that does at once what the load of the moment asks for."""
    replicas = min(max(_whole(wanted.replicas), pool.min_replicas), pool.max_replicas)
    return replicas, HoldReason.NOTHING, State()


def test_a_policy_without_hysteresis_is_found_to_flap():
    arrivals = noisy(Random(1), 3.0, 900)
    found = simulate(arrivals, Setup(costs(), 0.8, SIZES), thoughtless)
    assert len(flaps(found, arrivals)) > 5


def test_a_burst_is_worked_off_and_everything_comes_back():
    outcome = run(made_up("burst", Random(3)), seed=3)
    last = outcome.samples[-1]
    assert max(changes(outcome, "target")) >= 6
    assert last.queued_tokens == last.streams == 0
    assert dict(last.replicas) == {"target": 1, "draft": 0, "router": 1}
    after = [sample.queued_tokens for sample in outcome.samples if sample.at > 600]
    assert max(after) < 20_000, "three minutes after the burst there is still a queue"


def test_growing_keeps_up_with_a_ramp():
    fixed = {pool: Size(1, 1) for pool in POOLS}
    arrivals = made_up("ramp", Random(5))
    scaled, alone = run(arrivals, seed=5), run(arrivals, seed=5, sizes=fixed)
    waits = [sorted(request.wait for request in outcome.finished) for outcome in (scaled, alone)]
    assert [len(one) for one in waits] == [len(arrivals)] * 2
    assert waits[0][int(0.95 * len(arrivals))] < 5 < 60 < waits[1][int(0.95 * len(arrivals))]
    assert changes(scaled, "target")[:3] == [2, 3, 4], "one more each time, not in jumps"


def test_prompts_that_nothing_decodes_beside_take_larger_steps():
    waits = {}
    for max_tokens in (0, 320, 1024):
        (only,) = run([Arrival(1.0, 4096, 2)], limits=FleetLimits(prompt_tokens=max_tokens)).finished
        waits[max_tokens] = only.wait
    assert waits[1024] < 0.9 * waits[320], "they read the weights less often"
    assert waits[0] == waits[320], "Limits.step_tokens is the least"


def test_only_tokens_that_there_are_are_counted_as_computed():
    fleet = Fleet(costs(), Speculating(costs(), 0.8, 0), FleetLimits(), {"target": 1, "draft": 0, "router": 1})
    for prompt in (16, 40, 700):
        before = fleet.target_report().computed
        fleet.open(Arrival(fleet.now, prompt, 1))
        while fleet.streams:
            fleet.tick()
            assert all(one.to_compute >= 0 for one in fleet.requests)
        decoded = fleet.finished[-1].produced - 1.0
        assert fleet.target_report().computed - before == pytest.approx(prompt + decoded)


def test_drafters_sleep_while_nothing_is_asked_and_wake_when_something_is():
    early, late = made_up("steady", Random(1), 0.02)[:20], 1200.0
    arrivals = [Arrival(one.at / 20, one.prompt, one.output) for one in early]
    arrivals += [Arrival(late + one.at, one.prompt, one.output) for one in arrivals]
    outcome = run(arrivals)
    assert changes(outcome, "draft") == [1, 0, 1, 0]
    _, down, up, _ = (change for change in outcome.changes if change.pool == "draft")
    assert (down.wanted.why, up.wanted.why) == (Why.IDLE, Why.DEMAND)
    assert up.at - late < 10


def test_drafters_that_are_of_no_use_leave_and_try_again_ever_more_rarely():
    """Each token of a step costs as much as the step: no draft ever pays."""
    setup = Setup(costs(slope=1.0), 0.3, SIZES, limits=FleetLimits(draft_start=5.0))
    outcome = simulate([Arrival(at, 10, 60) for at in range(0, 3000, 3)], setup)
    ups = [change for change in outcome.changes if change.pool == "draft" and change.replicas]
    downs = [change for change in outcome.changes if change.pool == "draft" and not change.replicas]
    assert {change.wanted.why for change in downs} == {Why.RESTING}
    rests = [up.at - down.at for down, up in zip(downs, ups[1:], strict=False)]
    assert len(rests) >= 3
    assert all(later > 1.8 * sooner for sooner, later in pairwise(rests)), rests


def test_without_speculation_drafters_stay_away():
    outcome = run(made_up("steady", Random(2), 0.1), max_draft=0)
    assert changes(outcome, "draft") == []


def test_every_decision_says_why():
    outcome = run(made_up("ramp", Random(4)), seed=4)
    words = {change.wanted.why for change in outcome.changes}
    assert {Why.WORK, Why.LEAD, Why.IDLE} <= words <= set(Why)
    for change in outcome.changes:
        assert len(change.wanted.says.split()) >= 2
        assert "\n" not in change.wanted.says


def test_requests_that_are_never_done_are_told_and_their_waits_count():
    arrivals = [Arrival(0.0, 10, 2), Arrival(10.0, 10, 10_000_000), Arrival(20.0, 10, 2)]
    outcome = run(arrivals, sizes=dict.fromkeys(POOLS, Size(1, 1)), limits=FleetLimits(places=1))
    assert [one.first_at is not None for one in (*outcome.finished, *outcome.unfinished)] == [True, True, False]
    assert outcome.ended == pytest.approx(20.0 + LONGEST_TAIL, abs=0.2), "there is nothing to see afterwards"
    assert max(outcome.waits()) == outcome.waits(20.0)[0] == outcome.ended - 20.0


def test_the_same_seed_gives_the_same_run():
    first, second = (run(made_up("ramp", Random(6), 0.3), seed=6) for _ in range(2))
    assert first.changes == second.changes
    assert first.samples == second.samples
