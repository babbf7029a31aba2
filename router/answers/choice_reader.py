"""The choices of an answer, from what is committed to what a client gets: text, tool calls, tokens beside their text.

Decides what belongs together in one chunk, how the chunks of several choices merge, and that everything stops when one
choice fails or nobody listens. Streamed answers send the chunks, the others gather them, so both are equal.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from router.answers.logprobs import ShownToken, shown_token
from router.generation import Committed, Details, Ended, GenerationError, Generator
from router.schema.requests import ApiRequest
from router.text.text import Delta, Piece, TextRules, TextStream, opens_reasoning
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import Found, ToolCall, parser_of
from speculation.events import Origin, Own, StepMetadata
from speculation.frozen import frozen
from speculation.messages import FinishReason, Source, SourceName, Token, TokenLogprobs

DIGITS = 6
"""Of seconds: microseconds are what workers tell."""


@dataclass(frozen=True, slots=True)
class PromptShown:
    """What an answer shows of a choice's prompt."""

    text: str = ""
    """With which the answer begins; empty unless it was asked for."""
    ids: tuple[Token, ...] = ()
    tokens: Callable[[], tuple[ShownToken, ...]] = tuple
    """With their log-probabilities, if these were asked for; made by whoever shows them: there may be a million."""


@frozen
class TextChunk:
    """What one commit adds to choice ``index``; the last one of a choice has ``finish``.

    ``tokens``, ``accepted`` and ``offered`` leave out what lies behind a stop string: a draft token that was
    accepted there counts as if it had not been offered.
    """

    index: int
    pieces: tuple[Piece, ...] = ()
    tokens: int = 0
    accepted: int = 0
    offered: int = 0
    finish: FinishReason | None = None
    commit: Committed | None = None
    """That it comes of; None: it has no tokens, or is no more than what is shown of the prompt."""
    position: int = 0
    """Where the tokens stand in the whole sequence, prompt included."""
    origins: tuple[Origin, ...] = ()
    prompt: PromptShown | None = None
    """Comes once, before any commit, where something of the prompt is shown."""
    shown: tuple[ShownToken, ...] = ()
    """The tokens whose text is out with this chunk, if log-probabilities were asked for."""
    content: str | None = None
    """What of the text is content, where tool calls are searched for; None: all of it."""
    calls: tuple[ToolCall, ...] = ()
    called: bool = False
    """With the finish: the model called a tool."""

    @property
    def reason(self) -> str | None:
        """OpenAI's name for why the choice ended; None: it has not."""
        if self.finish is None:
            return None
        return "tool_calls" if self.called else self.finish.value

    @property
    def plain(self) -> bool:
        """Whether it has text, and nothing beside it."""
        text_alone = self.prompt is None and self.finish is None and self.content is None and not self.calls
        return text_alone and bool(self.pieces) and not self.shown

    @property
    def ids(self) -> tuple[Token, ...]:
        """Of its tokens, also where their text is held back or cut."""
        return () if self.commit is None else self.commit.tokens[: self.tokens]

    @property
    def text(self) -> str:
        """What the reader of the answer sees."""
        return "".join([piece.text for piece in self.pieces]) if self.content is None else self.content


@dataclass(slots=True)
class Usage:
    """Counts of one request over the chunks of all its choices, and what became of drafts; ``add`` takes every chunk.

    What is said of a prompt is counted once, of the first of its ``n`` choices: the others find it in the cache.
    """

    prompt: int
    n: int = 1
    choices: int = 1
    """Of all prompts together."""
    completion: int = 0
    cached: int = 0
    ended: dict[int, str] = field(default_factory=dict)
    """By choice: why."""
    steps: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    came: Counter[Origin] = field(default_factory=Counter)
    refused: Counter[SourceName] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    """By how many drafts were kept: how many of the steps that verified some."""
    latest: dict[int, Details] = field(default_factory=dict)
    drafters: dict[int, str] = field(default_factory=dict)
    """By choice: where it was last."""

    def add(self, chunk: TextChunk) -> None:
        """Count a chunk."""
        if chunk.reason is not None:
            self.ended[chunk.index] = chunk.reason
        commit = chunk.commit
        if commit is None:
            return
        if commit.cached and chunk.index % self.n == 0:
            self.cached += commit.cached
        if not chunk.tokens:
            return
        self.completion += chunk.tokens
        self.steps += 1
        for origin in chunk.origins:
            self.came[origin] += 1
        if commit.metadata.waited_us:
            self.waits += 1
            self.wait_seconds += commit.metadata.waited_us / 1e6
        if commit.offered > commit.accepted:
            for source in commit.refused:
                self.refused[source] += 1
        if chunk.offered:
            self.kept[chunk.accepted] += 1
        if commit.details is not None:
            self.latest[chunk.index] = commit.details
            if commit.details.draft is not None:
                self.drafters[chunk.index] = commit.details.draft

    @property
    def accepted(self) -> Counter[SourceName]:
        """Drafts that were kept, by their source."""
        return Counter({origin: count for origin, count in self.came.items() if not isinstance(origin, Own)})

    def body(self) -> dict[str, Any]:
        """The ``usage`` object. Counts of drafts of all sources, and, by OpenAI's names, of those of the prediction."""
        accepted = self.accepted
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_draft_tokens": accepted.total(),
                "rejected_draft_tokens": self.refused.total(),
                "accepted_prediction_tokens": accepted[Source.PREDICTION],
                "rejected_prediction_tokens": self.refused[Source.PREDICTION],
            },
        }

    def summary(self) -> dict[str, Any]:
        """``speculation.summary``, which docs/api.md explains under 'What was drafted'."""
        accepted, verified = self.accepted, self.kept.total()
        drafted = accepted | self.refused
        seen = [*(source for source in Source if source in drafted), *sorted(drafted.keys() - set(Source))]
        by_source = {
            str(source): {"accepted": accepted[source], "offered": accepted[source] + self.refused[source]}
            for source in seen
        }
        by_position = [
            round(sum(steps for kept, steps in self.kept.items() if kept >= place) / verified, 4)
            for place in range(1, max(self.kept, default=0) + 1)
        ]
        return {
            "steps": self.steps,
            "waits": self.waits,
            "wait_seconds": round(self.wait_seconds, DIGITS),
            "by_source": by_source,
            "own": {own.value: self.came[own] for own in Own},
            "by_position": by_position,
            "mean_acceptance_length": 1 + accepted.total() / verified if verified else None,
            "reopened": sum(details.reopened for details in self.latest.values()),
            "target": sorted({details.target for details in self.latest.values()}),
            "draft": sorted(set(self.drafters.values())),
        }


class ChoiceReader:
    """Reads one choice."""

    def __init__(self, request: ApiRequest, index: int, tokenizer: Tokenizer) -> None:
        generation = request.generations[index]
        self._index, self._generation, self._tokenizer = index, generation, tokenizer
        self._form, self._tools = request.form, request.tools
        self._prompt = request.prompts[index // request.n]
        self._prompt_only = request.prompt_only
        self._hidden = hidden = frozenset[Token]() if self._form.special else None
        if self._tools.form is not None and hidden is None:
            hidden = tokenizer.hidden - {tokenizer.tags.get(mark) for mark in self._tools.form.marks}
        stop_kept, unsearched = self._form.stop_string, generation.min_tokens
        rules = TextRules(request.stop, generation.stop_tokens, stop_kept, unsearched, hidden)
        self._shows = self._form.logprobs is not None
        after = generation.prompt if request.continues else ()
        self._text = TextStream(tokenizer, rules, after, placed=self._shows)
        self._waiting: deque[tuple[Token, TokenLogprobs]] = deque()
        self._before = len(self._prompt.text(tokenizer, hidden)) if self._form.echo else 0
        form, names = self._tools.form, frozenset(tool["function"]["name"] for tool in self._tools.offered)
        thinks = form is not None and opens_reasoning(tokenizer, generation.prompt, hidden)
        self._parser = None if form is None else parser_of(form, names, several=self._tools.several, thinks=thinks)
        self._calls = 0
        self._position = len(generation.prompt)
        self._begun = False

    def read(self, item: Committed | Ended) -> Iterator[TextChunk]:
        """What an item of the generation adds; nothing follows a chunk with ``finish``."""
        match item:
            case Committed():
                if not self._begun and (self._form.echo or self._form.token_ids or self._form.of_prompt is not None):
                    yield replace(self.prompt(item.metadata), commit=item if self._prompt_only else None)
                self._begun = True
                come_from = item.origins
                delta, found = self._taken(item, come_from)
                yield self._parsed(self._of_commit(item, come_from, delta), found)
            case Ended():
                rest = self._text.finish()
                finish = FinishReason.STOP if rest.stopped else item.reason
                chunk = TextChunk(
                    self._index, rest.pieces, finish=finish, shown=self._out(rest), position=self._position
                )
                yield self._parsed(chunk, self._found(rest))
            case _:
                assert_never(item)

    def prompt(self, metadata: StepMetadata = StepMetadata()) -> TextChunk:
        """What is shown of the prompt; the whole choice, if nothing else is asked for."""
        shown = PromptShown(
            text=self._prompt.text(self._tokenizer, self._hidden) if self._form.echo else "",
            ids=self._generation.prompt if self._form.token_ids else (),
            tokens=tuple if self._form.of_prompt is None else self._prompt_tokens(metadata),
        )
        return TextChunk(self._index, prompt=shown, finish=FinishReason.LENGTH if self._prompt_only else None)

    def _prompt_tokens(self, metadata: StepMetadata) -> Callable[[], tuple[ShownToken, ...]]:
        prompt, top_logprobs = self._generation.prompt, self._form.of_prompt or 0
        if len(metadata.prompt_logprobs) != len(prompt) - 1:
            raise GenerationError("internal", "the target told no log-probabilities of the prompt")

        def shown() -> tuple[ShownToken, ...]:
            try:
                told = (None, *metadata.prompt_logprobs)
            except ValueError as error:  # not before: to check them takes long
                why = f"the target told wrong log-probabilities of the prompt: {error}"
                raise GenerationError("internal", why) from error
            starts = self._prompt.starts(self._tokenizer, self._hidden)
            places = zip(prompt, starts, told, strict=True)
            return tuple(shown_token(self._tokenizer, *place, self._form, top_logprobs) for place in places)

        return shown

    def _of_commit(self, commit: Committed, come_from: tuple[Origin, ...], delta: Delta) -> TextChunk:
        if self._shows:
            logprobs = commit.metadata.logprobs
            if len(logprobs) != len(commit.tokens):
                raise GenerationError("internal", "the target told no log-probabilities")
            self._waiting.extend(zip(commit.tokens, logprobs, strict=True))
        accepted = min(commit.accepted, delta.tokens)
        position, self._position = self._position, self._position + delta.tokens
        return TextChunk(
            self._index,
            delta.pieces,
            tokens=delta.tokens,
            accepted=accepted,
            offered=commit.offered - (commit.accepted - accepted),
            finish=FinishReason.STOP if delta.stopped else None,
            commit=commit,
            position=position,
            origins=come_from[: delta.tokens],
            shown=self._out(delta) if self._shows else (),
        )

    def _out(self, delta: Delta) -> tuple[ShownToken, ...]:
        out = []
        for start in delta.starts:
            token, logprobs = self._waiting.popleft()
            place = self._before + start
            out.append(shown_token(self._tokenizer, token, place, logprobs, self._form, self._form.logprobs or 0))
        return tuple(out)

    def _taken(self, commit: Committed, come_from: tuple[Origin, ...]) -> tuple[Delta, Found]:
        """The text of a commit, and what it turned out to be.

        Where the first call is the end it is looked for after every token: what was committed behind it at the same
        time must not be read, or the answer would depend on the drafts.
        """
        if self._parser is None or self._tools.several:
            delta = self._text.push(commit.tokens, come_from)
            return delta, self._found(delta)
        taken, found = Delta(()), Found()
        for token, origin in zip(commit.tokens, come_from, strict=True):
            delta = self._text.push((token,), (origin,))
            taken, found = taken.then(delta), found.then(self._found(delta))
            if found.calls:
                return taken.then(self._text.cut()), found
            if taken.stopped:
                break
        return taken, found

    def _found(self, delta: Delta) -> Found:
        """What the text turned out to be, where calls are searched for."""
        return Found() if self._parser is None else self._parser.push("".join(piece.text for piece in delta.pieces))

    def _parsed(self, chunk: TextChunk, found: Found) -> TextChunk:
        """With the tool calls taken out of the text. The first one is the end, where there may be no second."""
        if self._parser is None:
            return chunk
        if chunk.finish is not None and (self._tools.several or not found.calls):
            found = found.then(self._parser.finish())
        calls, finish = found.calls, chunk.finish
        if calls and not self._tools.several:
            calls, finish = calls[:1], FinishReason.STOP
        self._calls += len(calls)
        called = finish is FinishReason.STOP and self._calls > 0
        return replace(chunk, content=found.content, calls=tuple(calls), finish=finish, called=called)


QUEUED_CHUNKS = 32
"""Chunks of several choices that wait for a slow client, none of a single one. What is committed meanwhile waits as
tokens; no target waits."""


def run_choices(request: ApiRequest, generator: Generator, tokenizer: Tokenizer) -> AsyncGenerator[TextChunk]:
    """Run all choices. Closing it stops them. Raises :class:`GenerationError` when one of them fails."""
    if len(request.generations) == 1:  # in the task of whoever listens
        return _choice(request, 0, generator, tokenizer)
    return _merged(request, generator, tokenizer)


async def _merged(request: ApiRequest, generator: Generator, tokenizer: Tokenizer) -> AsyncGenerator[TextChunk]:
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _choice(
    request: ApiRequest, index: int, generator: Generator, tokenizer: Tokenizer
) -> AsyncGenerator[TextChunk]:
    reader = ChoiceReader(request, index, tokenizer)
    if request.prompt_only and request.form.of_prompt is None:  # nothing has to be generated
        yield reader.prompt()
        return
    async with aclosing(generator.generate(request.generations[index])) as items:
        async for item in items:
            for chunk in reader.read(item):
                yield chunk
                if chunk.finish is not None:
                    return
    raise GenerationError("internal", "the generation stopped without a reason")
