"""What a simulated run of the policies came to: a table of periods, the decisions and their reasons, CSV and plot.

matplotlib is an optional dependency (``plots``) and is imported only when something is drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, quantiles

from rich.table import Table

from cluster.autoscaling.simulation import POOLS, Change, Sample, ScalingOutcome

PERIODS = (10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
"""Seconds of a row of the table."""
ROWS = 24
SOON = 120.0
"""Seconds within which a change that is taken back would better not have been made."""
COLOURS = {"target": "tab:blue", "draft": "tab:orange", "router": "tab:green"}


def rows(outcome: ScalingOutcome) -> list[dict[str, str]]:
    """What is shown of each period, by column. Waits are of requests that came in it: see ``waits``."""
    end = outcome.samples[-1].at
    length = next((period for period in PERIODS if end / period <= ROWS), PERIODS[-1])
    found = []
    for start in range(0, max(round(end), 1), length):
        samples = [sample for sample in outcome.samples if start < sample.at <= start + length]
        found.append(_row(start, samples, outcome.waits(start, start + length)))
    return found


def _row(start: int, samples: Sequence[Sample], waits: Sequence[float]) -> dict[str, str]:
    return {
        "from": clock(start),
        "requests": str(len(waits)),
        "streams": f"{fmean(sample.streams for sample in samples):.1f}",
        **{f"{pool}s": f"{fmean(sample.replicas[pool] for sample in samples):.1f}" for pool in POOLS},
        "queued": f"{max(sample.queued_tokens for sample in samples):,.0f}",
        "wait p50 s": f"{percentile(waits, 50):.1f}" if waits else "",
        "wait p95 s": f"{percentile(waits, 95):.1f}" if waits else "",
        "busy": f"{fmean(sample.busy for sample in samples):.2f}",
        "replica-s": f"{sum(sum(sample.replicas.values()) for sample in samples)}",
    }


def table(outcome: ScalingOutcome) -> Table:
    """For the terminal."""
    cells = rows(outcome)
    drawn = Table()
    for name in cells[0]:
        drawn.add_column(name, justify="right")
    for row in cells:
        drawn.add_row(*row.values())
    return drawn


def decisions(outcome: ScalingOutcome) -> Iterator[str]:
    """Every change of a pool, and why."""
    for change in outcome.changes:
        yield f"{clock(change.at):>8}  {change.pool} {_change(change)}  {change.decision.why}: {change.decision.says}"


def _change(change: Change) -> str:
    return f"{change.before} -> {change.decision.replicas}"


def summary(outcome: ScalingOutcome) -> Iterator[str]:
    """The run in a few sentences."""
    waits = outcome.waits()
    waiting = sum(one.first_at is None for one in outcome.unfinished)
    if waits:
        shown = ", ".join(f"p{share} {percentile(waits, share):.1f}" for share in (50, 95, 99))
        longest = f"the longest over {max(waits):.1f}" if waiting else f"at most {max(waits):.1f}"
        yield f"{len(waits)} requests; seconds to the first token: {shown}, {longest}"
    if outcome.unfinished:
        late = f"{len(outcome.unfinished)} of {len(waits)} requests were not done an hour after the last came"
        yield f"{late}; {waiting} had no first token, and count with the wait they had until then"
    max_replicas = {pool: max(sample.replicas[pool] for sample in outcome.samples) for pool in POOLS}
    hours = [f"{outcome.replica_seconds(pool) / 3600:.2f} {pool} (at most {max_replicas[pool]})" for pool in POOLS]
    yield f"replica-hours: {', '.join(hours)}"
    reversals = outcome.reversals(SOON)
    yield f"{len(outcome.changes)} changes, {len(reversals)} of them taken back within {SOON:g} s"


def write_csv(outcome: ScalingOutcome, file: Path) -> None:
    """The table, for a spreadsheet."""
    cells = rows(outcome)
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(cells[0]))
        writer.writeheader()
        writer.writerows(cells)


def plot(outcome: ScalingOutcome, file: Path) -> None:
    """Streams and queue above, replicas below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure((10, 6), layout="constrained")
    load, pools = figure.subplots(2, 1, sharex=True)
    minutes = [sample.at / 60 for sample in outcome.samples]
    load.plot(minutes, [sample.streams for sample in outcome.samples], color="tab:grey", label="streams")
    load.set_ylabel("streams")
    queue = load.twinx()
    queue.plot(minutes, [sample.queued_tokens for sample in outcome.samples], color="tab:red", linewidth=0.8)
    queue.set_ylabel("queued tokens", color="tab:red")
    for pool in POOLS:
        pools.step(
            minutes, [sample.replicas[pool] for sample in outcome.samples], color=COLOURS[pool], label=f"{pool}s"
        )
    pools.set_xlabel("minutes")
    pools.set_ylabel("replicas")
    pools.legend()
    figure.savefig(file, dpi=120)


def percentile(values: Sequence[float], share: int) -> float:
    """The value below which ``share`` percent lie; at least one value."""
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[share - 1]


def clock(seconds: float) -> str:
    """Hours, minutes and seconds since the start."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
