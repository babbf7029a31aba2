"""Single steps of the engine, ready to be timed, and where the time of a worker's step goes.

A timed step is what the verify loop does for it: the forward, the target's draw on every row, and giving the slots back
(where the loop commits some of them), so that the next step finds what this one found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.bandwidth import Work
from engine.sampling import Draw, sample
from engine.step import Chunk, Engine
from speculation.messages import Sampling

if TYPE_CHECKING:
    from benchmarks.engine_loop import Loop

PREFILL = 256
"""Tokens computed at once while the contexts are set up."""
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)
"""One token fed and seven drafts: two branches from the first, then narrower."""
GREEDY = Sampling(temperature=0.0)


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


class Steps:
    """Sequences with their context cached, and the steps that can be timed on them."""

    def __init__(self, engine: Engine, contexts: Sequence[Sequence[int]]) -> None:
        """Computes ``contexts``, each as one sequence."""
        self._engine = engine
        self._sequences = [engine.cache.sequence() for _ in contexts]
        for sequence, context in zip(self._sequences, contexts, strict=True):
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
        for sequence in self._sequences:
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

        sequences = [self._sequences[context] for context in contexts]
        tokens, rows = list(range(1, len(parents) + 1)), range(len(parents))
        return step


class Part(StrEnum):
    """What a step of the worker is made of."""

    LINEAR = "linear layers"
    ATTENTION = "attention"
    REST = "norms and rest"
    SAMPLING = "sampling"
    HOST = "host work"
    """Planner, books, building the batch: what is neither the model nor sampling."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """A plain decoding step of ``sequences`` sequences through the verify loop; medians, in seconds."""

    sequences: int
    total: float
    parts: dict[Part, float]
    """They add up to ``total``."""


def measure_parts(loop: Loop, prompts: Sequence[Sequence[int]], steps: int) -> StepParts:
    """Where the time goes, over ``steps`` steps of all ``prompts`` together.

    The model's parts are timed by hooks on its modules in every other step, and scaled to the forward without them.
    """
    engine = loop.engine
    logits_NV = torch.randn(len(prompts), engine.model.vocabulary)
    draws = [Draw(GREEDY, position) for position in range(len(prompts))]
    totals: list[float] = []
    forwards: list[float] = []
    samplings: list[float] = []
    hooked: list[dict[Part, float]] = []
    with loop.decoding(prompts, 2 * steps + 1) as step:
        for _ in range(steps):
            started = time.perf_counter()
            step()
            totals.append(time.perf_counter() - started)
            forwards.append(engine.forward_seconds)
            started = time.perf_counter()
            sample(logits_NV, draws)
            samplings.append(time.perf_counter() - started)
            with hooks(engine.model.module) as seconds:
                step()
            hooked.append(seconds)
    total, forward, sampling = median(totals), median(forwards), median(samplings)
    model = {part: median(one[part] for one in hooked) for part in (Part.LINEAR, Part.ATTENTION, Part.REST)}
    scale = forward / sum(model.values())
    parts = {part: scale * seconds for part, seconds in model.items()}
    return StepParts(
        len(prompts), total, parts | {Part.SAMPLING: sampling, Part.HOST: max(total - forward - sampling, 0.0)}
    )


@contextmanager
def hooks(module: nn.Module) -> Iterator[dict[Part, float]]:
    """Seconds spent in linear layers, in attention outside of those, and in the rest of ``module``, while it lasts.

    Known by their classes' names: linear layers may be packed, and every family has its own attention.
    """
    seconds = dict.fromkeys((Part.LINEAR, Part.ATTENTION, Part.REST), 0.0)
    entered: list[Part] = []
    since = 0.0

    def switch() -> None:
        """Credit the time since the last switch to the part that was running."""
        nonlocal since
        now = time.perf_counter()
        if entered:
            seconds[entered[-1]] += now - since
        since = now

    def watch(one: nn.Module, part: Part) -> None:
        def enter(*_: object) -> None:
            switch()
            entered.append(part)

        def leave(*_: object) -> None:
            switch()
            entered.pop()

        handles.extend((one.register_forward_pre_hook(enter), one.register_forward_hook(leave)))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    watch(module, Part.REST)
    for one in module.modules():
        name = type(one).__name__
        if "Linear" in name:
            watch(one, Part.LINEAR)
        elif name.endswith("Attention"):
            watch(one, Part.ATTENTION)
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()
