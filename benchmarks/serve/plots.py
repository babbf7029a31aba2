"""The plots: how many requests were how fast, and what a sweep changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.report import DPI, Plot, canvas
from benchmarks.serve.client import Heard
from benchmarks.serve.figures import Figures, Spread, e2e, figures, tpot, ttft
from benchmarks.serve.rounds import Log
from benchmarks.serve.settings import ServeOptions

MEASURES: tuple[tuple[str, Callable[[Heard], float | None]], ...] = (
    ("time to first token, ms", ttft),
    ("time per output token, ms", tpot),
    ("end to end, ms", e2e),
)


def draw(log: Log, options: ServeOptions, folder: Path) -> list[Plot]:
    """Draw all plots into ``folder``."""
    drawn = [_latencies(log, folder)]
    if options.sweep is not None:
        drawn.append(_sweep(log, options, folder))
    return drawn


def _latencies(log: Log, folder: Path) -> Plot:
    """A panel a measure, a line a variant: the share of requests that were at least so fast."""
    figure = canvas(4 * len(MEASURES), 3.6)
    for panel, (title, measure) in enumerate(MEASURES, 1):
        axes = figure.add_subplot(1, len(MEASURES), panel)
        for variant in log.variants:
            heard = [one for turn in log.turns if turn.variant == variant for one in turn.heard if not one.error]
            values = sorted(1e3 * value for one in heard if (value := measure(one)) is not None)
            shares = [(place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", label=variant.name)
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        if panel == 1:
            axes.set_ylabel("share of requests")
            axes.legend(fontsize=7)
    figure.savefig(folder / "latencies.png", dpi=DPI)
    return Plot("latencies.png", "Share of the requests that were at least so fast.")


def _sweep(log: Log, options: ServeOptions, folder: Path) -> Plot:
    """Throughput and the waits of users against what is swept; a contender without a value is a level line."""
    assert options.sweep is not None
    what = options.sweep.what.value
    panels: tuple[tuple[str, Callable[[Figures], float]], ...] = (
        ("tokens/s", lambda row: row.token_rate),
        ("time per output token, ms (median)", lambda row: _median(row.tpot)),
        ("time to first token, ms (median)", lambda row: _median(row.ttft)),
    )
    figure = canvas(4 * len(panels), 3.6)
    for panel, (title, measure) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), panel)
        for contender in log.contenders:
            points = [
                (variant.value, measure(figures(log, variant, options)))
                for variant in log.variants
                if variant.contender == contender
            ]
            if points and points[0][0] is None:
                axes.axhline(points[0][1], linestyle="--", color="tab:grey", label=contender.name)
            elif points:
                axes.plot(*zip(*points, strict=True), marker="o", label=contender.name)
        axes.set_xlabel(what)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        if panel == 1:
            axes.legend(fontsize=7)
    figure.savefig(folder / "sweep.png", dpi=DPI)
    return Plot("sweep.png", f"What {what} changes.")


def _median(spread: Spread | None) -> float:
    return spread.p50 if spread is not None else float("nan")
