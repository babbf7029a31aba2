"""Whether a model computes the same through our attention as it does on its own.

Registering an attention function is no proof that a model uses it, or uses it alone. So at load a few forwards through
the cache (chunked, mixed, a tree, a rollback, an advance) are compared with the stock forward of the same weights. What
is to be served without speculation is tested likewise: the caches of some models go wrong when a prompt comes in parts.
Decides whether a model may be served; knows nothing about where it came from.

Tensor legend: T tokens of a sequence, R rows compared, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.attention.row_attention import UnsupportedAttention
from engine.forward import Chunk
from engine.loading.checkpoint import STOCK, computes_bfloat16
from engine.model import CannotSpeculate, Model, ModelError
from engine.stateful import StatefulCache, StatefulEngine
from engine.step import Engine

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.12}
"""Largest accepted distance between two rows of logits, relative to the spread of the reference row.

Not tighter in float64 because models compute norms and rotations in float32 whatever their dtype.
"""

MIXED = 0.01
"""Largest accepted change, relative as above, that a sequence makes to another one. The arithmetic is the same."""

LARGEST_DRIFT = 0.5
"""Relative distance by which quantising may move logits. Around 0.05 is usual for int8; 1.4 is no relation at all."""

WINDOW = 11
"""Sliding window during the test, so that the short test sequences reach beyond it."""

WIDENED = 2**24
"""Weights that are widened to float32 at a time, where they are: 64 MiB."""

TRUNK, OTHER = 29, 17
TREE_PARENTS = (-1, -1, 0, 0, 1, 4, 2)
SECOND_PARENTS = (-1, 0, 0, 2)
"""Tokens of the two test sequences, and the trees tested on the first: the path 1, 4 of the first tree is
committed, the second tree hangs from node 5 of the first, which survives it as node 0."""


class SelfTest:
    """One test of one model: :meth:`expect` with the stock attention, then :meth:`check` with ours.

    The two are apart so that the weights can be packed in between, and packing is tested too. Where weights are
    quantised in between as well, :meth:`expect_quantised` follows: it says what that did to the logits, and
    :meth:`check` is left with the attention. :meth:`check_stateful` is the second chance of a model that fails.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(7)
        count = TRUNK + OTHER + len(TREE_PARENTS) + len(SECOND_PARENTS)
        tokens: list[int] = torch.randint(model.vocabulary, (count,), generator=generator).tolist()
        self.trunk, tokens = tokens[:TRUNK], tokens[TRUNK:]
        self.other, tokens = tokens[:OTHER], tokens[OTHER:]
        self.tree, self.second = tokens[: len(TREE_PARENTS)], tokens[len(TREE_PARENTS) :]
        self._expected_RV = torch.empty(0)

    def expect(self) -> None:
        """Record what the stock forward says, row by row in the order :meth:`check` computes them."""
        module: Any = self.model.module
        module.set_attn_implementation(STOCK)
        tree, committed = self.tree, [*self.trunk, self.tree[1], self.tree[4]]
        parents = (-1, *(parent + 1 for parent in SECOND_PARENTS))
        texts = [text[:end] for text in (self.trunk, self.other) for end in range(1, len(text) + 1)]
        texts += [self.trunk + path for path in _paths(tree, TREE_PARENTS)]
        texts += [committed + path for path in _paths([tree[5], *self.second], parents)[1:]]
        self._expected_RV = self._stock(texts)
        if self._expected_RV.isnan().any():
            raise ModelError(f"{self.model.name}: its logits are not numbers in {self.model.dtype}; check the weights")

    def expect_quantised(self, model: Model) -> float:
        """Expect instead what the model says with quantised weights.

        Returns how far that is from what was expected before (relative); raises :class:`ModelError` if too far.
        """
        self.model, original_RV = model, self._expected_RV
        self.expect()
        drift = self._distance(self._expected_RV, original_RV)
        if not drift <= LARGEST_DRIFT:  # also when it is NaN
            raise ModelError(
                f"{self.model.name}: quantised weights move its logits by {drift:.2g} (relative; at most "
                f"{LARGEST_DRIFT:g}); use another quantization"
            )
        return drift

    def check(self, model: Model) -> float:
        """Compare with ``model``, the tested one as it is to be served.

        Returns the relative difference or raises :class:`CannotSpeculate`.
        """
        self.model = model
        try:
            with _small_window(self.model):
                actual_RV = self._paged()
        except UnsupportedAttention as error:
            raise CannotSpeculate(self.model, str(error)) from error
        return self._judge("the slot cache", actual_RV, self._expected_RV)

    def check_stateful(self, model: Model) -> float:
        """The same for ``model``, a variant of the tested one, over its own cache."""
        module: Any = model.module
        module.set_attn_implementation(STOCK)
        with _small_window(model):
            together_RV = self._stateful(model, (0, 1))
            alone_RV = torch.cat((self._stateful(model, (0,)), self._stateful(model, (1,))))
        mixed = self._distance(together_RV, alone_RV)
        if not mixed <= MIXED:
            raise CannotSpeculate(model, f"its own cache mixes sequences: they change each other by {mixed:.2g}")
        trunk_TV, other_TV = self._expected_RV[:TRUNK], self._expected_RV[TRUNK : TRUNK + OTHER]
        return self._judge("its own cache", together_RV, torch.cat((trunk_TV[12:], other_TV[9:])))

    def _judge(self, through: str, actual_RV: Tensor, expected_RV: Tensor) -> float:
        difference = self._distance(actual_RV, expected_RV)
        tolerance = TOLERANCE[self._precision]
        if not difference <= tolerance:  # also when it is NaN
            raise CannotSpeculate(
                self.model,
                f"through {through} its logits differ from its own forward by {difference:.2g} "
                f"(relative; tolerance {tolerance:.2g} in {self.model.dtype})",
            )
        return difference

    @property
    def _precision(self) -> torch.dtype:
        """What differences are to be judged by: quantised activations fall to the next step by a rounding error."""
        return torch.bfloat16 if self.model.weights else self.model.dtype

    def _distance(self, actual_RV: Tensor, expected_RV: Tensor) -> float:
        spread_R = (expected_RV - expected_RV.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-6)
        error_R = (actual_RV - expected_RV).norm(dim=-1) / spread_R
        # In half precision one row may differ by chance (an expert's routing flips): the mean is judged.
        half = self._precision in (torch.bfloat16, torch.float16)
        return float(error_R.mean() if half else error_R.max())

    @torch.inference_mode()
    def _stock(self, texts: Sequence[list[int]]) -> Tensor:
        """The logits after each text, in one forward: what begins another is a row of it; no row sees padding."""
        whole = [text for text in texts if not any(len(text) < len(other) and _begins(text, other) for other in texts)]
        longest = max(map(len, whole))
        padded = [text + text[-1:] * (longest - len(text)) for text in whole]
        rows = [next(i for i, other in enumerate(whole) if _begins(text, other)) for text in texts]
        emulated = self.model.dtype == torch.bfloat16 and not computes_bfloat16(self.model.device)
        with _small_window(self.model), _Widened() if emulated else nullcontext():
            output = self.model.module(input_ids=torch.tensor(padded, device=self.model.device), use_cache=False)
        logits_RV: Tensor = output.logits[rows, [len(text) - 1 for text in texts], : self.model.vocabulary]
        return logits_RV.to(torch.promote_types(self.model.dtype, torch.float32))

    def _paged(self) -> Tensor:
        model = self.model
        block = model.block
        capacity = max(128, 4 * block)
        cache = model.new_cache(capacity)
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

    def _stateful(self, model: Model, which: Sequence[int]) -> Tensor:
        """Rows from position 12 of the trunk (0) on, then from 9 of the other sequence (1), computed side by side."""
        cache = StatefulCache(128, block=8, dtype=model.dtype, device=model.device)
        engine = StatefulEngine(model, cache)
        sequences = {i: cache.sequence() for i in which}
        rows: dict[int, list[Tensor]] = {i: [] for i in which}
        texts = (self.trunk, self.other)
        for ends in ((2, 1), (12, 9), (20, 10), (21, 16), (TRUNK, OTHER)):
            parts = {i: texts[i][sequences[i].length : ends[i]] for i in which}
            counts = [len(parts[i]) if ends > (12, 9) else 0 for i in which]
            if ends == (TRUNK, OTHER):
                engine.run([Chunk(sequence, self.tree, rows=[0]) for sequence in sequences.values()])
                for sequence in sequences.values():
                    sequence.rollback()
            chunks = [Chunk(sequences[i], parts[i], rows=range(count)) for i, count in zip(which, counts, strict=True)]
            for i, rows_RV in zip(which, torch.split(engine.run(chunks), counts), strict=True):
                rows[i].append(rows_RV)
                sequences[i].advance(range(sequences[i].pending))
        return torch.cat([rows_RV for i in which for rows_RV in rows[i]])

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


def _begins(text: list[int], other: list[int]) -> bool:
    return other[: len(text)] == text


class _Widened(TorchFunctionMode):
    """Has bfloat16 weights multiplied in float32: a CPU that emulates bfloat16 takes five times as long for it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not nn.functional.linear or kwargs or type(args[1].data) is not Tensor:  # quantised weights know how
            return func(*args, **(kwargs or {}))
        x, weight_OI, bias = (*args, None)[:3]
        parts = weight_OI.split(max(1, WIDENED // weight_OI.shape[1]))
        y = torch.cat([nn.functional.linear(x.float(), part.float()) for part in parts], -1)
        return (y if bias is None else y + bias.float()).to(x.dtype)


@contextmanager
def _small_window(model: Model) -> Iterator[None]:
    """Shrink sliding windows for the time of a forward: those of the configuration (masks) and of the layers."""
    modules: list[Any] = list(model.module.modules())
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    changed = [
        (holder, holder.sliding_window)
        for holder in (*configs.values(), *modules)
        if isinstance(getattr(holder, "sliding_window", None), int)
    ]
    for holder, _ in changed:
        holder.sliding_window = WINDOW
    try:
        yield
    finally:
        for holder, window in changed:
            holder.sliding_window = window
