"""From runs and records to figures: rows, ratios and the summary.

Every ratio is taken prompt by prompt within one setting of one run, and given as the median over the prompts with the
lowest and the highest. Which figures must be reached, and how far, is decided here; nothing is measured or shown.

A worker started with ``--record FILE`` writes one JSON line a step. Target, drafter and benchmark read the same
monotonic clock, so a step belongs to a run when it ended within it. Pipeline efficiency compares the pace with that of
a target that does nothing but verify: tokens a second over (tokens a verification / T), where T(n) is the mean time of
the forward of a step that verifies n draft tokens. With the tokens cancelled it is the sum of T over the steps of the
run, divided by the run's duration.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median

from benchmarks.harness.measure import Run, beside
from benchmarks.harness.pair import Pair
from benchmarks.harness.report import Goal
from benchmarks.speculation import settings
from benchmarks.speculation.settings import ComparisonSetting
from simulation.recorded import Line

Span = tuple[float, float]
"""A stretch of time: a wait of the target, or a step of the drafter."""


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """What the workers recorded; times in seconds."""

    steps: tuple[Line, ...] = ()
    """Of the target: planning, forward, sampling and acceptance."""
    waits: tuple[Span, ...] = ()
    """When the target waited for drafts although it could have gone on."""
    drafting: tuple[Span, ...] = ()

    def during(self, start: float, end: float) -> WorkerLog:
        """What ended within a run. The step that brought the run's first tokens ended before it."""
        return WorkerLog(
            tuple(step for step in self.steps if start < step["end"] <= end),
            tuple(wait for wait in self.waits if start < wait[1] <= end),
            tuple((began, ended) for began, ended in self.drafting if start < ended and began < end),
        )


def read_log(paths: Iterable[Path]) -> WorkerLog:
    """The records of all workers. A line cut short, by ``kill -9`` say, ends its file."""
    texts = (path.read_text(encoding="utf-8").splitlines(keepends=True) for path in paths if path.exists())
    lines: list[Line] = [json.loads(text) for text in chain.from_iterable(texts) if text.endswith("\n")]
    drafted, verified = ([line for line in lines if line["role"] == role] for role in ("draft", "target"))
    return WorkerLog(
        tuple(line for line in verified if "wait" not in line),
        tuple((began, ended) for began, ended in (line["wait"] for line in verified if "wait" in line)),
        tuple((line["start"], line["end"]) for line in drafted),
    )


def offered(step: Line) -> int:
    """Draft tokens verified."""
    return sum(session["offered"] for session in step["sessions"])


def verify_seconds(steps: Iterable[Line]) -> dict[int, float]:
    """T(n): mean seconds of the forward of a step that verifies n draft tokens, for every n that occurred."""
    by_size: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_size[offered(step)].append(step["forward"])
    return {size: fmean(seconds) for size, seconds in sorted(by_size.items())}


def efficiency(steps: Sequence[Line], seconds_by_size: Mapping[int, float], wall: float) -> float:
    """Share of the run's ``wall`` seconds that verification itself would have taken; 1: a target that never waits."""
    return sum(seconds_by_size[offered(step)] for step in steps) / wall


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time goes: mean milliseconds for each step of the target. Forward, own, wait and between are all."""

    steps: int
    forward_ms: float
    own_ms: float
    """The rest of a step: planning, sampling, acceptance, cache."""
    wait_ms: float
    """Waits for drafts, which all schedules bound."""
    longest_wait_ms: float
    """Of a single one. A wait that ran into its bound tells that a contender was not at its best."""
    between_ms: float
    """Neither step nor wait: messages on their way."""
    draft_busy: float
    """Share of the time in which the drafter computed."""

    @property
    def own_share(self) -> float:
        """Share of a step that is not the model."""
        return self.own_ms / (self.own_ms + self.forward_ms)


def profile(parts: Sequence[tuple[WorkerLog, float, float]]) -> Profile | None:
    """Profile of runs, each given as its log, start and end; None if there were no steps."""
    steps = [step for log, _, _ in parts for step in log.steps]
    if not steps:
        return None
    wall = sum(end - start for _, start, end in parts)
    forward = sum(step["forward"] for step in steps)
    own = sum(step["end"] - step["start"] for step in steps) - forward
    waits = [ended - began for log, _, _ in parts for began, ended in log.waits]
    wait = sum(waits)
    busy = sum(min(ended, end) - max(began, start) for log, start, end in parts for began, ended in log.drafting)
    between = max(wall - forward - own - wait, 0.0)
    forward, own, wait, between = (1000 * seconds / len(steps) for seconds in (forward, own, wait, between))
    return Profile(len(steps), forward, own, wait, 1000 * max(waits, default=0.0), between, busy / wall)


@dataclass(frozen=True, slots=True)
class Depth:
    """How drafts of one depth fared."""

    depth: int
    tried: int
    """Steps that kept everything above and had something to offer at this depth."""
    kept: int


def acceptance_by_depth(steps: Iterable[Line]) -> tuple[Depth, ...]:
    """What was tried and kept at every depth, from 1."""
    tried: defaultdict[int, int] = defaultdict(int)
    kept: defaultdict[int, int] = defaultdict(int)
    for session in (session for step in steps for session in step["sessions"]):
        for depth in set(session["depths"]):  # 1 hangs from the committed prefix
            # Of a tree, one path at most is kept, and it ends at the depth of what was accepted.
            tried[depth] += session["accepted"] >= depth - 1
            kept[depth] += session["accepted"] >= depth
    return tuple(Depth(depth, tried[depth], kept[depth]) for depth in sorted(tried) if tried[depth])


OURS, PLAIN, SEQUENTIAL, PARALLEL = "ours", "plain", "sequential", "PEARL-like"
ASSISTED = "transformers assisted"


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """The runs of one contender in one setting, by batch."""

    pair: str
    setting: ComparisonSetting
    contender: str
    runs: Sequence[Run]
    choice: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What one contender came to in one setting. Rates in tokens a second."""

    pair: str
    setting: ComparisonSetting
    contender: str
    choice: str
    rates: tuple[float, ...]
    """By prompt (by burst of prompts, in a batch), in the same order for all contenders of the setting."""
    tokens_per_step: float
    kept: float | None
    """Share of the drafts verified that were kept, those behind a refused one counted as refused; None: there were
    none, or another library does not say."""
    same_text: float
    """Share of the texts that are those of the setting's first contender. In bfloat16 another library rounds
    otherwise than we do, and near ties fall otherwise."""
    efficiency: tuple[float, ...] = ()
    """Pipeline efficiency by prompt; at batch 1 of our own target only."""
    profile: Profile | None = None
    depths: tuple[Depth, ...] = ()
    sent_per_token: float | None = None
    """Bytes a committed token from the router to the target, heartbeats and the prompt included."""
    received_per_token: float | None = None

    @property
    def rate(self) -> float:
        """Median over the prompts."""
        return median(self.rates)

    @property
    def median_efficiency(self) -> float:
        """Median over the prompts; only where there is any."""
        return median(self.efficiency)


@dataclass(frozen=True, slots=True)
class PairResult:
    """What a pair came to."""

    pair: Pair
    rows: list[Row]
    tried: list[Row]
    """The draft lengths and modes among which the best were chosen."""


def rows(measured: Sequence[MeasuredRuns], log: WorkerLog) -> list[Row]:
    """A row for each, with what ``log`` says about the time it ran."""
    first = {(one.pair, one.setting): one for one in reversed(measured)}
    return [_row(one, first[one.pair, one.setting], log) for one in measured]


def _row(one: MeasuredRuns, first: MeasuredRuns, log: WorkerLog) -> Row:
    found = beside(one.runs, first.runs)
    parts = [(log.during(run.start, run.end), run.start, run.end) for run in one.runs]
    steps = [step for part, _, _ in parts for step in part.steps]
    recorded = parts if steps and one.setting.batch == 1 else []
    seconds_by_size = verify_seconds(steps)
    tokens = sum(len(request.tokens) for run in one.runs for request in run.decoded)
    used = [run.traffic for run in one.runs if run.traffic]  # none: there were no workers
    return Row(
        pair=one.pair,
        setting=one.setting,
        contender=one.contender,
        choice=one.choice,
        rates=found.rates,
        tokens_per_step=found.tokens_per_step,
        kept=found.kept,
        same_text=found.same_text,
        efficiency=tuple(efficiency(part.steps, seconds_by_size, end - start) for part, start, end in recorded),
        profile=profile(recorded),
        depths=acceptance_by_depth(steps),
        sent_per_token=sum(traffic.sent for traffic in used) / tokens if used else None,
        received_per_token=sum(traffic.received for traffic in used) / tokens if used else None,
    )


def find(rows: Iterable[Row], pair: str, setting: ComparisonSetting, *contenders: str) -> Row | None:
    """The row of the first of these contenders that was measured there."""
    there = {row.contender: row for row in rows if (row.pair, row.setting) == (pair, setting)}
    return next((there[name] for name in contenders if name in there), None)


def ratio(row: Row, baseline: Row) -> tuple[float, float, float]:
    """``row`` over ``baseline``, prompt by prompt: median, lowest and highest."""
    assert (row.pair, row.setting) == (baseline.pair, baseline.setting), "a ratio is taken within one setting"
    ratios = [one / other for one, other in zip(row.rates, baseline.rates, strict=True)]
    return median(ratios), min(ratios), max(ratios)


def _over(baseline: str, setting: ComparisonSetting) -> Callable[[Sequence[Row]], float]:
    return lambda rows: ratio(_must(rows, setting, OURS), _must(rows, setting, baseline))[0]


def _efficiency(setting: ComparisonSetting) -> Callable[[Sequence[Row]], float]:
    return lambda rows: _must(rows, setting, OURS).median_efficiency


def _must(rows: Sequence[Row], setting: ComparisonSetting, contender: str) -> Row:
    row = find(rows, rows[0].pair, setting, contender)
    assert row is not None, f"{contender} was not measured in {setting.name}"
    return row


GOALS: tuple[Goal[Sequence[Row]], ...] = (
    Goal("pipeline_efficiency_0ms", "pipeline efficiency, round trip 0 ms", 0.92, False, _efficiency(settings.NEAR)),
    Goal("pipeline_efficiency_20ms", "pipeline efficiency, 20 ms", 0.85, False, _efficiency(settings.FAR)),
    Goal("over_sequential_0ms", "over the best sequential, 0 ms", 1.4, False, _over(SEQUENTIAL, settings.NEAR)),
    Goal("over_sequential_20ms", "over the best sequential, 20 ms", 1.8, False, _over(SEQUENTIAL, settings.FAR)),
    Goal("over_plain_0ms", "over plain decoding, 0 ms", 2.2, False, _over(PLAIN, settings.NEAR)),
    Goal("over_plain_20ms", "over plain decoding, 20 ms", 2.0, False, _over(PLAIN, settings.FAR)),
    Goal(
        "over_transformers_assisted",
        "over transformers' assisted generation",
        2.5,
        False,
        _over(ASSISTED, settings.TRANSFORMERS),
    ),
    Goal("dead_drafter_over_plain", "over plain, drafter dead", 0.97, False, _over(PLAIN, settings.DEAD)),
    Goal("wrong_drafter_over_plain", "over plain, drafter always wrong", 0.97, False, _over(PLAIN, settings.WRONG)),
    Goal("batch16_over_plain", "over plain, 16 requests at once", 1.0, False, _over(PLAIN, settings.BATCH_16)),
)
"""Of the rows of the main pair, which comes first."""
