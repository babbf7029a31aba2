"""The plots: speed-up against round trip, a timeline, acceptance by depth, where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.report import DPI, Plot, canvas
from benchmarks.speculation.figures import OURS, PARALLEL, PLAIN, SEQUENTIAL, Row, Timeline, find, ratio
from benchmarks.speculation.settings import EXTRAS, FAR, NEAR, ROUND_TRIPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {OURS: "tab:blue", SEQUENTIAL: "tab:orange", PARALLEL: "tab:green", PLAIN: "tab:grey"}
TRIED = 10
"""A depth tried less often is not shown."""


def draw(rows: Sequence[Row], timelines: Sequence[Timeline], folder: Path) -> list[Plot]:
    """Draw all plots into ``folder``."""
    plots = [
        (speedup(rows), "speedup", "Speed-up over plain decoding against the round trip to the drafter."),
        (timeline(timelines), "timeline", "One request: steps of target and drafter, from its first tokens on."),
        (step_times(rows), "step-times", "Where every millisecond of a step goes."),
        (acceptance(rows), "acceptance", "Share of drafts kept by depth, where all above was kept."),
    ]
    for figure, name, _ in plots:
        figure.savefig(folder / f"{name}.png", dpi=DPI)
    return [Plot(f"{name}.png", caption) for _, name, caption in plots]


def speedup(rows: Sequence[Row]) -> Figure:
    """A panel for every pair measured at several round trips."""
    at: dict[str, list[Row]] = {}
    for row in rows:
        if row.contender == OURS and row.setting in ROUND_TRIPS:
            at.setdefault(row.pair, []).append(row)
    panels = {pair: sorted(found, key=lambda row: row.setting.rtt_ms) for pair, found in at.items() if len(found) > 1}
    figure = canvas(4 * max(len(panels), 1), 3.6)
    for number, (pair, found) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), number)
        for contender in (OURS, SEQUENTIAL, PARALLEL, PLAIN):
            line = [(row.setting.rtt_ms, _over_plain(rows, row, contender)) for row in found]
            axes.plot(*zip(*line, strict=True), marker="o", label=contender, color=COLOURS[contender])
        axes.set_title(pair)
        axes.set_xlabel("round trip, ms")
        axes.set_ylabel("speed-up over plain")
        axes.set_ylim(bottom=0)
        if number == 1:
            axes.legend()
    return figure


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


def step_times(rows: Sequence[Row]) -> Figure:
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
    figure = canvas(7, 4)
    axes = figure.add_subplot()
    for row in rows:
        setting = row.setting
        if row.contender == OURS and setting.batch == 1 and setting.rtt_ms == 0 and setting not in EXTRAS:
            depths = [depth for depth in row.depths if depth.tried >= TRIED]
            shares = [depth.kept / depth.tried for depth in depths]
            label = f"{row.pair}, temperature {setting.temperature:g}"
            axes.plot([depth.depth for depth in depths], shares, marker=".", label=label)
    axes.set_xlabel("depth of the draft token")
    axes.set_ylabel("share kept")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7)
    return figure
