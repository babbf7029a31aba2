"""What a run is, how it is timed, and how contenders take turns.

Pace is taken from the moment every request of a run has its first tokens to its last token: the prompt's computation
is the same for all and is left out. Contenders take turns prompt by prompt, and who begins changes from prompt to
prompt, so a machine that changes its pace changes all of them. What the figures mean is decided in ``figures``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from router.dispatch import Dispatcher
from router.generation import Committed, Generation
from speculation.events import Role
from speculation.messages import RequestOptions, Sampling, Source, SourceName, Speculation, Token
from transport.client import Traffic

SETTLE_SECONDS = 0.05
"""Pause between two runs, for the end of one to reach all workers."""
RUN_SECONDS = 600.0
"""After this long something hangs."""

Name = TypeVar("Name")


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


def served(dispatcher: Dispatcher, speculation: Speculation, extras: RequestOptions = RequestOptions()) -> Runner:
    """A contender that is a request to our workers."""

    async def run(batch: Batch) -> Run:
        sampling = Sampling(temperature=batch.temperature, seed=batch.seed)
        asked_for = replace(extras, grammar=batch.grammar)
        before, asked = dispatcher.pool.traffic(Role.TARGET), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    decode(
                        dispatcher,
                        Generation(prompt, sampling, tokens, speculation=speculation, request_options=asked_for),
                    )
                )
                for prompt, tokens in zip(batch.prompts, batch.wanted, strict=True)
            ]
        used = dispatcher.pool.traffic(Role.TARGET) - before
        return Run(tuple(task.result() for task in tasks), used, asked)

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


def order(names: Sequence[Name], number: int) -> list[Name]:
    """Who begins in a round, and who follows."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


async def take_turns(
    runners: Mapping[Name, Runner], batches: Sequence[Batch], warm_up: int, advance: Callable[[], None] = lambda: None
) -> dict[Name, list[Run]]:
    """Let every contender decode every batch, in turn; the first ``warm_up`` rounds do not count.

    Returns the runs by contender, in the order of ``batches``. Calls ``advance`` after every run. Raises
    TimeoutError if one hangs.
    """
    names = list(runners)
    runs: dict[Name, list[Run]] = {name: [] for name in names}
    rounds = [*itertools.islice(itertools.cycle(batches), warm_up), *batches]
    for number, batch in enumerate(rounds):
        for name in order(names, number):
            await asyncio.sleep(SETTLE_SECONDS)
            async with asyncio.timeout(RUN_SECONDS):
                run = await runners[name](batch)
            if number >= warm_up:
                runs[name].append(run)
            advance()
    return runs
