"""Decides what text of the target's own a draft learns from, and is measured on.

A draft meets what the target writes, not what people write: greedy text repeats itself, sampled text wanders. So a
target continues prompts, at several temperatures in turn (Zhou et al. 2023, arXiv:2310.08461, found samples of the
target's to be worth as much as the draft's own, and they have to be drawn only once).

Legend for tensor names: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
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

    def write(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, seed: int) -> list[WrittenRow]:
        """Every prompt with at most ``tokens`` new tokens. The same for the same seed; sets torch's global one."""
        torch.manual_seed(seed)
        pad = min(self.stops, default=0)
        longest = max(map(len, prompts))
        prompts_BT = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows_BT = continuations(self.model, prompts_BT, tokens, temperature, mask_BT, pad, self.stops)
        return [
            WrittenRow((*prompt, *self._up_to_stop(row[longest:])), len(prompt), temperature)
            for prompt, row in zip(prompts, rows_BT.tolist(), strict=True)
        ]

    def _up_to_stop(self, written: list[int]) -> list[int]:
        """What follows the first stop token is padding."""
        end = next((place + 1 for place, token in enumerate(written) if token in self.stops), len(written))
        return written[:end]


def continuations(
    model: nn.Module,
    prompts_BT: Tensor,
    tokens: int,
    temperature: float,
    mask_BT: Tensor | None = None,
    pad: int | None = None,
    stops: Collection[int] = (),
) -> Tensor:
    """rows_BT: the prompts and up to ``tokens`` tokens of the model's after each. ``mask_BT`` is 0 where one is padded.

    Temperature 0 is greedy; otherwise torch's global seed decides. ``pad`` and ``stops``: by default the model's own.
    """
    device = next(model.parameters()).device
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    sampling |= {} if pad is None else {"pad_token_id": pad}
    sampling |= {"eos_token_id": sorted(stops)} if stops else {}
    # transformers declares `generate` for a protocol that its own models do not satisfy.
    rows_BT = cast(Any, model).generate(
        prompts_BT.to(device),
        attention_mask=(torch.ones_like(prompts_BT) if mask_BT is None else mask_BT).to(device),
        max_new_tokens=tokens,
        do_sample=temperature > 0.0,
        **sampling,
    )
    assert isinstance(rows_BT, Tensor)
    return rows_BT


class Written:
    """What a target wrote, kept in files round by round, so that a run that goes on does not write it again."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def rounds(
        self,
        count: int,
        title: str,
        write: Callable[[int], list[WrittenRow]],
        between: Callable[[], object],
    ) -> list[WrittenRow]:
        """The rows of rounds 0 to ``count`` - 1; ``write`` is asked for those that are missing.

        ``between`` rounds may raise. Raises :class:`alignment.errors.DiskError`.
        """
        rows: list[WrittenRow] = []
        for number in tqdm(range(count), desc=title, mininterval=1.0):
            path = self._folder / f"{title.replace(' ', '-')}-{number:05}.json"
            if path.exists():
                rows += [WrittenRow(tuple(tokens), *others) for tokens, *others in json.loads(path.read_text("utf-8"))]
                continue
            between()
            fresh = write(number)
            _keep(path, fresh)
            rows += fresh
        return rows


def _keep(path: Path, rows: Sequence[WrittenRow]) -> None:
    told = json.dumps([[row.tokens, row.start, row.temperature] for row in rows]).encode()
    write_whole(path, lambda file: file.write(told))
