"""Whether a model computes the same through our attention as it does on its own.

Registering an attention function is no proof that a model uses it, or uses it alone. So at load a few forwards through
the cache (chunked, mixed, a tree, a rollback, an advance) are compared with the stock forward of the same weights.
Decides whether a model may be served; knows nothing about where it came from.

Tensor legend: T tokens of a sequence, R rows compared, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention import NAME, UnsupportedAttention
from engine.kv_cache import KVCache
from engine.model import Model, ModelError
from engine.step import Chunk, Engine

STOCK = "eager"

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.12}
"""Largest accepted distance between two rows of logits, relative to the spread of the reference row.

Not tighter in float64 because models compute norms and rotations in float32 whatever their dtype.
"""

WINDOW = 11
"""Sliding window during the test, so that the short test sequences reach beyond it."""

TRUNK, OTHER = 29, 17
TREE_PARENTS = (-1, -1, 0, 0, 1, 4, 2)
SECOND_PARENTS = (-1, 0, 0, 2)
"""Tokens of the two test sequences, and the trees tested on the first: the path 1, 4 of the first tree is
committed, the second tree hangs from node 5 of the first, which survives it as node 0."""


class SelfTest:
    """One test of one model: :meth:`expect` with the stock attention, then :meth:`check` with ours.

    The two are apart so that the weights can be packed in between, and packing is tested too.
    """

    def __init__(self, model: Model, seed: int = 7) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        count = TRUNK + OTHER + len(TREE_PARENTS) + len(SECOND_PARENTS)
        tokens: list[int] = torch.randint(model.vocabulary, (count,), generator=generator).tolist()
        self.trunk, tokens = tokens[:TRUNK], tokens[TRUNK:]
        self.other, tokens = tokens[:OTHER], tokens[OTHER:]
        self.tree, self.second = tokens[: len(TREE_PARENTS)], tokens[len(TREE_PARENTS) :]
        self._expected_RV = torch.empty(0)

    def expect(self) -> None:
        """Record what the stock forward says, row by row in the order :meth:`check` computes them."""
        trunk, other, tree, second = self.trunk, self.other, self.tree, self.second
        rows = [self._stock(trunk), self._stock(other)]
        rows += [self._stock(trunk + path)[-1:] for path in _paths(tree, TREE_PARENTS)]
        committed = [*trunk, tree[1], tree[4]]
        parents = (-1, *(parent + 1 for parent in SECOND_PARENTS))
        rows += [self._stock(committed + path)[-1:] for path in _paths([tree[5], *second], parents)[1:]]
        self._expected_RV = torch.cat(rows)

    def check(self) -> float:
        """Compare; return the relative difference or raise :class:`ModelError`."""
        model_type = getattr(self.model.config, "model_type", type(self.model.module).__name__)
        try:
            with _small_window(self.model):
                actual_RV = self._paged()
        except UnsupportedAttention as error:
            raise ModelError(f"model type {model_type!r} is not supported: {error}") from error
        difference = self._distance(actual_RV, self._expected_RV)
        tolerance = TOLERANCE[self.model.dtype]
        if not difference <= tolerance:  # also when it is NaN
            raise ModelError(
                f"model type {model_type!r} is not supported: through the slot cache its logits differ from its own "
                f"forward by {difference:.2g} (relative; tolerance {tolerance:.2g} in {self.model.dtype})"
            )
        return difference

    def _distance(self, actual_RV: Tensor, expected_RV: Tensor) -> float:
        spread_R = (expected_RV - expected_RV.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
        error_R = (actual_RV - expected_RV).norm(dim=-1) / spread_R
        # In half precision one row may differ by chance (an expert's routing flips): the mean is judged.
        half = self.model.dtype in (torch.bfloat16, torch.float16)
        return float(error_R.mean() if half else error_R.max())

    @torch.inference_mode()
    def _stock(self, tokens: Sequence[int]) -> Tensor:
        module: Any = self.model.module
        module.set_attn_implementation(STOCK)
        try:
            with _small_window(self.model):
                output = module(input_ids=torch.tensor([tokens], device=self.model.device), use_cache=False)
        finally:
            module.set_attn_implementation(NAME)
        logits_TV: Tensor = output.logits[0, :, : self.model.vocabulary]
        return logits_TV.to(torch.promote_types(self.model.dtype, torch.float32))

    def _paged(self) -> Tensor:
        model = self.model
        cache = KVCache(model.layers, 128, block=8, dtype=model.dtype, device=model.device)
        engine = Engine(model, cache)
        trunk, other = cache.sequence(), cache.sequence()
        a, b = self.trunk, self.other
        rows_a, rows_b = [], []

        def both(chunk_a: list[int], chunk_b: list[int]) -> None:
            chunks = [Chunk(trunk, chunk_a, rows=range(len(chunk_a)))] if chunk_a else []
            chunks += [Chunk(other, chunk_b, rows=range(len(chunk_b)))] if chunk_b else []
            logits_RV = engine.run(chunks)
            rows_a.append(logits_RV[: len(chunk_a)])
            rows_b.append(logits_RV[len(chunk_a) :])
            for sequence in (trunk, other):
                sequence.advance(range(sequence.pending))

        both(a[:12], [])
        self._check_calls(engine)
        both(a[12:20], b[:9])
        engine.run([Chunk(trunk, a[:4])])
        trunk.rollback()
        both(a[20:28], b[9:10])
        both(a[28:], b[10:])
        tree_RV = engine.run([Chunk(trunk, self.tree, TREE_PARENTS, range(len(self.tree)))])
        survivor = trunk.advance((1, 4))[5]
        parents = [survivor if parent == -1 else parent + trunk.pending for parent in SECOND_PARENTS]
        second_RV = engine.run([Chunk(trunk, self.second, parents, range(len(self.second)))])
        return torch.cat((*rows_a, *rows_b, tree_RV, second_RV))

    def _check_calls(self, engine: Engine) -> None:
        calls = engine.last_calls
        if any(count != 1 for count in calls):
            wrong = next(layer for layer, count in enumerate(calls) if count != 1)
            raise UnsupportedAttention(
                f"its layers must each call the registered attention once, layer {wrong} called it {calls[wrong]} times"
            )


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens from the root to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths


@contextmanager
def _small_window(model: Model) -> Iterator[None]:
    """Shrink sliding windows for the time of a forward: those of the configuration (masks) and of the layers."""
    holders: set[Any] = set(model.module.modules())
    changed = [
        (holder, holder.sliding_window)
        for holder in (*_configs(model.module), *holders)
        if isinstance(getattr(holder, "sliding_window", None), int)
    ]
    for holder, _ in changed:
        holder.sliding_window = WINDOW
    try:
        yield
    finally:
        for holder, window in changed:
            holder.sliding_window = window


def _configs(module: nn.Module) -> list[Any]:
    configs = {id(child.config): child.config for child in module.modules() if hasattr(child, "config")}
    return list(configs.values())
