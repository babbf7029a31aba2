"""Random faults every few seconds, for minutes, under a steady load; then a look at what is left.

The schedule is drawn before anything runs, from the seed alone, and printed, so that it can be replayed. A fault whose
time comes while another still heals is injected all the same, except that the last target that serves is spared:
without any there is nothing to measure. Such a fault is skipped, and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from benchmarks.chaos import faults
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.processes import Process
from benchmarks.chaos.records import FaultResult, Requirement
from benchmarks.chaos.settings import FINISH_SECONDS, HEAL_SECONDS, SoakOptions
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import Workload
from speculation.events import Role

PAUSE_SECONDS = (3.0, 8.0)
STOP_SECONDS = (1.0, 15.0)
REQUESTS = 64
WARM_SECONDS = 30.0
"""Load without faults before memory is first looked at."""
MEGABYTE = 1 << 20
MEMORY_FACTOR, MEMORY_MB = 1.3, 64
"""Memory is flat if at the end it is at most so many times, and so much, more than when warm."""
DESCRIPTORS = 24
"""Most files and sockets that a router may have open at the end beyond what it began with."""
WANTED = Requirement("0 after acceptance, memory flat, nothing left")


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault of the schedule."""

    after: float
    """Seconds from the end of the one before."""
    kind: str
    seed: int


@dataclass(frozen=True, slots=True)
class _Kind:
    make: Callable[[Random], Fault]
    weight: int
    takes_target: bool = False


KINDS: Mapping[str, _Kind] = {
    "kill a drafter": _Kind(lambda _: faults.kill_replica(Role.DRAFT), 4),
    "kill all drafters": _Kind(lambda _: faults.kill_all(Role.DRAFT), 1),
    "stop a drafter": _Kind(lambda rng: faults.stop_replica(Role.DRAFT, rng.uniform(*STOP_SECONDS)), 3),
    "kill a target": _Kind(lambda _: faults.kill_replica(Role.TARGET), 4, takes_target=True),
    "kill rank 1 of a target": _Kind(lambda _: faults.kill_rank, 3, takes_target=True),
    "stop a target": _Kind(
        lambda rng: faults.stop_replica(Role.TARGET, rng.uniform(*STOP_SECONDS)), 3, takes_target=True
    ),
    "hang rank 1 of a target": _Kind(lambda _: faults.stop_rank, 1, takes_target=True),
    "starve a drafter": _Kind(lambda rng: faults.starve_drafter(rng.uniform(*STOP_SECONDS)), 1),
    "kill the controller": _Kind(lambda _: faults.kill_controller, 1),
    "remove a small node": _Kind(lambda _: faults.remove_node("small"), 1),
    "remove a large node": _Kind(lambda _: faults.remove_node("large"), 1, takes_target=True),
}


def schedule(seed: int, seconds: float) -> list[Planned]:
    """More than enough faults for so long; what comes after that time is not injected."""
    rng = Random(f"{seed} soak")
    kinds, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    planned, total = [], 0.0
    while total < seconds:
        pause = rng.uniform(*PAUSE_SECONDS)
        planned.append(Planned(pause, rng.choices(kinds, weights)[0], rng.getrandbits(32)))
        total += pause
    return planned


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of the largest process of each kind, in bytes, and open files and sockets of the routers."""

    memory: Mapping[str, int]
    descriptors: int


async def footprint(stage: Stage) -> Footprint:
    """Of what runs now."""
    processes: dict[str, list[Process]] = {"router": await asyncio.to_thread(stage.processes.routers)}
    for role in Role:
        processes[role.value] = [worker.replica for worker in await stage.workers(role)]
    memory = {name: max((process.resident for process in some), default=0) for name, some in processes.items()}
    return Footprint(memory, sum(router.descriptors for router in processes["router"]))


def against_growth(before: Footprint, after: Footprint) -> list[str]:
    """What has grown too much."""
    found = [
        f"the {name} takes {after.memory[name] / MEGABYTE:.0f} MB, when warm {was / MEGABYTE:.0f}"
        for name, was in before.memory.items()
        if after.memory[name] > was * MEMORY_FACTOR + MEMORY_MB * MEGABYTE
    ]
    if after.descriptors > before.descriptors + DESCRIPTORS:
        found.append(f"routers have {after.descriptors} files and sockets open, at the start {before.descriptors}")
    return found


async def soak(stage: Stage, options: SoakOptions, say: Callable[[str], None]) -> FaultResult:
    """Random faults for ``options.minutes``."""
    requests = options.requests(options.tokens, REQUESTS)
    quiet = await footprint(stage)
    complaints: list[str] = []
    async with Workload(stage.url, requests, options.streams) as load:
        await asyncio.sleep(WARM_SECONDS)
        warm = await footprint(stage)
        done = await _inject_all(stage, options, say, complaints)
        try:
            await stage.whole(HEAL_SECONDS)
        except StageError as error:
            complaints.append(str(error))
        await load.finish(FINISH_SECONDS)
    complaints += [words for words in (stage.ended, await stage.left()) if words]
    end = await footprint(stage)
    complaints += against_growth(Footprint(warm.memory, quiet.descriptors), end)
    notes = [f"{count} x {kind}" for kind, count in sorted(done.items())]
    notes += [
        f"{name}: {warm.memory[name] / MEGABYTE:.0f} MB warm, {end.memory[name] / MEGABYTE:.0f} at the end"
        for name in warm.memory
    ]
    notes.append(f"files and sockets of routers: {quiet.descriptors} at the start, {end.descriptors} at the end")
    counted = await stage.tally(requests, load.replies)
    title = f"random faults for {options.minutes:g} minutes"
    return FaultResult(options.streams, counted, 0.0, complaints, notes, "soak", title, WANTED)


async def _inject_all(
    stage: Stage, options: SoakOptions, say: Callable[[str], None], complaints: list[str]
) -> Counter[str]:
    """Follow the schedule until the time is over; how often each fault was injected."""
    began, seconds = time.monotonic(), 60 * options.minutes
    done: Counter[str] = Counter()
    for planned in schedule(options.seed, seconds):
        await asyncio.sleep(planned.after)
        now = time.monotonic() - began
        if now >= seconds:
            break
        kind, rng = KINDS[planned.kind], Random(planned.seed)
        if kind.takes_target and await stage.missing(Role.TARGET):
            done["skipped, no target to spare"] += 1
            say(f"{now:7.1f} s  {planned.kind}: skipped, no target to spare")
            continue
        say(f"{now:7.1f} s  {planned.kind}")
        try:
            await kind.make(rng)(stage, rng)
            done[planned.kind] += 1
        except StageError:
            done["skipped, no victim"] += 1
        except TimeoutError:
            complaints.append(f"{planned.kind} at {now:.0f} s: the process, or its successor, was waited for in vain")
    return done
