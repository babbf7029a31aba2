"""What all reports have in common: tables in words, what must be reached, and the machine that measured.

Imports nothing of what is measured, so that a benchmark of the engine alone needs no other part of the project.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.table import Table as RichTable

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
        for column in self.columns:
            table.add_column(column, justify="right", no_wrap=True)
        for line in self.lines:
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """For a README."""
        head = [self.columns, ("---",) * len(self.columns)]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in [*head, *self.lines])


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
    """The same of transformers, where it has one."""

    def reached(self, figure: float) -> bool:
        """Whether a figure is good enough."""
        return figure <= self.bound if self.at_most else figure >= self.bound

    @property
    def wanted(self) -> str:
        """The bound in words."""
        return f"at {'most' if self.at_most else 'least'} {self.bound:g}"


def goals_table(goals: Sequence[Goal[Measured]], measured: Measured) -> Table:
    """What must be reached, beside what was, and beside what transformers comes to, where it has such a figure."""
    lines = []
    for goal in goals:
        figure = goal.ours(measured)
        theirs = goal.transformers(measured) if goal.transformers else None
        lines.append(
            (
                goal.what,
                goal.wanted,
                MISSING if figure is None else f"{figure:.2f}",
                "" if figure is None else "yes" if goal.reached(figure) else "NO",
                "" if theirs is None else f"{theirs:.2f}",
            )
        )
    return Table("Must reach", ("figure", "wanted", "measured", "reached", "transformers"), lines)


def describe_machine() -> dict[str, Any]:
    """Processor, memory and versions."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
