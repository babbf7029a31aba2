"""Running the choices of a request at the same time: committed tokens in, text out.

Decides how the commits of several generations merge into one sequence, and that everything stops when one
choice fails or nobody listens any more. Knows nothing of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import assert_never

from router.generation import Committed, Ended, Generation, GenerationError, Generator
from router.requests import ApiRequest
from router.text import Delta, Piece, TextStream
from router.tokenizer import Tokenizer
from speculation.messages import FinishReason

QUEUED_CHUNKS = 32
"""Chunks of one request that wait for a slow client before its generations have to wait."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit adds to choice ``index``; the last one of a choice has ``finish``.

    ``tokens``, ``accepted`` and ``offered`` leave out what lies behind a stop string: a draft token that was
    accepted there counts as if it had not been offered.
    """

    index: int
    pieces: tuple[Piece, ...]
    tokens: int = 0
    accepted: int = 0
    offered: int = 0
    cached: int = 0
    """With the first commit: how many tokens of the prompt were in the target's cache."""
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(piece.text for piece in self.pieces)


async def run_choices(request: ApiRequest, generator: Generator, tokenizer: Tokenizer) -> AsyncGenerator[Chunk]:
    """Run all choices. Closing it stops them. Raises :class:`GenerationError` when one of them fails."""
    queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(QUEUED_CHUNKS)

    async def run(index: int, generation: Generation) -> None:
        try:
            async with aclosing(generator.generate(generation)) as items:
                after = generation.prompt if request.kind == "completion" else ()
                text = TextStream(tokenizer, request.stop, generation.stop_tokens, after)
                async for chunk in _chunks(index, items, text):
                    await queue.put(chunk)
        except Exception as error:  # Raised again below, in the task of whoever listens.
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(run(i, generation)) for i, generation in enumerate(request.generations)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _chunks(index: int, items: AsyncGenerator[Committed | Ended], text: TextStream) -> AsyncGenerator[Chunk]:
    """One choice, up to its end or its first stop string."""
    async for item in items:
        match item:
            case Committed():
                chunk = _of_commit(index, item, text.push(item.tokens, item.accepted))
                yield chunk
                if chunk.finish is not None:
                    return
            case Ended():
                rest = text.finish()
                yield Chunk(index, rest.pieces, finish=FinishReason.STOP if rest.stopped else item.reason)
                return
            case _:
                assert_never(item)
    raise GenerationError("internal", "the generation stopped without a reason")


def _of_commit(index: int, commit: Committed, delta: Delta) -> Chunk:
    accepted = min(commit.accepted, delta.tokens)
    return Chunk(
        index,
        delta.pieces,
        tokens=delta.tokens,
        accepted=accepted,
        offered=commit.offered - (commit.accepted - accepted),
        cached=commit.cached,
        finish=FinishReason.STOP if delta.stopped else None,
    )
