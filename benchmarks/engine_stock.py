"""The same model in transformers, in this process: ``generate`` with a batch, and single steps over its cache.

Its attention is torch's fused one (sdpa), faster than its eager one. It takes turns with ours on the same core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.bandwidth import Work
from benchmarks.engine_steps import chain
from benchmarks.measure import Batch, Commit, Decoded, Run
from benchmarks.transformers_baseline import continue_greedily
from models.pair import load

PREFIX = "transformers "


class Stock:
    """The model, loaded."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Text ends by length only."""
        self._model: Any = load(folder, dtype)
        self._model.set_attn_implementation("sdpa")
        self._model.generation_config.eos_token_id = None

    async def run(self, batch: Batch) -> Run:
        """Continue prompts together, the shorter ones padded; a :data:`benchmarks.measure.Runner`.

        All go on until the longest text is done. What a shorter one would go on with is no part of the run.
        """
        assert batch.temperature == 0.0
        asked = time.perf_counter()
        longest = max(len(prompt) for prompt in batch.prompts)
        padding = [longest - len(prompt) for prompt in batch.prompts]
        prompts_BT = torch.tensor([(0,) * pad + prompt for pad, prompt in zip(padding, batch.prompts, strict=True)])
        mask_BT = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
        new_BT, noted = continue_greedily(self._model, prompts_BT, batch.tokens, mask_BT)
        commits = tuple(Commit(at, tokens) for at, tokens in noted)  # a token of every text each
        texts = zip(new_BT.tolist(), batch.wanted, strict=True)
        return Run(tuple(Decoded(tuple(row[:tokens]), commits[:tokens]) for row, tokens in texts), asked=asked)

    def works(self, context: Sequence[int], sizes: Sequence[int]) -> dict[str, Work]:
        """Steps over a cached context that can be timed, by the names ours have, prefixed."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(input_ids=torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
        return {PREFIX + chain(size): self._step(cache, size) for size in sizes}

    def _step(self, cache: DynamicCache, tokens: int) -> Work:
        ids_1T = torch.arange(1, tokens + 1)[None]

        @torch.inference_mode()
        def step() -> None:
            self._model(input_ids=ids_1T, past_key_values=cache).logits.argmax(-1).tolist()
            cache.crop(-tokens)

        return step
