"""The text is the target's own: equal to transformers when greedy, equal for a seed whatever the drafts."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.lookahead import LookaheadLimits
from router.generation import Generation
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import Open, Sampling, Source, Speculation
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS
from tests.stack import decode, dispatcher, draft_worker, held_out_prompts, needs_exact_bf16, target_worker
from tests.thorough import mostly_thorough

NEW_TOKENS = 40
STOP = frozenset({0})


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """What transformers' own ``generate`` makes of 20 held-out prompts."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    assert set(STOP) == {model.generation_config.eos_token_id}
    texts = []
    for prompt in held_out_prompts()[:20]:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


DRAFTS = Speculation(sources=frozenset({Source.DRAFT}))


@pytest.mark.parametrize("at_once", mostly_thorough([1, 8], quick=[8]))
@pytest.mark.parametrize("drafted", mostly_thorough([False, True], quick=[True]), ids=["plain", "drafted"])
async def test_greedy_text_equals_transformers(reference, drafted: bool, at_once: int):
    """All drafts that come are verified: whether that pays depends on the machine and what else it does."""
    accepted = 0
    async with target_worker(TargetLimits(adaptive=False)) as target, draft_worker() as draft:
        target.rest_between_steps()
        drafts = [draft.worker.address] if drafted else []
        async with dispatcher([target.worker.address], drafts) as serving:
            gate = asyncio.Semaphore(at_once)

            async def one(prompt):
                async with gate:
                    return await decode(serving, prompt, NEW_TOKENS, stop_tokens=STOP, speculation=DRAFTS)

            for _ in range(5 if drafted else 1):  # a busy machine may let no draft come in time
                results = await asyncio.gather(*map(one, held_out_prompts()[:20]))
                assert [result.tokens for result in results] == reference
                accepted += sum(result.accepted for result in results)
                if accepted:
                    break
    assert (accepted > 0) is drafted


SAMPLINGS = [
    Sampling(temperature=0.8, seed=11),
    Sampling(temperature=1.3, top_k=20, seed=12),
    Sampling(temperature=1.0, top_p=0.8, min_p=0.02, seed=13),
    Sampling(temperature=0.0),
]


async def test_a_seed_gives_the_same_text_whatever_is_drafted():
    """Without drafts, with the bundled drafter, with the target as its own drafter, alone and in a mixed batch."""
    prompts = held_out_prompts()[:4]
    short = LookaheadLimits(draft=DraftLimits(lead=3, nodes=3))
    async with target_worker() as target, draft_worker() as draft, draft_worker(short, model="target") as twin:
        texts = []
        for drafts in ([], [draft.worker.address], [twin.worker.address]):
            async with dispatcher([target.worker.address], drafts) as serving:
                alone = [
                    await decode(serving, prompt, NEW_TOKENS, sampling)
                    for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
                ]
                together = await asyncio.gather(
                    *(
                        decode(serving, prompt, NEW_TOKENS, sampling)
                        for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
                    )
                )
            texts.append([result.tokens for result in alone])
            texts.append([result.tokens for result in together])
    assert all(text == texts[0] for text in texts)


@needs_exact_bf16
async def test_bfloat16_text_does_not_depend_on_drafts_or_company():
    """Bit for bit, since no logit depends on the batch: see tests/unit/engine/attention/test_invariance.py."""
    prompts = held_out_prompts()[:6]
    samplings = [Sampling(temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    pairs = list(zip(prompts, samplings, strict=True))
    async with target_worker(dtype="bfloat16") as target, draft_worker() as draft:
        target.rest_between_steps()
        async with dispatcher([target.worker.address]) as serving:
            plain = [await decode(serving, prompt, 64, sampling) for prompt, sampling in pairs]
        async with dispatcher([target.worker.address], [draft.worker.address]) as serving:
            drafted = [await decode(serving, prompt, 64, sampling) for prompt, sampling in pairs]
            together = await asyncio.gather(*(decode(serving, prompt, 64, sampling) for prompt, sampling in pairs))
    assert sum(result.accepted for result in drafted) > 0
    for results in (drafted, together):
        assert [result.tokens for result in results] == [result.tokens for result in plain]


async def test_a_request_may_switch_speculation_off():
    async with target_worker() as target, draft_worker() as draft:
        async with dispatcher([target.worker.address], [draft.worker.address]) as serving:
            off = await decode(serving, held_out_prompts()[0], 24, speculation=Speculation(enabled=False))
            on = await decode(serving, held_out_prompts()[0], 24)
    assert off.tokens == on.tokens
    assert (off.offered, off.steps) == (0, 24)


async def test_the_priority_of_a_request_reaches_the_target(monkeypatch):
    opened: list[Open] = []
    receive = VerifyLoop.receive

    def listen(self, link, message, at=0.0):
        opened.extend([message] if isinstance(message, Open) else [])
        return receive(self, link, message, at)

    monkeypatch.setattr(VerifyLoop, "receive", listen)
    async with target_worker() as target, dispatcher([target.worker.address]) as serving:
        generation = Generation(held_out_prompts()[0], Sampling(temperature=0.0), 2, priority=-7)
        assert [item async for item in serving.generate(generation)]
    assert [message.priority for message in opened] == [-7]


async def test_prompts_longer_than_a_prefill_chunk_and_a_small_token_budget_change_nothing():
    budget = Budget(tokens=12, drafts_per_session=3, verify=5)
    prompts = held_out_prompts()[:6]
    async with target_worker() as target, target_worker(TargetLimits(running=3, budget=budget)) as cramped:
        async with draft_worker(LookaheadLimits(prefill=5)) as draft:
            texts = []
            for worker in (target, cramped):
                async with dispatcher([worker.worker.address], [draft.worker.address]) as serving:
                    results = await asyncio.gather(*(decode(serving, prompt, 20) for prompt in prompts))
                    texts.append([result.tokens for result in results])
    assert texts[0] == texts[1]


async def test_a_full_cache_preempts_and_fails_nobody():
    prompts = held_out_prompts()[:6]
    longest = max(map(len, prompts)) + NEW_TOKENS
    async with target_worker() as roomy, target_worker(cache_tokens=-(-2 * longest // 16) * 16) as cramped:
        texts = []
        for worker in (roomy, cramped):
            async with dispatcher([worker.worker.address]) as serving:
                results = await asyncio.gather(*(decode(serving, prompt, NEW_TOKENS) for prompt in prompts))
                texts.append([result.tokens for result in results])
    assert texts[0] == texts[1]
