"""Runs the table's scenarios, or random faults, on a stage of their own each time, and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime

from benchmarks.chaos import report, scenarios, soak
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.settings import Options, configuration
from benchmarks.chaos.stage import Stage, running
from cluster.console import say
from cluster.flags import FAILED
from cluster.ports import HeldPort

Play = Callable[[Stage, Options], Awaitable[list[Outcome]]]


def chaos(options: Options) -> int:
    """The table; the exit code says whether every row holds. Raises :class:`benchmarks.chaos.stage.StageError`."""
    return _report(options, "chaos", asyncio.run(_on_stage(_all, options)))


def random_faults(options: Options) -> int:
    """The same for random faults."""
    return _report(options, "soak", asyncio.run(_on_stage(_soak, options)))


async def _on_stage(play: Play, options: Options) -> list[Outcome]:
    say("starting the cluster")
    with closing(HeldPort()) as port:
        async with running(configuration(port.number, options.dtype)) as stage:
            say(f"Paceline serves at {stage.url}")
            return await play(stage, options)


async def _all(stage: Stage, options: Options) -> list[Outcome]:
    outcomes = []
    for scenario in scenarios.scenarios(options):
        if not options.only or scenario.name in options.only:
            say(f"{scenario.name}: {scenario.fault}")
            outcome = await scenarios.run(scenario, stage, options)
            outcomes.append(outcome)
            say(f"  {report.verdict(outcome)}")
            _save(options, "chaos", outcomes)  # a run of many minutes may be cut short
            if stage.ended:
                await stage.up()
    return outcomes


async def _soak(stage: Stage, options: Options) -> list[Outcome]:
    say(f"random faults of seed {options.seed}:")
    return [await soak.soak(stage, options, say)]


def _report(options: Options, name: str, outcomes: list[Outcome]) -> int:
    result = _save(options, name, outcomes)
    report.show(result)
    return 0 if result.holds else FAILED


def _save(options: Options, name: str, outcomes: list[Outcome]) -> report.Result:
    """Write what is known by now where it is wanted."""
    result = report.Result(datetime.now(UTC).date(), options, outcomes)
    if options.json:
        report.write_json(result, options.json)
    if options.out:
        report.write_folder(result, options.out, name)
    return result
