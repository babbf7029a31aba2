"""Decides what text of the target's own a draft learns from, and is measured on.

A draft meets what the target writes, not what people write: greedy text repeats itself, sampled text wanders. So a
target continues prompts, at several temperatures in turn (Zhou et al. 2023, arXiv:2310.08461, found samples of the
target's to be worth as much as the draft's own, and they have to be drawn only once).

Legend for tensor names: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from tqdm import tqdm

from alignment.workplace import write_whole

TEMPERATURES = (0.0, 0.8, 1.0)
BATCH = 64


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A prompt and what the target wrote behind it, up to its first stop token."""

    tokens: tuple[int, ...]
    start: int
    """Tokens of the prompt."""
    temperature: float


@dataclass(frozen=True, slots=True)
class Writer:
    """A target that continues prompts."""

    model: nn.Module
    stops: Collection[int]
    """Tokens that end a text. Not empty for a model that ends texts at all."""
    vocabulary: int
    """Usable token ids are below this; rows of the output layer behind them are padding, which says nothing."""

    def write(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seed: int) -> list[WrittenRow]:
        """Every prompt with at most ``tokens`` new tokens. The same for the same seed; sets torch's global one."""
        torch.manual_seed(seed)
        pad, longest = min(self.stops, default=0), max(map(len, prompts))
        prompts_BT = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        sampling |= {"eos_token_id": sorted(self.stops)} if self.stops else {}
        device, model = next(self.model.parameters()).device, cast(Any, self.model)  # transformers declares a protocol
        rows = model.config.get_text_config(decoder=True).vocab_size
        sampling |= {"suppress_tokens": [*range(self.vocabulary, rows)]} if self.vocabulary < rows else {}
        # Penalties, beams and limits there make other text than the logits do, and serving knows nothing of them.
        kept = model.generation_config
        model.generation_config = type(kept)()
        try:
            rows_BT = model.generate(
                prompts_BT.to(device),
                attention_mask=mask_BT.to(device),
                max_new_tokens=tokens,
                do_sample=temperature > 0.0,
                pad_token_id=pad,
                **sampling,
            )
        finally:
            model.generation_config = kept
        written = []
        for prompt, row in zip(prompts, rows_BT.tolist(), strict=True):
            new = row[longest:]
            end = next((place + 1 for place, token in enumerate(new) if token in self.stops), len(new))
            written.append(WrittenRow((*prompt, *new[:end]), len(prompt), temperature))  # what follows is padding
        return written


def written_rows(
    folder: Path,
    rounds: int,
    title: str,
    vocabulary: int,
    write: Callable[[int], list[WrittenRow]],
    between: Callable[[], object],
) -> list[WrittenRow]:
    """The rows of rounds 0 to ``rounds`` - 1, kept in ``folder`` so that a run that goes on does not write them again.

    ``write`` is asked for those that are missing, or that an older version kept with ids outside ``vocabulary``;
    ``between`` rounds may raise. Raises :class:`alignment.options.DiskError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[WrittenRow] = []
    for number in tqdm(range(rounds), desc=title, mininterval=1.0):
        path = folder / f"{title.replace(' ', '-')}-{number:05}.json"
        if path.exists():
            kept = [WrittenRow(tuple(tokens), *others) for tokens, *others in json.loads(path.read_text("utf-8"))]
            if all(max(row.tokens, default=0) < vocabulary for row in kept):
                rows += kept
                continue
        between()
        fresh = write(number)
        _keep(path, fresh)
        rows += fresh
    return rows


def _keep(path: Path, rows: Sequence[WrittenRow]) -> None:
    told = json.dumps([astuple(row) for row in rows]).encode()
    write_whole(path, lambda file: file.write(told))
