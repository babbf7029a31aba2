"""A deterministic simulation of router, drafters and targets under faults; see :mod:`fault_world`.

The weather of a run says which faults it has and how often. Messages are delayed, lost and doubled, streams break for
one end or both, workers are killed, stopped, stuck, drained and replaced, alone or many at once, the router itself is
lost, a drafter lies, and some requests are poison. After that, the promises: :mod:`fault_promises`.

    python -m simulation.faults --seeds 2000
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from random import Random
from time import perf_counter

from simulation.fault_promises import check
from simulation.fault_workers import HEALED, Poison, SimulatedPeer
from simulation.fault_world import OUTPUT, FaultWorld
from speculation.events import PeerId, Role
from speculation.messages import SessionId
from speculation.request.poison_detector import PoisonLimits

SESSIONS = 6
ROOMY = 1 << 20
LIMITS = PoisonLimits()
STORMY_TRIES = 6
"""Where a storm begins with the first request, its first two deaths are as often chance as not."""
CALMER_AFTER = 8.0
"""Virtual seconds in which faults become half as frequent. Who is suspected when a storm ends at once, and it is quiet
from then on, counts as poison, and rightly so by all that a router can know."""


@dataclass(frozen=True, slots=True)
class Weather:
    """The faults of one run. Times are mean seconds between two such faults; 0: never."""

    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.002
    """Mean one-way delay in seconds, exponentially distributed; order within a stream is kept."""
    crash_every: float = 0.0
    """For each worker, as the next ones."""
    hang_every: float = 0.0
    """Stopped for a while, as by SIGSTOP."""
    stuck_every: float = 0.0
    """A computing thread that does not come back from a step."""
    cut_every: float = 0.0
    """A stream that ends for one side only."""
    drain_every: float = 0.0
    """A worker drained and replaced."""
    node_every: float = 0.0
    """A target and two drafters killed at once."""
    drafts_away_every: float = 0.0
    """All drafters drained, to come back later."""
    scale_every: float = 0.0
    upgrade_after: float = 0.0
    """Mean seconds until all targets are replaced, one after another, by those of another revision; 0: never."""
    router_every: float = 0.0
    """The router lost, and everything begun again at another."""
    lies: bool = False
    """Whether a drafter says what only targets say."""
    capacity: int = ROOMY
    """Sessions that a target takes from one router."""
    poison: str = ""
    """What a request does to targets that compute it; none if empty."""
    poisonous: int = 0
    agreement: float = 0.8

    @classmethod
    def random(cls, rng: Random) -> Weather:
        """One of many kinds of weather, calm ones included."""
        calm = cls(
            doubling=rng.choice([0.0, 0.05]),
            delay=rng.choice([0.0005, 0.005, 0.05]),
            agreement=rng.choice([0.0, 0.5, 0.8, 1.0]),
            capacity=rng.choice([ROOMY, ROOMY, ROOMY, 2]),
            poison=rng.choice(["", "", "", "dies", "dies", "hangs", "refuses"]),
            poisonous=rng.choice([1, 1, 2]),
            lies=rng.choice([False, False, True]),
        )
        match rng.randrange(6):
            case 0:
                return calm
            case 1:  # planned changes only
                return replace(
                    calm,
                    drain_every=rng.choice([0.0, 1.0, 3.0]),
                    drafts_away_every=rng.choice([0.0, 1.0]),
                    scale_every=rng.choice([0.0, 1.0]),
                )
            case 2:  # and a new revision
                return replace(
                    calm, poison="", upgrade_after=rng.choice([0.3, 1.0]), drain_every=rng.choice([0.0, 1.0])
                )
            case _:
                # Poison that computes on where the router believes it gone cannot be told from chance.
                believed = not calm.poison
                return replace(
                    calm,
                    loss=rng.choice([0.0, 0.0, 0.01, 0.1]) * believed,
                    crash_every=rng.choice([0.0, 0.3, 2.0]),
                    hang_every=rng.choice([0.0, 0.0, 1.0]),
                    stuck_every=rng.choice([0.0, 0.0, 2.0]),
                    cut_every=rng.choice([0.0, 0.0, 1.0]) * believed,
                    drain_every=rng.choice([0.0, 1.0]),
                    node_every=rng.choice([0.0, 0.0, 2.0]),
                    drafts_away_every=rng.choice([0.0, 2.0]),
                    scale_every=rng.choice([0.0, 1.0]),
                    router_every=rng.choice([0.0, 0.0, 0.0, 3.0]) * believed,
                )

    @property
    def quiet(self) -> bool:
        """Whether workers come to harm by poison only."""
        troubles = (self.loss, self.crash_every, self.hang_every, self.stuck_every, self.cut_every, self.node_every)
        return not any(troubles) and not self.router_every


class FaultRun:
    """One seed: its weather, its world, its requests."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        """The same seed and weather give the same run, event by event."""
        self.rng = Random(seed)
        self.weather = weather = weather or Weather.random(self.rng)
        self.world = FaultWorld(
            self.rng,
            delay=weather.delay,
            loss=weather.loss,
            doubling=weather.doubling,
            agreement=weather.agreement,
            capacity=weather.capacity,
            tries=LIMITS.tries if weather.quiet else STORMY_TRIES,
            upgrades=weather.upgrade_after > 0,
        )
        self.world.peers[PeerId("d2")].lies = weather.lies

    def run(self) -> FaultWorld:
        """Serve all requests to their end, then check the promises."""
        world, weather = self.world, self.weather
        numbers = [world.begin(self.rng.random()) for _ in range(SESSIONS)]
        for number in numbers[-weather.poisonous :] if weather.poison else []:
            prompt = world.sessions[number].prompt_length
            world.poison[number] = Poison(prompt + self.rng.choice([0, OUTPUT // 2]), weather.poison)
        if self.rng.random() < 0.5:
            world.at(self.rng.uniform(0.1, 1.5), lambda: world.client_stops(SessionId(0)))
        self._schedule()
        world.run()
        check(world, quiet=weather.quiet, lossless=not weather.loss, roomy=weather.capacity == ROOMY)
        return world

    # -- when faults happen --------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        world, weather, rng = self.world, self.weather, self.rng
        spare = SimulatedPeer(PeerId("t2"), Role.TARGET, up=False, known=False)
        world.peers[spare.name] = spare
        for peer in list(world.peers.values()):
            if peer is not spare:
                self._repeat(weather.crash_every, lambda peer=peer: world.crash(peer))  # type: ignore[misc]
            self._repeat(weather.hang_every, lambda peer=peer: world.stop_process(peer, rng.uniform(0.05, 4.0)))  # type: ignore[misc]
            self._repeat(weather.stuck_every, lambda peer=peer: world.get_stuck(peer))  # type: ignore[misc]
            self._repeat(weather.cut_every, lambda peer=peer: self._cut(peer))  # type: ignore[misc]
        self._repeat(weather.drain_every, self._roll)
        self._repeat(weather.node_every, self._remove_node)
        self._repeat(weather.drafts_away_every, self._send_drafters_away)
        self._repeat(weather.scale_every, lambda: world.drain(spare, None) if spare.up else world.come_back(spare))
        if weather.upgrade_after:
            when = rng.expovariate(1 / weather.upgrade_after)
            for name in ("t2", "t0", "t1"):
                world.at(when, lambda peer=world.peers[PeerId(name)]: world.upgrade(peer, rng.uniform(0.01, 1.0)))  # type: ignore[misc]
                when += rng.choice([0.0, 0.02, 0.5]) * rng.random()
        # A router that knows nothing yet, and sees workers die just before the storm ends, must think it was a request.
        self._repeat(weather.router_every, world.replace_router, until=HEALED / 2)

    def _repeat(self, mean: float, fault: Callable[[], None], until: float = HEALED) -> None:
        """Let ``fault`` happen again and again, ever more rarely, until the faults stop."""

        def strike() -> None:
            fault()
            self._repeat(mean, fault, until)

        calmer = 1 + (self.world.now / CALMER_AFTER) ** 2
        when = self.world.now + self.rng.expovariate(1 / mean) * calmer if mean else until
        if when < until and self.world.running:
            self.world.at(when, strike)

    def _cut(self, peer: SimulatedPeer) -> None:
        self.rng.choice([self.world.cut_for_worker, self.world.cut_for_router])(peer)

    def _roll(self) -> None:
        """Replace a worker, unless it is the last of its role that stays."""
        peer = self.rng.choice([self.world.peers[PeerId(name)] for name in ("t0", "t1", "d0", "d1", "d2")])
        others = [p for p in self.world.peers.values() if p.role is peer.role and p is not peer]
        if any(other.known and not other.draining for other in others):
            self.world.drain(peer, self.rng.uniform(0.01, 1.0))

    def _remove_node(self) -> None:
        back_in = self.rng.uniform(0.5, 5.0)
        for name in (self.rng.choice(["t0", "t1"]), "d0", "d1"):
            self.world.crash(self.world.peers[PeerId(name)], back_in)

    def _send_drafters_away(self) -> None:
        back_in = self.rng.uniform(0.5, 3.0)
        for name in ("d0", "d1", "d2"):
            self.world.drain(self.world.peers[PeerId(name)], back_in)


@dataclass(frozen=True, slots=True)
class FaultTotals:
    """What many runs add up to."""

    events: int = 0
    accepted: int = 0
    reopened: int = 0
    moved: int = 0
    poisoned: int = 0

    def __add__(self, other: FaultTotals) -> FaultTotals:
        return FaultTotals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def run_seed(seed: int) -> FaultTotals | str:
    """One run; what it adds to the totals, or which promise it broke."""
    try:
        world = FaultRun(seed).run()
    except AssertionError as error:
        return f"seed {seed}: {error}\nreplay: python -m simulation.faults --first {seed} --seeds 1\n"
    sessions = world.sessions.values()
    moved = sum(session.moved for session in sessions)
    return FaultTotals(world.events, world.accepted, sum(s.reopened for s in sessions), moved, len(world.harmed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds; on the first failure say how to replay it."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation.faults", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--seeds", type=int, default=500, help="number of runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    started, totals = perf_counter(), FaultTotals()
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(run_seed, seeds, chunksize=max(min(options.seeds // 50, 50), 1)):
            if isinstance(result, str):
                sys.stderr.write(result)
                pool.shutdown(cancel_futures=True)
                return 1
            totals += result
    rate = options.seeds / (perf_counter() - started)
    tokens = options.seeds * SESSIONS * OUTPUT
    sys.stdout.write(
        f"{options.seeds} seeds passed ({rate:.0f} a second): {totals.events} events, "
        f"{totals.accepted} of about {tokens} tokens drafted, {totals.reopened} failovers, {totals.moved} moves, "
        f"{totals.poisoned} poison requests\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
