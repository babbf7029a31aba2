"""The protocol under faults: many seeds must pass. That bugs are found, :mod:`tests.sim.test_planted_bugs` shows."""

import pytest

from speculation.events import FailureCode
from tests.faults.run import FaultRun, Weather, main

SEEDS = 30
STORM = Weather(loss=0.05, doubling=0.1, delay=0.01, crash_every=0.5, hang_every=1.0, cut_every=1.0, drain_every=1.0)


def test_many_kinds_of_weather(capsys):
    assert main(["--seeds", str(SEEDS)]) == 0, capsys.readouterr().err


def test_a_storm():
    for seed in range(5):
        FaultRun(seed, STORM).run()


def test_a_calm_run_speculates_and_never_fails_over():
    world = FaultRun(1, Weather(delay=0.0005, agreement=1.0)).run()
    assert sum(session.reopened + session.moved for session in world.sessions.values()) == 0
    emitted = sum(map(len, world.emitted.values()))
    assert world.accepted > emitted / 2


def test_a_seed_replays_exactly():
    def trace(seed: int) -> tuple[int, float, dict[int, list[int]]]:
        world = FaultRun(seed).run()
        return world.events, world.now, world.emitted

    assert trace(3) == trace(3)


def test_workers_are_replaced_one_after_another_and_nobody_waits():
    worlds = [FaultRun(seed, Weather(delay=0.002, drain_every=0.2, agreement=0.5)).run() for seed in range(8)]
    assert sum(session.moved for world in worlds for session in world.sessions.values()) > 8
    silence = max(world.longest_silence for world in worlds)
    assert silence < 0.1, "a session that moves pauses for a step and the way there, not longer"


@pytest.mark.parametrize(("harm", "tries"), [("dies", 2), ("hangs", 2), ("refuses", 3)])
def test_one_poison_request_is_failed_after_so_many_tries(harm, tries):
    """Two, and one more for each time that it was among others or had gone on before it did harm."""
    harmed: list[int] = []
    for seed in range(20):
        world = FaultRun(seed, Weather(poison=harm, poisonous=1)).run()
        assert list(world.failed.values()) == [FailureCode.FAULTY]
        harmed += world.harmed.values()
    assert min(harmed) == tries
    assert sorted(harmed)[len(harmed) // 2] <= 3
    assert max(harmed) <= 5
