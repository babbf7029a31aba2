"""Single steps of the engine, ready to be timed in turn with reading memory.

A step of decoding reads every weight once, so it cannot be faster than the same core reads as many bytes. What the core
can read is measured in several ways over a buffer that no cache holds, in turn with the steps it is compared with, so
that whatever else the machine does slows both.

A timed step is what the verify loop does for it: the forward, the target's draw on every row, and giving the slots back
(where the loop commits some of them), so that the next step finds what this one found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random

import torch

from engine.host.memory import collapse
from engine.interface import Chunk
from engine.sampling.sampling import Draw, sample
from engine.step import Engine
from speculation.messages import Sampling

SEED = 0
PREFIX = "transformers "
"""Of what is named as ours is, and is theirs."""
TRIES = 4
"""How often a step is timed in a round, one after the other as in decoding. The fastest counts, as it does of reads."""
Work = Callable[[], object]
PREFILL = 256
"""Tokens computed at once while the contexts are set up."""
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)
"""One token fed and seven drafts: two branches from the first, then narrower."""
GREEDY = Sampling(temperature=0.0)


def reads(size: int) -> dict[str, Work]:
    """Ways to read a buffer of ``size`` bytes once."""
    # Written to, because memory that never was is backed by a single page of zeros.
    bytes_S = torch.ones(size, dtype=torch.uint8)
    collapse(bytes_S.data_ptr(), size)  # as the weights are, or the floor would be too easy
    floats_S = bytes_S.view(torch.float32)
    integers_S = bytes_S.view(torch.int64)
    return {
        "sum int64": integers_S.sum,
        "sum float32": floats_S.sum,
        "max uint8": bytes_S.amax,
        "dot float32": lambda: torch.dot(floats_S, floats_S),
    }


def in_turn(
    works: Mapping[str, Work], rounds: int, warm_up: int = 1, tries: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Seconds of every work in every round, the fastest of its ``tries`` (1 if not named).

    The order is another one in every round, so that none has a best place.
    """
    order, shuffle = list(works), Random(SEED).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            fastest = min(_timed(works[name]) for _ in range((tries or {}).get(name, 1)))
            if number >= warm_up:
                seconds[name].append(fastest)
    return seconds


def _timed(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Keep this thread, and those it starts meanwhile, on the first usable cores."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def chain(tokens: int) -> str:
    """Name of a step of one sequence: one token fed, the others drafts in a row."""
    return f"chain {tokens}"


def many(sequences: int) -> str:
    """Name of a step of as many sequences, with a token each."""
    return f"many {sequences}"


TREE = f"tree {len(TREE_PARENTS)}"


def draw_tokens(engine: Engine, chunks: Sequence[Chunk]) -> list[int]:
    """Compute chunks that bring their draws and fetch what is drawn, in the step or behind it, as a worker does."""
    logits_RV = engine.run(chunks)
    if engine.drawn is None:
        return sample(logits_RV, [draw for chunk in chunks for draw in chunk.draws])
    return [token for token, _ in engine.drawn.tolist()]


class TimedSteps:
    """Sequences with their context cached, and the steps that can be timed on them."""

    def __init__(self, engine: Engine, contexts: Sequence[Sequence[int]]) -> None:
        """Computes ``contexts``, each as one sequence."""
        self._engine = engine
        self.sequences = [engine.cache.sequence() for _ in contexts]
        for sequence, context in zip(self.sequences, contexts, strict=True):
            for start in range(0, len(context), PREFILL):
                part = context[start : start + PREFILL]
                engine.run([Chunk(sequence, part)])
                sequence.advance(range(len(part)))

    def works(self, sizes: Sequence[int]) -> dict[str, Work]:
        """By name: of one sequence, a chain of every size and a tree; of as many sequences, a token each."""
        chains = {chain(size): self.step([0], range(-1, size - 1)) for size in sizes}
        side_by_side = {many(size): self.step(range(size), (-1,)) for size in sizes if size > 1}
        return {**chains, TREE: self.step([0], TREE_PARENTS), **side_by_side}

    def free(self) -> None:
        """Give the cache back."""
        for sequence in self.sequences:
            sequence.free()

    def step(self, contexts: Sequence[int], parents: Sequence[int]) -> Work:
        """Of the sequences of these contexts, by their indices, with the same tree each."""

        def step() -> None:
            draw_tokens(
                self._engine,
                [
                    Chunk(sequence, tokens, parents, rows, [Draw(GREEDY, sequence.length + row) for row in rows])
                    for sequence in sequences
                ],
            )
            for sequence in sequences:
                sequence.rollback()

        sequences = [self.sequences[context] for context in contexts]
        tokens, rows = list(range(1, len(parents) + 1)), range(len(parents))
        return step
