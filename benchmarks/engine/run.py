"""The engine alone: how close its steps come to the memory's pace, and what many requests at once gain.

One model of random weights, one core. Ours and transformers run in this process and take turns; the worker whose memory
is looked at is a process of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from benchmarks.engine import figures
from benchmarks.engine.figures import ALONE, CONCURRENT, MIXED, TOGETHER, Measured, Memory, random_prompts
from benchmarks.engine.settings import EngineOptions
from benchmarks.engine.steps import PREFIX, TRIES, TimedSteps, Work, chain, in_turn, pinned, reads
from benchmarks.harness.measure import PLAIN, Batch, Decoded, Run, Runner, TimedCommit, served, take_turns
from benchmarks.harness.processes import WorkerPlan, connected, losses_unsaid, running
from benchmarks.harness.transformers_baseline import Stock
from cluster.config.config import Config
from cluster.config.serving import target_settings
from cluster.console import stages
from engine.build import build, welcome
from engine.settings import EngineSettings
from engine.step import Engine
from router.generation import GenerationError
from speculation.events import Role
from speculation.messages import Limits, Open, Refused, Sampling, SessionId, Token, Verification
from target_service.verify_loop import VerifyLoop
from transport.worker import Outgoing

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 200
PROMPT, NEW = 64, 64
REPEATED_PREFIX, SUFFIX = 1000, 16
"""Tokens of a prompt that were, and were not, served before."""
CACHE_TOKENS = 32_768
"""More than all that is ever cached, so that nothing is evicted."""
WORKER_CACHE_TOKENS = CONCURRENT * (PROMPT + NEW + 32)
"""Of the worker process: room for its requests and their growth, and no more."""
READ_BYTES = 512 << 20
"""Many times a last-level cache, and about what the model's weights take."""


def main(options: EngineOptions) -> int:
    """Build the model, measure, and report. Raises WorkerFailed, GenerationError, ModelError, TimeoutError."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with losses_unsaid(), tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, stages() as report:
        report("writing a model of random weights")
        figures.write_model(options, Path(folder) / "model")
        measured, dtype = asyncio.run(measure(Path(folder), options, report))
    figures.result(options, str(dtype).removeprefix("torch."), measured).publish()
    return 0


async def measure(folder: Path, options: EngineOptions, report: Callable[[str], None]) -> tuple[Measured, torch.dtype]:
    """Everything, on the model in ``folder``; and the number format, which is the one that workers choose here."""
    model, generator = folder / "model", torch.Generator().manual_seed(figures.SEED)
    with pinned(options.threads):
        report("loading the model, for ours and for transformers")
        settings = EngineSettings(
            str(model), device="cpu", threads=options.threads, cache_tokens=CACHE_TOKENS, name="random"
        )
        engine = build(settings)
        dtype = engine.model.dtype
        stock = Stock(model, dtype)
        report("timing steps, in turn with reading memory")
        read_seconds, step_seconds = time_steps(engine, stock, options, generator)
        loop = Loop(engine, settings)
        report("decoding batches, in turn with transformers")
        runs = await decode_batches(loop, stock, options, generator)
        report("repeating prefixes")
        prefixes = await repeat_prefixes(loop, options.turns, generator)
    report("serving from a worker process")
    memory = await serve(folder, options, dtype, generator)
    weight_bytes = options.shape.weights_read * dtype.itemsize
    return Measured(weight_bytes, READ_BYTES, read_seconds, step_seconds, runs, prefixes, memory), dtype


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
        prefix + name: _only(prompts, run)
        for prefix, run in (("", loop.run), (PREFIX, stock.run))
        for name, prompts in ((ALONE, slice(CONCURRENT, None)), (TOGETHER, slice(CONCURRENT)))
    }
    mixed = {MIXED: loop.run, PREFIX + MIXED: stock.run}
    batches = [figures.mixed_batch(CONCURRENT, generator) for _ in range(options.mixed_turns)]
    # The prompts of a first turn, which does not count, do not come again.
    prompts = (random_prompts(CONCURRENT + 1, PROMPT, generator) for _ in range(1 + options.turns))
    alike = await take_turns(runners, [Batch(tuple(some), NEW) for some in prompts], 0, skip=1)
    return alike | await take_turns(mixed, batches, 0)


async def repeat_prefixes(loop: Loop, count: int, generator: torch.Generator) -> list[tuple[float, float]]:
    """Time to first token of a new prefix, then of another request that begins with it. A first pair warms up."""

    async def first_token(prompt: tuple[int, ...]) -> float:
        return (await loop.run(Batch((prompt,), tokens=2))).first_token_seconds

    pairs = []
    for prefix in random_prompts(1 + count, REPEATED_PREFIX, generator):
        one, other = random_prompts(2, SUFFIX, generator)
        pairs.append((await first_token(prefix + one), await first_token(prefix + other)))
    return pairs[1:]


async def serve(folder: Path, options: EngineOptions, dtype: torch.dtype, generator: torch.Generator) -> Memory:
    """Memory of a worker process that served one batch."""
    flags = ["--dtype", str(dtype).removeprefix("torch."), "--threads", f"{options.threads}"]
    flags += ["--cache-tokens", f"{WORKER_CACHE_TOKENS}"]
    core = 0 if options.threads == 1 else None
    plan = WorkerPlan(Role.TARGET, folder / "model", core, flags=flags)
    async with running(plan) as worker, connected(worker) as dispatcher:
        await served(dispatcher, PLAIN)(Batch(tuple(random_prompts(CONCURRENT, PROMPT, generator)), NEW))
        return figures.memory_of(worker.process.pid, options.shape, dtype.itemsize, WORKER_CACHE_TOKENS, CONCURRENT)


def _only(prompts: slice, runner: Runner) -> Runner:
    """On some prompts of a batch."""
    return lambda batch: runner(replace(batch, prompts=batch.prompts[prompts]))


LINK = "benchmark"


class Loop:
    """A target worker without its server, with its usual limits. Every request decodes plainly and ends by length only.

    What the worker refuses raises :class:`router.generation.GenerationError`.
    """

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        """``settings``: what ``engine`` was built from."""
        self._loop = VerifyLoop(engine, welcome(settings, engine.model, "target"), target_settings(Config()).limits)
        self._numbers = map(SessionId, itertools.count(1))

    async def run(self, batch: Batch) -> Run:
        """Decode all prompts of a batch at the same time; a :data:`benchmarks.harness.measure.Runner`."""
        asked = time.perf_counter()
        sampling = Sampling(temperature=batch.temperature, seed=batch.seed)
        tokens: dict[SessionId, list[Token]] = {}
        commits: dict[SessionId, list[TimedCommit]] = {}
        for prompt, count in zip(batch.prompts, batch.wanted, strict=True):
            session, end = next(self._numbers), Limits(len(prompt) + count)
            tokens[session], commits[session] = [], []
            opened = Open(session, 1, tuple(prompt), sampling, end, PLAIN)
            _refuse(self._loop.receive(LINK, opened, time.perf_counter()))
        unfinished = set(tokens)
        while unfinished:
            sent = self._loop.step()
            assert sent is not None, "the verify loop idles while requests are open"
            _refuse(sent)
            now = time.perf_counter()
            for verification in (message for _, message in sent if isinstance(message, Verification)):
                tokens[verification.session] += verification.tokens
                commits[verification.session].append(TimedCommit(now, len(verification.tokens)))
                if verification.finish:
                    unfinished.remove(verification.session)
        decoded = tuple(Decoded(tuple(text), tuple(commits[session])) for session, text in tokens.items())
        return Run(decoded, asked=asked)


def _refuse(sent: Outgoing) -> None:
    for _, message in sent:
        if isinstance(message, Refused):
            raise GenerationError(message.code, message.message)


def stock_works(stock: Stock, context: Sequence[int], sizes: Sequence[int]) -> dict[str, Work]:
    """Steps of transformers over a cached context that can be timed, by the names ours have, prefixed."""
    cache = DynamicCache(config=stock.model.config)
    with torch.inference_mode():
        stock.model(input_ids=torch.tensor([context]), past_key_values=cache, logits_to_keep=1)

    def work(tokens: int) -> Work:
        ids_1T = torch.arange(1, tokens + 1)[None]

        @torch.inference_mode()
        def step() -> None:
            stock.model(input_ids=ids_1T, past_key_values=cache).logits.argmax(-1).tolist()
            cache.crop(-tokens)

        return step

    return {PREFIX + chain(size): work(size) for size in sizes}
