"""Answers in OpenAI's JSON, streamed and not, and errors.

Decides shapes, which events a chunk has, and which of them are written at once. Of our own are ``speculation``
(docs/api.md, "What was drafted") and two counts in ``usage.completion_tokens_details``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router.answers.choice_reader import DIGITS, PromptShown, TextChunk, Usage
from router.answers.logprobs import ShownToken, of_chat, of_completion, of_prompt
from router.errors import ApiError, ErrorCode
from router.generation import GenerationError, Passed
from router.schema.requests import ApiRequest
from router.text.text import Piece
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCall
from speculation.events import Own
from speculation.messages import Token

Json = dict[str, Any]

CALL_ID_DIGITS = 24
"""Of the id of a tool call: other servers take back no more than 40 characters."""


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode(value: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return _JSON.encode(value).encode()


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event, on one line for whoever splits at Unicode's line ends too."""
    return b"data: " + _on_one_line(encode(value)) + b"\n\n"


def _on_one_line(data: bytes) -> bytes:
    for end, escape in _LINE_ENDS:
        data = data.replace(end, escape)
    return data


_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")
"""That JSON leaves as they are; in UTF-8 no other characters hold their bytes."""

DONE = b"data: [DONE]\n\n"


def error_body(error: ApiError) -> Json:
    """OpenAI's error object."""
    told = {"message": error.message, "type": error.code.type, "param": error.param, "code": error.code.name}
    return {"error": told}


INTERNAL_ERROR = ApiError("internal", "internal error")
"""What is told of a fault of this server: nothing of what went wrong, which the log says."""


def commit_body(chunk: TextChunk, tokenizer: Tokenizer) -> Json:
    """What a chunk says of its commit."""
    body: Json = {
        "accepted": chunk.accepted,
        "offered": chunk.offered,
        "tokens": chunk.tokens,
        "position": chunk.position,
        "pieces": [
            {"text": piece.text, "drafted": not isinstance(piece.origin, Own), "source": str(piece.origin)}
            for piece in chunk.pieces
        ],
    }
    if chunk.commit is not None and (details := chunk.commit.details) is not None:
        end, metadata = details.at, chunk.commit.metadata
        body["step"] = {
            "start": round(end - metadata.took_us / 1e6, DIGITS),
            "end": round(end, DIGITS),
            "waited": round(metadata.waited_us / 1e6, DIGITS),
        }
        body["committed"] = [
            {"id": token, "text": tokenizer.decode([token]), "source": str(origin)}
            for token, origin in zip(chunk.commit.tokens, chunk.origins, strict=False)  # without what a stop string cut
        ]
        body["proposals"] = [_proposal(passed, tokenizer) for passed in details.passed]
    return body


def _proposal(passed: Passed, tokenizer: Tokenizer) -> Json:
    proposal = passed.proposal
    return {
        "source": proposal.source.value,
        "start": round(passed.at - proposal.took_us / 1e6, DIGITS),
        "end": round(passed.at, DIGITS),
        "anchor": proposal.anchor_position,
        "after": passed.after,
        "tokens": [
            {"id": token, "text": tokenizer.decode([token]), "number": number}
            for token, number in zip(proposal.tokens, passed.numbers, strict=True)
        ],
        "parents": list(proposal.parents),
        "confidence": [round(value, 3) for value in proposal.confidence],
    }


@dataclass(slots=True)
class Choice:
    """A whole choice, gathered from its chunks."""

    texts: list[str] = field(default_factory=list)
    shown: list[ShownToken] = field(default_factory=list)
    ids: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    prompt: PromptShown = PromptShown()
    finish: str | None = None

    def add(self, chunk: TextChunk) -> None:
        """Take the next chunk."""
        self.prompt = chunk.prompt or self.prompt
        self.texts.append(chunk.text)
        self.shown += chunk.shown
        self.ids += chunk.ids
        self.calls += chunk.calls
        self.finish = chunk.reason or self.finish


@dataclass(slots=True)
class Envelope:
    """What all parts of one answer share."""

    request: ApiRequest
    id: str
    created: int
    tokenizer: Tokenizer
    chat: bool = field(init=False)
    plain: bool = field(init=False)
    """Whether nothing stands in the chunks of a stream but text."""
    _called: dict[int, int] = field(default_factory=dict)
    """Tool calls that each choice of a stream has made."""
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """What stands before and behind the text in the plain events of each choice."""

    def __post_init__(self) -> None:
        form, options = self.request.form, self.request.stream_options
        self.chat = self.request.kind == "chat"
        beside = form.token_ids or form.logprobs is not None or form.prompt_logprobs is not None
        self.plain = not (beside or options.include_speculation or options.continuous_usage_stats)

    def plain_event(self, index: int, text: str) -> bytes:
        """The event of :meth:`text` for a chunk of text alone, where all are plain."""
        around = self._around.get(index)
        if around is None:
            mark = f"{self.id}-text"
            before, behind = event(self.text(TextChunk(index, (Piece(mark, Own.TARGET),)))).split(mark.encode())
            around = self._around[index] = before[:-1], behind[1:]
        return around[0] + _on_one_line(_JSON.encode(text).encode()) + around[1]

    async def whole(self, chunks: AsyncGenerator[TextChunk], usage: Usage) -> bytes:
        """The answer that is not streamed, in JSON. Raises :class:`GenerationError`."""
        choices = [Choice() for _ in range(usage.choices)]
        commits: list[Json] = []
        async with aclosing(chunks):
            async for chunk in chunks:
                usage.add(chunk)
                choices[chunk.index].add(chunk)
                if self.request.details and chunk.tokens:
                    commits.append({"index": chunk.index} | commit_body(chunk, self.tokenizer))
        return await self.made(lambda: encode(self._whole(choices, commits, usage)))

    async def made(self, make: Callable[[], bytes]) -> bytes:
        """A part of the answer, made beside the event loop where it may be long: with log-probabilities."""
        long = self.request.form.logprobs is not None or self.request.form.of_prompt is not None
        return await asyncio.to_thread(make) if long else make()

    def _whole(self, choices: Sequence[Choice], commits: Sequence[Json], usage: Usage) -> Json:
        bodies = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        name = "chat.completion" if self.chat else "text_completion"
        body = self._outer(name, bodies) | {"usage": usage.body()}
        if self.request.details:
            body["speculation"] = {"commits": commits, "summary": usage.summary()}
        return body | self._of_prompt(choices[0].prompt) if self.chat else body

    def opening(self, index: int, prompt: PromptShown | None) -> Json:
        """Chat only: the first chunk of a choice, which gives the role."""
        body = self._chunk([self._choice(index, {"delta": {"role": "assistant", "content": ""}})])
        return body | self._of_prompt(prompt or PromptShown())

    def text(self, chunk: TextChunk) -> Json:
        """A chunk with the text of a commit, or of the prompt."""
        prompt = chunk.prompt or PromptShown()
        delta: Json = {"content": chunk.text} if chunk.text or not chunk.calls else {}
        if chunk.calls:
            first = self._called.get(chunk.index, 0)
            self._called[chunk.index] = first + len(chunk.calls)
            calls = self._calls(chunk.index, chunk.calls, first)
            delta["tool_calls"] = [{"index": first + number, **call} for number, call in enumerate(calls)]
        content = {"delta": delta} if self.chat else {"text": prompt.text + chunk.text}
        body = self._chunk([self._choice(chunk.index, content) | self._beside(prompt, chunk.shown, chunk.ids)])
        if self.request.stream_options.include_speculation and chunk.prompt is None:
            body["speculation"] = commit_body(chunk, self.tokenizer)
        return body

    def closing(self, chunk: TextChunk, usage: Usage) -> Json:
        """The last chunk of a choice; that of the last choice has the summary."""
        content: Json = {"delta": {}} if self.chat else {"text": ""}
        body = self._chunk([self._choice(chunk.index, content, chunk.reason)])
        if self.request.details and len(usage.ended) == usage.choices:
            body["speculation"] = {"summary": usage.summary()}
        return body

    def usage(self, usage: Usage) -> Json:
        """The last chunk of a stream that asked for it."""
        return self._chunk([]) | {"usage": usage.body()}

    def _whole_choice(self, index: int, choice: Choice) -> Json:
        text = choice.prompt.text + "".join(choice.texts)
        content: Json = {"text": text}
        if self.chat:
            said = None if choice.calls and not text else text
            content = {"message": {"role": "assistant", "content": said, "refusal": None}}
            if choice.calls:
                content["message"]["tool_calls"] = self._calls(index, choice.calls)
        return self._choice(index, content, choice.finish) | self._beside(choice.prompt, choice.shown, choice.ids)

    def _choice(self, index: int, content: Json, finish: str | None = None) -> Json:
        return {"index": index, **content, "logprobs": None, "finish_reason": finish}

    def _beside(self, prompt: PromptShown, shown: Sequence[ShownToken], ids: Sequence[Token]) -> Json:
        body: Json = {}
        if (top := self.request.form.logprobs) is not None:
            echoed = prompt.tokens() if self.request.form.echo else ()
            tokens = [*echoed, *shown]
            body["logprobs"] = of_chat(tokens) if self.chat else of_completion(tokens, top)
        if self.request.form.token_ids:
            body["token_ids"] = list(ids)
        return body if self.chat else body | self._of_prompt(prompt)

    def _of_prompt(self, prompt: PromptShown) -> Json:
        """VLLM's fields about the prompt: in each choice of a completion, beside the choices of a chat."""
        body: Json = {}
        if prompt.ids:
            body["prompt_token_ids"] = list(prompt.ids)
        if self.request.form.prompt_logprobs is not None:
            body["prompt_logprobs"] = of_prompt(prompt.tokens(), self.request.form.prompt_logprobs)
        return body

    def _calls(self, index: int, calls: Sequence[ToolCall], first: int = 0) -> list[Json]:
        """Of choice ``index``, whose call number ``first`` is the first of these."""
        return [
            {
                "id": f"call_{hashlib.sha256(f'{self.id} {index} {number}'.encode()).hexdigest()[:CALL_ID_DIGITS]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls, first)
        ]

    def _chunk(self, choices: list[Json]) -> Json:
        name = "chat.completion.chunk" if self.chat else "text_completion"
        return self._outer(name, choices) | ({"usage": None} if self.request.stream_options.include_usage else {})

    def _outer(self, name: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }


MAX_HELD_BYTES = 1 << 16


async def events(
    first: TextChunk,
    chunks: AsyncGenerator[TextChunk],
    envelope: Envelope,
    usage: Usage,
    failed: Callable[[ErrorCode, Exception], None],
) -> AsyncGenerator[bytes]:
    """The whole stream, what is there at once in one write. A failure after its first byte ends it, with an event."""
    opened: set[int] = set()
    held, chunk = b"", first
    async with aclosing(chunks):
        try:
            while True:
                make = partial(_chunk_events, chunk, envelope, usage, opened)
                held += make() if chunk.prompt is None else await envelope.made(make)
                more = chunk.commit is not None and chunk.commit.more
                follows = more if chunk.finish is None else len(usage.ended) == usage.choices
                if held and (not follows or len(held) > MAX_HELD_BYTES):
                    yield held
                    held = b""
                chunk = await anext(chunks)
        except StopAsyncIteration:
            pass
        except Exception as error:
            told = error if isinstance(error, GenerationError) else INTERNAL_ERROR
            failed(told.code, error)
            yield held + event(error_body(told))
            return
    yield held + (event(envelope.usage(usage)) if envelope.request.stream_options.include_usage else b"") + DONE


def _chunk_events(chunk: TextChunk, envelope: Envelope, usage: Usage, opened: set[int]) -> bytes:
    usage.add(chunk)
    if envelope.plain and chunk.plain and chunk.index in opened:
        return envelope.plain_event(chunk.index, chunk.text)
    more = {"usage": usage.body()} if envelope.request.stream_options.continuous_usage_stats else {}
    return b"".join(event(body | more) for body in _chunk_bodies(chunk, envelope, usage, opened))


def _chunk_bodies(chunk: TextChunk, envelope: Envelope, usage: Usage, opened: set[int]) -> Iterator[Json]:
    if chunk.index not in opened and envelope.chat:
        yield envelope.opening(chunk.index, chunk.prompt)
    opened.add(chunk.index)
    of_prompt = chunk.prompt is not None and not envelope.chat
    beside = envelope.request.stream_options.include_speculation or envelope.request.form.token_ids
    of_commit = chunk.tokens > 0 and beside
    if chunk.text or chunk.shown or chunk.calls or of_prompt or of_commit:
        yield envelope.text(chunk)
    if chunk.finish is not None:
        yield envelope.closing(chunk, usage)
