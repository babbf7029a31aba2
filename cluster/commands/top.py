"""``paceline top``: the workers and sessions of a running server, in the terminal, as they change."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.commands.complete import DEFAULT_URL
from cluster.config import environment
from cluster.config.security import first_key
from cluster.console import BadInput, CommandError, say

if TYPE_CHECKING:
    import httpx


Json = dict[str, Any]
"""Of ``GET /cluster``, or a part of it; see docs/alerts.md."""

ABOUT = "show workers, sessions and events of a running server, live"
DETAILS = """\
One line for every worker: its sessions, how full its cache is, the round trip, the share of drafts accepted and its
tokens/s over the last seconds; below, what lately happened. Ctrl-C ends it. If the output is no terminal, it is
printed once. Where several routers stand behind the address, one of them answers.

  paceline top
  paceline top --url http://gpu-head:8000 --api-key-file keys.txt --interval 2
  paceline top --json | jq .router.now
"""
TIMEOUT_SECONDS = 5.0
MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0
PLAIN_WIDTH = 160
"""Columns where the output is no terminal."""
STATES = {"draining": "yellow", "connecting": "yellow", "loading": "yellow", "lost": "red"}
BAD = ("worker_lost", "session_condemned", "drafter_quarantined")
OTHER_LINES = 8
"""Of the screen, besides workers and events."""
FEWEST_ROWS = 3
"""Workers and events that are shown on however low a screen."""
NOTHING = "-"


class Unreachable(CommandError):
    """The router does not answer at present. One line."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where Paceline serves (default: {DEFAULT_URL})")
    about = "the first key in it is sent (default: OPENAI_API_KEY)"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=about)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON, once")


def run(args: argparse.Namespace) -> int:
    """Show it until stopped."""
    import httpx

    from cluster.completion import bearer, is_local

    if not MIN_INTERVAL <= args.interval <= MAX_INTERVAL:  # also refuses nan
        bounds = f"{MIN_INTERVAL:g} to {MAX_INTERVAL:g} s"
        raise BadInput(f"--interval must be {bounds}, got {args.interval:g}")
    headers = bearer(_key(args.api_key_file))
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=not is_local(args.url), headers=headers) as client:
        look = partial(look_at, client, args.url)
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        view = look()
        if args.json:
            say(json.dumps(view, allow_nan=False))
        elif args.once or not console.is_terminal:
            console.print(screen(view, console.width))
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(view, look, console, args.interval)
        return 0


def look_at(client: httpx.Client, url: str) -> Json:
    """A router's view of the cluster. Raises :class:`Unreachable`, and CommandError where no later try would help."""
    import httpx

    try:
        answer = client.get(url.rstrip("/") + "/cluster")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise BadInput(f"--url {url}: {error}") from error
    except httpx.HTTPError as error:
        raise Unreachable(f"{url} does not answer: {error or type(error).__name__}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise BadInput(f"{url} wants an API key it knows: see --api-key-file")
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise BadInput(f"{url} wants an operator's API key for this: see --api-key-file")
    if answer.is_server_error:
        raise Unreachable(f"{url} answers with status {answer.status_code}")
    try:
        view = answer.json()
    except ValueError:
        view = None
    if not isinstance(view, dict) or view.get("object") != "cluster":
        raise CommandError(f"{url} is no Paceline server: status {answer.status_code} at /cluster")
    return view


def watch(
    view: Json,
    look: Callable[[], Json],
    console: Console,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the view, and look again and again, until KeyboardInterrupt. While the router is away, the last, and why."""
    seen = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            trouble = ""
            try:
                view, seen = look(), time.monotonic()
            except Unreachable as error:
                away = math.ceil(time.monotonic() - seen)
                trouble = f"as of {away} s ago; {error}; trying again"
            live.update(screen(view, console.width, console.height, trouble), refresh=True)
            sleep(interval)


def _key(path: Path | None) -> str:
    if path is None:
        key = environment.api_key()
        return key if key.isascii() and key.isprintable() else ""
    return first_key(path, "--api-key-file")


# -- the screen --------------------------------------------------------------------------------------------------------


COLUMNS: tuple[tuple[str, int, bool, Callable[[Json, float], str]], ...] = (
    ("worker", 0, True, lambda w, _: f"{w['role']:6} {w['address']}"),
    ("state", 0, True, lambda w, _: w["state"] + ("" if w["fraction"] is None else f" {percent(w['fraction'])}")),
    ("for", 100, False, lambda w, now: span(now - w["since"])),
    ("model", 120, True, lambda w, _: w["model"] or NOTHING),
    ("dtype", 150, True, lambda w, _: w["dtype"] or NOTHING),
    ("sess", 0, False, lambda w, _: f"{w['sessions']}"),
    ("wait", 0, False, lambda w, _: f"{w['waiting']}"),
    ("cache", 0, False, lambda w, _: _used(w)),
    ("trip ms", 0, False, lambda w, _: number(w["round_trip_ms"])),
    ("acc", 0, False, lambda w, _: percent(w["acceptance"])),
    ("steps/s", 100, False, lambda w, _: number(w["steps_per_second"])),
    ("tok/s", 0, False, lambda w, _: number(w["tokens_per_second"])),
    ("busy", 110, False, lambda w, _: percent(w["efficiency"])),
)
"""Title, columns of the terminal from which on it is shown, whether it is text, and the cell of a worker at a time."""


def screen(view: Json, width: int, height: int | None = None, trouble: str = "") -> RenderableType:
    """Everything, in so many columns and lines (None: as many as it takes). ``trouble``: why the view is an old one."""
    workers, events = _fit(len(view["workers"]), len(view["events"]), height)
    shown: list[RenderableType] = [_head(view), _line(view), Text(), _workers(view, width, workers)]
    if left := len(view["workers"]) - workers:
        shown.append(Text(f"and {left} more", style="dim"))
    shown.append(Text())
    latest = view["events"][-events:] if events else []
    shown += [_event(event) for event in reversed(latest)]
    if trouble:
        shown.insert(0, Text(printable(trouble), style="bold red", no_wrap=True, overflow="ellipsis"))
    return Group(*shown)


def _fit(workers: int, events: int, height: int | None) -> tuple[int, int]:
    """How many rows of each: workers first, then the latest events."""
    if height is None:
        return workers, min(events, 10)
    room = max(height - OTHER_LINES, 2 * FEWEST_ROWS)
    shown = min(workers, max(room - min(events, FEWEST_ROWS), FEWEST_ROWS))
    return shown, min(events, room - shown)


def _head(view: Json) -> Text:
    router = view["router"]
    state = ("ready", "green") if router["ready"] else (printable(router["unready"] or "not ready"), "bold red")
    models = ", ".join(printable(model["name"]) for model in view["models"]) or "no model"
    up = span(router["uptime_seconds"])
    parts = ("Paceline ", printable(router["version"]), "  ", state, f"  up {up}  ", (models, "bold"))
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _line(view: Json) -> Text:
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


def _workers(view: Json, width: int, rows: int) -> Table:
    columns = [column for column in COLUMNS if width >= column[1]]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, _, text, _ in columns:
        # Only the first two may be cut; figures never are.
        least = None if text else len(title)
        justify: Literal["left", "right"] = "left" if text else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    for worker in view["workers"][:rows]:
        cells = (Text(printable(cell(worker, view["time"]))) for *_, cell in columns)
        table.add_row(*cells, style=STATES.get(worker["state"], ""))
    return table


def _event(event: Json) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    times = f" ({event['times']} times)" if event["times"] > 1 else ""
    style = "red" if event["kind"] in BAD else ""
    return Text.assemble(
        (f"{at} ", "dim"), (printable(event["text"]) + times, style), no_wrap=True, overflow="ellipsis"
    )


def printable(text: str) -> str:
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


def _used(worker: Json) -> str:
    cache = worker["cache"]
    return percent(1 - cache["free"] / cache["capacity"]) if cache["capacity"] else NOTHING
