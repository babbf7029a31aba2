"""Ours against plain decoding, sequential and PEARL-like drafting and transformers: runs the design of ``settings``.

One target, one drafter, a core each; the router is this process. What a contender does is said in its requests, so all
of ours run on the same processes. The server is used as it would be: learned costs and acceptances carry over from one
setting to the next, and its drafter dies, and is replaced by a wrong one, late in its life.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging as transformers_logging

from benchmarks.harness import transformers_baseline as baseline
from benchmarks.harness.measure import (
    DRAFTED,
    LENGTHS,
    PLAIN,
    WITH_LOOKUP,
    Batch,
    Run,
    Runner,
    best,
    in_chains,
    served,
    take_turns,
)
from benchmarks.harness.pair import Pair, Shape, held_out, stretched_pair, trained_pair, wrong_draft
from benchmarks.harness.processes import WorkerPlan, connected, running, until_lost
from benchmarks.speculation import figures, settings
from benchmarks.speculation.figures import ASSISTED, OURS, MeasuredRuns, PairResult, rows
from benchmarks.speculation.records import read_log
from benchmarks.speculation.report import result
from benchmarks.speculation.settings import ComparisonSetting, PairPlan, SpeculationOptions
from router.dispatch import Dispatcher
from speculation.events import Role
from speculation.messages import Schedule, Speculation

PLAIN_AND_OURS = {figures.PLAIN: PLAIN, OURS: DRAFTED}
BASELINES = {figures.SEQUENTIAL: Schedule.SEQUENTIAL, figures.PARALLEL: Schedule.PARALLEL}
WARM_UP = 2
SWEEP_PROMPTS = 2
"""Prompts on which draft lengths are tried; others than those measured."""
COLD_ROUNDS = 2
"""Rounds after a wrong drafter came that are reported apart."""


@dataclass(slots=True)
class PairBench:
    """The comparisons of one pair, on a running server."""

    pair: Pair
    options: SpeculationOptions
    prompts: Sequence[tuple[int, ...]]
    progress: Progress
    measured: list[MeasuredRuns] = field(default_factory=list)
    tried: list[MeasuredRuns] = field(default_factory=list)

    def batches(self, setting: ComparisonSetting) -> list[Batch]:
        """What every contender decodes in a setting."""
        count = self.options.prompts if setting.batch == 1 else self.options.bursts
        endless = itertools.cycle(self.prompts[:-SWEEP_PROMPTS])
        return [
            Batch(tuple(itertools.islice(endless, setting.batch)), self.options.tokens, setting.temperature, seed)
            for seed in range(count)
        ]

    async def compare(
        self,
        setting: ComparisonSetting,
        runners: Mapping[str, Runner],
        choices: Mapping[str, str],
        warm_up: int = WARM_UP,
    ) -> None:
        """Measure the contenders of a setting. ``choices``: what was chosen for whom."""
        batches = self.batches(setting)
        if setting == settings.WRONG_COLD:
            batches = batches[:COLD_ROUNDS]
        runs = await self._take_turns(f"{self.pair.name}, {setting.name}", runners, batches, warm_up)
        self.measured += [
            MeasuredRuns(self.pair.name, setting, name, tuple(runs[name]), choices.get(name, "")) for name in runners
        ]

    async def choose(self, setting: ComparisonSetting, contender: str, choices: Mapping[str, Runner]) -> str:
        """The best of the choices for a contender in a setting, on prompts that are not measured."""
        tokens = max(2 * self.options.tokens // 3, 8)
        batches = [Batch((prompt,), tokens, setting.temperature) for prompt in self.prompts[-SWEEP_PROMPTS:]]
        title = f"{self.pair.name}, {setting.name}: best {contender}"
        runs = await self._take_turns(title, choices, batches, warm_up=0)
        self.tried += [
            MeasuredRuns(self.pair.name, setting, contender, tuple(runs[choice]), choice) for choice in choices
        ]
        return best(runs)

    async def _take_turns(
        self, title: str, runners: Mapping[str, Runner], batches: Sequence[Batch], warm_up: int
    ) -> dict[str, list[Run]]:
        task = self.progress.add_task(title, total=len(runners) * (len(batches) + warm_up))
        return await take_turns(runners, batches, warm_up, lambda: self.progress.advance(task))


async def compare_ours(bench: PairBench, dispatcher: Dispatcher, setting: ComparisonSetting, lookup: bool) -> None:
    """Everyone who runs on our processes, in one setting; the baselines with their best draft length."""
    dispatcher.pool.delays[Role.DRAFT] = setting.rtt_ms / 2000
    everyone = dict(PLAIN_AND_OURS)
    choices: dict[str, str] = {}
    if setting.batch == 1:
        if lookup:
            everyone["ours with lookup"] = WITH_LOOKUP
        for name, schedule in BASELINES.items():
            known = {f"K = {length}": in_chains(schedule, length) for length in LENGTHS[schedule]}
            choices[name] = await bench.choose(setting, name, _served(dispatcher, known))
            everyone[name] = known[choices[name]]
    await bench.compare(setting, _served(dispatcher, everyone), choices)
    dispatcher.pool.delays[Role.DRAFT] = 0.0


async def compare_transformers(bench: PairBench, dispatcher: Dispatcher) -> None:
    """The other library, in turn with ours."""
    async with baseline.transformers(bench.pair, bench.options.dtype) as other:
        modes = {str(mode): baseline.runner(other, mode) for mode in baseline.ASSISTED}
        chosen = await bench.choose(settings.TRANSFORMERS, ASSISTED, modes)
        runners = {
            OURS: served(dispatcher, DRAFTED),
            "transformers plain": baseline.runner(other, baseline.PLAIN),
            ASSISTED: modes[chosen],
        }
        await bench.compare(settings.TRANSFORMERS, runners, {ASSISTED: chosen})


def _served(dispatcher: Dispatcher, known: Mapping[str, Speculation]) -> dict[str, Runner]:
    return {name: served(dispatcher, speculation) for name, speculation in known.items()}


async def measure(pair: Pair, plan: PairPlan, options: SpeculationOptions, progress: Progress) -> PairResult:
    """Start a server for the pair and run its plan."""
    bench = PairBench(pair, options, held_out(), progress)
    flags = ["--dtype", options.dtype, "--threads", "1"]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        records = [Path(name) / f"{worker}.jsonl" for worker in ("target", "draft", "wrong")]
        async with (
            running(WorkerPlan(Role.TARGET, pair.target, 0, records[0], flags)) as target,
            running(WorkerPlan(Role.DRAFT, pair.draft, 1, records[1], flags)) as draft,
            connected(target, draft) as dispatcher,
        ):
            for setting in plan.settings:
                await compare_ours(bench, dispatcher, setting, plan.lookup)
            if plan.extras:
                await compare_transformers(bench, dispatcher)
                await draft.kill()
                await until_lost(dispatcher, Role.DRAFT)
                await bench.compare(settings.DEAD, _served(dispatcher, PLAIN_AND_OURS), {})
                async with (
                    running(WorkerPlan(Role.DRAFT, wrong_draft(pair), 1, records[2], flags)) as wrong,
                    connected(target, wrong) as afterwards,
                ):
                    for setting, warm_up in ((settings.WRONG_COLD, 0), (settings.WRONG, WARM_UP)):
                        await bench.compare(setting, _served(afterwards, PLAIN_AND_OURS), {}, warm_up)
        if plan.shared:
            flags = ["--dtype", options.dtype, "--threads", str(len(os.sched_getaffinity(0)))]
            records += [Path(name) / f"shared-{role}.jsonl" for role in ("target", "draft")]
            async with (
                running(WorkerPlan(Role.TARGET, pair.target, None, records[-2], flags)) as target,
                running(WorkerPlan(Role.DRAFT, pair.draft, None, records[-1], flags)) as draft,
                connected(target, draft) as dispatcher,
            ):
                await compare_ours(bench, dispatcher, settings.SHARED, lookup=False)
        log = read_log(records)  # complete only now: workers write when they are idle
    return PairResult(pair, rows(bench.measured, log), rows(bench.tried, log))


def main(options: SpeculationOptions) -> int:
    """Build the pairs, measure, and report."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("router.sessions.pool").setLevel(logging.ERROR)  # that workers are lost is part of the plan
    console = Console(stderr=True)
    outcomes = []
    for plan in options.plans:
        with console.status("building the pair, or finding it as built before"):
            shape = Shape(options.hidden, options.layers, plan.acceptance or 0.0)
            pair = trained_pair() if plan.acceptance is None else stretched_pair(shape)
        with Progress(console=console) as progress:
            outcomes.append(asyncio.run(measure(pair, plan, options, progress)))
    result(options, outcomes).publish()
    return 0
