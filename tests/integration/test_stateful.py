"""A target that cannot speculate, with a drafter at hand: the same text, and the drafter is left alone."""

import asyncio
from pathlib import Path

import pytest

from tests.stack import decode, dispatcher, draft_worker, target_worker
from tests.unit.engine.engine_models import Stock, random_tokens, save_model
from tests.unit.engine.test_families import FAMILIES

NEW_TOKENS = 24
PROMPTS = [tuple(random_tokens(length, seed=length)) for length in (18, 30, 11)]
REPEATS = {"mamba": True, "qwen3_next": False}
"""With one table for reading and writing tokens a random model repeats itself: prompt lookup has something to offer."""


@pytest.fixture(scope="module", params=REPEATS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, changes = tmp_path_factory.mktemp(request.param), FAMILIES[request.param].changes
    save_model(request.param, folder, tie_word_embeddings=REPEATS[request.param], **changes)
    return folder


async def test_text_is_that_of_transformers_and_nothing_is_drafted(model: Path, caplog: pytest.LogCaptureFixture):
    stock = Stock(str(model))
    async with target_worker(model=model) as target, draft_worker() as draft:
        assert f"{model} is served without speculation" in caplog.text
        async with dispatcher([target.worker.address], [draft.worker.address]) as serving:
            alone = [await decode(serving, prompt, NEW_TOKENS) for prompt in PROMPTS]
            together = await asyncio.gather(*(decode(serving, prompt, NEW_TOKENS) for prompt in PROMPTS))
        assert draft.machine.load().counters["steps"] == 0
        assert target.machine.load().counters["proposals_placed"] == 0
    expected = [stock.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for results in (alone, together):
        assert [result.tokens for result in results] == expected
        assert all((result.offered, result.steps) == (0, NEW_TOKENS) for result in results)


async def test_a_full_cache_preempts_and_computes_again(model: Path):
    """There is room for two beginnings and one end."""
    stock, prompts, count = Stock(str(model)), [tuple(random_tokens(11, seed)) for seed in (4, 5)], 60
    async with target_worker(model=model, cache_tokens=96) as target:
        async with dispatcher([target.worker.address]) as serving:
            results = await asyncio.gather(*(decode(serving, prompt, count) for prompt in prompts))
        assert target.machine.load().counters["preempted"] > 0
    assert [result.tokens for result in results] == [stock.generate(prompt, count) for prompt in prompts]
