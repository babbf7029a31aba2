"""The plot of a fit: speed-up by depth beside the textbook's, acceptance by depth and kind, speed-up under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fit.report import FitResult, textbook_speedups
from benchmarks.harness.report import DPI, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRIED = 10
"""A depth tried less often is not shown."""


def draw(result: FitResult, folder: Path) -> Path:
    """Draw into ``folder``; returns the file."""
    figure = canvas(13, 4)
    panels = figure.subplots(1, 3)
    _depths(panels[0], result)
    _acceptance(panels[1], result)
    _loads(panels[2], result)
    file = folder / "fit.png"
    figure.savefig(file, dpi=DPI)
    return file


def _depths(axes: Axes, result: FitResult) -> None:
    for one in result.forecasts:
        depths = result.shown.depths if one.way == result.shown.way else one.depths
        axes.plot(list(depths), list(depths.values()), marker=".", label=str(one.way))
    textbook = textbook_speedups(result)
    axes.plot(list(textbook), list(textbook.values()), linestyle="--", color="tab:grey", label="textbook, in turn")
    if result.validation is not None:
        measured = {one.depth: one.measured for one in result.validation.depths}
        axes.plot(list(measured), list(measured.values()), "kx", label="measured")
    axes.axhline(1.0, color="tab:grey", linewidth=0.5)
    axes.set_xlabel("depth")
    axes.set_ylabel("speed-up over plain")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _acceptance(axes: Axes, result: FitResult) -> None:
    shown = result.shown
    for kind, found in shown.by_kind.items():
        depths = [depth for depth in found.depths if depth.tried >= TRIED]
        axes.plot([at.depth for at in depths], [at.kept / at.tried for at in depths], marker=".", label=kind)
    axes.set_title(str(shown.way), fontsize=9)
    axes.set_xlabel("depth of the draft token")
    axes.set_ylabel("share right, where all above was")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7)


def _loads(axes: Axes, result: FitResult) -> None:
    sessions = [one.sessions for one in result.loaded]
    axes.plot(sessions, [one.speedup for one in result.loaded], marker=".", label="speed-up")
    axes.axhline(1.0, color="tab:grey", linewidth=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sessions, [str(count) for count in sessions])
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("speed-up over plain")
    axes.set_ylim(bottom=0)
