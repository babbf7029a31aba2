"""Contenders that say the same in turn, prompt by prompt: what comes of each is one :class:`RunTotals`.

Pace is taken from a run's first tokens to its last, as in :mod:`benchmarks.harness.measure`. A contender is a way to
speculate; the first one is what the others are compared with.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import SETTLE_SECONDS, TimedCommit, order
from benchmarks.harness.pair import ROOT
from benchmarks.harness.workers import WorkerPlan, connected, running
from cluster.console import say
from models.corpus import read_prompts
from router.dispatch import Dispatcher
from router.generation import Committed, Generation
from router.text.tokenizer import Tokenizer
from speculation.events import Role
from speculation.messages import Source, SourceName, Token

WARM_UP = 2
"""Rounds before those that count."""


@dataclass(slots=True)
class RunTotals:
    """What came of one contender's runs."""

    rates: list[float] = field(default_factory=list)
    """Tokens a second of each run, after its first tokens."""
    commits: list[TimedCommit] = field(default_factory=list)
    """Those after the first of each run."""
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    """From the beginnings of the runs to their ends."""
    sources: Counter[SourceName] = field(default_factory=Counter)
    """Whose drafts were accepted, and how many."""


@asynccontextmanager
async def serving(target: Path, *flags: str, draft: Path | None = None) -> AsyncIterator[Dispatcher]:
    """A target on a core of its own, perhaps a draft on another, both in bfloat16, and a router's session side."""
    with tempfile.TemporaryDirectory() as folder:
        record, given = Path(folder), ("--dtype", "bfloat16", *flags)
        async with AsyncExitStack() as stack:
            plans = [WorkerPlan(Role.TARGET, target, 0, record / "target.jsonl", given)]
            plans += [WorkerPlan(Role.DRAFT, draft, 1, record / "draft.jsonl", given)] if draft else []
            workers = [await stack.enter_async_context(running(plan)) for plan in plans]
            yield await stack.enter_async_context(connected(*workers))


def held_out(tokenizer: Tokenizer, count: int) -> list[tuple[Token, ...]]:
    """So many prompts that no bundled model was trained on; those there are, if they are fewer."""
    texts = read_prompts(ROOT / "models" / "prompts.jsonl")[:count]
    return [tokenizer.encode(text, special=False) for text in texts]


def tell(row: Mapping[str, Any]) -> None:
    """A line of JSON."""
    say(json.dumps(row))


async def decode(dispatcher: Dispatcher, generation: Generation, tally: RunTotals | None) -> list[Token]:
    """One run, noted in ``tally``."""
    tokens: list[Token] = []
    commits: list[TimedCommit] = []
    sources: Counter[SourceName] = Counter()
    asked = time.perf_counter()
    async for item in dispatcher.generate(generation):
        if isinstance(item, Committed):
            commits.append(TimedCommit(time.perf_counter(), len(item.tokens), item.accepted, item.offered))
            tokens += item.tokens
            sources.update(item.metadata.sources or (Source.DRAFT,) * item.accepted)
    if tally is not None:
        tally.tokens += len(tokens)
        tally.steps += len(commits)
        tally.seconds += commits[-1].at - asked
        tally.sources.update(sources)
        tally.commits += commits[1:]
        if len(commits) > 1:
            tally.rates.append((len(tokens) - commits[0].tokens) / (commits[-1].at - commits[0].at))
    return tokens


async def take_turns(dispatcher: Dispatcher, rounds: Sequence[Mapping[str, Generation]]) -> dict[str, RunTotals]:
    """Let all contenders say the same in every round, the first :data:`WARM_UP` uncounted.

    ``rounds`` hold what each contender is asked. Raises AssertionError if they do not say the same.
    """
    tallies = {name: RunTotals() for name in rounds[0]}
    for number, asked in enumerate(rounds):
        said: list[list[Token]] = []
        for name in order(list(asked), number):
            await asyncio.sleep(SETTLE_SECONDS)
            said.append(await decode(dispatcher, asked[name], tallies[name] if number >= WARM_UP else None))
        assert all(one == said[0] for one in said), "the text depends on how it was drafted"
    return tallies


def accepted(tally: RunTotals) -> dict[str, Any]:
    """How many drafts of each source were accepted."""
    return {"accepted": dict(tally.sources)}


def rows(tallies: Mapping[str, RunTotals], more: Callable[[RunTotals], dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each contender, and ``more`` of them."""
    plain = next(iter(tallies.values())).rates
    return [
        {
            "contender": name,
            "tokens_per_second": round(statistics.median(tally.rates), 1),
            "ratio_to_plain": round(statistics.median(a / b for a, b in zip(tally.rates, plain, strict=True)), 2),
            "tokens_per_step": round(tally.tokens / tally.steps, 2),
            **more(tally),
        }
        for name, tally in tallies.items()
    ]
