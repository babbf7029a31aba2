"""Percentiles, ratios: right on requests whose times are known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.serve.client import BUSY_LATER, LATE, Drafts, Heard
from benchmarks.serve.report import baseline_of, bootstrap, compare, figures, result, spread
from benchmarks.serve.rounds import Log, Turn
from benchmarks.serve.settings import PACELINE, ServeOptions, ServerContender

A, B = ServerContender("a", "http://a.test"), ServerContender("b", "http://b.test")
ONE = Heard(0, 10.0, 10.1, 11.2, [10.5, 10.7, 11.1], [2, 3, 7], usage=8, text="x")
UNSAID = replace(ONE, totals=[None] * 3)
FAILED = Heard(1, due=10.0, sent=10.0, ended=12.0, error=LATE, detail="not over after 2 s")


def options(**given) -> ServeOptions:
    return ServeOptions(**{"contenders": (A, B), "requests": 8, **given})


def logged(given: ServeOptions, *turns: tuple[str, list[Heard]]) -> Log:
    """A log with a turn for each, by the name of the contender."""
    log = Log(given.contenders)
    by_name = {one.name: one for one in given.contenders}
    for number, (name, heard) in enumerate(turns):
        log.turns.append(Turn(by_name[name], number // len(by_name), 10.0, heard, client_cpu=0.2))
    return log


def decoded(number: int, first: float, step: float, text: str = "") -> Heard:
    """Three chunks of a token each."""
    times = [10.0 + first + step * place for place in range(3)]
    return Heard(number, 10.0, 10.0, times[-1] + 0.01, times, [1, 2, 3], text=text or str(number))


def test_latencies_count_from_when_a_request_was_due() -> None:
    assert (ONE.ttft, ONE.e2e, ONE.tpot) == pytest.approx((0.5, 1.2, 0.6 / 5))
    assert ONE.gaps == pytest.approx([0.2, 0.1, 0.1, 0.1, 0.1])


def test_without_sizes_latencies_are_between_chunks() -> None:
    assert UNSAID.gaps == pytest.approx([0.2, 0.4])
    assert UNSAID.tpot == pytest.approx(0.6 / 7)
    assert not figures(logged(options(), ("a", [ONE, UNSAID])), A, options())["by_token"]
    nothing = replace(ONE, times=[], totals=[], usage=0)
    assert (nothing.ttft, nothing.tpot, nothing.gaps) == (None, None, [])
    assert replace(ONE, times=[10.5], totals=[8]).tpot is None


def test_percentiles_are_interpolated() -> None:
    values = [number / 1000 for number in range(101)]
    random.Random(3).shuffle(values)
    assert spread(values) == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert spread([0.0, None, 0.010]) == pytest.approx({"mean": 5.0, "p50": 5.0, "p90": 9.0, "p99": 9.9})
    assert spread([]) is None


def test_what_failed_is_counted_and_in_no_latency() -> None:
    given = options()
    busy = replace(FAILED, number=2, error=BUSY_LATER, detail="full")
    empty = Heard(3, due=10.0, sent=10.0, ended=10.5)
    log = logged(given, ("a", [ONE, FAILED, busy, replace(busy, detail="again"), empty]))
    log.turns[0].running = 2
    row = figures(log, A, given)
    counts = {"requests": 5, "ok": 2, "empty": 1, "unfinished": 2, "tokens": 8}
    rates = {"seconds": 2.0, "request_rate": 1.0, "token_rate": 4.0, "client_share": 0.1}
    errors = {"errors": {BUSY_LATER: 2, LATE: 1}, "details": {BUSY_LATER: "full", LATE: "not over after 2 s"}}
    assert {key: row[key] for key in (*counts, *errors)} == counts | errors
    assert {key: row[key] for key in rates} == pytest.approx(rates)
    assert row["ttft"]["p99"] == pytest.approx(500.0)
    said = " ".join(" ".join(line) for table in result(log, given).tables for line in table.lines)
    assert BUSY_LATER in said and "full" in said


def test_drafts_are_added_up() -> None:
    given = options()
    heard = [replace(ONE, drafts=Drafts(3, 10, 2)), replace(ONE, drafts=Drafts(1, 2, None)), ONE]
    log = logged(given, ("a", heard))
    row = figures(log, A, given)
    assert (row["accepted"], row["offered"], row["acceptance_length"]) == (4, 12, 2.5)


def test_bootstrap_intervals() -> None:
    seed = random.randrange(1 << 30)
    source = random.Random(seed)
    exact = bootstrap([(2 * value, value) for value in (1.0, 5.0, 0.5)], 0)
    assert exact == {"value": 2.0, "low": 2.0, "high": 2.0, "n": 3}
    covered = 0
    for trial in range(12):
        pairs = [(source.expovariate(1.0) + 3, source.expovariate(1.0) + 1) for _ in range(30)]
        found = bootstrap(pairs, trial)
        assert found is not None and found["low"] < found["value"] < found["high"], seed
        assert found == bootstrap(pairs, trial)
        covered += found["low"] <= 2.0 <= found["high"]
    assert covered >= 7, f"{covered} of 12 intervals hold the true ratio, seed {seed}"
    assert bootstrap([], 0) is None
    assert bootstrap([(1.0, 0.0)], 0) is None


def test_contenders_are_compared_request_by_request() -> None:
    given = options()
    slow = [decoded(number, 0.4, 0.2) for number in range(6)]
    fast = [decoded(number, 0.2, 0.05, str(number if number else 9)) for number in range(1, 8)]
    log = logged(given, ("a", [*slow, replace(FAILED, number=7)]), ("b", [*fast, decoded(0, 0.2, 0.05, "9")]))
    one = compare(log, B, A, given)
    assert (one["variant"], one["baseline"], one["same"], one["compared"]) == ("b", "a", 5, 6)
    assert one["ttft"]["value"] == pytest.approx(2.0) and one["ttft"]["n"] == 6
    assert one["tpot"]["value"] == pytest.approx(4.0)
    assert one["token_rate"]["n"] == 1
    warm = replace(given, temperature=0.5)
    assert compare(log, B, A, warm)["same"] is None
    ours, again = (replace(one, make=PACELINE) for one in (A, B))
    warm = replace(warm, contenders=(ours, again))
    assert compare(logged(warm, ("a", slow), ("b", fast)), again, ours, warm)["same"] == 5
    at_rate = options(rate=2.0)
    rated = logged(at_rate, ("a", slow), ("b", fast))
    assert compare(rated, B, A, at_rate)["token_rate"] is None


def test_what_is_compared_with_what() -> None:
    plain = replace(A, name="a plain", plain=True)
    assert baseline_of((A, B)) == A
    assert baseline_of((A, plain, B)) == plain


def test_a_reader_is_told_what_limits_the_figures() -> None:
    given = options(contenders=(A, replace(A, name="again")), rate=2.0)
    late = replace(UNSAID, due=9.0, usage=None, cached=40)
    log = logged(given, ("a", [late]), ("again", [ONE]))
    log.turns[0].client_cpu, log.turns[0].running = 10.0, 1
    found = result(log, given)
    said = " ".join(found.notes)
    for words in (
        "Poisson arrivals (seed 0)",
        "share its prefix cache",
        "from a prefix cache: 40 of a.",
        "interrupted with 1 requests",
        "of a core and may be what was measured",
        "1100 ms late",
    ):
        assert words in said
    request = found.document()["requests"][0]
    assert (request["contender"], request["sent"], request["chunks"]) == ("a", 1100.0, [1500.0, 1700.0, 2100.0])
