"""The engine alone: how close its steps come to the memory's pace, and what many requests at once gain.

One model of random weights, one core. Ours and transformers run in this process and take turns; the worker whose memory
is looked at is a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.status import Status
from transformers.utils import logging as transformers_logging

from benchmarks.engine.contenders import PREFIX, Loop, stock_works
from benchmarks.engine.figures import ALONE, MIXED, TOGETHER, Measured, Repeated, result
from benchmarks.engine.model import SEED, Memory, memory_of, mixed_batch, parameters, random_prompts, write_model
from benchmarks.engine.settings import (
    CACHE_TOKENS,
    CONCURRENT,
    CONTEXT,
    EXACT_NEW,
    NEW,
    PROMPT,
    READ_BYTES,
    REPEATED_PREFIX,
    SIZES,
    SUFFIX,
    WORKER_CACHE_TOKENS,
    EngineOptions,
)
from benchmarks.engine.steps import TRIES, TimedSteps, in_turn, pinned, reads
from benchmarks.harness.contenders import PLAIN
from benchmarks.harness.measure import Batch, Run, Runner, served, take_turns
from benchmarks.harness.processes import WorkerPlan, connected, running
from benchmarks.harness.transformers_baseline import Stock
from engine.build import build
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.events import Role


def main(options: EngineOptions) -> int:
    """Build the model, measure, and report. Raises WorkerFailed, GenerationError, ModelError, TimeoutError."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("router.sessions.pool").setLevel(logging.ERROR)  # that its worker leaves is part of the plan
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        Console(stderr=True).status("writing a model of random weights") as status,
    ):
        write_model(options.shape, Path(folder) / "model")
        measured, dtype = asyncio.run(measure(Path(folder), options, status))
    result(options, str(dtype).removeprefix("torch."), measured).publish()
    return 0


async def measure(folder: Path, options: EngineOptions, status: Status) -> tuple[Measured, torch.dtype]:
    """Everything, on the model in ``folder``; and the number format, which is the one that workers choose here."""
    model, generator = folder / "model", torch.Generator().manual_seed(SEED)
    with pinned(options.threads):
        status.update("loading the model, for ours and for transformers")
        settings = EngineSettings(
            str(model), device="cpu", threads=options.threads, cache_tokens=CACHE_TOKENS, name="random"
        )
        engine = build(settings)
        dtype = engine.model.dtype
        stock = Stock(model, dtype)
        status.update("timing steps, in turn with reading memory")
        read_seconds, step_seconds = time_steps(engine, stock, options, generator)
        loop = Loop(engine, settings)
        status.update("decoding batches, in turn with transformers")
        runs = await decode_batches(loop, stock, options, generator)
        status.update("repeating prefixes")
        prefixes = await repeat_prefixes(loop, options.turns, generator)
        status.update("comparing texts in float32")
        exact = await decode_exactly(replace(settings, dtype="float32"), generator)
    status.update("serving from a worker process")
    memory = await serve(folder, options, dtype, generator)
    measured = Measured(
        weight_bytes=parameters(options.shape) * dtype.itemsize,
        read_bytes=READ_BYTES,
        reads=read_seconds,
        steps=step_seconds,
        runs=runs,
        prefixes=prefixes,
        memory=memory,
        exact=exact,
    )
    return measured, dtype


def time_steps(
    engine: Engine, stock: Stock, options: EngineOptions, generator: torch.Generator
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of every way to read, and of every step of ours and of transformers, all in turn."""
    contexts = random_prompts(max(SIZES), CONTEXT, generator)
    steps = TimedSteps(engine, contexts)
    ways = reads(READ_BYTES)
    timed = steps.works(SIZES) | stock_works(stock, contexts[0], SIZES)
    seconds = in_turn(ways | timed, options.rounds, tries=dict.fromkeys(timed, TRIES))
    steps.free()
    return {name: seconds.pop(name) for name in ways}, seconds


async def decode_batches(
    loop: Loop, stock: Stock, options: EngineOptions, generator: torch.Generator
) -> dict[str, list[Run]]:
    """One request, 16 alike and 16 of mixed lengths, ours and transformers'.

    No two requests share a prompt, or a cached one would win.
    """
    runners = {
        ALONE: _alone(loop.run),
        TOGETHER: _together(loop.run),
        PREFIX + ALONE: _alone(stock.run),
        PREFIX + TOGETHER: _together(stock.run),
    }
    mixed = {MIXED: loop.run, PREFIX + MIXED: stock.run}
    batches = [mixed_batch(CONCURRENT, generator) for _ in range(options.mixed_turns)]
    alike = await _take_turns(runners, options.turns, NEW, generator)
    return alike | await take_turns(mixed, batches, 0)


async def decode_exactly(settings: EngineSettings, generator: torch.Generator) -> dict[str, list[Run]]:
    """The same 16 prompts by both in float32, where rounding does not decide between tokens."""
    loop = Loop(build(settings), settings)
    stock = Stock(Path(settings.model), torch.float32)
    runners = {TOGETHER: _together(loop.run), PREFIX + TOGETHER: _together(stock.run)}
    return await _take_turns(runners, 1, EXACT_NEW, generator)


async def repeat_prefixes(loop: Loop, count: int, generator: torch.Generator) -> list[Repeated]:
    """Time to first token of a new prefix, then of another request that begins with it. A first pair warms up."""

    async def first_token(prompt: tuple[int, ...]) -> float:
        return (await loop.run(Batch((prompt,), tokens=2))).first_token_seconds

    pairs = []
    for prefix in random_prompts(1 + count, REPEATED_PREFIX, generator):
        one, other = random_prompts(2, SUFFIX, generator)
        pairs.append(Repeated(await first_token(prefix + one), await first_token(prefix + other)))
    return pairs[1:]


async def serve(folder: Path, options: EngineOptions, dtype: torch.dtype, generator: torch.Generator) -> Memory | None:
    """Memory of a worker process that served one batch."""
    flags = ["--dtype", str(dtype).removeprefix("torch."), "--threads", f"{options.threads}"]
    flags += ["--cache-tokens", f"{WORKER_CACHE_TOKENS}"]
    core = 0 if options.threads == 1 else None
    plan = WorkerPlan(Role.TARGET, folder / "model", core, flags=flags)
    async with running(plan) as worker, connected(worker) as dispatcher:
        await served(dispatcher, PLAIN.speculation)(Batch(tuple(random_prompts(CONCURRENT, PROMPT, generator)), NEW))
        if sys.platform != "linux":
            return None
        return memory_of(worker.process.pid, options.shape, dtype.itemsize, WORKER_CACHE_TOKENS, CONCURRENT)


async def _take_turns(
    runners: Mapping[str, Runner], turns: int, tokens: int, generator: torch.Generator
) -> dict[str, list[Run]]:
    """Runs of every contender, without those of a first turn, whose prompts do not come again."""
    batches = [Batch(tuple(random_prompts(CONCURRENT + 1, PROMPT, generator)), tokens) for _ in range(1 + turns)]
    runs = await take_turns(runners, batches, 0)
    return {name: of_one[1:] for name, of_one in runs.items()}


def _alone(runner: Runner) -> Runner:
    """Only the last prompt of a batch."""
    return lambda batch: runner(replace(batch, prompts=batch.prompts[CONCURRENT:]))


def _together(runner: Runner) -> Runner:
    """All but the last prompt of a batch."""
    return lambda batch: runner(replace(batch, prompts=batch.prompts[:CONCURRENT]))
