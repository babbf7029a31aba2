"""Streamed answers: an event of text alone is written as any other, and what is there together is written at once."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.answers import responses
from router.answers.choice_reader import PromptShown, TextChunk, Usage
from router.answers.logprobs import NamedToken, ShownToken
from router.answers.responses import MAX_HELD_BYTES, Envelope, events
from router.generation import Committed, GenerationError
from router.schema.request_objects import StreamOptions
from router.schema.request_schema import Kind
from router.schema.requests import AnswerForm, ApiRequest
from router.text.text import Piece
from speculation.events import Own
from speculation.messages import FinishReason
from tests.fakes import tiny_tokenizer


def envelope(kind: Kind = "completion", model: str = "m", *, include_usage: bool = False) -> Envelope:
    request = ApiRequest(kind, model, (), (), (), 1, stream_options=StreamOptions(include_usage=include_usage))
    return Envelope(request, "cmpl-1", 2, tiny_tokenizer())


def said(text: str, index: int = 0, *, more: bool = False, finish: FinishReason | None = None) -> TextChunk:
    return TextChunk(
        index, (Piece(text, Own.TARGET),), tokens=1, commit=Committed((1,), 0, 0, more=more), finish=finish
    )


@pytest.mark.parametrize("kind", ["completion", "chat"])
@settings(derandomize=True, deadline=None)
@given(st.text(min_size=1), st.integers(0, 3), st.text(max_size=5))
def test_an_event_of_text_alone_is_written_as_any_other(kind: Kind, text: str, index: int, model: str) -> None:
    one = envelope(kind, model, include_usage=bool(index))
    assert one.plain
    for _ in range(2):
        assert one.plain_event(index, text) == responses.event(one.text(said(text, index)))


async def writes(chunks: Iterable[TextChunk | GenerationError], choices: int = 1) -> list[bytes]:
    async def source() -> AsyncGenerator[TextChunk]:
        for chunk in chunks:
            if isinstance(chunk, GenerationError):
                raise chunk
            yield chunk

    stream = source()
    first = await anext(stream)
    written = [each async for each in events(first, stream, envelope(), Usage(1, 1, choices), lambda *_: None)]
    told = [line.removeprefix(b"data: ") for line in b"".join(written).split(b"\n\n") if line]
    assert all(line == b"[DONE]" or json.loads(line) for line in told)
    return written


async def test_what_is_there_together_is_written_at_once_with_the_end() -> None:
    end = TextChunk(0, finish=FinishReason.LENGTH)
    alone = await writes([said("a"), said("b"), said("c"), end])
    together = await writes([said("a"), said("b", more=True), said("c", more=True), end])
    assert b"".join(together) == b"".join(alone)
    assert [each.count(b"data: ") for each in alone] == [1, 1, 1, 2]
    assert [each.count(b"data: ") for each in together] == [1, 4]


async def test_nothing_waits_for_another_choice() -> None:
    end = [TextChunk(i, finish=FinishReason.STOP, commit=Committed((1,), 0, 0, more=True)) for i in (0, 1)]
    written = await writes([said("a", more=True), end[0], said("b", 1, more=True), end[1]], choices=2)
    assert [each.count(b"data: ") for each in written] == [2, 3]


async def test_a_failure_comes_behind_what_was_there_before_it() -> None:
    written = await writes([said("a", more=True), GenerationError("internal", "why")])
    assert len(written) == 1
    assert written[0].index(b'"a"') < written[0].index(b'"why"')


async def test_only_so_much_is_written_at_once() -> None:
    long = "x" * (MAX_HELD_BYTES // 2)
    written = await writes([*[said(long, more=True)] * 5, said("b")])
    assert max(map(len, written)) < 2 * MAX_HELD_BYTES
    assert len(written) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_prompt_are_made_beside_the_event_loop(stream: bool) -> None:
    """There may be a million; other texts go on meanwhile."""
    made: list[threading.Thread] = []

    def tokens() -> tuple[ShownToken, ...]:
        made.append(threading.current_thread())
        return (ShownToken(NamedToken(1, "a", b"a"), 0),)

    async def source() -> AsyncGenerator[TextChunk]:
        yield TextChunk(0, prompt=PromptShown(tokens=tokens))
        yield said("b", finish=FinishReason.LENGTH)

    request = ApiRequest("completion", "m", (), (), (), 1, form=AnswerForm(prompt_logprobs=0))
    asked, usage, chunks = Envelope(request, "cmpl-1", 2, tiny_tokenizer()), Usage(1, 1, 1), source()
    if stream:
        told = b"".join([each async for each in events(await anext(chunks), chunks, asked, usage, lambda *_: None)])
    else:
        told = await asked.whole(chunks, usage)
    assert b'"prompt_logprobs":[null]' in told
    assert made and threading.main_thread() not in made
