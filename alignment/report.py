"""What an alignment brought, for people: a table of before and after, a sentence, and a plot of the way."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from alignment.distillation import DistillationOutcome, score

READINGS = {"greedy": "greedy agreement", "overlap": "1 - TV", "coupled": "same noise"}
"""The last two at temperature 1."""
PLOT = "alignment.png"
DPI = 120


def table(outcome: DistillationOutcome) -> Table:
    """A line for every kind of text."""
    shown = Table(title="acceptance before and after: text held out, and what the target writes at temperatures")
    shown.add_column("text")
    for reading in READINGS.values():
        shown.add_column(reading, justify="right")
    for kind, before in outcome.before.items():
        after = outcome.after[kind]
        shown.add_row(kind, *(f"{before[name]:.3f} → {after[name]:.3f}" for name in READINGS))
    return shown


def verdict(outcome: DistillationOutcome, out: Path) -> str:
    """In one sentence."""
    gained = score(outcome.after) - score(outcome.before)
    if not outcome.best_step:
        return f"nothing was gained: no step made the draft better on held-out text; {out} holds the draft as it was"
    kept = f"the weights of step {outcome.best_step} of {outcome.steps}"
    return f"acceptance of the target's own text rose by {gained:.3f}; {out} holds {kept}: paceline up --draft {out}"


def plot(outcome: DistillationOutcome, folder: Path) -> Path | None:
    """Draw acceptance against steps into ``folder``; None without matplotlib, which is optional."""
    if not find_spec("matplotlib"):
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure((6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps, scores = zip(*outcome.history, strict=True)
    axes.plot(steps, scores, marker="o", color="tab:blue", label="held out, the target's own text")
    axes.axhline(scores[0], color="tab:grey", linestyle="--", label="before")
    axes.axvline(outcome.best_step, color="tab:green", linestyle=":", label="kept")
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance")
    axes.legend(fontsize=8)
    path = folder / PLOT
    figure.savefig(path, dpi=DPI)
    return path
