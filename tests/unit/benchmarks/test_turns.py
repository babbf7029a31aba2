"""Contenders take turns, and who says something else than the others is found."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.harness import measure
from benchmarks.harness.measure import Batch, Run, rows, served, take_turns
from router.dispatch import Dispatcher
from speculation.messages import RequestOptions, Speculation
from tests.fakes import FakeGenerator, commits
from transport.client import Traffic

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
