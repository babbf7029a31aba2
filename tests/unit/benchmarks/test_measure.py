"""Pace, turns and choices of the benchmark, with contenders that only pretend."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import drafting
from benchmarks.harness import measure
from benchmarks.harness import transformers_baseline as baseline
from benchmarks.harness.measure import Batch, Decoded, Run, TimedCommit, best, pace, rows, served, take_turns
from router.dispatch import Dispatcher
from speculation.messages import RequestOptions, Speculation
from tests.fakes import FakeGenerator, commits
from transport.client import Traffic


def request(*commits: tuple[float, int]) -> Decoded:
    return Decoded(tuple(range(sum(tokens for _, tokens in commits))), tuple(TimedCommit(at, n) for at, n in commits))


def run(tokens: int, seconds: float) -> Run:
    return Run((request((0.0, 1), (seconds, tokens)),))


def test_the_prompt_and_the_first_tokens_do_not_count():
    one = Run((request((10.0, 5), (10.5, 2), (12.0, 4)),))
    assert (one.start, one.end, one.tokens) == (10.0, 12.0, 6)
    assert one.rate == 3.0


def test_a_batch_is_timed_from_when_all_decode():
    one = Run((request((1.0, 1), (1.5, 1), (3.0, 2)), request((2.0, 1), (4.0, 3))))
    assert (one.start, one.end, one.tokens) == (2.0, 4.0, 5)
    assert one.rate == 2.5


def test_pace_is_taken_over_all_runs_together():
    assert pace([run(10, 1.0), run(10, 4.0)]) == 4.0


def test_the_best_choice_has_the_highest_pace_and_is_the_first_of_equals():
    assert best({2: [run(10, 1.0)], 4: [run(30, 2.0)], 6: [run(15, 1.0)], 8: [run(10, 3.0)]}) == 4
    # The highest rate on one prompt does not win.
    assert best({"a": [run(10, 1.0), run(10, 1.0)], "b": [run(40, 1.0), run(10, 9.0)]}) == "a"


async def test_contenders_take_turns_and_take_turns_in_beginning(monkeypatch):
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0.0)
    calls: list[tuple[str, int]] = []

    def pretending(name: str):
        async def decode(batch: Batch) -> Run:
            calls.append((name, batch.seed))
            return run(batch.seed + 1, 1.0)

        return decode

    batches = [Batch(((1,),), 8, seed=seed) for seed in range(3)]
    runs = await take_turns({"a": pretending("a"), "b": pretending("b")}, batches, 1)
    assert calls == [("a", 0), ("b", 0), ("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert [one.tokens for one in runs["b"]] == [1, 2, 3], "the warm-up counted"


def test_no_contender_leaves_answers_for_another_to_copy():
    asked = [measure.PLAIN, measure.DRAFTED, measure.WITH_LOOKUP, *drafting.STRUCTURED.values()]
    asked += [measure.in_chains(schedule, 3) for schedule in measure.LENGTHS]
    assert not any(one.remember for one in asked)


@pytest.mark.parametrize("mode", baseline.ASSISTED)
def test_modes_of_transformers_have_names_of_their_own(mode):
    assert [str(other) for other in baseline.ASSISTED].count(str(mode)) == 1


CONTENDERS = {"plain": Speculation(enabled=False), "drafts": Speculation()}
BATCHES = [Batch(((1,),), 9, seed=seed, grammar="a grammar") for seed in range(2)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0.0)


async def said(generator: FakeGenerator) -> dict[str, list[Run]]:
    generator.pool = SimpleNamespace(traffic=lambda _: Traffic(0, 0))  # type: ignore[attr-defined]
    runners = {
        name: served(cast(Dispatcher, generator), speculation, RequestOptions(scope=name))
        for name, speculation in CONTENDERS.items()
    }
    return await take_turns(runners, BATCHES, 2)


async def test_rounds_that_count_are_counted_and_each_begins_another_contender() -> None:
    generator = FakeGenerator(lambda asked: commits(range(9), (3,) if asked.speculation.enabled else (1,)))
    runs = await said(generator)
    drafts: Sequence[Run] = runs["drafts"]
    assert [len(run.decoded[0].tokens) for run in drafts] == [9, 9]
    assert [commit.tokens for run in drafts for commit in run.counted] == [3] * 4
    enabled = [generation.speculation.enabled for generation in generator.generations]
    assert enabled == [False, True, True, False] * 2
    assert {one.request_options.grammar for one in generator.generations} == {"a grammar"}
    assert {one.request_options.scope for one in generator.generations} == set(CONTENDERS)
    found = rows(runs)
    assert [row["contender"] for row in found] == list(CONTENDERS)
    assert [row["tokens_per_step"] for row in found] == [1.0, 3.0]
    assert found[0]["ratio_to_plain"] == 1.0
    assert found[1]["accepted"] == {"draft": 8}, "of the commits that count"


async def test_texts_that_differ_end_the_benchmark() -> None:
    generator = FakeGenerator(lambda asked: commits([asked.speculation.enabled] * 9, (3,)))
    runs = await said(generator)
    with pytest.raises(AssertionError, match="depends on how it was drafted"):
        rows(runs)
    assert [row["same_text"] for row in rows(runs, exact=False)] == [1.0, 0.0]
