"""``paceline top``: what it shows on narrow, wide and low terminals, and what it does while the router is away."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster import cli
from cluster.commands import top
from cluster.commands.top import look_at, number, screen, span, watch
from cluster.console import CommandError
from router.generation import ServedModel
from router.sessions.run import EventKind, LoggedEvent
from router.sessions.snapshot import Snapshot, Totals, WorkerState, WorkerView
from router.sessions.tally import RouterCounters
from router.telemetry.cluster_view import ClusterView
from router.telemetry.metrics import RouterMetrics
from speculation.events import PeerId, Role
from speculation.messages import Load, Welcome


def view(targets: int = 2, events: int = 3) -> dict[str, Any]:
    load = Load(12, 3, 2500, 10000, counters={"offered": 10, "accepted": 4})
    welcome = Welcome("target", "bundled/target", 290, 256, dtype="bfloat16")
    workers = [
        WorkerView(
            PeerId(f"target@10.200.100.{i}:7001"),
            Role.TARGET,
            WorkerState.UP,
            "bundled/target",
            load,
            0.0123,
            welcome,
            since=40.0,
            rates=(31.0, 1234.5),
        )
        for i in range(targets)
    ]
    workers.append(WorkerView(PeerId("draft@10.200.100.99:7002"), Role.DRAFT, WorkerState.DOWN, described=welcome))
    lines = [
        LoggedEvent(i, 1000.0, EventKind.WORKER_LOST, f"worker {i} \x1b[2J gone", PeerId("x")) for i in range(events)
    ]
    models = (ServedModel("bundled/target", 290, 256, 1),)
    snapshot = Snapshot(tuple(workers), models, tuple(lines), Totals(reopened=7), running=24)
    return ClusterView(RouterMetrics(RouterCounters(lambda: 50.0), lambda: snapshot), lambda: 1050.0)()


def drawn(shown: dict[str, Any], width: int, height: int | None = None, trouble: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(screen(shown, width, height, trouble))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_eighty_columns_hold_every_figure() -> None:
    lines = drawn(view(), 80)
    assert max(map(len, lines)) <= 80
    (worker,) = (line for line in lines if "100.1:7001" in line)
    assert worker.split() == ["target", "10.200.100.1:7001", "up", "12", "3", "75%", "12.3", "40%", "1,234"]
    (draft,) = (line for line in lines if "100.99:7002" in line)
    assert "lost" in draft
    assert "24 running" in lines[1]
    assert any("worker 2 ?[2J gone" in line for line in lines), "nothing that a terminal would obey"


def test_a_wide_terminal_shows_more() -> None:
    titles = next(line for line in drawn(view(), 160) if "state" in line).split()
    assert {"model", "dtype", "steps/s", "busy", "for"} <= set(titles)
    assert "bfloat16" in "".join(drawn(view(), 160))


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (120, 15), (200, 60)])
def test_it_fits_the_screen(width: int, height: int) -> None:
    lines = drawn(view(targets=50, events=100), width, height, "gone\x07 for a while " * 10)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 16)
    assert lines[0].startswith("gone? for")
    assert any(line.startswith("and ") and line.endswith(" more") for line in lines)


def test_an_empty_cluster_is_shown() -> None:
    empty = ClusterView(RouterMetrics(RouterCounters(), Snapshot))()
    assert "no target worker is known" in drawn(empty, 80)[0]


def test_numbers_are_short() -> None:
    assert [number(x) for x in (None, 0.0, 99.94, 1234.6)] == ["-", "0.0", "99.9", "1,235"]
    assert [span(x) for x in (-1, 59.9, 61, 3700, 100000)] == ["0s", "59s", "1m01s", "1h01m", "1d03h"]


def client(*answers: Any) -> httpx.Client:
    """Answers in turn; the last one again and again."""
    left = list(answers)

    def answer(_request: httpx.Request) -> httpx.Response:
        given = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(given, Exception):
            raise given
        return given if isinstance(given, httpx.Response) else httpx.Response(200, json=given)

    return httpx.Client(transport=httpx.MockTransport(answer))


def test_it_says_that_the_router_is_away_and_goes_on_when_it_is_back() -> None:
    written = io.StringIO()
    console = Console(file=written, width=80, height=24, force_terminal=True, highlight=False)
    gone, broken = httpx.ConnectError("refused"), httpx.Response(502, text="bad gateway")
    look = partial(look_at, client(view(), view(), gone, broken, view(targets=3)), "http://paceline")
    frames: list[str] = []

    def sleep(_seconds: float) -> None:
        frames.append(written.getvalue())
        written.seek(written.truncate(0))
        if len(frames) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(look(), look, console, 1.0, sleep)
    assert "\x1b[?1049h" in frames[0], "on a screen of its own, so that what stood there comes back"
    assert "does not answer: refused; trying again" in frames[1]
    assert "100.1:7001" in frames[1], "what was last known stays"
    assert "status 502" in frames[2]
    assert "trying again" not in frames[3]
    assert "100.2:7001" in frames[3]
    assert all("\x1b[2J" not in frame for frame in frames[1:]), "redrawn in place, never cleared"


@pytest.mark.parametrize(
    ("answer", "words", "code"),
    [
        (httpx.ConnectError("refused"), "does not answer: refused", 1),
        (httpx.Response(401, json={}), "--api-key-file", 2),
        (httpx.Response(403, json={}), "an operator's API key", 2),
        (httpx.Response(404, text="no"), "is no Paceline server: status 404", 1),
        (httpx.Response(200, text="<html>"), "is no Paceline server", 1),
        ([], "is no Paceline server", 1),
    ],
)
def test_what_is_wrong_at_the_start_ends_it(answer: Any, words: str, code: int) -> None:
    with pytest.raises(CommandError, match=words) as error:
        look_at(client(answer), "http://paceline")
    assert error.value.code == code


def test_json_is_the_answer_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = view()
    monkeypatch.setattr(top, "look_at", lambda *_: shown)
    assert cli.main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--interval", "nan"], "--interval must be 0.1 to 3600 s, got nan"),
        (["--interval", "0"], "--interval must be"),
        (["--url", "http://[::1"], "--url http://[::1:"),
        (["--url", "paceline"], "--url paceline:"),
        (["--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys: cannot be read"),
    ],
)
def test_bad_flags_are_refused_in_a_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
