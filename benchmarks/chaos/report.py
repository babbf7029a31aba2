"""Shows what faults did: the table on the terminal, a JSON file, a folder with a page for a reader."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.chaos import settings
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.settings import Options
from benchmarks.tables import Table, describe_machine

COLUMNS = ("fault", "streams", "requests", "refused (429)", "failed", "text different", "longest silence",
           "first token", "whole after", "wanted", "holds")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    day: date
    options: Options
    outcomes: Sequence[Outcome]
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def holds(self) -> bool:
        """Whether every row does."""
        return all(outcome.holds for outcome in self.outcomes)


def table(result: Result) -> Table:
    """A row for each fault."""
    lines = []
    for outcome in result.outcomes:
        counted = outcome.tally
        lines.append(
            (
                outcome.fault,
                f"{outcome.streams}",
                f"{counted.requests}",
                f"{counted.refused}",
                f"{counted.failed}",
                f"{counted.different}",
                f"{counted.silence.seconds:.2f} s",
                f"{counted.first_token:.2f} s",
                f"{outcome.seconds:.1f} s" if outcome.seconds else "",
                outcome.wanted.text,
                "yes" if outcome.holds else "NO",
            )
        )
    return Table("Faults under streaming requests", COLUMNS, lines)


def verdict(outcome: Outcome) -> str:
    """A row in one line."""
    counted = outcome.tally
    figures = f"{counted.failed} failed, {counted.different} different, silence {counted.silence.seconds:.2f} s"
    return f"as wanted: {figures}" if outcome.holds else f"NOT AS WANTED: {'; '.join(outcome.problems)} ({figures})"


def remarks(result: Result) -> list[str]:
    """Further figures, and what was not as it must be."""
    found = [f"{outcome.name}: {'; '.join(outcome.notes)}" for outcome in result.outcomes if outcome.notes]
    return found + [f"{outcome.name}, NOT AS WANTED: {why}" for outcome in result.outcomes for why in outcome.problems]


def show(result: Result) -> None:
    """Print everything on stdout."""
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table(result).rich())
    for remark in remarks(result):
        console.print(remark, highlight=False, markup=False)


def document(result: Result) -> dict[str, Any]:
    """What :func:`write_json` writes."""
    return {
        "date": result.day.isoformat(),
        "hardware": result.machine,
        "command": result.options.command,
        "seed": result.options.seed,
        "streams": result.options.streams,
        "tokens": result.options.tokens,
        "cluster": settings.configuration(0, result.options.dtype),
        "holds": result.holds,
        "rows": [
            {**asdict(outcome), "problems": outcome.problems, "holds": outcome.holds} for outcome in result.outcomes
        ],
    }


def write_json(result: Result, file: Path) -> None:
    """Everything, for other programs."""
    file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")


def write_folder(result: Result, folder: Path, name: str) -> None:
    """Write JSON, and ``README.md`` with the table."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, folder / f"{name}.json")
    (folder / "README.md").write_text(markdown(result), encoding="utf-8")


def markdown(result: Result) -> str:
    """The section for a README."""
    machine = result.machine
    options = result.options
    parts = [
        f"## Faults, {result.day.isoformat()}",
        f"`{options.command}`",
        f"{machine['processor']}, {machine['cores']} cores for everything: a pretend Ray cluster of a head, two "
        f"small-GPU and two large-GPU nodes, {settings.TARGETS} targets of {settings.RANKS} ranks, {settings.DRAFTS} "
        f"drafters, {settings.ROUTERS} router, the bundled models in {options.dtype}. Requests of {options.tokens} new "
        f"tokens at temperature {settings.TEMPERATURE}, one after another; every text is compared with that of plain "
        "decoding, undisturbed.",
        table(result).markdown(),
        "\n".join(f"- {remark}" for remark in remarks(result)),
        NOTES,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


NOTES = """\
- Longest silence: of all streams, between two pieces of text, as the client saw it. First token: the longest wait for
  one, queueing included. Whole after: from the fault until all workers were back and connected to the router; where
  something was stopped or removed, with the time that it was.
- Load and random faults ask for a few requests again and again; every other row asks only for new ones, whose texts no
  target has in its cache.
- A node is removed by killing all its processes at once, and comes back ten seconds later. Clients connect through the
  head, which is not removed."""
