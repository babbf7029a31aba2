"""Shows what was measured; decides nothing about the figures (see :mod:`benchmarks.speculation.figures`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from benchmarks.harness.report import Result, Table, cell, listed
from benchmarks.speculation import plots
from benchmarks.speculation.figures import GOALS, PLAIN, PairResult, Row, find, ratio, summary
from benchmarks.speculation.settings import SpeculationOptions


def result(options: SpeculationOptions, outcomes: Sequence[PairResult], **about: Any) -> Result:
    """All that is shown; the main pair's outcome comes first. ``summary`` has exactly the keys of the goals."""
    rows = list(chain.from_iterable(outcome.rows for outcome in outcomes))
    measured = summary(rows, outcomes[0].pair.name)
    given = {name: value for name, value in asdict(options).items() if name not in ("json", "out")}
    pairs = [outcome.pair for outcome in outcomes]
    found = Result(
        "speculation",
        "Speculative decoding",
        options,
        (settings(rows), step_times(rows), goals(measured)),
        [pair.about for pair in pairs],
        {
            "summary": measured,
            "options": given,
            "pairs": [{"name": pair.name, "parameters": pair.parameters, "about": pair.about} for pair in pairs],
            "rows": [asdict(row) for row in rows],
            "tried": [asdict(row) for outcome in outcomes for row in outcome.tried],
        },
        plots=lambda folder: plots.draw(rows, outcomes[0].timelines, folder),
        width=220,
        **about,
    )
    machine = found.machine
    page = [
        f"{machine['processor']}, {machine['cores']} cores: one for the target, one for the drafter, the router beside "
        f"them; transformers {machine['transformers']} gets as many in all. {options.dtype}, {options.prompts} prompts "
        f"(held out in training) of {options.tokens} new tokens, contenders in turn prompt by prompt; ratios: medians "
        "over the prompts. The round trip is injected between router and drafter.",
        listed([f"{pair.name}: {pair.about}" for pair in pairs]),
        goals(measured).markdown(),
        step_times(rows).markdown(),
        NOTES,
        settings(rows).markdown(),
    ]
    return replace(found, page=page, figures={**found.figures, "machine": machine})


def goals(measured: Mapping[str, float]) -> Table:
    """What must be reached, beside what was."""
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


def settings(rows: Sequence[Row]) -> Table:
    """Every contender in every setting."""
    columns = ("pair", "setting", "contender", "chosen", "tokens/s", "over plain", "range", "efficiency",
               "tokens a step", "drafts kept", "same text", "bytes out", "bytes in")  # fmt: skip
    return Table("All settings", columns, [_line(row, rows) for row in rows])


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
        cell(row.kept),
        f"{row.same_text:.0%}",
        cell(row.sent_per_token, ".0f"),
        cell(row.received_per_token, ".0f"),
    )


def step_times(rows: Sequence[Row]) -> Table:
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
        for row in rows
        if (time := row.profile)
    ]
    return Table("Where every millisecond of a step goes", columns, lines)


NOTES = """\
- Efficiency: tokens/s over (tokens a step / T), with T the mean measured forward of a step that verifies as many
  drafts.
- Own: planning, sampling, acceptance and cache, inside a step. Wait: for drafts; a longest one of
  half a second ran into its bound, so that contender was not at its best. Between: messages.
- Range: lowest and highest over the prompts. Drafts kept: those behind a refused one count as refused. Same text: as
  the setting's first contender. Bytes: a committed token, between router and target.
- Wrong drafter, cold: its first prompts on a server that trusted the last drafter. Without "cold": after those and two
  more, as in service."""
