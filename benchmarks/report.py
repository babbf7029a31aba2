"""Shows what was measured: tables on the terminal, a JSON file, a folder with plots and a section for a README.

Decides nothing about the figures; see :mod:`benchmarks.figures`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import plots
from benchmarks.figures import GOALS, PLAIN, Outcome, Row, find, ratio, summary
from benchmarks.settings import Options
from benchmarks.tables import Table


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the benchmark."""

    day: date
    machine: dict[str, Any]
    options: Options
    outcomes: Sequence[Outcome]
    """The main pair's first."""

    @property
    def rows(self) -> list[Row]:
        """Of all pairs."""
        return list(chain.from_iterable(outcome.rows for outcome in self.outcomes))

    @property
    def summary(self) -> dict[str, float]:
        """The figures that must be reached."""
        return summary(self.rows, self.outcomes[0].pair.name)


def goals(result: Result) -> Table:
    """What must be reached, beside what was."""
    measured = result.summary
    lines = [
        (
            goal.what,
            f"{goal.least:.2f}",
            f"{measured[goal.key]:.2f}",
            "yes" if measured[goal.key] >= goal.least else "NO",
        )
        for goal in GOALS
    ]
    return Table("Must reach", ("ours", "at least", "measured", "reached"), lines)


def settings(result: Result) -> Table:
    """Every contender in every setting."""
    columns = ("pair", "setting", "contender", "chosen", "tokens/s", "over plain", "range", "efficiency",
               "tokens a step", "drafts kept", "same text", "bytes out", "bytes in")  # fmt: skip
    return Table("All settings", columns, [_line(row, result.rows) for row in result.rows])


def _line(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    plain = find(rows, row.pair, row.setting.name, PLAIN) or find(
        rows, row.pair, row.setting.name, f"transformers {PLAIN}"
    )
    over = ratio(row, plain) if plain else None
    return (
        row.pair,
        row.setting.name,
        row.contender,
        row.choice,
        f"{row.rate:.1f}",
        f"{over.median:.2f}" if over else "",
        f"{over.lowest:.2f} to {over.highest:.2f}" if over else "",
        f"{row.median_efficiency:.2f}" if row.efficiency else "",
        f"{row.tokens_per_step:.2f}",
        "" if row.kept is None else f"{row.kept:.2f}",
        f"{row.same_text:.0%}",
        _whole(row.sent_per_token),
        _whole(row.received_per_token),
    )


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"


def step_times(result: Result) -> Table:
    """Where every millisecond of a step goes, at batch 1."""
    columns = ("pair", "setting", "contender", "steps", "forward ms", "own ms", "own share", "wait ms", "longest",
               "between ms", "drafter busy")  # fmt: skip
    lines = [
        (
            row.pair,
            row.setting.name,
            row.contender,
            f"{time.steps}",
            f"{time.forward_ms:.2f}",
            f"{time.own_ms:.2f}",
            f"{time.own_share:.1%}",
            f"{time.wait_ms:.2f}",
            f"{time.longest_wait_ms:.0f}",
            f"{time.between_ms:.2f}",
            f"{time.draft_busy:.0%}",
        )
        for row in result.rows
        if (time := row.profile)
    ]
    return Table("Where every millisecond of a step goes", columns, lines)


def show(result: Result) -> None:
    """Print the tables on stdout."""
    console = Console(width=None if sys.stdout.isatty() else 220)
    for table in (settings(result), step_times(result), goals(result)):
        console.print(table.rich())
    for outcome in result.outcomes:
        console.print(outcome.pair.about, highlight=False)


def write_json(result: Result, file: Path) -> None:
    """Everything, with every prompt's figures, for other programs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")


def document(result: Result) -> dict[str, Any]:
    """What :func:`write_json` writes: ``summary`` has exactly the keys of the goals."""
    options = asdict(result.options)
    del options["json"], options["out"]
    return {
        "summary": result.summary,
        "date": result.day.isoformat(),
        "machine": result.machine,
        "options": options,
        "pairs": [
            {"name": outcome.pair.name, "parameters": outcome.pair.parameters, "about": outcome.pair.about}
            for outcome in result.outcomes
        ],
        "rows": [asdict(row) for row in result.rows],
        "tried": [asdict(row) for outcome in result.outcomes for row in outcome.tried],
    }


def write_folder(result: Result, folder: Path) -> None:
    """Write JSON, plots, and ``README.md`` that shows them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, folder / "speculation.json")
    drawn = plots.draw(result.rows, result.outcomes[0].timelines, folder)
    (folder / "README.md").write_text(markdown(result, drawn), encoding="utf-8")


def markdown(result: Result, drawn: Sequence[plots.Drawn]) -> str:
    """The section for a README."""
    machine, options = result.machine, result.options
    parts = [
        f"## Speculative decoding, {result.day.isoformat()}",
        f"{machine['processor']}, {machine['cores']} cores: one for the target, one for the drafter, the router beside "
        f"them; transformers {machine['transformers']} gets as many in all. {options.dtype}, {options.prompts} prompts "
        f"(held out in training) of {options.tokens} new tokens, contenders in turn prompt by prompt; ratios: medians "
        "over the prompts. The round trip is injected between router and drafter.",
        "\n".join(f"- {outcome.pair.name}: {outcome.pair.about}" for outcome in result.outcomes),
        goals(result).markdown(),
        *(f"![{one.caption}]({one.file})\n\n{one.caption}" for one in drawn),
        step_times(result).markdown(),
        NOTES,
        settings(result).markdown(),
    ]
    return "\n\n".join(parts) + "\n"


NOTES = """\
- Efficiency: tokens/s over (tokens a step / T), with T the mean measured forward of a step that verifies as many
  drafts.
- Own: planning, sampling, acceptance and cache, inside a step. Wait: for drafts; a longest one of
  half a second ran into its bound, so that contender was not at its best. Between: messages.
- Range: lowest and highest over the prompts. Drafts kept: those behind a refused one count as refused. Same text: as
  the setting's first contender. Bytes: a committed token, between router and target.
- Wrong drafter, cold: its first prompts on a server that trusted the last drafter. Without "cold": after those and two
  more, as in service."""
