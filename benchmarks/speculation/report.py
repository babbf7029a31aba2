"""Shows what was measured; decides nothing about the figures (see :mod:`benchmarks.speculation.figures`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.harness.report import PlotLine, PlotPanel, Result, Table, against, cell, draw, goals_table, table_of
from benchmarks.speculation import figures
from benchmarks.speculation.figures import GOALS, PairResult, RateRatio, Row, find, ratio
from benchmarks.speculation.settings import EXTRAS, ROUND_TRIPS, SpeculationOptions

COLOURS = {
    figures.OURS: "tab:blue",
    figures.SEQUENTIAL: "tab:orange",
    figures.PARALLEL: "tab:green",
    figures.PLAIN: "tab:grey",
}
STYLES = {contender: {"marker": "o", "color": colour} for contender, colour in COLOURS.items()}
TRIED = 10


def result(options: SpeculationOptions, outcomes: Sequence[PairResult], **about: Any) -> Result:
    """All that is shown; the main pair's outcome comes first."""
    rows = list(chain.from_iterable(outcome.rows for outcome in outcomes))
    given = {name: value for name, value in asdict(options).items() if name not in ("json", "out")}
    pairs = [outcome.pair for outcome in outcomes]
    found = Result(
        "speculation",
        "Speculative decoding",
        options,
        (settings(rows), step_times(rows), goals_table(GOALS, rows)),
        [f"{pair.name}: {pair.about}" for pair in pairs],
        {
            **against(GOALS, rows),
            "options": given,
            "pairs": [{"name": pair.name, "parameters": pair.parameters, "about": pair.about} for pair in pairs],
            "rows": [asdict(row) for row in rows],
            "tried": [asdict(row) for outcome in outcomes for row in outcome.tried],
        },
        plots=lambda folder: plots(rows, folder),
        width=220,
        **about,
    )
    machine = found.machine
    about_all = (
        f"{machine['processor']}, {machine['cores']} cores: one for the target, one for the drafter, the router beside "
        f"them; transformers {machine['transformers']} gets as many in all. {options.dtype}, {options.prompts} prompts "
        f"(held out in training) of {options.tokens} new tokens, contenders in turn prompt by prompt; ratios: medians "
        "over the prompts. The round trip is injected between router and drafter."
    )
    return replace(found, notes=[about_all, *found.notes, *NOTES], figures={**found.figures, "machine": machine})


def settings(rows: Sequence[Row]) -> Table:
    """Every contender in every setting."""

    def over(row: Row) -> RateRatio | None:
        named = (
            find(rows, row.pair, row.setting.name, name) for name in (figures.PLAIN, f"transformers {figures.PLAIN}")
        )
        plain = next(filter(None, named), None)
        return ratio(row, plain) if plain else None

    return table_of(
        "All settings",
        [(row, over(row)) for row in rows],
        {
            "pair": lambda of: of[0].pair,
            "setting": lambda of: of[0].setting.name,
            "contender": lambda of: of[0].contender,
            "chosen": lambda of: of[0].choice,
            "tokens/s": lambda of: f"{of[0].rate:.1f}",
            "over plain": lambda of: of[1] and of[1].median,
            "range": lambda of: of[1] and f"{of[1].lowest:.2f} to {of[1].highest:.2f}",
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
    at: dict[str, list[Row]] = {}
    for row in rows:
        if row.contender == figures.OURS and row.setting in ROUND_TRIPS:
            at.setdefault(row.pair, []).append(row)
    panels = []
    for pair, found in at.items():
        if len(found) > 1:
            trips = sorted(found, key=lambda row: row.setting.rtt_ms)
            lines: list[PlotLine] = [
                (contender, [(row.setting.rtt_ms, _over_plain(rows, row, contender)) for row in trips], style)
                for contender, style in STYLES.items()
            ]
            panels.append(PlotPanel("round trip, ms", "speed-up over plain", lines, pair))
    return panels


def _over_plain(rows: Sequence[Row], beside: Row, contender: str) -> float:
    row, plain = (find(rows, beside.pair, beside.setting.name, name) for name in (contender, figures.PLAIN))
    assert row is not None and plain is not None
    return ratio(row, plain).median


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
