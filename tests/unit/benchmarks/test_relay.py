"""``paceline bench relay``: its figures are right, its flags are checked, and it measures what really runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness.processes import WorkerFailed
from benchmarks.relay.part import clock_us, since
from benchmarks.relay.run import (
    BARE,
    CLOCK_US,
    CONTENDERS,
    DIRECT,
    FEATURES,
    PACELINE,
    PROPOSED,
    VERIFIED,
    WANTED_MS,
    RelayTurn,
    figures,
    summary,
)
from cluster.cli import main


def turn(contender: str, verified: list[float], proposed: list[float], router_us: float = 50.0) -> RelayTurn:
    """Times in milliseconds; machines take up what they hear 1 ms later."""
    heard = {VERIFIED: verified, PROPOSED: proposed}
    taken = {way: [time + 1.0 for time in times] for way, times in heard.items()}
    return RelayTurn(contender, heard, taken, {"target": 1.0, "draft": 2.0, "router": router_us})


def test_figures_are_over_all_turns_of_a_contender() -> None:
    turns = [
        turn(PACELINE, [0.2, 0.4], [1.0], 10.0),
        turn(BARE, [0.1], [0.5]),
        turn(PACELINE, [0.6], [3.0, 2.0], 30.0),
        turn(FEATURES, [0.6], [3.0, 2.0], 35.0),
    ]
    found = figures(turns, PACELINE, VERIFIED)
    assert (found.messages, found.p50_ms, found.p99_ms, found.taken_p50_ms) == pytest.approx((3, 0.4, 0.6, 1.4))
    assert summary(turns) == pytest.approx(
        {
            "verified_p50_ms": 0.4,
            "proposed_p50_ms": 2.0,
            "verified_p99_ms": 0.6,
            "proposed_p99_ms": 3.0,
            "verified_over_bare": 4.0,
            "proposed_over_bare": 4.0,
            "router_cpu_us": 20.0,
            "router_cpu_us_with_features": 35.0,
        }
    )


def test_a_way_on_which_nothing_came_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match="nothing came from drafter to target through paceline"):
        figures([turn(PACELINE, [1.0], [])], PACELINE, PROPOSED)


def test_times_may_pass_the_end_of_the_clock() -> None:
    assert since((clock_us() + CLOCK_US // 2) % CLOCK_US) >= CLOCK_US // 2 / 1000, "sent half a turn ago"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sessions", "0"], "--sessions must be 1 to 256, got 0"),
        (["--steps", "0"], "--steps must be 1 to 1000, got 0"),
        (["--host-ms", "9"], "--host-ms must be 0 to 8, a step, got 9"),
        (["--rounds", "0"], "--rounds must be 1 to 100, got 0"),
        (["--json", "/"], "--json /: a folder, not a file"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, capsys) -> None:
    assert main(["bench", "relay", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_it_measures_what_really_runs(tmp_path, capsys) -> None:
    """Both ways, through real streams of all contenders; how long they take is not for a test to say."""
    arguments = ["--sessions", "2", "--steps", "50", "--rounds", "1", "--seconds", "0.5"]
    assert main(["bench", "relay", *arguments, "--json", str(tmp_path / "relay.json")]) == 0
    assert "drafter to target" in capsys.readouterr().out
    written = json.loads((tmp_path / "relay.json").read_text())
    for contender in CONTENDERS:
        found = written["figures"][contender]
        assert all(found[way]["messages"] > 0 and found[way]["p50_ms"] > 0 for way in (VERIFIED, PROPOSED))
        parts = {"target", "draft"} if contender == DIRECT else {"target", "draft", "router"}
        assert {part for part, us in found["cpu_us"].items() if us > 0} == parts
    assert written["command"].startswith("paceline bench relay --sessions 2 --steps 50")
    assert written["wanted"]["verified_p50_ms"]["below"] == WANTED_MS
