"""Real workers and a real dispatcher inside one test: real models, real gRPC, no Ray, no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.head_engine import HeadEngine
from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.service import ROLE as DRAFT
from engine.build import build, build_target, welcome
from engine.cache.kv_cache import KVCache
from engine.cpu.library import find_library
from engine.interface import StepEngine
from engine.settings import EngineSettings
from router.dispatch import Dispatcher, DispatchLimits
from router.generation import Committed, Generation
from speculation.events import Role
from speculation.messages import Sampling, Speculation, Token
from target_service.service import ROLE as TARGET
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS
from tests.bundled import held_out_prompts as held_out_prompts
from transport.worker import Door, Machine, Worker

needs_invariant_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="that bfloat16 results do not depend on the batch was established for AVX-512 and AMX kernels only",
)

needs_exact_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() and find_library() is None,
    reason="no C++ compiler, and no AVX-512 or AMX kernels of oneDNN, for which it was established without",
)
"""The same for models whose layers are computed by :mod:`engine.cpu`."""


def settings(
    name: str | Path, cache_tokens: int = 0, dtype: str = "float32", quantization: str = "none"
) -> EngineSettings:
    """A bundled model, or any by its folder."""
    return EngineSettings(str(MODELS / name), dtype=dtype, quantization=quantization, cache_tokens=cache_tokens)


def forget_prefixes(cache: KVCache) -> None:
    """Use every block once, so that nothing that was computed before is found again. Not while a worker computes."""
    sequence = cache.sequence()
    sequence.append(range(-1, cache.free_tokens - 1))
    sequence.free()


@dataclass
class Running:
    """A worker under test, with what it computes laid open."""

    worker: Worker
    machine: Machine
    engine: StepEngine | HeadEngine

    async def quiescent(self) -> None:
        """Wait until nothing is left of any session, and check the cache's accounts."""
        async with asyncio.timeout(60):
            while self.machine.load().sessions or self.engine.cache.free_tokens != self.engine.cache.capacity:
                await asyncio.sleep(0.01)
        self.machine.validate()

    def rest_between_steps(self, seconds: float = 0.02) -> None:
        """Have each step take so much longer, so that drafts come in time: in one process models compute in turn."""
        run = self.engine.run

        def rested(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return run(*arguments, **named)

        self.engine.run = rested  # type: ignore[method-assign, union-attr]


@asynccontextmanager
async def serving_worker(
    machine: Machine, engine: StepEngine | HeadEngine, role: str, *, validate: bool = True
) -> AsyncIterator[Running]:
    worker = Worker(machine, role, validate=validate)
    await worker.start(await Door.open(role, "127.0.0.1:0"))
    running = Running(worker, machine, engine)
    try:
        async with asyncio.TaskGroup() as group:
            failed = group.create_task(worker.wait())  # ends the test that waits for it
            yield running
            await running.quiescent()
            failed.cancel()
    finally:
        await worker.stop()


@asynccontextmanager
async def target_worker(
    limits: TargetLimits = TargetLimits(),
    cache_tokens: int = 0,
    model: str | Path = "target",
    dtype: str = "float32",
    quantization: str = "none",
    name: str = "",
    *,
    validate: bool = True,
) -> AsyncIterator[Running]:
    """The bundled target (or another), listening; ``name``: of the model, if not that of its folder.

    ``validate``: whether its books are checked whenever there is nothing to do.
    """
    chosen = replace(settings(model, cache_tokens, dtype, quantization), name=name)
    engine = await asyncio.to_thread(build_target, chosen)
    machine = VerifyLoop(engine, welcome(chosen, engine.model, TARGET), limits)
    async with serving_worker(machine, engine, TARGET, validate=validate) as up:
        yield up


@asynccontextmanager
async def draft_worker(
    limits: LookaheadLimits = LookaheadLimits(),
    cache_tokens: int = 0,
    model: str | Path = "draft",
    quantization: str = "none",
    *,
    validate: bool = True,
) -> AsyncIterator[Running]:
    """The bundled draft (or any bundled model as one), listening."""
    chosen = settings(model, cache_tokens, quantization=quantization)
    engine = await asyncio.to_thread(build, chosen)
    machine = Lookahead(engine, welcome(chosen, engine.model, DRAFT), limits)
    async with serving_worker(machine, engine, DRAFT, validate=validate) as up:
        yield up


@asynccontextmanager
async def dispatcher(
    targets: Sequence[str], drafts: Sequence[str] = (), limits: DispatchLimits = DispatchLimits()
) -> AsyncIterator[Dispatcher]:
    """A router's session side, connected to at least one target and all drafters."""
    serving = Dispatcher(limits)
    serving.pool.set_workers(Role.TARGET, targets)
    serving.pool.set_workers(Role.DRAFT, drafts)
    try:
        async with asyncio.timeout(60):
            while sum(peer.welcome is not None for peer in serving.pool.peers.values()) < len(targets) + len(drafts):
                await asyncio.sleep(0.01)
        yield serving
        assert serving.demand().streams == 0
    finally:
        await serving.pool.close()


@dataclass
class Result:
    """What one generation produced."""

    tokens: list[Token] = field(default_factory=list)
    accepted: int = 0
    offered: int = 0
    cached: int = 0
    steps: int = 0


async def decode(
    serving: Dispatcher,
    prompt: tuple[Token, ...],
    max_tokens: int,
    sampling: Sampling = Sampling(temperature=0.0),
    stop_tokens: frozenset[Token] = frozenset(),
    speculation: Speculation = Speculation(),
) -> Result:
    """One generation to its end."""
    result = Result()
    generation = Generation(prompt, sampling, max_tokens, stop_tokens, speculation)
    async for item in serving.generate(generation):
        if isinstance(item, Committed):
            result.tokens += item.tokens
            result.accepted += item.accepted
            result.offered += item.offered
            result.cached += item.cached
            result.steps += 1
    return result
