"""Runs the table's scenarios, or random faults, on a stage of their own each time, and shows what faults did."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial

from benchmarks.chaos import scenarios, settings, soak
from benchmarks.chaos.records import FaultResult
from benchmarks.chaos.scenarios import Scenario
from benchmarks.chaos.settings import ChaosOptions, FaultOptions, SoakOptions, configuration
from benchmarks.chaos.stage import Stage, running
from benchmarks.harness.options import known
from benchmarks.harness.report import Result, Table, table_of
from cluster.console import FAILED, say
from cluster.processes.child import HeldPort

NOTES = (
    "Longest silence: of all streams, between two pieces of text, as the client saw it. First token: the longest wait "
    "for one, queueing included. Whole after: from the fault until all workers were back and connected to the router; "
    "where something was stopped or removed, with the time that it was.",
    "Load and random faults ask for a few requests again and again; every other row asks only for new ones, whose "
    "texts no target has in its cache.",
    "A node is removed by killing all its processes at once, and comes back ten seconds later. Clients connect "
    "through the head, which is not removed, and there through Serve's own proxy; long streams through HAProxy, as in "
    "Kubernetes.",
)


def chaos(options: ChaosOptions) -> int:
    """The table; the exit code says whether every row holds. Raises :class:`benchmarks.chaos.stage.StageError`."""
    rows = scenarios.scenarios(options)
    known("--only", options.only, [row.name for row in rows], "fault")
    if options.listed:
        for row in rows:
            say(f"{row.name:16} {row.fault}")
        return 0

    outcomes: list[FaultResult] = []

    async def play(stage: Stage, rows: Sequence[Scenario]) -> None:
        for scenario in rows:
            say(f"{scenario.name}: {scenario.fault}")
            outcomes.append(await scenarios.run(scenario, stage, options))
            say(f"  {verdict(outcomes[-1])}")
            result(options, outcomes).save()  # a run of many minutes may be cut short
            if stage.ended:
                await stage.up()

    for haproxy in (False, True):
        chosen = [row for row in rows if row.haproxy is haproxy and (not options.only or row.name in options.only)]
        if chosen:
            _on_stage(options, partial(play, rows=chosen), haproxy=haproxy)
    return _published(options, outcomes)


def random_faults(options: SoakOptions) -> int:
    """The same for random faults."""
    outcomes: list[FaultResult] = []

    async def play(stage: Stage) -> None:
        say(f"random faults of seed {options.seed}:")
        outcomes.append(await soak.soak(stage, options, say))

    _on_stage(options, play)
    return _published(options, outcomes)


def _on_stage(options: FaultOptions, play: Callable[[Stage], Awaitable[None]], *, haproxy: bool = False) -> None:
    async def run() -> None:
        say("starting the cluster, behind HAProxy" if haproxy else "starting the cluster")
        with closing(HeldPort()) as port:
            async with running(configuration(port.number, options.dtype), haproxy=haproxy) as stage:
                say(f"Paceline serves at {stage.url}")
                await play(stage)

    asyncio.run(run())


def _published(options: FaultOptions, outcomes: Sequence[FaultResult]) -> int:
    result(options, outcomes).publish()
    return 0 if all(outcome.holds for outcome in outcomes) else FAILED


def result(options: FaultOptions, outcomes: Sequence[FaultResult]) -> Result:
    """What is known by now."""
    found = Result(
        options.BENCH,
        "Faults",
        options,
        [table(outcomes)],
        remarks(outcomes),
        {
            "seed": options.seed,
            "streams": options.streams,
            "tokens": options.tokens,
            "cluster": configuration(0, options.dtype),
            "holds": all(outcome.holds for outcome in outcomes),
            "rows": [{**asdict(one), "problems": one.problems, "holds": one.holds} for one in outcomes],
        },
        width=220,
    )
    machine = found.machine
    about = (
        f"{machine['processor']}, {machine['cores']} cores for everything: a pretend Ray cluster of a head, two "
        f"small-GPU and two large-GPU nodes, {settings.TARGETS} targets of {settings.RANKS} ranks, {settings.DRAFTS} "
        f"drafters, {settings.ROUTERS} router, the bundled models in {options.dtype}. Requests of {options.tokens} new "
        f"tokens at temperature {settings.TEMPERATURE}, one after another; every text is compared with that of plain "
        "decoding, undisturbed."
    )
    return replace(found, notes=[about, *found.notes, *NOTES])


def table(outcomes: Sequence[FaultResult]) -> Table:
    """A row for each fault."""
    return table_of(
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


def verdict(outcome: FaultResult) -> str:
    """A row in one line."""
    counted = outcome.tally
    figures = f"{counted.failed} failed, {counted.different} different, silence {counted.silence.seconds:.2f} s"
    return f"as wanted: {figures}" if outcome.holds else f"NOT AS WANTED: {'; '.join(outcome.problems)} ({figures})"


def remarks(outcomes: Sequence[FaultResult]) -> list[str]:
    """Further figures, and what was not as it must be."""
    found = [f"{outcome.name}: {'; '.join(outcome.notes)}" for outcome in outcomes if outcome.notes]
    return found + [f"{outcome.name}, NOT AS WANTED: {why}" for outcome in outcomes for why in outcome.problems]
