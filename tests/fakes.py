"""Stand-ins for the peers of a part under test. They keep the peer's promises and record what was asked of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from router.generation import Committed, Ended, Generation, GenerationError, ServedModel
from router.text.tokenizer import Tokenizer, Tokenizers
from speculation.events import StepMetadata
from speculation.messages import FinishReason, Token, TokenLogprobs

Script = Callable[[Generation], Iterable[Committed]]
"""What a generation commits, in order."""


class FakeGenerator:
    """A router that commits what a script says, cut at ``max_tokens`` and at the first stop token as a target would.

    ``error`` is raised once the script is over; ``hang`` waits there for ever instead. ``started`` is set when a
    generation begins to wait or ends, and ``closed`` counts the generations that are over, however they ended.
    """

    def __init__(
        self,
        script: Script,
        *,
        model: ServedModel | None = None,
        error: Exception | None = None,
        hang: bool = False,
    ) -> None:
        self.models = {model.name: model} if model else {}
        self.expected: tuple[str, ...] = ()
        self.loading: set[str] = set()
        self.generations: list[Generation] = []
        self.started = asyncio.Event()
        self.closed = 0
        self._script = script
        self._error = error
        self._hang = hang

    @property
    def running(self) -> int:
        """Generations that are not over."""
        return len(self.generations) - self.closed

    async def generate(self, generation: Generation) -> AsyncGenerator[Committed | Ended]:
        """See :class:`router.generation.Generator`."""
        self.generations.append(generation)
        try:
            left = generation.max_tokens
            for commit in self._script(generation):
                await asyncio.sleep(0)
                kept, stopped = _cut(commit, left, generation)
                kept = replace(kept, metadata=metadata_of(kept, generation, first=left == generation.max_tokens))
                left -= len(kept.tokens)
                yield kept
                if stopped or not left:
                    yield Ended(FinishReason.STOP if stopped else FinishReason.LENGTH)
                    return
            self.started.set()
            if self._hang:
                await asyncio.get_running_loop().create_future()
            raise self._error or GenerationError("internal", "the script of the fake is too short")
        finally:
            self.closed += 1


def _cut(commit: Committed, left: int, generation: Generation) -> tuple[Committed, bool]:
    """The part of a commit that a target would make, and whether it ends with a stop token."""
    tokens = commit.tokens[:left]
    stop = next((i for i, token in enumerate(tokens) if token in generation.stop_tokens), None)
    if stop is not None:
        tokens = tokens[: stop + 1]
    accepted = min(commit.accepted, len(tokens))
    return replace(commit, tokens=tokens, accepted=accepted, offered=max(commit.offered, accepted)), stop is not None


def metadata_of(commit: Committed, generation: Generation, *, first: bool) -> StepMetadata:
    """What a target would tell of a commit: log-probabilities, if they are asked for."""
    request_options = generation.request_options
    prompt = generation.prompt[1:] if first and request_options.prompt_logprobs is not None else ()
    return replace(
        commit.metadata,
        logprobs=tuple(
            logprobs_of(token, request_options.logprobs)
            for token in commit.tokens
            if request_options.logprobs is not None
        ),
        prompt_logprobs=tuple(logprobs_of(token, request_options.prompt_logprobs or 0) for token in prompt),
    )


def logprobs_of(token: Token, top_logprobs: int) -> TokenLogprobs:
    """Made up: every third token is not among the ``top_logprobs`` likeliest, and every sixth is not likely at all."""
    rare = token % 3 == 0
    own = (-math.inf if token % 2 == 0 else -9.0) if rare else -0.25
    return TokenLogprobs(
        own, tuple(token + rare + n for n in range(top_logprobs)), tuple(-(n + 1) / 4 for n in range(top_logprobs))
    )


def commits(tokens: Iterable[int], sizes: Iterable[int]) -> list[Committed]:
    """``tokens`` split into commits of the given sizes (repeated at need), all but the last token of each drafted."""
    rest, pattern = list(tokens), list(sizes)
    result: list[Committed] = []
    while rest:
        size = pattern[len(result) % len(pattern)]
        part, rest = tuple(rest[:size]), rest[size:]
        result.append(Committed(part, accepted=len(part) - 1, offered=size))
    return result


class FakeTokenizers(Tokenizers):
    """The same tokenizer for every model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    async def of(self, model: ServedModel) -> Tokenizer:
        """That one."""
        return self._tokenizer


BOS, EOS, TURN = 0, 1, 2
"""Special tokens of :func:`tiny_tokenizer`."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ bos_token if loop.first }}<turn>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE, tags: Iterable[str] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer of 3 special tokens, 256 bytes and a few merges; it puts BOS before a text.

    ``tags``: more tokens, which show in a text.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<bos>", "<eos>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, the quick brown fox says hello to the world"] * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    backend.add_tokens([tokenizers.AddedToken(tag, special=False) for tag in tags])
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer(backend, stop_tokens=frozenset({EOS}), special_tokens=special, chat_template=chat_template)
