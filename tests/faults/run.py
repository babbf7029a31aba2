"""A deterministic simulation of router, drafters and targets under faults; see :mod:`tests.faults.world`.

The weather of a run says which faults it has and how often. Messages are delayed, lost and doubled, streams break for
one end or both, workers are killed, stopped, stuck, drained and replaced, alone or many at once, the router itself is
lost, a drafter lies, and some requests are poison. After that, what must hold after every run (:func:`check`).

    python -m tests.faults.run --seeds 2000
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from random import Random
from time import perf_counter

from speculation.events import FailureCode, PeerId, Role
from speculation.messages import SessionId
from speculation.request.poison_detector import PoisonLimits
from tests.faults.weather import ROOMY, Weather
from tests.faults.workers import HEALED, Poison, SimulatedPeer
from tests.faults.world import OUTPUT, FaultWorld

SESSIONS = 6
CALMER_AFTER = 8.0
"""Virtual seconds in which faults become half as frequent. Who is suspected when a storm ends at once, and it is quiet
from then on, counts as poison, and rightly so by all that a router can know."""


def check(world: FaultWorld, weather: Weather) -> None:
    """Raise AssertionError where a promise is broken, whatever happened in a run.

    That the text is the target's own, and nothing is said twice, is checked at every emission; that every session ends,
    by the clock of the world.
    """
    for number in world.sessions:
        _check_end(world, number, roomy=weather.capacity == ROOMY)
    _check_poison(world, quiet=weather.quiet)
    if weather.quiet and not world.poison:
        assert not world.unexpected, "a worker left that had not said so"
        reopened = sum(session.reopened for session in world.sessions.values())
        assert not reopened, f"{reopened} sessions counted a fault where there was none"
    if not weather.loss:
        held = {
            name: list(worker.sessions)
            for name, peer in world.peers.items()
            for worker in peer.links.values()
            if worker.sessions
        }
        assert not held, f"sessions left behind: {held}"
    known = world.poison_detector
    assert not known._waiting and not known._reserved and not known._suspicions, (
        "a router remembers sessions that are over"
    )


def _check_end(world: FaultWorld, number: SessionId, *, roomy: bool) -> None:
    """Innocent requests end with all their text; what the client stopped, with a part of it."""
    session, emitted = world.sessions[number], tuple(world.emitted[number])
    assert emitted == session.output, "what was emitted is not what is committed"
    code = world.failed.get(number)
    if code is FailureCode.OVERLOADED:
        assert not roomy and not emitted, f"session {number} was begun, and then refused for want of room"
    elif code is FailureCode.UNAVAILABLE and world.upgraded and emitted and not world.revisions[number]:
        assert emitted == world.truth[number][: len(emitted)]  # no target of its revision was left
    elif number not in world.poison:
        assert code is None, f"session {number} is innocent, and was failed: {code}"
        assert number in world.stopped or emitted == world.truth[number], f"session {number} ended early"


def _check_poison(world: FaultWorld, *, quiet: bool) -> None:
    """Poison is failed, after as many tries as it takes to be sure, and no more."""
    limits = PoisonLimits()
    for number in world.poison:
        code, harmed = world.failed.get(number), world.harmed.get(number, 0)
        assert code in (FailureCode.FAULTY, FailureCode.OVERLOADED) or number in world.stopped, (
            f"poison request {number} was not failed"
        )
        # One more if it was among others at first, or had committed before it did harm.
        assert not quiet or harmed <= limits.tries + 10, f"poison request {number} harmed {harmed} targets"


class FaultRun:
    """One seed: its weather, its world, its requests."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        """The same seed and weather give the same run, event by event."""
        self.rng = Random(seed)
        self.weather = weather = weather or Weather.random(self.rng)
        self.world = FaultWorld(self.rng, weather)
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
        check(world, weather)
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
            self._repeat(weather.unlist_every, lambda peer=peer: world.unlist(peer, rng.uniform(0.01, 0.5)))  # type: ignore[misc]
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


def run_seed(seed: int) -> Counter[str] | str:
    """One run; what it adds to the totals, or which promise it broke."""
    try:
        world = FaultRun(seed).run()
    except AssertionError as error:
        return f"seed {seed}: {error}\nreplay: python -m tests.faults.run --first {seed} --seeds 1\n"
    sessions = world.sessions.values()
    return Counter(
        events=world.events,
        accepted=world.accepted,
        reopened=sum(session.reopened for session in sessions),
        moved=sum(session.moved for session in sessions),
        poisoned=len(world.harmed),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds; on the first failure say how to replay it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.run", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--seeds", type=int, default=500, help="number of runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    started, totals = perf_counter(), Counter[str]()
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(run_seed, seeds, chunksize=max(min(options.seeds // 50, 50), 1)):
            if isinstance(result, str):
                sys.stderr.write(result)
                pool.shutdown(cancel_futures=True)
                return 1
            totals.update(result)
    rate = options.seeds / (perf_counter() - started)
    tokens = options.seeds * SESSIONS * OUTPUT
    sys.stdout.write(
        f"{options.seeds} seeds passed ({rate:.0f} a second): {totals['events']} events, {totals['accepted']} of about "
        f"{tokens} tokens drafted, {totals['reopened']} failovers, {totals['moved']} moves, "
        f"{totals['poisoned']} poison requests\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
