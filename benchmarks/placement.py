"""Where a draft model works: on a worker of its own, a core each, or in the target's process, in turn with it.

    python -m benchmarks.placement --dtype bf16 --rounds 4

The pair is that of ``paceline up --stretched``: the bundled target at the cost of a larger model, drafted for by the
bundled draft. Contenders take turns prompt by prompt: plain decoding and drafting, each with one thread and with one
for every core. Drafts come from the draft model alone and nothing is remembered. Prints a line for each, as a factor of
plain decoding on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.harness import contenders
from benchmarks.harness.contenders import OURS, PLAIN
from benchmarks.harness.measure import Batch, Run, Runner, served, take_turns
from benchmarks.harness.pair import ROOT, slow_draft
from benchmarks.harness.workers import WorkerPlan, connected, running
from cluster.console import say
from cluster.local.stretched import HIDDEN, LAYERS
from models.corpus import read_prompts
from speculation.events import Role

SETTINGS = ((1, 0.0), (1, 0.8), (8, 0.0), (8, 0.8))
"""Streams and temperature."""
BASE = "plain, 1 core"


async def measure(dtype: str, rounds: int, tokens: int, settings: Sequence[tuple[int, float]] = SETTINGS) -> None:
    """Start all of them, and compare."""
    target, draft = slow_draft(HIDDEN, LAYERS), ROOT / "models" / "draft"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in read_prompts(ROOT / "models" / "prompts.jsonl")]
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        async with AsyncExitStack() as ending:

            def worker(role: Role, core: int | None, threads: int, *more: str) -> WorkerPlan:
                model, number = target if role is Role.TARGET else draft, next(numbers)
                flags = ["--dtype", dtype, "--threads", str(threads), *more]
                return WorkerPlan(role, model, core, Path(folder) / f"{number}.jsonl", flags)

            numbers = itertools.count()
            beside = ["--draft-model", str(draft)]
            plans = (
                worker(Role.TARGET, 0, 1),
                worker(Role.DRAFT, 1, 1),
                worker(Role.TARGET, 0, 1, *beside),
                worker(Role.TARGET, None, cores, *beside),
            )
            first, second, one, all_cores = [await ending.enter_async_context(running(plan)) for plan in plans]
            own, in_turn, wide = [
                await ending.enter_async_context(connected(*workers))
                for workers in ((first, second), (one,), (all_cores,))
            ]
            runners = {
                BASE: served(own, PLAIN.speculation),
                "own, a core each": served(own, OURS.speculation),
                "shared, 1 core": served(in_turn, OURS.speculation),
                f"plain, {cores} cores": served(wide, PLAIN.speculation),
                f"shared, {cores} cores": served(wide, OURS.speculation),
            }
            for streams, temperature in settings:
                say(f"{streams} streams, temperature {temperature:g}")
                await compare(runners, batches(prompts, streams, temperature, rounds, tokens))


def batches(
    prompts: Sequence[tuple[int, ...]], streams: int, temperature: float, rounds: int, tokens: int
) -> list[Batch]:
    """Prompts that are all different, as far as there are enough."""
    endless = itertools.cycle(prompts)
    return [
        Batch(tuple(itertools.islice(endless, streams)), tokens, temperature, seed=number) for number in range(rounds)
    ]


async def compare(runners: Mapping[str, Runner], asked: Sequence[Batch]) -> None:
    """Let all take turns, and print what came of it."""
    runs = await take_turns(runners, asked, 1, lambda: None)
    plain = runs[BASE]
    for name, found in runs.items():
        factor = contenders.pace(found) / contenders.pace(plain)
        steps = [commit for run in found for commit in run.counted]
        kept = sum(commit.accepted for commit in steps) / len(steps)
        offered = sum(commit.offered for commit in steps) / len(steps)
        each = " ".join(f"{run.rate / base.rate:.2f}" for run, base in zip(found, plain, strict=True))
        same = "same text" if _texts(found) == _texts(plain) else "other text"
        say(f"  {name:17} {factor:5.2f}  {kept:.2f} of {offered:.2f} drafts a step, {same}; runs {each}")


def _texts(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    return [request.tokens for run in runs for request in run.decoded]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=4, help="batches of prompts in a setting (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    given = parser.parse_args()
    asyncio.run(measure(given.dtype, given.rounds, given.tokens))
