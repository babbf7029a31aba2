"""Attention over the slot cache, as transformers models call it.

Registered under :data:`NAME` with transformers' AttentionInterface, so any model that dispatches its attention there
runs packed: the tokens of all sequences in one row, each chunk looking at its own keys. Decides how one chunk's
attention is computed. Which slots it reads and what it may see is decided in :mod:`engine.visibility` and
:mod:`engine.invariance`.

What a step needs travels in a forward context next to the call, not in keyword arguments: some models drop those.

In bfloat16 on a CPU attention can be *batch-invariant*: a query's result has the same bits whether it is computed alone
or with others, so that verifying drafts cannot tip a near tie that decoding would have decided otherwise.

Tensor legend: Q query heads, H key/value heads, G = Q / H, T tokens, M = G * T rows of a key head, K keys, S slots,
D key head size, E value head size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.invariance import position_ordered
from engine.kv_cache import CachedSequence
from engine.kv_store import KVStore
from engine.visibility import KeyView, slot_ordered

NAME = "paceline"

FOLD_BELOW = 64
"""Tokens up to which the query heads that share a key head are folded into one longer query.

CPU kernels then read each key once instead of G times (up to 10 times faster for one token in bf16); beyond, the
repeated mask would cost more than it saves.
"""

WRITTEN_ABOVE = 1 << 19
"""Multiplications of a query-key product above which, in bfloat16 on a CPU, the fused kernel is the slower one."""


class UnsupportedAttention(Exception):
    """The model asks its attention for something this engine does not compute."""


class Step:
    """What the attention layers need to know about the forward in progress."""

    def __init__(
        self,
        store: KVStore,
        chunks: Sequence[tuple[CachedSequence, int]],
        slots: Sequence[int],
        layers: int,
        invariant: bool,
    ) -> None:
        """``chunks``: sequences and how many of their last pending nodes are in this step, in packed order."""
        self.store = store
        self.invariant = invariant
        self.first = slots[0] if list(slots) == list(range(slots[0], slots[0] + len(slots))) else None
        self.slots_T = torch.tensor(slots, device=store.device)
        self.calls = [0] * layers
        """How often each layer called; a model that computes attention elsewhere leaves zeros here."""
        self._chunks = chunks
        self._views: dict[int | None, list[KeyView]] = {}

    def views(self, window: int | None) -> list[KeyView]:
        """Views of all tokens in packed order; shared by all layers with the same window."""
        if window not in self._views:
            self._views[window] = [view for chunk in self._chunks for view in self._chunk_views(*chunk, window)]
        return self._views[window]

    def _chunk_views(self, sequence: CachedSequence, tokens: int, window: int | None) -> Sequence[KeyView]:
        store = self.store
        if self.invariant:
            return position_ordered(sequence, tokens, window, store.slots, store.device)
        return [slot_ordered(sequence, tokens, window, store.dtype, store.device)]


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
    """Cache the new keys and values, attend, return ``[1, T, Q, E]``. The signature is transformers'."""
    step = _current.step
    assert step is not None, "attention was called outside Engine.run"
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttention("the model adds its own bias to the attention scores (ALiBi or similar)")
    layer: int = module.layer_idx  # type: ignore[assignment]
    step.calls[layer] += 1
    keys_1HSD, values_1HSE = step.store.write(layer, step.slots_T, step.first, key_1HTD, value_1HTE)
    views = step.views(sliding_window)
    queries = (query_1QTD,) if len(views) == 1 else torch.split(query_1QTD, [view.queries for view in views], 2)
    outputs = []
    for view, chunk_1QTD in zip(views, queries, strict=True):
        if step.invariant or softcap or s_aux is not None or _written_is_faster(chunk_1QTD, view):
            out_1QTE = written_attention(chunk_1QTD, keys_1HSD, values_1HSE, view, scaling, softcap, s_aux)
        else:
            out_1QTE = fused_attention(chunk_1QTD, keys_1HSD, values_1HSE, view, scaling)
        outputs.append(out_1QTE)
    packed_1QTE = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return packed_1QTE.transpose(1, 2), None


def _written_is_faster(query_1QTD: Tensor, view: KeyView) -> bool:
    on_cpu = query_1QTD.dtype == torch.bfloat16 and query_1QTD.device.type == "cpu"
    return on_cpu and query_1QTD.numel() * view.keys > WRITTEN_ABOVE


def fused_attention(
    query_1QTD: Tensor, keys_1HSD: Tensor, values_1HSE: Tensor, view: KeyView, scaling: float | None
) -> Tensor:
    """Softmax attention by torch's fused kernel, ``[1, Q, T, E]``; keys and values are all of a layer's."""
    _, query_heads, tokens, size = query_1QTD.shape
    heads = keys_1HSD.shape[1]
    group = query_heads // heads
    keys_1HKD, values_1HKE = view.of(keys_1HSD, 0, view.keys), view.of(values_1HSE, 0, view.keys)
    if tokens > FOLD_BELOW:
        return scaled_dot_product_attention(
            query_1QTD, keys_1HKD, values_1HKE, attn_mask=view.mask_TK, scale=scaling, enable_gqa=group > 1
        )
    folded_1HMD = query_1QTD.reshape(1, heads, group * tokens, size)
    mask_MK = view.repeated_mask(group, 0, tokens, query_1QTD.dtype)
    out_1HME = scaled_dot_product_attention(folded_1HMD, keys_1HKD, values_1HKE, attn_mask=mask_MK, scale=scaling)
    return out_1HME.view(1, query_heads, tokens, -1)


def written_attention(
    query_1QTD: Tensor,
    keys_1HSD: Tensor,
    values_1HSE: Tensor,
    view: KeyView,
    scaling: float | None,
    softcap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """The same written out, also with capped scores and attention sinks.

    A sink is a learned score per query head that takes part in the softmax and has no value. On a bfloat16 CPU, with
    keys in the order of :mod:`engine.invariance`, a query's bits do not depend on the other queries.
    """
    _, query_heads, tokens, size = query_1QTD.shape
    heads = keys_1HSD.shape[1]
    group = query_heads // heads
    scale = size**-0.5 if scaling is None else scaling
    # Contiguous before it is transposed: the product would copy it element by element otherwise.
    keys_HDK = view.of(keys_1HSD, 0, view.keys)[0].contiguous().transpose(1, 2)
    values_HKE = [view.of(values_1HSE, *segment)[0] for segment in view.segments]
    outputs = []
    for start in range(0, tokens, FOLD_BELOW):
        stop = min(start + FOLD_BELOW, tokens)
        rows = group * (stop - start)
        folded_HMD = query_1QTD[0, :, start:stop].reshape(heads, rows, size)
        if rows == 1:  # a lone row may be multiplied by another kernel, which adds up in another order
            folded_HMD = folded_HMD.expand(-1, 2, -1)
        scores_HMK = _scores(folded_HMD @ keys_HDK, scale, softcap, view.repeated_mask(group, start, stop))
        if sinks_Q is None:
            weights_HMK = scores_HMK.softmax(-1)
        else:
            sinks_HM1 = sinks_Q.to(scores_HMK.dtype).view(heads, group).repeat_interleave(stop - start, 1)[..., None]
            weights_HMK = torch.cat((scores_HMK, sinks_HM1.expand(-1, scores_HMK.shape[1], 1)), -1).softmax(-1)
        out_HME = _weighted_sum(weights_HMK.to(query_1QTD.dtype), values_HKE, view.segments)
        outputs.append(out_HME[:, :rows].reshape(1, query_heads, stop - start, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _scores(products_HMK: Tensor, scale: float, softcap: float | None, mask_MK: Tensor | None) -> Tensor:
    """What the softmax takes, in float32 at least."""
    scores_HMK = products_HMK.to(torch.promote_types(products_HMK.dtype, torch.float32))
    if softcap:
        scores_HMK = torch.tanh(scores_HMK * (scale / softcap))
        scale = softcap
    if mask_MK is None:
        return scores_HMK.mul_(scale)
    return torch.add(mask_MK, scores_HMK, alpha=scale)


def _weighted_sum(weights_HMK: Tensor, values_HKE: Sequence[Tensor], segments: Sequence[tuple[int, int]]) -> Tensor:
    """``[H, M, E]``: each segment's sum by itself, then one after the other."""
    sums = [weights_HMK[..., start:stop] @ part for part, (start, stop) in zip(values_HKE, segments, strict=True)]
    if len(sums) == 1:
        return sums[0]
    total_HME = sums[0].to(torch.promote_types(sums[0].dtype, torch.float32))
    for part_HME in sums[1:]:
        total_HME += part_HME
    return total_HME.to(weights_HMK.dtype)


AttentionInterface.register(NAME, paged_attention)
