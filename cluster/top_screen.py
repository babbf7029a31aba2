"""What ``paceline top`` shows of a router's view of its cluster: as wide and as high as there is room.

Draws only; where the view comes from is :mod:`cluster.commands.top`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from router.telemetry.cluster_shape import Cluster, EventPart, WorkerPart

STATES = {"up": "green", "draining": "yellow", "connecting": "yellow", "loading": "yellow", "lost": "red"}
BAD = ("worker_lost", "session_condemned", "drafter_quarantined")
OTHER_LINES = 8
"""Of the screen, besides workers and events."""
FEWEST_ROWS = 3
"""Workers and events that are shown on however low a screen."""
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[WorkerPart, float], str]
    """Of a worker at a time."""
    min_width: int = 0
    """Columns of the terminal from which on it is shown."""
    left: bool = False


COLUMNS = (
    _Column("worker", lambda w, _: f"{w['role']:6} {w['address']}", left=True),
    _Column("state", lambda w, _: _state(w), left=True),
    _Column("for", lambda w, now: span(now - w["since"]), 100),
    _Column("model", lambda w, _: w["model"] or NOTHING, 120, left=True),
    _Column("dtype", lambda w, _: w["dtype"] or NOTHING, 150, left=True),
    _Column("sess", lambda w, _: f"{w['sessions']}"),
    _Column("wait", lambda w, _: f"{w['waiting']}"),
    _Column("cache", lambda w, _: _used(w)),
    _Column("trip ms", lambda w, _: number(w["round_trip_ms"])),
    _Column("acc", lambda w, _: percent(w["acceptance"])),
    _Column("steps/s", lambda w, _: number(w["steps_per_second"]), 100),
    _Column("tok/s", lambda w, _: number(w["tokens_per_second"])),
    _Column("busy", lambda w, _: percent(w["efficiency"]), 110),
)


def screen(view: Cluster, width: int, height: int | None = None, trouble: str = "") -> RenderableType:
    """Everything, in ``width`` columns and ``height`` lines (None: as many as it takes).

    ``trouble``: why the view is an old one.
    """
    workers, events = _fit(len(view["workers"]), len(view["events"]), height)
    shown: list[RenderableType] = [_head(view), _line(view), Text(), _workers(view, width, workers)]
    if left := len(view["workers"]) - workers:
        shown.append(Text(f"and {left} more", style="dim"))
    shown.append(Text())
    latest = view["events"][-events:] if events else []
    shown += [_event(event) for event in reversed(latest)]
    if trouble:
        shown.insert(0, Text(clean(trouble), style="bold red", no_wrap=True, overflow="ellipsis"))
    return Group(*shown)


def _fit(workers: int, events: int, height: int | None) -> tuple[int, int]:
    """How many rows of each: workers first, then the latest events."""
    if height is None:
        return workers, min(events, 10)
    room = max(height - OTHER_LINES, 2 * FEWEST_ROWS)
    shown = min(workers, max(room - min(events, FEWEST_ROWS), FEWEST_ROWS))
    return shown, min(events, room - shown)


def _head(view: Cluster) -> Text:
    router = view["router"]
    state = ("ready", "green") if router["ready"] else (clean(router["unready"] or "not ready"), "bold red")
    models = ", ".join(clean(model["name"]) for model in view["models"]) or "no model"
    up = span(router["uptime_seconds"])
    parts = ("Paceline ", clean(router["version"]), "  ", state, f"  up {up}  ", (models, "bold"))
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _line(view: Cluster) -> Text:
    sessions, now, totals = view["router"]["sessions"], view["router"]["now"], view["totals"]
    parts = [
        f"{sessions['running']} running, {sessions['placing']} placing, {sessions['queued']} queued",
        f"{number(now['requests_per_second'])} req/s",
        f"{number(now['tokens_per_second'])} tok/s",
        f"acceptance {percent(now['acceptance'])}",
        f"failovers {totals['reopened']}",
        f"moved {totals['moved']}",
        f"failed {totals['failed']}",
    ]
    return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def _workers(view: Cluster, width: int, rows: int) -> Table:
    columns = [column for column in COLUMNS if width >= column.min_width]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        # Only the first two may be cut; figures never are.
        table.add_column(
            column.title,
            justify="left" if column.left else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if column.left else len(column.title),
        )
    for worker in view["workers"][:rows]:
        cells = (Text(clean(column.cell(worker, view["time"]))) for column in columns)
        style = STATES.get(worker["state"], "")
        table.add_row(*cells, style="" if style == "green" else style)
    return table


def _event(event: EventPart) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    times = f" ({event['times']} times)" if event["times"] > 1 else ""
    style = "red" if event["kind"] in BAD else ""
    return Text.assemble((f"{at} ", "dim"), (clean(event["text"]) + times, style), no_wrap=True, overflow="ellipsis")


def clean(text: str) -> str:
    """Without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def number(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share of 1."""
    return NOTHING if value is None else f"{100 * value:.0f}%"


def span(seconds: float) -> str:
    """A length of time in its largest units."""
    whole = max(int(seconds), 0)
    for unit, length, below, smaller in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // smaller:02}{below}"
    return f"{whole}s"


def _state(worker: WorkerPart) -> str:
    return worker["state"] if worker["fraction"] is None else f"{worker['state']} {percent(worker['fraction'])}"


def _used(worker: WorkerPart) -> str:
    cache = worker["cache"]
    return percent(1 - cache["free"] / cache["capacity"]) if cache["capacity"] else NOTHING
