"""A target that is killed mid-stream changes no text: the one that takes over has the same bits, in bfloat16 too."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
import torch

from benchmarks.harness.processes import ReadyProcess, WorkerPlan, all_running
from router.dispatch import Dispatcher
from router.generation import Committed, Ended, Generation
from speculation.events import Role
from speculation.messages import Sampling, Source, Speculation, Token
from tests.bundled import MODELS, held_out_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: failover on one is not checked")

DEVICE = "cuda"
NEW, STREAMS = 96, 6
DRAFTED = Speculation(sources=frozenset({Source.DRAFT}), remember=False)


def plan(role: Role, model: str) -> WorkerPlan:
    # What is free of a GPU that several share is no size for a cache.
    flags = ["--device", DEVICE, "--dtype", "bfloat16", "--cache-tokens", "4096"]
    return WorkerPlan(role, MODELS / model, None, flags=flags)


async def until_welcome(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(20.0):
        while not all(peer.welcome for peer in dispatcher.pool.peers.values()):
            await asyncio.sleep(0.05)


async def told(dispatcher: Dispatcher, lost: ReadyProcess | None) -> tuple[list[list[Token]], int]:
    """All texts, and how often a session was opened again; ``lost`` is killed once each text is begun."""
    texts: list[list[Token]] = [[] for _ in range(STREAMS)]
    reopened = 0
    begun = [asyncio.Event() for _ in texts]

    async def stream(number: int, prompt: tuple[Token, ...]) -> None:
        nonlocal reopened
        sampling = Sampling(temperature=0.8 if number % 2 else 0.0, seed=number)
        async for item in dispatcher.generate(Generation(prompt, sampling, NEW, speculation=DRAFTED)):
            if isinstance(item, Committed):
                texts[number] += item.tokens
                begun[number].set()
            elif isinstance(item, Ended):
                reopened += item.reopened

    async with asyncio.TaskGroup() as group:
        for number, prompt in enumerate(held_out_prompts()[:STREAMS]):
            group.create_task(stream(number, prompt))
        for event in begun:
            await event.wait()
        if lost is not None:
            await lost.kill()
    return texts, reopened


def test_a_killed_target_changes_no_text_in_bfloat16() -> None:
    async def compared() -> None:
        plans = [plan(Role.TARGET, "target"), plan(Role.TARGET, "target"), plan(Role.DRAFT, "draft")]
        async with all_running(plans, together=True) as (first, second, draft), AsyncExitStack() as ending:
            dispatcher = Dispatcher()
            ending.push_async_callback(dispatcher.pool.close)
            dispatcher.pool.set_workers(Role.TARGET, [first.first, second.first])
            dispatcher.pool.set_workers(Role.DRAFT, [draft.first])
            await until_welcome(dispatcher)
            expected, reopened = await told(dispatcher, None)
            assert reopened == 0 and {len(text) for text in expected} == {NEW}
            found, reopened = await told(dispatcher, first)
            assert reopened, "no session was at the target that was killed, so nothing is shown"
            assert found == expected

    asyncio.run(compared())
