"""Shows what the benchmark of the HTTP path measured: tables on the terminal, a JSON file, a folder with a README."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.http_figures import WANTED, Round, figures, summary
from benchmarks.http_settings import COMMIT_SECONDS, COMMIT_TOKENS, CONTENDERS, ECHO, PACELINE, PATTERNS, Options
from benchmarks.tables import Table, describe_machine

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the benchmark."""

    day: date
    options: Options
    rounds: Sequence[Round]
    machine: dict[str, Any] = field(default_factory=describe_machine)


def goals(result: Result) -> Table:
    """What must be reached, beside what was."""
    measured = summary(result.rounds)
    lines = [
        (name, f"at most {bound:g}", f"{measured[name]:.2f}", "yes" if measured[name] <= bound else "NO")
        for name, bound in WANTED.items()
    ]
    lines += [(name, "", f"{value:.2f}", "") for name, value in measured.items() if name not in WANTED]
    return Table("Must reach", ("figure", "wanted", "measured", "reached"), lines)


def paths(result: Result) -> Table:
    """Each contender under each pattern, and the ratios."""
    lines = []
    for pattern in PATTERNS:
        both = {name: asdict(figures(result.rounds, name, pattern)) for name in CONTENDERS}
        lines += [(pattern, name, *(f"{value:.2f}" for value in found.values())) for name, found in both.items()]
        ratios = (f"{both[PACELINE][key] / both[ECHO][key]:.2f}" for key in both[ECHO])
        lines.append((pattern, "ratio", *ratios))
    columns = (
        "requests",
        "server",
        "first ms",
        "p90",
        "before ms",
        "later ms",
        "p90",
        "CPU us/token",
        "client's",
    )
    return Table("What the path adds", columns, lines)


def notes(result: Result) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    options = result.options
    return [
        f"{result.machine['processor']}, {result.machine['cores']} cores. {options.streams} streams, a commit of "
        f"{COMMIT_TOKENS} tokens every {1e3 * COMMIT_SECONDS:g} ms each, {options.commits} to a request; no model is "
        "computed. Server and client are processes on the same machine; both servers ran in the same rounds, in turn.",
        "First: from the request's first byte to its first event at the client, less the time from the generator's "
        "start to its first commit. Before: how much of it was spent before the generator was asked. Later: from a "
        "commit to its event at the client.",
        "Steady: a request comes while all other streams run, evenly spread. Burst: all requests at one moment.",
    ]


def show(result: Result) -> None:
    """Print the tables and notes on stdout."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in (paths(result), goals(result)):
        console.print(table.rich())
    for note in notes(result):
        console.print(note, highlight=False)


def write_json(result: Result, file: Path) -> None:
    """Everything, for other programs."""
    document = {
        "summary": summary(result.rounds),
        "wanted": {name: {"at_most": bound} for name, bound in WANTED.items()},
        "date": result.day.isoformat(),
        "hardware": result.machine,
        "command": result.options.command,
        "notes": notes(result),
        "figures": {
            pattern: {name: asdict(figures(result.rounds, name, pattern)) for name in CONTENDERS}
            for pattern in PATTERNS
        },
        "first_seconds": [
            {"contender": one.contender, "pattern": one.pattern, "added": one.first} for one in result.rounds
        ],
    }
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_folder(result: Result, folder: Path) -> None:
    """Write JSON, and ``README.md`` with the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, folder / "http.json")
    shown = [
        f"## The HTTP path, {result.day.isoformat()}",
        f"`{result.options.command}`",
        "\n".join(f"- {note}" for note in notes(result)),
        goals(result).markdown(),
        paths(result).markdown(),
    ]
    (folder / "README.md").write_text("\n\n".join(shown) + "\n", encoding="utf-8")
