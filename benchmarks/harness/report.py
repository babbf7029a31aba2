"""What came of a run, and how it is shown: tables and notes on the terminal, JSON, a folder with a page.

Decides nothing about the figures, and imports nothing of what is measured, so that a benchmark of the engine alone
needs no other part of the project.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.harness.options import Options
from cluster.console import say

DPI = 120
FILE_COLUMNS = 220
"""Of a table that goes to a file, at most."""
MISSING = "not measured"
Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Table:
    """A table in words."""

    title: str
    columns: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """For a README."""
        head = [self.columns, ("---",) * len(self.columns)]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in [*head, *self.lines])


Of = TypeVar("Of")


def table_of(title: str, rows: Iterable[Of], columns: Mapping[str, Callable[[Of], object]]) -> Table:
    """A line for each of ``rows``: what each column makes of it, two digits of a fraction and nothing for None."""
    lines = [tuple(_words(column(row)) for column in columns.values()) for row in rows]
    return Table(title, tuple(columns), lines)


def _words(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Goal(Generic[Measured]):
    """A figure that must be reached."""

    key: str
    what: str
    bound: float
    at_most: bool
    """Whether ``bound`` is the most it may be; else it is the least."""
    ours: Callable[[Measured], float | None]
    transformers: Callable[[Measured], float] | None = None

    def reached(self, figure: float) -> bool:
        """Whether a figure is good enough."""
        return figure <= self.bound if self.at_most else figure >= self.bound

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return f"at {'most' if self.at_most else 'least'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Result:
    """One run, as it is shown."""

    title: str
    options: Options
    tables: Sequence[Table]
    """The one that matters last, unless there are goals."""
    notes: Sequence[str]
    """What a reader of the figures must know, a sentence or two each."""
    figures: Mapping[str, Any]
    """What its JSON has besides the date, the machine, the command, notes and goals."""
    goals: Sequence[Goal[Any]] | None = None
    """What ``measured`` must reach."""
    measured: Any = None
    plots: Callable[[Path], Mapping[str, str]] | None = None
    """Draws into a folder; what each of the files it writes shows."""
    indent: int | None = 2
    day: date = field(default_factory=lambda: datetime.now(UTC).date())
    machine: Mapping[str, Any] = field(default_factory=lambda: describe_machine())

    def publish(self) -> None:
        """Show it, and write it where the options say."""
        self.show()
        self.save()

    def save(self) -> None:
        """Write it where the options say; a quick run writes no folder."""
        if self.options.json is not None:
            self.write_json(self.options.json)
        if self.options.out is not None and not self.options.quick:
            self.write_folder(self.options.out)

    def show(self) -> None:
        """Print tables and notes on stdout."""
        console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS)
        for table in self._tables():
            console.print(table.rich())
        for note in self.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)

    def document(self) -> dict[str, Any]:
        """Everything, for other programs."""
        about = {"date": self.day.isoformat(), "hardware": self.machine, "command": self.options.command}
        judged = {} if self.goals is None else against(self.goals, self.measured)
        return {**about, "notes": list(self.notes), **judged, **self.figures}

    def write_json(self, file: Path) -> None:
        """The document."""
        file.write_text(json.dumps(self.document(), indent=self.indent) + "\n", encoding="utf-8")

    def write_folder(self, folder: Path) -> None:
        """The document, plots, and ``README.md``: the command, the notes, the tables, the last of them first, plots."""
        folder.mkdir(parents=True, exist_ok=True)
        self.write_json(folder / f"{self.options.BENCH}.json")
        drawn = self.plots(folder) if self.plots is not None else {}
        *others, first = (table.markdown() for table in self._tables())
        notes = "\n".join(f"- {note}" for note in self.notes)
        pictures = (f"![{caption}]({file})\n\n{caption}" for file, caption in drawn.items())
        parts = [f"## {self.title}, {self.day.isoformat()}", f"`{self.options.command}`", notes, first, *others]
        parts = [*filter(None, parts), *pictures]
        (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    def _tables(self) -> list[Table]:
        return [*self.tables, *([goals_table(self.goals, self.measured)] if self.goals else [])]


@dataclass(frozen=True, slots=True)
class PlotPanel:
    """A drawing of lines, both axes from 0 on."""

    xlabel: str
    ylabel: str
    lines: Sequence[PlotLine]
    title: str = ""
    top: float | None = None
    """Of the upright axis."""
    ticks: Sequence[int] = ()
    """Of the other, which is logarithmic where there are some."""


PlotLine = tuple[str, Sequence[tuple[float, float]], Mapping[str, Any]]
"""Its label, points that are joined, and its style, as matplotlib's ``plot`` takes it."""


def draw(file: Path, panels: Sequence[PlotPanel], width: float, height: float, *, legends: bool = False) -> None:
    """Panels beside each other, of this size in inches each; ``legends``: in each of them, not in the first alone.

    matplotlib is an optional dependency (``plots``) and is imported only when something is drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure((width * max(len(panels), 1), height), layout="constrained")
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        for label, points, style in panel.lines:
            axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.xlabel)
        axes.set_ylabel(panel.ylabel)
        axes.set_ylim(0, panel.top)
        if panel.ticks:
            axes.set_xscale("log", base=2)
            axes.set_xticks(panel.ticks, [str(tick) for tick in panel.ticks])
        else:
            axes.set_xlim(left=0)
        if legends or not number:
            axes.legend(fontsize=7)
    figure.savefig(file, dpi=DPI)


def tell(row: Mapping[str, Any]) -> None:
    """A line of JSON on stdout."""
    say(json.dumps(row))


def cell(value: float | None, form: str = ".2f", missing: str = "") -> str:
    """A figure in a table."""
    return missing if value is None else format(value, form)


def against(goals: Sequence[Goal[Measured]], measured: Measured) -> dict[str, Any]:
    """The figure of every goal as ``summary`` and its bound as ``wanted``, for JSON."""
    bounds = {goal.key: {"at_most" if goal.at_most else "at_least": goal.bound} for goal in goals}
    return {"summary": {goal.key: goal.ours(measured) for goal in goals}, "wanted": bounds}


def goals_table(goals: Sequence[Goal[Measured]], measured: Measured) -> Table:
    """What must be reached, beside what was, and beside what transformers comes to, where it has such figures."""
    lines = []
    for goal in goals:
        figure, theirs = goal.ours(measured), goal.transformers(measured) if goal.transformers else None
        reached = "" if figure is None else "yes" if goal.reached(figure) else "NO"
        lines.append((goal.what, goal.wanted, cell(figure, missing=MISSING), reached, cell(theirs)))
    columns = ("figure", "wanted", "measured", "reached", "transformers")
    shown = 5 if any(goal.transformers for goal in goals) else 4
    return Table("Must reach", columns[:shown], [line[:shown] for line in lines])


def describe_machine() -> dict[str, Any]:
    """Processor, memory and versions."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
