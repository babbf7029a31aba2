"""Ours against plain decoding, sequential and PEARL-like drafting and transformers: runs the design of ``settings``.

One target, one drafter, a core each; the router is this process. What a contender does is said in its requests, so all
of ours run on the same processes. The server is used as it would be: learned costs and acceptances carry over from one
setting to the next, and its drafter dies, and is replaced by a wrong one, late in its life.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.harness import transformers_baseline as baseline
from benchmarks.harness.measure import (
    DRAFTED,
    LENGTHS,
    PLAIN,
    WITH_LOOKUP,
    Batch,
    Runner,
    best,
    in_chains,
    seeded,
    served,
    take_turns,
)
from benchmarks.harness.pair import Pair, Shape, held_out, stretched_pair, trained_pair, wrong_draft
from benchmarks.harness.processes import (
    WorkerPlan,
    all_running,
    connected,
    drafting_late,
    losses_unsaid,
    routed,
    running,
    until_lost,
)
from benchmarks.harness.report import (
    PlotLine,
    PlotPanel,
    Result,
    Table,
    cell,
    describe_machine,
    draw,
    table_of,
)
from benchmarks.speculation import figures, settings
from benchmarks.speculation.figures import OURS, MeasuredRuns, PairResult, Row, find, ratio
from benchmarks.speculation.settings import EXTRAS, ROUND_TRIPS, ComparisonSetting, PairPlan, SpeculationOptions
from cluster.console import stages
from router.dispatch import Dispatcher
from speculation.events import Role
from speculation.messages import Schedule, Speculation

PLAIN_AND_OURS = {figures.PLAIN: PLAIN, OURS: DRAFTED}
BASELINES = {figures.SEQUENTIAL: Schedule.SEQUENTIAL, figures.PARALLEL: Schedule.PARALLEL}
TRANSFORMERS_PLAIN = f"transformers {figures.PLAIN}"
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
    report: Callable[[str], None]
    measured: list[MeasuredRuns] = field(default_factory=list)
    tried: list[MeasuredRuns] = field(default_factory=list)

    def batches(self, setting: ComparisonSetting) -> list[Batch]:
        """What every contender decodes in a setting."""
        options, prompts = self.options, self.prompts[:-SWEEP_PROMPTS]
        rounds = options.prompts if setting.batch == 1 else options.bursts
        return seeded(prompts, rounds, setting.batch, options.tokens, setting.temperature)

    async def compare(
        self,
        setting: ComparisonSetting,
        runners: Mapping[str, Runner],
        choices: Mapping[str, str],
        warm_up: int = WARM_UP,
    ) -> None:
        """Measure the contenders of a setting. ``choices``: what was chosen for whom."""
        batches = self.batches(setting)[: COLD_ROUNDS if setting == settings.WRONG_COLD else None]
        self.report(f"{self.pair.name}, {setting.name}")
        self.measured += [
            MeasuredRuns(self.pair.name, setting, name, runs, choices.get(name, ""))
            for name, runs in (await take_turns(runners, batches, warm_up)).items()
        ]

    async def choose(self, setting: ComparisonSetting, contender: str, choices: Mapping[str, Runner]) -> str:
        """The best of the choices for a contender in a setting, on prompts that are not measured."""
        tokens = max(2 * self.options.tokens // 3, 8)
        batches = [Batch((prompt,), tokens, setting.temperature) for prompt in self.prompts[-SWEEP_PROMPTS:]]
        self.report(f"{self.pair.name}, {setting.name}: best {contender}")
        runs = await take_turns(choices, batches, warm_up=0)
        self.tried += [MeasuredRuns(self.pair.name, setting, contender, own, choice) for choice, own in runs.items()]
        return best(runs)


async def compare_ours(bench: PairBench, dispatcher: Dispatcher, setting: ComparisonSetting, *, lookup: bool) -> None:
    """Everyone who runs on our processes, in one setting; the baselines with their best draft length.

    ``lookup``: ours with prompt lookup too, at batch 1; there is no goal for it.
    """
    everyone = dict(PLAIN_AND_OURS)
    choices: dict[str, str] = {}
    async with drafting_late(dispatcher, setting.rtt_ms / 2000) if setting.rtt_ms else nullcontext():
        if setting.batch == 1:
            if lookup:
                everyone["ours with lookup"] = WITH_LOOKUP
            for name, schedule in BASELINES.items():
                known = {f"K = {length}": in_chains(schedule, length) for length in LENGTHS[schedule]}
                choices[name] = await bench.choose(setting, name, _served(dispatcher, known))
                everyone[name] = known[choices[name]]
        await bench.compare(setting, _served(dispatcher, everyone), choices)


async def compare_transformers(bench: PairBench, dispatcher: Dispatcher) -> None:
    """The other library, in turn with ours."""
    async with baseline.transformers(bench.pair, bench.options.dtype) as other:
        modes = {str(mode): baseline.runner(other, mode) for mode in baseline.ASSISTED}
        chosen = await bench.choose(settings.TRANSFORMERS, figures.ASSISTED, modes)
        runners = {
            OURS: served(dispatcher, DRAFTED),
            TRANSFORMERS_PLAIN: baseline.runner(other, baseline.PLAIN),
            figures.ASSISTED: modes[chosen],
        }
        await bench.compare(settings.TRANSFORMERS, runners, {figures.ASSISTED: chosen})


def _served(dispatcher: Dispatcher, known: Mapping[str, Speculation]) -> dict[str, Runner]:
    return {name: served(dispatcher, speculation) for name, speculation in known.items()}


async def measure(pair: Pair, plan: PairPlan, options: SpeculationOptions, report: Callable[[str], None]) -> PairResult:
    """Start a server for the pair and run its plan."""
    bench = PairBench(pair, options, held_out(), report)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        records: list[Path] = []

        def worker(role: Role, model: Path, core: int | None, threads: int = 1) -> WorkerPlan:
            records.append(Path(name) / f"{len(records)}.jsonl")
            flags = ("--dtype", options.dtype, "--threads", str(threads))
            return WorkerPlan(role, model, core, records[-1], flags)

        plans = [worker(Role.TARGET, pair.target, 0), worker(Role.DRAFT, pair.draft, 1)]
        async with all_running(plans) as (target, draft), connected(target, draft) as dispatcher:
            for setting in plan.settings:
                await compare_ours(bench, dispatcher, setting, lookup=not options.quick)
            if plan.extras:
                await compare_transformers(bench, dispatcher)
                await draft.kill()
                await until_lost(dispatcher, Role.DRAFT)
                await bench.compare(settings.DEAD, _served(dispatcher, PLAIN_AND_OURS), {})
                async with (
                    running(worker(Role.DRAFT, wrong_draft(pair), 1)) as wrong,
                    connected(target, wrong) as afterwards,
                ):
                    for setting, warm_up in ((settings.WRONG_COLD, 0), (settings.WRONG, WARM_UP)):
                        await bench.compare(setting, _served(afterwards, PLAIN_AND_OURS), {}, warm_up)
        if plan.extras and not options.quick:
            cores = len(os.sched_getaffinity(0))
            plans = [worker(alone.role, alone.model, None, cores) for alone in plans]
            async with routed(plans, [(0, 1)]) as (dispatcher,):
                await compare_ours(bench, dispatcher, settings.SHARED, lookup=False)
        log = figures.read_log(records)  # complete only now: workers write when they are idle
    return PairResult(pair, figures.rows(bench.measured, log), figures.rows(bench.tried, log))


def main(options: SpeculationOptions) -> int:
    """Build the pairs, measure, and report."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    outcomes = []
    with losses_unsaid(), stages() as report:
        for plan in options.plans:
            report("building the pair, or finding it as built before")
            shape = Shape(options.hidden, options.layers, plan.acceptance or 0.0)
            pair = trained_pair() if plan.acceptance is None else stretched_pair(shape)
            outcomes.append(asyncio.run(measure(pair, plan, options, report)))
    result(options, outcomes).publish()
    return 0


STYLES = {
    figures.OURS: {"marker": "o", "color": "tab:blue"},
    figures.SEQUENTIAL: {"marker": "o", "color": "tab:orange"},
    figures.PARALLEL: {"marker": "o", "color": "tab:green"},
    figures.PLAIN: {"marker": "o", "color": "tab:grey"},
}
TRIED = 10


def result(options: SpeculationOptions, outcomes: Sequence[PairResult]) -> Result:
    """All that is shown; the main pair's outcome comes first."""
    rows = list(chain.from_iterable(outcome.rows for outcome in outcomes))
    given = {name: value for name, value in asdict(options).items() if name not in ("json", "out")}
    pairs, machine = [outcome.pair for outcome in outcomes], describe_machine()
    about_all = (
        f"{machine['processor']}, {machine['cores']} cores: one for the target, one for the drafter, the router beside "
        f"them; transformers {machine['transformers']} gets as many in all. {options.dtype}, {options.prompts} prompts "
        f"(held out in training) of {options.tokens} new tokens, contenders in turn prompt by prompt; ratios: medians "
        "over the prompts. The round trip is injected between router and drafter."
    )
    return Result(
        "Speculative decoding",
        options,
        (settings_table(rows), step_times(rows)),
        [about_all, *(f"{pair.name}: {pair.about}" for pair in pairs), *NOTES],
        {
            "options": given,
            "pairs": [{"name": pair.name, "parameters": pair.parameters, "about": pair.about} for pair in pairs],
            "rows": [asdict(row) for row in rows],
            "tried": [asdict(row) for outcome in outcomes for row in outcome.tried],
            "machine": machine,
        },
        figures.GOALS,
        rows,
        plots=lambda folder: plots(rows, folder),
    )


def over_plain(row: Row, rows: Sequence[Row]) -> tuple[float, float, float] | None:
    """Median, lowest and highest ratio to plain decoding, ours if it was measured there; None: nobody's was."""
    plain = find(rows, row.pair, row.setting, figures.PLAIN, TRANSFORMERS_PLAIN)
    return ratio(row, plain) if plain else None


def settings_table(rows: Sequence[Row]) -> Table:
    """Every contender in every setting."""
    return table_of(
        "All settings",
        [(row, over_plain(row, rows)) for row in rows],
        {
            "pair": lambda of: of[0].pair,
            "setting": lambda of: of[0].setting.name,
            "contender": lambda of: of[0].contender,
            "chosen": lambda of: of[0].choice,
            "tokens/s": lambda of: f"{of[0].rate:.1f}",
            "over plain": lambda of: of[1] and of[1][0],
            "range": lambda of: of[1] and "{1:.2f} to {2:.2f}".format(*of[1]),
            "efficiency": lambda of: of[0].median_efficiency if of[0].efficiency else None,
            "tokens a step": lambda of: of[0].tokens_per_step,
            "drafts kept": lambda of: of[0].kept,
            "same text": lambda of: f"{of[0].same_text:.0%}",
            "bytes out": lambda of: cell(of[0].sent_per_token, ".0f"),
            "bytes in": lambda of: cell(of[0].received_per_token, ".0f"),
        },
    )


def step_times(rows: Sequence[Row]) -> Table:
    """Where every millisecond of a step goes, at batch 1."""
    return table_of(
        "Where every millisecond of a step goes",
        [(row, row.profile) for row in rows if row.profile],
        {
            "pair": lambda of: of[0].pair,
            "setting": lambda of: of[0].setting.name,
            "contender": lambda of: of[0].contender,
            "steps": lambda of: of[1].steps,
            "forward ms": lambda of: of[1].forward_ms,
            "own ms": lambda of: of[1].own_ms,
            "own share": lambda of: f"{of[1].own_share:.1%}",
            "wait ms": lambda of: of[1].wait_ms,
            "longest": lambda of: f"{of[1].longest_wait_ms:.0f}",
            "between ms": lambda of: of[1].between_ms,
            "drafter busy": lambda of: f"{of[1].draft_busy:.0%}",
        },
    )


NOTES = (
    "Efficiency: tokens/s over (tokens a step / T), with T the mean measured forward of a step that verifies as many "
    "drafts.",
    "Own: planning, sampling, acceptance and cache, inside a step. Wait: for drafts; a longest one of half a second "
    "ran into its bound, so that contender was not at its best. Between: messages.",
    "Range: lowest and highest over the prompts. Drafts kept: those behind a refused one count as refused. Same text: "
    "as the setting's first contender. Bytes: a committed token, between router and target.",
    "Wrong drafter, cold: its first prompts on a server that trusted the last drafter. Without cold: after those and "
    "two more, as in service.",
)


def plots(rows: Sequence[Row], folder: Path) -> dict[str, str]:
    """Draw all plots into ``folder``; what each file shows."""
    draw(folder / "speedup.png", speedup(rows), 4.0, 3.6)
    draw(folder / "acceptance.png", acceptance(rows), 7, 4)
    return {
        "speedup.png": "Speed-up over plain decoding against the round trip to the drafter.",
        "acceptance.png": "Share of drafts kept by depth, where all above was kept.",
    }


def speedup(rows: Sequence[Row]) -> list[PlotPanel]:
    """A panel for every pair measured at several round trips."""
    panels = []
    for pair in dict.fromkeys(row.pair for row in rows):
        lines: list[PlotLine] = []
        for contender, style in STYLES.items():
            trips = filter(None, (find(rows, pair, setting, contender) for setting in ROUND_TRIPS))
            points = [(row.setting.rtt_ms, over[0]) for row in trips if (over := over_plain(row, rows))]
            lines.append((contender, points, style))
        if len(lines[0][1]) > 1:
            panels.append(PlotPanel("round trip, ms", "speed-up over plain", lines, pair))
    return panels


def acceptance(rows: Sequence[Row]) -> list[PlotPanel]:
    """A line for ours in every setting that changes what is drafted: pairs and temperatures."""
    lines: list[PlotLine] = [
        (
            f"{row.pair}, temperature {row.setting.temperature:g}",
            [(depth.depth, depth.kept / depth.tried) for depth in row.depths if depth.tried >= TRIED],
            {"marker": "."},
        )
        for row in rows
        if row.contender == figures.OURS
        and row.setting.batch == 1
        and not row.setting.rtt_ms
        and row.setting not in EXTRAS
    ]
    return [PlotPanel("depth of the draft token", "share kept", lines, top=1)]
