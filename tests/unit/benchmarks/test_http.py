"""``paceline bench http``: its figures are right, its flags are checked, and it measures what really runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.http import run
from benchmarks.http.figures import (
    BURST,
    COMMIT_TOKENS,
    CONTENDERS,
    ECHO,
    PACELINE,
    PATTERNS,
    STEADY,
    BadAnswer,
    HttpOptions,
    Round,
    StreamedReply,
    figures,
    p90,
    result,
    summary,
)
from cluster.cli import main


def measured(contender: str, added: float, pattern: str = STEADY) -> Round:
    """A request of three commits whose first token is late by ``added`` and the others by half of it."""
    heard = StreamedReply("r", 10.0, [10.5 + added, 10.6 + added / 2, 10.7 + added / 2, 10.7 + added])
    times = {"r": [10.0 + added / 4, 10.5 + added / 4, 10.6, 10.7], "warm-up": [1.0, 1.1]}
    return Round.of(contender, pattern, [heard], times, cpu=0.012, client_cpu=0.006, seconds=1.0)


def test_what_is_added_is_told_apart_from_what_the_router_sees() -> None:
    one = measured(PACELINE, 0.04)
    assert one.first == pytest.approx((0.04,))
    assert one.before == pytest.approx((0.01,))
    assert one.later == pytest.approx((0.02, 0.02))
    assert one.tokens == 4 * COMMIT_TOKENS
    found = figures([one, measured(ECHO, 0.02)], PACELINE, STEADY)
    assert (found.first_median, found.later_median) == pytest.approx((40.0, 20.0))
    assert found.cpu_us_per_token == pytest.approx(1000.0)
    assert summary([one, measured(PACELINE, 0.08, BURST), measured(ECHO, 0.02)]) == pytest.approx(
        {
            "first_token_added_ms": 40.0,
            "first_token_added_in_a_burst_ms": 80.0,
            "first_token_added_over_echo": 2.0,
            "cpu_per_token_over_echo": 1.0,
        }
    )
    assert p90([5.0]) == 5.0


def test_a_commit_without_an_event_is_an_error() -> None:
    with pytest.raises(BadAnswer, match="2 events for 3 commits"):
        Round.of(
            ECHO,
            BURST,
            [StreamedReply("r", 0.0, [1.0, 2.0])],
            {"r": [0.0, 1.0, 2.0, 3.0]},
            cpu=1,
            client_cpu=1,
            seconds=1,
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--streams", "0"], "--streams must be 1 to 256, got 0"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--quick", "--out", "results"], "--out belongs to a full run"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, capsys) -> None:
    assert main(["bench", "http", *arguments]) == 2
    assert words in capsys.readouterr().err


class Small(HttpOptions):
    """A benchmark of a few seconds."""

    commits, requests = 3, 2


async def test_both_servers_are_measured_and_reported(tmp_path) -> None:
    options = Small(out=tmp_path, streams=4, rounds=1)
    rounds = await run.measure(options)
    assert {(one.contender, one.pattern) for one in rounds} == {(c, p) for c in CONTENDERS for p in PATTERNS}
    for one in rounds:
        assert (len(one.first), len(one.later)) == (4, 8)
        assert one.tokens == 4 * 3 * COMMIT_TOKENS * (1 if one.pattern == BURST else 2)
        assert min(*one.first, *one.later, one.cpu) > 0
    result(options, rounds).publish()
    document = json.loads((tmp_path / "http.json").read_text())
    assert document["summary"].keys() >= document["wanted"].keys()
    assert "first_token_added_ms" in (tmp_path / "README.md").read_text()
