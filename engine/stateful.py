"""Running a model that cannot speculate: one cache of transformers' own for each sequence, computed one by one.

For models that keep a recurrent state, which cannot be rolled back, and for those whose attention cannot be taken over.
Offers what :class:`engine.step.Engine` and its cache offer, except trees: a sequence is a chain, and whoever takes back
a part of it pays with computing all of it again. Decides how much of a sequence is fed at once, and when its state is
thrown away. The books of the cache are kept as for any model: room is counted in tokens, although a purely recurrent
state does not grow with them.

Tensor legend: R rows asked for, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.forward import Chunk, checked
from engine.model import Model, ModelError

STATE_NAMES = ("past_key_values", "cache_params", "state")
"""What models call their own cache, as an argument and in what they return."""

RIGHT_IN_PARTS = frozenset(
    (
        *("bamba", "deepseek_v4", "falcon_h1", "granitemoehybrid", "mamba2", "minimax", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "rwkv", "zamba2", "zaya", "lfm2", "lfm2_moe", "lfm3"),
        *("bloom", "codegen", "diffllama", "doge", "falcon", "gpt_neo", "gptj", "minimax_m3_vl_text", "mpt", "xglm"),
    )
)
"""Model types whose caches stay right when a prompt is fed in parts; those of others get it in one go.

A list, because in half precision no test at load could tell: the state that some lose between parts (mamba, jamba)
weighs no more than rounding. It is held against float32 by tests/unit/engine/test_families.py.
"""


class StatefulSequence(CachedSequence):
    """A chain of tokens and the state that a model has after some of them."""

    among_others = False

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache, None)
        self.fed: list[int] = []
        """All tokens, committed and pending."""
        self.computed = 0
        """How many of them are in ``state``."""
        self.state: Any = None

    def reuse(self) -> int:
        """Take over what other sequences have computed: nothing, a state belongs to one sequence."""
        return 0

    def append(self, parents: Sequence[int]) -> list[int]:
        """As in the slot cache, but for chains only."""
        if list(parents) != list(range(self.pending - 1, self.pending - 1 + len(parents))):
            raise ValueError(
                f"parents {list(parents)} behind {self.pending} pending tokens; this model computes no trees"
            )
        return super().append(parents)

    def retract(self, count: int) -> None:
        """Drop the ``count`` tokens appended last."""
        super().retract(count)
        self._keep(len(self.fed) - count)

    def commit(self, path: Sequence[int]) -> None:
        """Commit the first pending tokens and drop the others."""
        super().commit(path)
        self._keep(self.length)

    def truncate(self, length: int) -> None:
        """Shorten the committed tokens to ``length``. Nothing may be pending."""
        super().truncate(length)
        self._keep(length)

    def free(self) -> None:
        """Give everything back. Harmless when done twice."""
        super().free()
        self._keep(0)

    def _keep(self, count: int) -> None:
        """Forget the tokens after ``count``, and the state if it knows any of them."""
        del self.fed[count:]
        if self.computed > count:
            self.forget()

    def forget(self) -> None:
        """Drop the state; it is computed again from the tokens when it is needed."""
        self.state, self.computed = None, 0


class StatefulCache(KVCache):
    """The books of the slot cache, for sequences whose tensors are in states of their own."""

    def __init__(self, capacity: int, *, block: int = 16, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(0, capacity, block=block, dtype=dtype, device=device)

    def sequence(self, tokens: Sequence[int] | None = None, scope: str = "") -> StatefulSequence:  # noqa: ARG002 - nothing is shared
        """A new, empty sequence. Whoever asked for it must free it."""
        return StatefulSequence(self)


class StatefulEngine:
    """A model over one state per sequence."""

    speculates = False
    row_classes: Sequence[int] = ()
    eagle = aux = drawn = None
    fuses = False
    exactness = "not measured: this model is served without speculation"

    def __init__(self, model: Model, cache: StatefulCache) -> None:
        self.model = model
        self.cache = cache
        self.forward_seconds = 0.0
        """How long the model itself took in the last step."""
        self._dtype = torch.promote_types(model.dtype, torch.float32)
        """Of the logits."""
        accepted = inspect.signature(model.module.forward).parameters
        self._name = next((name for name in STATE_NAMES if name in accepted), None)
        if self._name is None:
            raise ModelError(f"model type {model.kind!r} is not supported: it takes none of {', '.join(STATE_NAMES)}")
        self._takes_positions = "position_ids" in accepted
        self._keeps_rows = "logits_to_keep" in accepted

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute ``chunks``, as :meth:`engine.step.Engine.run` does; raises as it does."""
        checked(chunks, self.model.vocabulary)
        for chunk in chunks:
            end = chunk.sequence.length + chunk.sequence.pending + len(chunk.tokens)
            if end > self.model.context:
                raise ValueError(f"position {end - 1} is beyond the model's context of {self.model.context} tokens")
        self.forward_seconds = 0.0
        appended: list[tuple[StatefulSequence, int]] = []
        try:
            for chunk in chunks:
                sequence = _stateful(chunk)
                sequence.append(chunk.resolved_parents())
                appended.append((sequence, len(chunk.tokens)))
                sequence.fed += chunk.tokens
            rows = [row_V for chunk in chunks for row_V in self._rows(chunk)]
        except BaseException:
            for sequence, count in appended:
                sequence.retract(count)
                sequence.forget()
            raise
        if rows:
            return torch.stack(rows)
        return torch.empty(0, self.model.vocabulary, dtype=self._dtype, device=self.model.device)

    def check(self) -> None:
        """There are no other ranks."""

    def close(self) -> None:
        """Nothing is held beyond this process."""

    def _rows(self, chunk: Chunk) -> list[Tensor]:
        """The wanted logits of a chunk, ``[V]`` each."""
        sequence = _stateful(chunk)
        if self.model.whole_prompts and not chunk.rows and not sequence.computed:
            return []  # computed with the part of the prompt that ends it
        first = len(sequence.fed) - len(chunk.tokens)
        wanted = {first + row for row in chunk.rows}
        found: dict[int, Tensor] = {}
        for start, part in self._parts(sequence):
            inside = [position for position in range(start, start + len(part)) if position in wanted]
            logits_RV = self._forward(sequence, part, [position - start for position in inside])
            found |= zip(inside, logits_RV, strict=True)
        return [found[first + row] for row in chunk.rows]

    def _parts(self, sequence: StatefulSequence) -> Iterator[tuple[int, list[int]]]:
        """The tokens that are not in the state yet, as they may be fed, and the position each part starts at."""
        start, new = sequence.computed, sequence.fed[sequence.computed :]
        if start and self.model.whole_prompts:
            yield from ((start + i, [token]) for i, token in enumerate(new))
        else:
            yield start, new

    def _forward(self, sequence: StatefulSequence, tokens: list[int], rows: list[int]) -> Tensor:
        """Feed ``tokens``; return the logits of ``rows`` among them, ``[R, V]``."""
        module: Any = self.model.module
        device = self.model.device
        assert self._name is not None
        if sequence.state is None and module._supports_default_dynamic_cache():
            sequence.state = DynamicCache(config=module.config.get_text_config(decoder=True))
        options: dict[str, Any] = {self._name: sequence.state}
        if self._takes_positions:
            end = sequence.computed + len(tokens)
            options["position_ids"] = torch.arange(sequence.computed, end, device=device)[None]
        wanted = torch.tensor(rows or [len(tokens) - 1], device=device)
        if self._keeps_rows:
            options["logits_to_keep"] = wanted
        started = time.perf_counter()
        output = module(input_ids=torch.tensor([tokens], device=device), use_cache=True, **options)
        self.forward_seconds += time.perf_counter() - started
        sequence.state = getattr(output, self._name, sequence.state)
        sequence.computed += len(tokens)
        logits_RV: Tensor = output.logits[0] if self._keeps_rows else output.logits[0, wanted]
        return logits_RV[: len(rows), : self.model.vocabulary].to(self._dtype)


def _stateful(chunk: Chunk) -> StatefulSequence:
    assert isinstance(chunk.sequence, StatefulSequence), "a chunk of another engine's sequence"
    return chunk.sequence
