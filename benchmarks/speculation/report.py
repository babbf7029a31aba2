"""Shows what was measured; decides nothing about the figures (see :mod:`benchmarks.speculation.figures`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.report import (
    DPI,
    Plot,
    PlotLine,
    PlotPanel,
    Result,
    Table,
    against,
    canvas,
    cell,
    draw,
    goals_table,
    table_of,
)
from benchmarks.speculation.figures import (
    GOALS,
    OURS,
    PARALLEL,
    PLAIN,
    SEQUENTIAL,
    PairResult,
    RateRatio,
    Row,
    Timeline,
    find,
    ratio,
)
from benchmarks.speculation.settings import EXTRAS, FAR, NEAR, ROUND_TRIPS, SpeculationOptions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {OURS: "tab:blue", SEQUENTIAL: "tab:orange", PARALLEL: "tab:green", PLAIN: "tab:grey"}
TRIED = 10
"""A depth tried less often is not shown."""


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
        plots=lambda folder: plots(rows, outcomes[0].timelines, folder),
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
        named = (find(rows, row.pair, row.setting.name, name) for name in (PLAIN, f"transformers {PLAIN}"))
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


def plots(rows: Sequence[Row], timelines: Sequence[Timeline], folder: Path) -> list[Plot]:
    """Draw all plots into ``folder``."""
    drawn = [
        (speedup(rows), "speedup", "Speed-up over plain decoding against the round trip to the drafter."),
        (timeline(timelines), "timeline", "One request: steps of target and drafter, from its first tokens on."),
        (step_times_plot(rows), "step-times", "Where every millisecond of a step goes."),
        (acceptance(rows), "acceptance", "Share of drafts kept by depth, where all above was kept."),
    ]
    for figure, name, _ in drawn:
        figure.savefig(folder / f"{name}.png", dpi=DPI)
    return [Plot(f"{name}.png", caption) for _, name, caption in drawn]


def speedup(rows: Sequence[Row]) -> Figure:
    """A panel for every pair measured at several round trips."""
    at: dict[str, list[Row]] = {}
    for row in rows:
        if row.contender == OURS and row.setting in ROUND_TRIPS:
            at.setdefault(row.pair, []).append(row)
    panels = []
    for pair, found in at.items():
        if len(found) > 1:
            trips = sorted(found, key=lambda row: row.setting.rtt_ms)
            lines = [
                PlotLine(
                    contender,
                    [(row.setting.rtt_ms, _over_plain(rows, row, contender)) for row in trips],
                    {"marker": "o", "color": COLOURS[contender]},
                )
                for contender in (OURS, SEQUENTIAL, PARALLEL, PLAIN)
            ]
            panels.append(PlotPanel("round trip, ms", "speed-up over plain", lines, pair))
    return draw(panels)


def _over_plain(rows: Sequence[Row], beside: Row, contender: str) -> float:
    row, plain = (find(rows, beside.pair, beside.setting.name, name) for name in (contender, PLAIN))
    assert row is not None and plain is not None
    return ratio(row, plain).median


def timeline(timelines: Sequence[Timeline]) -> Figure:
    """A panel for every timeline: bars for forwards and waits of the target, and for steps of the drafter."""
    figure = canvas(10, 1.5 * max(len(timelines), 1))
    for number, shown in enumerate(timelines, 1):
        axes = figure.add_subplot(len(timelines), 1, number)
        log = shown.log
        _bars(axes, [(step.start, step.end) for step in log.steps], shown, 1, "tab:blue", "target: verifies")
        _bars(axes, [(wait.start, wait.end) for wait in log.waits], shown, 1, "tab:red", "target: waits for drafts")
        _bars(axes, [(span.start, span.end) for span in log.drafting], shown, 0, "tab:orange", "drafter: drafts")
        axes.set_yticks([0, 1], ["drafter", "target"])
        axes.set_title(f"{shown.contender}, {shown.setting.name}", loc="left", fontsize=9)
        axes.set_xlim(0, 1000 * (shown.end - shown.start))
        if number == 1:
            axes.legend(ncols=3, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1))
        if number == len(timelines):
            axes.set_xlabel("ms")
    return figure


def _bars(axes: Axes, spans: Sequence[tuple[float, float]], shown: Timeline, row: int, colour: str, label: str) -> None:
    bars = [(1000 * (start - shown.start), 1000 * (end - start)) for start, end in spans]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5, label=label)


def step_times_plot(rows: Sequence[Row]) -> Figure:
    """Stacked bars for the main settings of the first pair."""
    shown = [row for row in rows if row.pair == rows[0].pair and row.setting in (NEAR, FAR) and row.profile]
    figure = canvas(9, 0.5 * len(shown) + 1.2)
    axes = figure.add_subplot()
    left = [0.0] * len(shown)
    names = [f"{row.contender}, {row.setting.name}" for row in shown]
    parts = {"forward_ms": "forward", "own_ms": "own", "wait_ms": "wait for drafts", "between_ms": "between steps"}
    for part, label in parts.items():
        widths = [float(getattr(row.profile, part)) for row in shown]
        axes.barh(names, widths, left=left, label=label)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend(ncols=len(parts), fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def acceptance(rows: Sequence[Row]) -> Figure:
    """A line for ours in every setting that changes what is drafted: pairs and temperatures."""
    lines = [
        PlotLine(
            f"{row.pair}, temperature {row.setting.temperature:g}",
            [(depth.depth, depth.kept / depth.tried) for depth in row.depths if depth.tried >= TRIED],
        )
        for row in rows
        if row.contender == OURS and row.setting.batch == 1 and not row.setting.rtt_ms and row.setting not in EXTRAS
    ]
    return draw([PlotPanel("depth of the draft token", "share kept", lines, top=1)], width=7, height=4)
