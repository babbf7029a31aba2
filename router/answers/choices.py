"""Running the choices of a request at the same time: committed tokens in, text out.

Decides how the commits of several generations merge into one sequence, and that everything stops when one
choice fails or nobody listens any more. Knows nothing of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.answers.choice_reader import ChoiceReader, TextChunk
from router.generation import GenerationError, Generator
from router.schema.requests import ApiRequest
from router.text.tokenizer import Tokenizer

QUEUED_CHUNKS = 32
"""Chunks of several choices that wait for a slow client, none of a single one. What is committed meanwhile waits as
tokens; no target waits."""


async def run_choices(request: ApiRequest, generator: Generator, tokenizer: Tokenizer) -> AsyncGenerator[TextChunk]:
    """Run all choices. Closing it stops them. Raises :class:`GenerationError` when one of them fails."""
    if len(request.generations) == 1:  # in the task of whoever listens
        async with aclosing(_choice(request, 0, generator, tokenizer)) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    queue: asyncio.Queue[TextChunk | Exception | None] = asyncio.Queue(QUEUED_CHUNKS)

    async def run(index: int) -> None:
        try:
            async with aclosing(_choice(request, index, generator, tokenizer)) as chunks:
                async for chunk in chunks:
                    await queue.put(chunk)
        except Exception as error:  # Raised again below, in the task of whoever listens.
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(run(index)) for index in range(len(request.generations))]
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


async def _choice(
    request: ApiRequest, index: int, generator: Generator, tokenizer: Tokenizer
) -> AsyncGenerator[TextChunk]:
    """One choice, up to its end or its first stop string."""
    reader = ChoiceReader(request, index, tokenizer)
    if reader.knows_all:
        yield reader.prompt()
        return
    async with aclosing(generator.generate(request.generations[index])) as items:
        async for item in items:
            for chunk in reader.read(item):
                yield chunk
                if chunk.finish is not None:
                    return
    raise GenerationError("internal", "the generation stopped without a reason")
