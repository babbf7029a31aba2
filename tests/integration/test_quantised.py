"""A quantised target's text is its own, whoever drafts and whatever runs beside it; a quantised drafter's hints fit."""

import asyncio

import pytest

from engine.layers.int8_linear import has_kernel
from speculation.messages import Sampling, Schedule, Source, Speculation
from speculation.verifying import planner
from tests.stack import decode, dispatcher, draft_worker, held_out_prompts, needs_invariant_bf16, target_worker

NEW_TOKENS = 20
DRAFTS = Speculation(sources=frozenset({Source.DRAFT}))
IN_TURN = Speculation(sources=frozenset({Source.DRAFT}), schedule=Schedule.SEQUENTIAL, max_depth=4)
"""The target waits for drafts, however busy the machine is."""
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.0), Sampling(temperature=0.9, seed=5)]

pytestmark = [
    needs_invariant_bf16,
    pytest.mark.skipif(not has_kernel(), reason="this CPU or build of torch has no kernel for int8"),
]


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic"])
async def test_drafted_text_equals_plain_text_alone_and_in_a_batch(quantization: str, monkeypatch):
    monkeypatch.setattr(planner, "DEAF_AFTER", 30.0)
    requests = list(zip(held_out_prompts(), SAMPLINGS, strict=False))
    texts = []
    async with (
        target_worker(dtype="bfloat16", quantization=quantization) as target,
        draft_worker(quantization="int8-dynamic") as draft,
    ):
        for drafts in ([], [draft.worker.address]):
            async with dispatcher([target.worker.address], drafts) as serving:

                async def one(request):
                    prompt, sampling = request
                    return await decode(serving, prompt, NEW_TOKENS, sampling, speculation=DRAFTS)

                alone = [await one(request) for request in requests]
                together = await asyncio.gather(*map(one, requests))
            texts += [[result.tokens for result in alone], [result.tokens for result in together]]
            assert drafts or not any(result.accepted for result in alone)
        async with dispatcher([target.worker.address], [draft.worker.address]) as serving:
            prompt, sampling = requests[0]
            in_turn = await decode(serving, prompt, NEW_TOKENS, sampling, speculation=IN_TURN)
    assert texts[1:] == texts[:1] * 3
    assert in_turn.tokens == texts[0][0]
    assert in_turn.accepted > 0
