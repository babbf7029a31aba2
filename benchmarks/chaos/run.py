"""Runs the table's scenarios, or random faults, on a stage of their own each time, and shows what faults did.

The schedule of random faults is drawn before anything runs, from the seed alone. A fault whose time comes while another
still heals is injected all the same, except that the last target that serves is spared: without any there is nothing to
measure. Such a fault is skipped, and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from random import Random

from benchmarks.chaos import faults, scenarios, settings
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.processes import ROUTER, Process
from benchmarks.chaos.scenarios import Scenario
from benchmarks.chaos.settings import ChaosOptions, FaultOptions, SoakOptions, configuration
from benchmarks.chaos.stage import Stage, StageError, running
from benchmarks.chaos.workload import FaultResult, Requirement, Workload
from benchmarks.harness.options import known
from benchmarks.harness.report import Result, describe_machine, table_of
from cluster.console import FAILED, say
from cluster.processes.child import HeldPort
from speculation.events import Role

PAUSE_SECONDS = (3.0, 8.0)
STOP_SECONDS = (1.0, 15.0)
REQUESTS = 64
WARM_SECONDS = 30.0
"""Load without faults before memory is first looked at."""
MEMORY_FACTOR, MEMORY_MB = 1.3, 64
"""Memory is flat if at the end it is at most so many times, and so much, more than when warm."""
DESCRIPTORS = 24
"""Most files and sockets that a router may have open at the end beyond what it began with."""
WANTED = Requirement("0 after acceptance, memory flat, nothing left")


KINDS: Mapping[str, tuple[int, Callable[[Random], Fault]]] = {
    "kill a drafter": (4, lambda _: partial(faults.kill_replica, role=Role.DRAFT)),
    "kill all drafters": (1, lambda _: faults.kill_drafters),
    "stop a drafter": (3, lambda rng: partial(faults.stop_replica, role=Role.DRAFT, seconds=_stop(rng))),
    "kill a target": (4, lambda _: partial(faults.kill_replica, role=Role.TARGET)),
    "kill rank 1 of a target": (3, lambda _: faults.kill_rank),
    "stop a target": (3, lambda rng: partial(faults.stop_replica, role=Role.TARGET, seconds=_stop(rng))),
    "hang rank 1 of a target": (1, lambda _: faults.stop_rank),
    "starve a drafter": (1, lambda rng: partial(faults.starve_drafter, seconds=_stop(rng))),
    "kill the controller": (1, lambda _: faults.kill_controller),
    "remove a small node": (1, lambda _: partial(faults.remove_node, gpu_class="small")),
    "remove a large node": (1, lambda _: partial(faults.remove_node, gpu_class="large")),
}
"""How often each is drawn among them all, and what makes it."""


def _stop(rng: Random) -> float:
    return rng.uniform(*STOP_SECONDS)


def schedule(seed: int, seconds: float) -> list[tuple[float, str, int]]:
    """Seconds from the end of the fault before, kind and seed of each fault.

    More than enough for so long; what comes after that time is not injected.
    """
    rng = Random(f"{seed} soak")
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    planned, total = list[tuple[float, str, int]](), 0.0
    while total < seconds:
        pause = rng.uniform(*PAUSE_SECONDS)
        planned.append((pause, rng.choices(kinds, weights)[0], rng.getrandbits(32)))
        total += pause
    return planned


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of the largest process of each kind, in MB, and open files and sockets of the routers."""

    memory: Mapping[str, float]
    descriptors: int


async def footprint(stage: Stage) -> Footprint:
    """Of what runs now."""
    processes: dict[str, list[Process]] = {"router": await stage.found(ROUTER)}
    for role in Role:
        processes[role.value] = [worker.replica for worker in await stage.workers(role)]
    memory = {name: max((process.resident_mb for process in some), default=0.0) for name, some in processes.items()}
    return Footprint(memory, sum(router.descriptors for router in processes["router"]))


def against_growth(before: Footprint, after: Footprint) -> list[str]:
    """What has grown too much."""
    found = [
        f"the {name} takes {after.memory[name]:.0f} MB, when warm {was:.0f}"
        for name, was in before.memory.items()
        if after.memory[name] > was * MEMORY_FACTOR + MEMORY_MB
    ]
    if after.descriptors > before.descriptors + DESCRIPTORS:
        found.append(f"routers have {after.descriptors} files and sockets open, at the start {before.descriptors}")
    return found


async def soak(stage: Stage, options: SoakOptions) -> FaultResult:
    """Random faults for ``options.minutes``."""
    say(f"of seed {options.seed}:")
    requests = options.requests(options.tokens, REQUESTS)
    quiet = await footprint(stage)
    complaints: list[str] = []
    async with Workload(stage.url, requests, options.streams) as load:
        await asyncio.sleep(WARM_SECONDS)
        warm = await footprint(stage)
        done = await _inject_all(stage, options, complaints)
        try:
            await stage.whole()
        except StageError as error:
            complaints.append(str(error))
        await load.finish()
    await stage.left()  # what is still held is told of every row
    end = await footprint(stage)
    complaints += against_growth(Footprint(warm.memory, quiet.descriptors), end)
    notes = [f"{count} x {kind}" for kind, count in sorted(done.items())]
    notes += [f"{name}: {was:.0f} MB warm, {end.memory[name]:.0f} at the end" for name, was in warm.memory.items()]
    notes.append(f"files and sockets of routers: {quiet.descriptors} at the start, {end.descriptors} at the end")
    counted = await stage.tally(requests, load.replies)
    return FaultResult(options.streams, counted, complaints=complaints, notes=notes)


async def _inject_all(stage: Stage, options: SoakOptions, complaints: list[str]) -> Counter[str]:
    """Follow the schedule until the time is over; how often each fault was injected."""
    began, seconds = time.monotonic(), 60 * options.minutes
    done: Counter[str] = Counter()
    for pause, kind, seed in schedule(options.seed, seconds):
        await asyncio.sleep(pause)
        now = time.monotonic() - began
        if now >= seconds:
            break
        (_, make), rng = KINDS[kind], Random(seed)
        takes_target = "target" in kind or "large" in kind
        if takes_target and await stage.missing(Role.TARGET):
            done["skipped, no target to spare"] += 1
            say(f"{now:7.1f} s  {kind}: skipped, no target to spare")
            continue
        say(f"{now:7.1f} s  {kind}")
        try:
            await make(rng)(stage, rng)
            done[kind] += 1
        except StageError:
            done["skipped, no victim"] += 1
        except TimeoutError:
            complaints.append(f"{kind} at {now:.0f} s: the process, or its successor, was waited for in vain")
    return done


NOTES = (
    "Longest silence: of all streams, between two pieces of text, as the client saw it. First token: the longest wait "
    "for one, queueing included. Whole after: from the fault until all workers were back and of use to the router; "
    "where something was stopped or removed, with the time that it was.",
    "Load and random faults ask for a few requests again and again; every other row asks only for new ones, whose "
    "texts no target has in its cache.",
    "A node is removed by killing all its processes at once, and comes back ten seconds later. Clients connect "
    "through the head, which is not removed, and there through Serve's own proxy; long streams through HAProxy, as in "
    "Kubernetes.",
)


def main(options: ChaosOptions | SoakOptions) -> int:
    """The table, or random faults; the exit code says whether every row holds.

    Raises :class:`benchmarks.chaos.stage.StageError`.
    """
    if isinstance(options, SoakOptions):
        fault = f"random faults for {options.minutes:g} minutes"
        return _played(options, [Scenario("soak", fault, WANTED, soak)])
    rows = scenarios.scenarios(options)
    known("--only", options.only, [row.name for row in rows], "fault")
    if options.listed:
        for row in rows:
            say(f"{row.name:16} {row.fault}")
        return 0
    return _played(options, [row for row in rows if not options.only or row.name in options.only])


def _played(options: FaultOptions, rows: Sequence[Scenario]) -> int:
    outcomes: list[FaultResult] = []

    async def play(rows: Sequence[Scenario], *, haproxy: bool) -> None:
        say("starting the cluster, behind HAProxy" if haproxy else "starting the cluster")
        with closing(HeldPort()) as port:
            async with running(configuration(port.number, options.dtype), haproxy=haproxy) as stage:
                say(f"Paceline serves at {stage.url}")
                for scenario in rows:
                    say(f"{scenario.name}: {scenario.fault}")
                    outcomes.append(await scenarios.run(scenario, stage, options))
                    say(f"  {verdict(outcomes[-1])}")
                    result(options, outcomes).save()  # a run of many minutes may be cut short
                    if stage.ended:
                        await stage.up()

    for haproxy in (False, True):
        if chosen := [row for row in rows if row.haproxy is haproxy]:
            asyncio.run(play(chosen, haproxy=haproxy))
    result(options, outcomes).publish()
    return 0 if all(outcome.holds for outcome in outcomes) else FAILED


def result(options: FaultOptions, outcomes: Sequence[FaultResult]) -> Result:
    """What is known by now."""
    machine = describe_machine()
    about = (
        f"{machine['processor']}, {machine['cores']} cores for everything: a pretend Ray cluster of a head, two "
        f"small-GPU and two large-GPU nodes, {settings.TARGETS} targets of {settings.RANKS} ranks, {settings.DRAFTS} "
        f"drafters, {settings.ROUTERS} router, the bundled models in {options.dtype}. Requests of {options.tokens} new "
        f"tokens at temperature {settings.TEMPERATURE}, one after another; every text is compared with that of plain "
        "decoding, undisturbed."
    )
    table = table_of(
        "Faults under streaming requests",
        outcomes,
        {
            "fault": lambda one: one.fault,
            "streams": lambda one: one.streams,
            "requests": lambda one: one.tally.requests,
            "refused (429)": lambda one: one.tally.refused,
            "failed": lambda one: one.tally.failed,
            "text different": lambda one: one.tally.different,
            "longest silence": lambda one: f"{one.tally.silence.seconds:.2f} s",
            "first token": lambda one: f"{one.tally.first_token:.2f} s",
            "whole after": lambda one: f"{one.seconds:.1f} s" if one.seconds else "",
            "wanted": lambda one: one.wanted.text,
            "holds": lambda one: "yes" if one.holds else "NO",
        },
    )
    figures = [f"{one.name}: {'; '.join(one.notes)}" for one in outcomes if one.notes]
    problems = [f"{one.name}, NOT AS WANTED: {why}" for one in outcomes for why in one.problems]
    return Result(
        "Faults",
        options,
        [table],
        [about, *figures, *problems, *NOTES],
        {
            "seed": options.seed,
            "streams": options.streams,
            "tokens": options.tokens,
            "cluster": configuration(0, options.dtype),
            "holds": all(outcome.holds for outcome in outcomes),
            "rows": [{**asdict(one), "problems": one.problems, "holds": one.holds} for one in outcomes],
        },
    )


def verdict(outcome: FaultResult) -> str:
    """A row in one line."""
    counted = outcome.tally
    figures = f"{counted.failed} failed, {counted.different} different, silence {counted.silence.seconds:.2f} s"
    return f"as wanted: {figures}" if outcome.holds else f"NOT AS WANTED: {'; '.join(outcome.problems)} ({figures})"
