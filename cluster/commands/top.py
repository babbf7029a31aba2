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
from typing import TYPE_CHECKING, cast

from cluster.commands.complete import DEFAULT_URL
from cluster.config import environment
from cluster.config.flags import BAD_INPUT, FAILED
from cluster.console import CommandError, say

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from router.telemetry.cluster_shape import Cluster

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


class Unreachable(Exception):
    """The router does not answer at present. One line."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where Paceline serves (default: {DEFAULT_URL})")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="the first key in it is sent (default: OPENAI_API_KEY)"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON, once")


def run(args: argparse.Namespace) -> int:
    """Show it until stopped."""
    import httpx
    from rich.console import Console

    from cluster.completion import bearer, is_local

    if not MIN_INTERVAL <= args.interval <= MAX_INTERVAL:  # also refuses nan
        bounds = f"{MIN_INTERVAL:g} to {MAX_INTERVAL:g} s"
        raise CommandError(f"--interval must be {bounds}, got {args.interval:g}", BAD_INPUT)
    headers = bearer(_key(args.api_key_file))
    with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=not is_local(args.url), headers=headers) as client:
        look = partial(look_at, client, args.url)
        console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        if args.json or args.once or not console.is_terminal:
            return _once(look, console, as_json=args.json)
        with contextlib.suppress(KeyboardInterrupt):
            watch(look, console, args.interval)
        return 0


def look_at(client: httpx.Client, url: str) -> Cluster:
    """A router's view of the cluster. Raises :class:`Unreachable`, and CommandError where no later try would help."""
    import httpx

    try:
        answer = client.get(url.rstrip("/") + "/cluster")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise CommandError(f"--url {url}: {error}", BAD_INPUT) from error
    except httpx.HTTPError as error:
        raise Unreachable(f"{url} does not answer: {error or type(error).__name__}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise CommandError(f"{url} wants an API key it knows: see --api-key-file", BAD_INPUT)
    if answer.status_code == httpx.codes.FORBIDDEN:
        raise CommandError(f"{url} wants an operator's API key for this: see --api-key-file", BAD_INPUT)
    if answer.is_server_error:
        raise Unreachable(f"{url} answers with status {answer.status_code}")
    try:
        view = answer.json()
    except ValueError:
        view = None
    if not isinstance(view, dict) or view.get("object") != "cluster":
        raise CommandError(f"{url} is no Paceline server: status {answer.status_code} at /cluster", FAILED)
    return cast("Cluster", view)


def watch(
    look: Callable[[], Cluster],
    console: Console,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show the view again and again, until KeyboardInterrupt. While the router is away, the last one, and why."""
    from rich.live import Live

    from cluster.top_screen import screen

    view, seen = _first(look), clock()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            trouble = ""
            try:
                view, seen = look(), clock()
            except Unreachable as error:
                away = math.ceil(clock() - seen)
                trouble = f"as of {away} s ago; {error}; trying again"
            live.update(screen(view, console.width, console.height, trouble), refresh=True)
            sleep(interval)


def _once(look: Callable[[], Cluster], console: Console, *, as_json: bool) -> int:
    from cluster.top_screen import screen

    view = _first(look)
    if as_json:
        say(json.dumps(view, allow_nan=False))
        return 0
    console.print(screen(view, console.width))
    return 0


def _first(look: Callable[[], Cluster]) -> Cluster:
    """The first view; a server that was never there is a mistake rather than a fault."""
    try:
        return look()
    except Unreachable as error:
        raise CommandError(str(error), FAILED) from error


def _key(path: Path | None) -> str:
    """The key to send; empty for none."""
    if path is None:
        key = environment.api_key()
        return key if key.isascii() and key.isprintable() else ""
    from router.http.auth import KeyFileError, read_keys

    try:
        return next(iter(read_keys(path)))
    except KeyFileError as error:
        raise CommandError(f"--api-key-file {error}", BAD_INPUT) from error
