"""An answer from the chunks of its choices: whole, or as server-sent events.

Decides which events a chunk has, and which of them are written at once. Their shapes stand in
:mod:`router.answers.responses`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from router.answers import responses
from router.answers.choice_reader import TextChunk
from router.answers.responses import Choice, Envelope, Json, Usage
from router.errors import ErrorCode, code_of
from router.generation import GenerationError

MAX_HELD_BYTES = 1 << 16
"""Of events that are written together."""


async def whole(chunks: AsyncGenerator[TextChunk], envelope: Envelope, usage: Usage) -> Json:
    """The answer that is not streamed. Raises :class:`GenerationError`."""
    gathered = [Choice() for _ in range(usage.choices)]
    commits: list[TextChunk] = []
    async with aclosing(chunks):
        async for chunk in chunks:
            usage.add(chunk)
            gathered[chunk.index].add(chunk)
            if envelope.details and chunk.tokens:
                commits.append(chunk)
    return envelope.whole(gathered, usage, commits)


async def events(
    first: TextChunk,
    chunks: AsyncGenerator[TextChunk],
    envelope: Envelope,
    usage: Usage,
    failed: Callable[[ErrorCode, Exception], None],
) -> AsyncGenerator[bytes]:
    """The whole stream. After its first byte a failure can only be told in an event, which ends it.

    Events that are there at the same time are written together.
    """
    opened: set[int] = set()
    held, chunk = b"", first
    async with aclosing(chunks):
        try:
            while True:
                held += _chunk_events(chunk, envelope, usage, opened)
                follows = chunk.more if chunk.finish is None else usage.ended == usage.choices
                if held and (not follows or len(held) > MAX_HELD_BYTES):
                    yield held
                    held = b""
                chunk = await anext(chunks)
        except StopAsyncIteration:
            pass
        except GenerationError as error:
            failed(code_of(error.code), error)
            yield held + responses.event(responses.error_body(code_of(error.code), error.message))
            return
        except Exception as error:
            failed(code_of("internal"), error)
            yield held + responses.event(responses.internal_error_body())
            return
    yield held + (responses.event(envelope.usage(usage)) if envelope.include_usage else b"") + responses.DONE


def _chunk_events(chunk: TextChunk, envelope: Envelope, usage: Usage, opened: set[int]) -> bytes:
    """The events for one chunk, usually one; they are written together."""
    usage.add(chunk)
    if envelope.plain and chunk.plain and chunk.index in opened:
        return envelope.plain_event(chunk.index, chunk.text)
    more = {"usage": usage.body()} if envelope.continuous_usage else {}
    return b"".join(responses.event(body | more) for body in _chunk_bodies(chunk, envelope, usage, opened))


def _chunk_bodies(chunk: TextChunk, envelope: Envelope, usage: Usage, opened: set[int]) -> Iterator[Json]:
    if chunk.index not in opened and envelope.kind == "chat":
        yield envelope.opening(chunk.index, chunk.prompt)
    opened.add(chunk.index)
    of_prompt = chunk.prompt is not None and envelope.kind == "completion"
    if chunk.text or chunk.shown or chunk.calls or of_prompt or (envelope.include_speculation and chunk.tokens):
        yield envelope.text(chunk)
    if chunk.finish is not None:
        yield envelope.closing(chunk, usage)
