"""Many simulated settings: which there are, their table, CSV and plot, and how many workers are enough.

Every setting is compared with plain decoding of the same number of sessions on the same number of targets. matplotlib
is an optional dependency (``plots``) and is imported only when something is drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.table import Table

from simulation.costs import Costs
from simulation.simulate import WITHIN, Bounds, Report, SimulationSettings, enough, simulate
from speculation.drafting.draft_session import Outcome
from speculation.messages import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN = "plain"
SCHEDULES: dict[str, Schedule | None] = {**{schedule: schedule for schedule in Schedule}, PLAIN: None}
"""What can be asked for, by name."""
COLOURS = {"trie": "tab:blue", "sequential": "tab:orange", "parallel": "tab:green", PLAIN: "tab:grey"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of which every combination is simulated."""

    schedules: tuple[str, ...]
    draft_lengths: tuple[int, ...]
    """Of the baseline schedules; only the best is shown, for each setting."""
    rtts: tuple[float, ...]
    """Seconds."""
    sessions: tuple[int, ...]
    targets: tuple[int, ...]
    drafters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One setting, and how it compares."""

    report: Report
    speedup: float
    """Throughput over that of plain decoding."""

    @property
    def schedule(self) -> str:
        """By name."""
        return self.report.setting.schedule or PLAIN

    @property
    def drafts(self) -> bool:
        """Whether drafters have a part in it."""
        return self.schedule != PLAIN

    def cells(self) -> dict[str, str]:
        """What is shown, by column."""
        report, setting = self.report, self.report.setting
        baseline = self.drafts and setting.schedule is not Schedule.TRIE
        return {
            "schedule": f"{self.schedule} {setting.draft_length}" if baseline else self.schedule,
            "round trip ms": f"{1000 * setting.rtt:g}" if self.drafts else "",
            "sessions": str(setting.sessions),
            "targets": str(setting.targets),
            "drafters": str(setting.drafters) if self.drafts else "",
            "tokens/s": f"{report.rate:.1f}",
            "a request": f"{report.rate_per_request:.1f}",
            "a target": f"{report.rate_per_target:.1f}",
            "speed-up": f"{self.speedup:.2f}",
            "tokens a step": f"{report.tokens_per_verification:.2f}",
            "drafts a step": f"{report.offered / report.verifications:.2f}",
            "target busy": f"{report.target_busy:.2f}",
            "drafter busy": f"{report.draft_busy:.2f}" if self.drafts else "",
        }


@dataclass(frozen=True, slots=True)
class Simulator:
    """Simulates settings of one set-up, see :func:`simulation.simulate.simulate`; the same one is computed once."""

    costs: Costs
    outcomes: Sequence[Outcome]
    bounds: Bounds
    tokens: int
    seed: int
    common: SimulationSettings
    """What all settings are as, but for what is swept."""
    known: dict[SimulationSettings, Report] = field(default_factory=dict)

    def report(self, setting: SimulationSettings) -> Report:
        """Simulate, or remember."""
        if setting not in self.known:
            run = self.costs, self.outcomes, Random(self.seed)
            self.known[setting] = simulate(setting, *run, tokens=self.tokens, bounds=self.bounds)
        return self.known[setting]

    def row(self, sweep: Sweep, schedule: str, rtt: float, sessions: int, targets: int, drafters: int) -> SweepRow:
        """One combination; of a baseline, with the draft length that suits it best."""
        loaded = replace(self.common, sessions=sessions, targets=targets)
        plain = self.report(replace(loaded, schedule=None))
        kind = SCHEDULES[schedule]
        if kind is None:
            return SweepRow(plain, 1.0)
        lengths = sweep.draft_lengths if kind is not Schedule.TRIE else (0,)
        drafted = replace(loaded, schedule=kind, rtt=rtt, drafters=drafters)
        reports = (self.report(replace(drafted, draft_length=length)) for length in lengths)
        best = max(reports, key=lambda report: report.rate)
        return SweepRow(best, best.rate / plain.rate)

    def rows(self, sweep: Sweep, progress: Callable[[str], None]) -> list[SweepRow]:
        """All combinations; plain decoding, which knows no drafters, once for each kind of load."""
        rows: dict[SimulationSettings, SweepRow] = {}
        every = product(sweep.sessions, sweep.targets, sweep.rtts, sweep.drafters, sweep.schedules)
        for sessions, targets, rtt, drafters, schedule in every:
            progress(f"{schedule}, {sessions} sessions, round trip {1000 * rtt:g} ms")
            row = self.row(sweep, schedule, rtt, sessions, targets, drafters)
            rows.setdefault(row.report.setting, row)
        return list(rows.values())

    def verdicts(self, sweep: Sweep) -> Iterator[str]:
        """How many drafters, and how many sessions, are enough; for what was swept, under the first schedule."""
        drafting = [schedule for schedule in sweep.schedules if SCHEDULES[schedule] is not None]
        for schedule, rtt, targets in product(drafting[:1], sweep.rtts, sweep.targets):
            where = f"{schedule}, round trip {1000 * rtt:g} ms, {_count(targets, 'target')}"
            for sessions in sweep.sessions if len(sweep.drafters) > 1 else ():
                rates = {m: self.row(sweep, schedule, rtt, sessions, targets, m).report.rate for m in sweep.drafters}
                alone = self.row(sweep, schedule, rtt, sessions, targets, sessions).report.rate
                count, goal = enough(rates, alone), f"within {100 * WITHIN:g} % of one drafter a session"
                verdict = f"no number of drafters tried is {goal}"
                if count is not None:
                    each = f"{_count(count, 'drafter')} ({count / targets:g} a target)"
                    verdict = f"{each} {'is' if count == 1 else 'are'} {goal}"
                yield f"{where}, {_count(sessions, 'session')}: {verdict}"
            for drafters in sweep.drafters if len(sweep.sessions) > 1 else ():
                rates = {s: self.row(sweep, schedule, rtt, s, targets, drafters).report.rate for s in sweep.sessions}
                full = enough(rates)
                assert full is not None, "the best is as good as itself"
                verdict = f"throughput still grows at {_count(full, 'session')}"
                if full != max(rates):
                    each = f"({full / targets:g} a target, {full / drafters:g} a drafter)"
                    verdict = f"throughput is full from {full} sessions on {each}"
                yield f"{where}, {_count(drafters, 'drafter')}: {verdict}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(rows: Iterable[SweepRow]) -> Table:
    """For the terminal, without the columns that say nothing new."""
    cells = [row.cells() for row in rows]

    def redundant(name: str) -> bool:  # 1 throughout, or the throughput again
        return all(row[name] in ("1", "") or (name[:2] == "a " and row[name] == row["tokens/s"]) for row in cells)

    shown = [name for name in cells[0] if not redundant(name)]
    drawn = Table()
    for name in shown:
        drawn.add_column(name, justify="left" if name == "schedule" else "right")
    for row in cells:
        drawn.add_row(*(row[name] for name in shown))
    return drawn


def write_csv(rows: Sequence[SweepRow], file: Path) -> None:
    """The same, for a spreadsheet."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0].cells()))
        writer.writeheader()
        writer.writerows(row.cells() for row in rows)


def axes_of(sweep: Sweep) -> list[str]:
    """What there is to plot against: the fields of a setting with more than one value."""
    values = {"rtt": sweep.rtts, "drafters": sweep.drafters, "sessions": sweep.sessions}
    return [name for name, given in values.items() if len(given) > 1]


def plot(rows: Sequence[SweepRow], sweep: Sweep, file: Path) -> None:
    """A panel for each thing swept, at the first value of most others."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    names = axes_of(sweep)
    figure = Figure((5 * len(names), 4), layout="constrained")
    for number, name in enumerate(names, 1):
        _panel(figure.add_subplot(1, len(names), number), rows, sweep, name)
    figure.savefig(file, dpi=120)


def _panel(axes: Axes, rows: Sequence[SweepRow], sweep: Sweep, name: str) -> None:
    # Drafters are short where sessions are many.
    sessions = sweep.sessions[-1 if name == "drafters" else 0]
    held = {"rtt": sweep.rtts[0], "drafters": sweep.drafters[0], "sessions": sessions, "targets": sweep.targets[0]}
    for schedule in sweep.schedules:
        # Distance and drafters mean nothing to plain decoding.
        fixed = held.keys() - ({name} if schedule != PLAIN else {name, "rtt", "drafters"})
        shown = [row for row in rows if row.schedule == schedule]
        shown = [row for row in shown if all(getattr(row.report.setting, other) == held[other] for other in fixed)]
        points = sorted(_point(row, name) for row in shown)
        if schedule == PLAIN and name != "sessions":
            axes.axhline(points[0][1], label=PLAIN, color=COLOURS[PLAIN])
        else:
            axes.plot(*zip(*points, strict=True), marker="o", label=schedule, color=COLOURS[schedule])
    labels = {"rtt": "round trip, ms", "drafters": "drafters a target", "sessions": "sessions"}
    axes.set_title("" if name == "sessions" else _count(sessions, "session"))
    axes.set_xlabel(labels[name])
    axes.set_ylabel("speed-up over plain" if name == "rtt" else "tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend()


def _point(row: SweepRow, name: str) -> tuple[float, float]:
    setting = row.report.setting
    if name == "rtt":
        return 1000 * setting.rtt, row.speedup
    if name == "drafters":
        return setting.drafters / setting.targets, row.report.rate
    return setting.sessions, row.report.rate
