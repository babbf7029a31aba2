"""Attention over the slot cache, as transformers models call it.

Registered under :data:`NAME` with transformers' AttentionInterface, so any model that dispatches its attention there
runs packed: the tokens of all sequences in one row, each chunk looking at its own keys. Decides how one chunk's
attention is computed. Which slots it reads and what it may see is decided in :mod:`engine.attention.visibility` and
:mod:`engine.attention.invariance`.

On CUDA a step is rows, which kernels of our own compute whatever they are for (:mod:`engine.cuda`); everything else
here is for CPUs, and for where those kernels cannot run.

What a step needs travels in a forward context next to the call, not in keyword arguments: some models drop those.

In bfloat16 on a CPU attention can be *batch-invariant*: a query's result has the same bits whether it is computed alone
or with others, so that verifying drafts cannot tip a near tie that decoding would have decided otherwise.

Tensor legend: N views of a batch, Q query heads, H key/value heads, B = N * H, T tokens of a view, M = T * Q / H rows
of a key head, P packed tokens, K keys, S slots, D key head size, E value head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.attention.invariance import chain_segments, position_ordered
from engine.attention.key_batch import FEW_KEYS, FEW_QUERIES, KeyBatch, Segments, View, together
from engine.attention.row_attention import RowAttention, RowPlan
from engine.attention.rows import Rows
from engine.attention.visibility import ChainView, KeyView, is_plain, slot_ordered
from engine.cache.kv_store import KVStore
from engine.cache.sequence_state import SequenceState

NAME = "paceline"

FOLD_BELOW = 64
"""Tokens up to which the query heads that share a key head are folded into one longer query.

CPU kernels then read each key once instead of G times (up to 10 times faster for one token in bf16); beyond, the
repeated mask would cost more than it saves. On CUDA more are folded too, so many at a time.
"""

WRITTEN_ABOVE = 1 << 19
"""Multiplications of a query-key product above which, in bfloat16 on a CPU, the fused kernel is the slower one."""


class UnsupportedAttention(Exception):
    """The model asks its attention for something this engine does not compute."""


class KeepsStates(Protocol):
    """Takes in states between layers; see :class:`engine.hidden.LayerTap`."""

    layers: tuple[int, ...]

    def keep(self, layer: int, states_TD: Tensor) -> None:
        """What stands behind so many layers."""

    def room(self, rows: int) -> Tensor:
        """Where they all go, ``[T, L, D]``."""


class Step:
    """What the attention layers need to know about the forward in progress."""

    def __init__(
        self,
        store: KVStore,
        chunks: Sequence[tuple[SequenceState, int]],
        slots_T: Tensor,
        layers: int,
        *,
        first: int | None = None,
        invariant: bool = False,
        rows: Rows | None = None,
        attention: RowAttention | None = None,
    ) -> None:
        """``chunks``: sequences and how many of their last pending nodes are in this step, in packed order.

        ``first``: see :meth:`engine.cache.kv_store.KVStore.write`. ``rows``: the step as rows, which ``attention``
        computes instead of what is made of ``chunks``.
        """
        self.store = store
        self.slots_T = slots_T
        self.first = first
        self.invariant = invariant
        self.rows, self.attention = rows, attention
        self.tap: KeepsStates | None = None
        """What wants the states between layers, if anything."""
        self.calls = [0] * layers
        """How often each layer called; a model that computes attention elsewhere leaves zeros here."""
        self._chunks = chunks
        self._starts = list(accumulate((tokens for _, tokens in chunks), initial=0))
        self._batches: dict[int | None, list[KeyBatch]] = {}
        self._plan: RowPlan | None = None

    def keep(self, layer: int, states_TD: Tensor) -> None:
        """What stands behind so many layers, before any norm; it is copied if it is wanted."""
        if self.tap is not None:
            self.tap.keep(layer, states_TD)

    def attend(
        self,
        layer: int,
        query_TQD: Tensor,
        keys_SHD: Tensor,
        values_SHE: Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """Attention of all rows, whose own keys and values are stored already, ``[T, Q, E]``, contiguous."""
        assert self.rows is not None and self.attention is not None, "this step has no rows"
        self.calls[layer] += 1
        if not self.attention.takes(query_TQD, keys_SHD, values_SHE):
            raise UnsupportedAttention(f"heads of {query_TQD.shape[-1]} in {query_TQD.dtype} are not computed by rows")
        if self._plan is None:
            self._plan = self.attention.plan(self.rows)
        return self.attention(
            query_TQD,
            keys_SHD,
            values_SHE,
            self._plan,
            scaling=scaling,
            window=sliding_window,
            cap=softcap,
            sinks_Q=sinks_Q,
        )

    def batches(self, window: int | None) -> list[KeyBatch]:
        """What is computed together; shared by all layers with the same window."""
        if window not in self._batches:
            views: list[View] = []
            starts: list[int] = []
            for i, (sequence, tokens) in enumerate(self._chunks):
                of_chunk = self._chunk_views(sequence, tokens, window)
                views += of_chunk
                starts += accumulate((view.queries for view in of_chunk[:-1]), initial=self._starts[i])
            self._batches[window] = together(views, starts, self.store.device)
        return self._batches[window]

    def _chunk_views(self, sequence: SequenceState, tokens: int, window: int | None) -> Sequence[View]:
        end = sequence.length + tokens
        if tokens <= FEW_QUERIES and end <= FEW_KEYS and is_plain(sequence, tokens, window):
            segments = chain_segments(end) if self.invariant else [(0, end)]
            alone = partial(self._key_views, sequence, tokens, window)
            return [ChainView(sequence, tokens, segments[-1][1], segments, alone)]
        return self._key_views(sequence, tokens, window)

    def _key_views(self, sequence: SequenceState, tokens: int, window: int | None) -> Sequence[KeyView]:
        if self.invariant:
            return position_ordered(sequence, tokens, window, self.store.slots)
        return [slot_ordered(sequence, tokens, window, self.store.dtype)]


Compute = Callable[[Step, Tensor, Tensor, Tensor], Tensor]
"""The wanted rows of a step, ``[R, X]``, from its tokens, their positions and which rows are wanted, all int64."""


class _Current(threading.local):
    """The step of this thread: a target and a draft worker may compute in threads of one process."""

    step: Step | None = None


_current = _Current()


@contextmanager
def forward_context(step: Step) -> Iterator[None]:
    """Make ``step`` the one that attention layers called inside belong to."""
    assert _current.step is None, "a forward is already in progress on this thread"
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def current_step() -> Step:
    """The one that the forward in progress on this thread belongs to."""
    assert _current.step is not None, "a layer was called outside Engine.run"
    return _current.step


def paged_attention(
    module: nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Cache the new keys and values, attend, return ``[1, P, Q, E]``, contiguous. The signature is transformers'."""
    step = current_step()
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttention("the model adds its own bias to the attention scores (ALiBi or similar)")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys_SHD, values_SHE = step.store.write(layer, step.slots_T, step.first, key_1HTD, value_1HTE)
    if step.rows is not None:
        query_TQD = query_1QTD[0].transpose(0, 1)
        return step.attend(layer, query_TQD, keys_SHD, values_SHE, scaling, sliding_window, softcap, s_aux)[None], None
    step.calls[layer] += 1
    batches = step.batches(sliding_window)
    outputs = []
    for batch in batches:
        query_NQTD = batch.queries_of(query_1QTD[0])
        if step.invariant or softcap or s_aux is not None or batch.views > 1 or _written_is_faster(query_NQTD, batch):
            found_NTQE = written_attention(query_NQTD, keys_SHD, values_SHE, batch, scaling, softcap, s_aux)
        else:
            found_NTQE = fused_attention(query_NQTD, keys_SHD, values_SHE, batch, scaling)
        outputs.append(found_NTQE)
    if len(batches) == 1 and batches[0].packed_F is None:
        return outputs[0].flatten(0, 1)[None].contiguous(), None
    out_PQE = query_1QTD.new_empty(query_1QTD.shape[2], query_1QTD.shape[1], values_SHE.shape[-1])
    for batch, found_NTQE in zip(batches, outputs, strict=True):
        batch.put(out_PQE, found_NTQE)
    return out_PQE[None], None


def _written_is_faster(query_NQTD: Tensor, batch: KeyBatch) -> bool:
    on_cpu = query_NQTD.dtype == torch.bfloat16 and query_NQTD.device.type == "cpu"
    return on_cpu and query_NQTD.numel() * batch.keys > WRITTEN_ABOVE


def fused_attention(
    query_NQTD: Tensor, keys_SHD: Tensor, values_SHE: Tensor, batch: KeyBatch, scaling: float | None
) -> Tensor:
    """Softmax attention by torch's fused kernel, ``[N, T, Q, E]``; keys and values are all of a layer's."""
    views, query_heads, tokens, _ = query_NQTD.shape
    heads = keys_SHD.shape[1]
    keys_NHKD = batch.keys_of(keys_SHD).view(views, heads, batch.keys, -1)
    values_NHKE = batch.keys_of(values_SHE).view(views, heads, batch.keys, -1)
    if tokens <= FOLD_BELOW or query_NQTD.device.type != "cpu":
        return _folded_attention(query_NQTD, keys_NHKD, values_NHKE, batch, scaling)
    return scaled_dot_product_attention(
        query_NQTD,
        keys_NHKD,
        values_NHKE,
        attn_mask=batch.mask(query_NQTD.dtype),
        scale=scaling,
        enable_gqa=query_heads > heads,
    ).transpose(1, 2)


def _folded_attention(
    query_NQTD: Tensor, keys_NHKD: Tensor, values_NHKE: Tensor, batch: KeyBatch, scaling: float | None
) -> Tensor:
    """Some queries at a time, with the heads that share a key head as one.

    CUDA kernels take a mask or shared key heads, not both; what takes both writes out the scores of all queries.
    """
    views, query_heads, tokens, size = query_NQTD.shape
    heads = keys_NHKD.shape[1]
    group = query_heads // heads
    mask_N1TK = batch.mask(query_NQTD.dtype)
    outputs = []
    for start in range(0, tokens, FOLD_BELOW):
        stop = min(start + FOLD_BELOW, tokens)
        folded_NHMD = query_NQTD[:, :, start:stop].reshape(views, heads, -1, size)
        if tokens <= FOLD_BELOW:
            mask_N1MK = batch.mask(query_NQTD.dtype, times=group)
        else:
            mask_N1MK = None if mask_N1TK is None else mask_N1TK[:, :, start:stop].repeat(1, 1, group, 1)
        out_NHME = scaled_dot_product_attention(folded_NHMD, keys_NHKD, values_NHKE, attn_mask=mask_N1MK, scale=scaling)
        outputs.append(out_NHME.reshape(views, query_heads, stop - start, -1).transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def written_attention(
    query_NQTD: Tensor,
    keys_SHD: Tensor,
    values_SHE: Tensor,
    batch: KeyBatch,
    scaling: float | None,
    softcap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """The same written out, also with capped scores and attention sinks.

    A sink is a learned score per query head that takes part in the softmax and has no value. On a bfloat16 CPU, with
    keys in the order of :mod:`engine.attention.invariance`, a query's bits do not depend on the other queries.
    """
    views, query_heads, tokens, size = query_NQTD.shape
    scale = size**-0.5 if scaling is None else scaling
    keys_BDK = batch.keys_of(keys_SHD).transpose(1, 2)
    values_BKE = batch.keys_of(values_SHE)
    mask_N1TK = batch.mask(_precise(query_NQTD.dtype))
    outputs = []
    for start in range(0, tokens, FOLD_BELOW):
        stop = min(start + FOLD_BELOW, tokens)
        folded_BMD = query_NQTD[:, :, start:stop].reshape(len(keys_BDK), -1, size)
        products_NQTK = _product(folded_BMD, keys_BDK).reshape(views, query_heads, stop - start, -1)
        some_N1TK = None if mask_N1TK is None else mask_N1TK[:, :, start:stop]
        weights_NQTK = _softmax(_scores(products_NQTK, scale, softcap, some_N1TK), sinks_Q).to(query_NQTD.dtype)
        weights_BMK = weights_NQTK.view(*folded_BMD.shape[:2], -1)
        out_BME = _weighted_sum(weights_BMK, values_BKE, batch.segments)
        outputs.append(out_BME.view(views, query_heads, stop - start, -1).transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _scores(products_NQTK: Tensor, scale: float, softcap: float | None, mask_N1TK: Tensor | None) -> Tensor:
    """What the softmax takes, in float32 at least."""
    if softcap:
        products_NQTK = torch.tanh(products_NQTK.to(_precise(products_NQTK.dtype)) * (scale / softcap))
        scale = softcap
    if mask_N1TK is None:
        return products_NQTK.to(_precise(products_NQTK.dtype)) * scale
    return torch.add(mask_N1TK, products_NQTK, alpha=scale)


def _softmax(scores_NQTK: Tensor, sinks_Q: Tensor | None) -> Tensor:
    """Over the keys; a sink takes its part as one more column."""
    if sinks_Q is None:
        return scores_NQTK.softmax(-1)
    sinks_NQT1 = sinks_Q.to(scores_NQTK.dtype)[:, None, None].expand(*scores_NQTK.shape[:-1], 1)
    return torch.cat((scores_NQTK, sinks_NQT1), -1).softmax(-1)


def _weighted_sum(weights_BMK: Tensor, values_BKE: Tensor, segments: Segments) -> Tensor:
    """``[B, M, E]``: each segment's sum by itself, then one after the other."""
    sums = [_product(weights_BMK[..., start:stop], values_BKE[:, start:stop]) for start, stop in segments]
    if len(sums) == 1:
        return sums[0]
    total_BME = sums[0].to(_precise(sums[0].dtype))
    for part_BME in sums[1:]:
        total_BME += part_BME
    return total_BME.to(weights_BMK.dtype)


def _product(rows_BMI: Tensor, matrix_BIO: Tensor) -> Tensor:
    """Matrix product. A lone row gets company: another kernel might multiply it, and add up in another order."""
    if rows_BMI.shape[1] > 1:
        return rows_BMI @ matrix_BIO
    return (rows_BMI.expand(-1, 2, -1) @ matrix_BIO)[:, :1]


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


AttentionInterface.register(NAME, paged_attention)
