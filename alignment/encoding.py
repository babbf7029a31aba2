"""Decides how passages of the data become token ids, where in them a target is asked to go on, and what makes a batch.

Which windows of which tokens a batch has is a function of the seed and the step, so that training can resume.

Legend for tensor names: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from alignment.data import Conversation, Data, Passage
from alignment.options import DataError
from engine.model import first_line

SHORTEST_PROMPT, LONGEST_PROMPT = 8, 64
"""Tokens of a prompt that is cut from plain text."""

TokenIds = npt.NDArray[np.unsignedinteger[Any]]  # Token ids, one after another


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A passage as token ids."""

    ids: tuple[int, ...]
    start: int
    """How many of them are asked as a whole; 0: it may be cut anywhere."""


class Encoder:
    """Encodes for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._lead = tuple(tokenizer("")["input_ids"])
        """What the tokenizer puts before every text."""

    @property
    def separator(self) -> int | None:
        """What goes before a text among others; None: the tokenizer puts something there itself."""
        end = self.tokenizer.eos_token_id
        return None if self._lead or not isinstance(end, int) else end

    def piece(self, passage: Passage) -> EncodedText:
        """Its ids. Raises :class:`alignment.options.DataError` for a conversation that there is no template for."""
        match passage.start:
            case Conversation(messages, tools):
                begin = self._rendered(messages, tools)
            case text:
                lead = () if self.tokenizer.bos_token and text.startswith(str(self.tokenizer.bos_token)) else self._lead
                begin = (*lead, *self._plain(text)) if text else ()
        rest = self._plain(passage.rest)
        return EncodedText((*begin, *rest), len(begin)) if begin else EncodedText((*self._lead, *rest), 0)

    def prompt(self, piece: EncodedText, draw: np.random.Generator, longest: int) -> tuple[int, ...]:
        """At most ``longest`` tokens to go on from: all of its start, or a stretch of the text."""
        if piece.start:
            return piece.ids[: piece.start][-longest:]
        text = piece.ids[len(self._lead) :]
        length = min(int(draw.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1)), longest, len(text))
        begin = int(draw.integers(len(text) - length + 1))
        return (*self._lead, *text[begin : begin + length])

    def _plain(self, text: str) -> Sequence[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _rendered(self, messages: Sequence[Any], tools: Sequence[Any]) -> tuple[int, ...]:
        render: Any = self.tokenizer.apply_chat_template
        try:
            given = {"tools": list(tools)} if tools else {}
            shown = [_as_templates_want(message) for message in messages]
            return tuple(render(shown, add_generation_prompt=True, return_dict=False, **given))
        except Exception as error:  # a template is a program, and may refuse what it likes
            role = messages[-1]["role"]
            raise DataError(f"messages of role {role!r} cannot be rendered: {first_line(error)}") from error


def _as_templates_want(said: Mapping[str, Any]) -> dict[str, Any]:
    """A message, a call in it or its function: arguments in a string, as requests have them, become an object."""
    found = dict(said)
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_as_templates_want(call) for call in calls]
    if isinstance(found.get("function"), dict):
        found["function"] = _as_templates_want(found["function"])
    if isinstance(found.get("arguments"), str):
        with suppress(ValueError):
            found["arguments"] = json.loads(found["arguments"] or "{}")
    return found


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """Of a model that was loaded before."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model, local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def gather(
    data: Data, encoder: Encoder, tokens: int, held_out: int, seed: int
) -> tuple[list[EncodedText], list[EncodedText]]:
    """About ``tokens`` tokens to train on and ``held_out`` passages that are not, or all there are.

    Raises :class:`alignment.options.DataError` where there is too little of one of them.
    """
    train, found = [], 0
    for passage in data.passages(seed, held_out=False):
        train.append(encoder.piece(passage))
        found += len(train[-1].ids)
        if found >= tokens:
            break
    apart = [encoder.piece(passage) for passage in islice(data.passages(seed, held_out=True), held_out)]
    train, apart = ([piece for piece in pieces if piece.ids] for pieces in (train, apart))
    if not train or not apart:
        raise DataError(
            f"{data}: too little text: {len(train)} passages to train on and {len(apart)} to hold out; "
            "give some 100 KB or more"
        )
    return train, apart


class Batches:
    """Packed windows of a token stream, in an order that depends only on the seed and the step."""

    def __init__(self, ids: TokenIds, seed: int) -> None:
        self._ids = ids
        self._seed = seed

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        """tokens_BT1: fewer sequences than asked for only where all tokens together make fewer windows."""
        windows = max((len(self._ids) - 1) // length - 1, 1)
        per_epoch = max(1, windows // sequences)
        epoch, place = divmod(step, per_epoch)
        generator = np.random.default_rng([self._seed, length, epoch])
        offset = int(generator.integers(max(1, min(length, len(self._ids) - windows * length))))
        chosen = generator.permutation(windows)[place * sequences : (place + 1) * sequences]
        rows = [self._ids[offset + w * length : offset + w * length + length + 1] for w in chosen]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


class BatchesInTurn:
    """Batches of several sources, each as often as its weight says, spread evenly."""

    def __init__(self, *parts: tuple[BatchSource, int]) -> None:
        """Sources and whole weights; 0: never."""
        self._parts = parts
        turns = [
            ((place + 0.5) / weight, number, place)
            for number, (_, weight) in enumerate(parts)
            for place in range(weight)
        ]
        self._turns = [(number, place) for _, number, place in sorted(turns)]

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        """tokens_BT1 of the source whose turn it is."""
        around, turn = divmod(step, len(self._turns))
        number, place = self._turns[turn]
        part, weight = self._parts[number]
        return part.at(around * weight + place, sequences, length)


BatchSource = Batches | BatchesInTurn
"""What a trainer learns from: its ``step``-th batch is ``sequences`` windows of ``length`` + 1 tokens, int64."""


def joined(rows: Sequence[Sequence[int]], separator: int | None) -> TokenIds:
    """All rows one after another, each behind a ``separator``, if there is one."""
    before = [] if separator is None else [separator]
    return np.asarray([token for row in rows for token in (*before, *row)], dtype=np.uint32)
