"""Who takes part, what a run is, how it is timed, and how contenders take turns.

All contenders but those of another library are requests to the same processes; what differs is what the request says.
No answer is remembered: all are asked the same, and one that drafts from what was said before would copy another's.
The baselines get their best draft length: each is tried with several in the very setting it is measured in, and then
measured again with the best, so that the choice does not flatter the figure.

Pace is taken from the moment every request of a run has its first tokens to its last token: the prompt's computation
is the same for all and is left out. Contenders take turns prompt by prompt, and who begins changes from prompt to
prompt, so a machine that changes its pace changes all of them. What the figures mean is decided in ``figures``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeVar

from router.dispatch import Dispatcher
from router.generation import Committed, Generation
from speculation.events import Role
from speculation.messages import RequestOptions, Sampling, Schedule, Source, SourceName, Speculation, Token
from transport.client import Traffic

SETTLE_SECONDS = 0.05
"""Pause between two runs, for the end of one to reach all workers."""
RUN_SECONDS = 600.0
"""After this long something hangs."""

Name = TypeVar("Name")
PLAIN = Speculation(enabled=False, remember=False)
DRAFTED = Speculation(sources=frozenset({Source.DRAFT}), remember=False)
"""Ours with drafts of the draft model only, so that it is compared with others on equal terms."""
WITH_LOOKUP = Speculation(remember=False)
"""What a request gets that asks for nothing, but that nothing was said before."""
LENGTHS = {Schedule.SEQUENTIAL: (2, 4, 6, 8, 10, 12), Schedule.PARALLEL: (6, 8, 10, 12)}
"""Draft lengths K that baselines are tried with: one drafts, then verifies, in turn (Leviathan et al. 2023); the other
drafts the next K tokens during verification, and drops them at a refusal (as PEARL does, Liu et al. 2024)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts to be continued at the same time, and how."""

    prompts: tuple[tuple[Token, ...], ...]
    tokens: int
    """New tokens a prompt; text ends there and nowhere else."""
    temperature: float = 0.0
    seed: int = 0
    each: tuple[int, ...] = ()
    """New tokens of every prompt, where they differ; ``tokens`` is the most then."""
    grammar: str = ""
    predictions: tuple[tuple[Token, ...], ...] = ()
    """What is expected of every prompt, where something is."""

    def __post_init__(self) -> None:
        assert not self.each or (len(self.each) == len(self.prompts) and max(self.each) == self.tokens)

    @property
    def wanted(self) -> tuple[int, ...]:
        """New tokens of every prompt."""
        return self.each or (self.tokens,) * len(self.prompts)


@dataclass(frozen=True, slots=True)
class TimedCommit:
    """Tokens that arrived together."""

    at: float
    """Seconds, on the monotonic clock that all processes of a machine share."""
    tokens: int
    accepted: int = 0
    offered: int = 0
    sources: tuple[SourceName, ...] = ()
    """Whose drafts the accepted ones are."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One request."""

    tokens: tuple[Token, ...]
    commits: tuple[TimedCommit, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One contender on one batch."""

    decoded: tuple[Decoded, ...]
    traffic: Traffic | None = None
    """Between router and target, heartbeats included; None where there is no wire."""
    asked: float | None = None
    """When the requests were made; None where nobody noted it."""

    @property
    def start(self) -> float:
        """When every request had its first tokens."""
        return max(request.commits[0].at for request in self.decoded)

    @property
    def end(self) -> float:
        """When the last token came."""
        return max(request.commits[-1].at for request in self.decoded)

    @property
    def seconds(self) -> float:
        """What the pace is taken over."""
        return self.end - self.start

    @property
    def counted(self) -> tuple[TimedCommit, ...]:
        """Commits after ``start``."""
        start = self.start
        return tuple(commit for request in self.decoded for commit in request.commits if commit.at > start)

    @property
    def tokens(self) -> int:
        """Tokens committed after ``start``."""
        return sum(commit.tokens for commit in self.counted)

    @property
    def rate(self) -> float:
        """Tokens a second, of all requests together."""
        return self.tokens / self.seconds

    @property
    def whole_rate(self) -> float:
        """The same from the requests on, so that the prompts' computation counts too; only where that was noted."""
        assert self.asked is not None
        return sum(len(request.tokens) for request in self.decoded) / (self.end - self.asked)

    @property
    def first_token_seconds(self) -> float:
        """From the requests to when every one had its first tokens; only where that was noted."""
        assert self.asked is not None
        return self.start - self.asked


Runner = Callable[[Batch], Awaitable[Run]]


def served(
    dispatcher: Dispatcher,
    speculation: Speculation,
    extras: RequestOptions = RequestOptions(),
    stop_tokens: frozenset[Token] = frozenset(),
) -> Runner:
    """A contender that is a request to our workers."""

    async def run(batch: Batch) -> Run:
        sampling = Sampling(temperature=batch.temperature, seed=batch.seed)
        predictions = batch.predictions or ((),) * len(batch.prompts)
        generations = [
            Generation(prompt, sampling, tokens, stop_tokens, speculation, request_options=options)
            for prompt, tokens, expected in zip(batch.prompts, batch.wanted, predictions, strict=True)
            for options in [replace(extras, grammar=batch.grammar, prediction=expected)]
        ]
        before, asked = dispatcher.pool.traffic(Role.TARGET), time.perf_counter()
        decoded = await asyncio.gather(*(decode(dispatcher, one) for one in generations))
        return Run(tuple(decoded), dispatcher.pool.traffic(Role.TARGET) - before, asked)

    return run


async def decode(dispatcher: Dispatcher, generation: Generation) -> Decoded:
    """Run one generation; raises :class:`router.generation.GenerationError`."""
    tokens: list[Token] = []
    commits: list[TimedCommit] = []
    async for item in dispatcher.generate(generation):
        if isinstance(item, Committed):
            sources = item.metadata.sources or (Source.DRAFT,) * item.accepted
            commits.append(TimedCommit(time.perf_counter(), len(item.tokens), item.accepted, item.offered, sources))
            tokens += item.tokens
    return Decoded(tuple(tokens), tuple(commits))


def seeded(
    prompts: Iterable[tuple[Token, ...]], rounds: int, streams: int, tokens: int, temperature: float = 0.0
) -> list[Batch]:
    """A batch a round, each with a seed of its own: as many of the prompts as there are streams, which come again."""
    endless = itertools.cycle(prompts)
    return [Batch(tuple(itertools.islice(endless, streams)), tokens, temperature, seed) for seed in range(rounds)]


def order(names: Sequence[Name], number: int) -> list[Name]:
    """Who begins in a round, and who follows."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


async def run_once(runner: Runner, batch: Batch) -> Run:
    """Once what ran before has settled. Raises TimeoutError if it hangs."""
    await asyncio.sleep(SETTLE_SECONDS)
    async with asyncio.timeout(RUN_SECONDS):
        return await runner(batch)


async def take_turns(
    runners: Mapping[Name, Runner], batches: Sequence[Batch], warm_up: int, skip: int = 0
) -> dict[Name, list[Run]]:
    """Let every contender decode every batch, in turn.

    Rounds that do not count: ``warm_up``, whose batches come again, and those of the first ``skip`` batches. Returns
    the runs by contender, in the order of ``batches``. Raises TimeoutError if one hangs.
    """
    names = list(runners)
    runs: dict[Name, list[Run]] = {name: [] for name in names}
    rounds = [*itertools.islice(itertools.cycle(batches), warm_up), *batches]
    for number, batch in enumerate(rounds):
        for name in order(names, number):
            run = await run_once(runners[name], batch)
            if number >= warm_up + skip:
                runs[name].append(run)
    return runs


def in_chains(schedule: Schedule, length: int) -> Speculation:
    """A baseline, over the same wire."""
    return replace(DRAFTED, max_depth=length, schedule=schedule)


def pace(runs: Sequence[Run]) -> float:
    """Tokens a second over all runs together; long waits count as long as they were."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def best(tried: Mapping[Name, Sequence[Run]]) -> Name:
    """The choice with the highest pace; the first of equals."""
    return max(tried, key=lambda choice: pace(tried[choice]))


@dataclass(frozen=True, slots=True)
class Beside:
    """What a contender came to, run by run beside another."""

    rates: tuple[float, ...]
    """Tokens a second."""
    ratios: tuple[float, ...]
    """Of its rates over the other's."""
    commits: tuple[TimedCommit, ...]
    """Of all runs."""
    same_text: float
    """Share of the texts that are the other's."""

    @property
    def tokens_per_step(self) -> float:
        """Mean."""
        return fmean(commit.tokens for commit in self.commits)

    @property
    def kept(self) -> float | None:
        """Share of the drafts verified that became text; None: there were none, or nobody said."""
        offered = sum(commit.offered for commit in self.commits)
        return sum(commit.accepted for commit in self.commits) / offered if offered else None


def beside(own: Sequence[Run], other: Sequence[Run]) -> Beside:
    """Of runs over the same batches."""
    texts, others = ([request.tokens for run in runs for request in run.decoded] for runs in (own, other))
    return Beside(
        tuple(run.rate for run in own),
        tuple(run.rate / base.rate for run, base in zip(own, other, strict=True)),
        tuple(commit for run in own for commit in run.counted),
        fmean(text == its for text, its in zip(texts, others, strict=True)),
    )


def reached(kept: Sequence[int], places: int) -> list[float]:
    """Share of the steps that kept a draft at the first place, at the second, and so on; ``kept``: drafts by step."""
    return [round(sum(count > place for count in kept) / len(kept), 3) for place in range(places)]


def rows(runs: Mapping[str, Sequence[Run]], *, exact: bool = True) -> list[dict[str, Any]]:
    """What each contender came to, run by run beside the first of them.

    ``exact``: all have to say the same, else this raises AssertionError.
    """
    base = next(iter(runs.values()))
    found = [(name, beside(own, base)) for name, own in runs.items()]
    assert not exact or all(one.same_text == 1 for _, one in found), "the text depends on how it was drafted"
    return [
        {
            "contender": name,
            "tokens_per_second": round(median(one.rates), 1),
            "ratio_to_plain": round(median(one.ratios), 2),
            "lowest_and_highest": [round(min(one.ratios), 2), round(max(one.ratios), 2)],
            "tokens_per_step": round(one.tokens_per_step, 2),
            "kept_of_offered": None if one.kept is None else round(one.kept, 2),
            "accepted": dict(Counter(str(source) for commit in one.commits for source in commit.sources)),
            "same_text": one.same_text,
        }
        for name, one in found
    ]
