"""Contenders take turns, and who says something else than the others is found."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks import turns
from benchmarks.turns import WARM_UP, accepted, rows, take_turns
from router.dispatch import Dispatcher
from router.generation import Generation
from speculation.messages import Sampling, Source, Speculation
from tests.fakes import FakeGenerator, commits

CONTENDERS = {"plain": Speculation(enabled=False), "drafts": Speculation()}
ROUNDS = [
    {name: Generation((1,), Sampling(), 9, speculation=speculation) for name, speculation in CONTENDERS.items()}
] * (WARM_UP + 2)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SETTLE_SECONDS", 0.0)


async def said(generator: FakeGenerator) -> dict[str, turns.RunTotals]:
    return await take_turns(cast(Dispatcher, generator), ROUNDS)


async def test_rounds_that_count_are_counted_and_each_begins_another_contender() -> None:
    generator = FakeGenerator(lambda asked: commits(range(9), (3,) if asked.speculation.enabled else (1,)))
    tallies = await said(generator)
    drafts = tallies["drafts"]
    assert (drafts.tokens, drafts.steps, len(drafts.rates), drafts.sources) == (18, 6, 2, {Source.DRAFT: 12})
    assert [commit.tokens for commit in drafts.commits] == [3] * 4
    enabled = [generation.speculation.enabled for generation in generator.generations]
    assert enabled == [False, True, True, False] * 2
    found: list[dict[str, Any]] = rows(tallies, accepted)
    assert [row["contender"] for row in found] == list(CONTENDERS)
    assert [row["tokens_per_step"] for row in found] == [1.0, 3.0]
    assert found[0]["ratio_to_plain"] == 1.0
    assert found[1]["accepted"] == {"draft": 12}


async def test_texts_that_differ_end_the_benchmark() -> None:
    generator = FakeGenerator(lambda asked: commits([asked.speculation.enabled] * 9, (3,)))
    with pytest.raises(AssertionError, match="depends on how it was drafted"):
        await said(generator)
