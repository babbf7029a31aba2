"""Attention over the slot cache, as transformers models call it.

Registered under :data:`NAME` with transformers' AttentionInterface, so any model that dispatches its attention there
runs packed: the tokens of all sequences in one row, each chunk looking at its own keys. Decides how one chunk's
attention is computed. Which slots it reads and what it may see is :mod:`engine.visibility`'s decision.

What a step needs travels in a forward context next to the call, not in keyword arguments: some models drop those.

In bfloat16 on a CPU attention is *batch-invariant*: a query's result has the same bits whether it is computed alone or
with others, so that verifying drafts cannot tip a near tie that decoding would have decided otherwise. See
:func:`invariant_attention`.

Tensor legend: Q query heads, H key/value heads, G = Q / H, T tokens, K keys, S slots, D key head size, E value head
size.
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

from engine.kv_cache import CachedSequence, KVCache
from engine.visibility import KeyView, view_keys

NAME = "paceline"

FOLD_BELOW = 64
"""Tokens up to which the query heads that share a key head are folded into one longer query.

CPU kernels then read each key once instead of G times (up to 10 times faster for one token in bf16); beyond, the
repeated mask would cost more than it saves.
"""


class UnsupportedAttention(Exception):
    """The model asks its attention for something this engine does not compute."""


class Step:
    """What the attention layers need to know about the forward in progress."""

    def __init__(
        self, cache: KVCache, chunks: Sequence[tuple[CachedSequence, int]], slots: Sequence[int], layers: int
    ) -> None:
        """``chunks``: sequences and how many of their last pending nodes are in this step, in packed order."""
        self.cache = cache
        self.invariant = cache.dtype == torch.bfloat16 and cache.device.type == "cpu"
        self.sizes = [tokens for _, tokens in chunks]
        self.first = slots[0] if list(slots) == list(range(slots[0], slots[0] + len(slots))) else None
        self.slots_T = torch.tensor(slots, device=cache.device)
        self.calls = [0] * layers
        """How often each layer called; a model that computes attention elsewhere leaves zeros here."""
        self._chunks = chunks
        self._views: dict[int | None, list[KeyView]] = {}

    def views(self, window: int | None) -> list[KeyView]:
        """One view per chunk; shared by all layers with the same window."""
        if window not in self._views:
            cache = self.cache
            self._views[window] = [
                view_keys(
                    sequence, tokens, window, cache.dtype, cache.device, room=cache.capacity if self.invariant else None
                )
                for sequence, tokens in self._chunks
            ]
        return self._views[window]


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
    keys_1HSD, values_1HSE = step.cache.write(layer, step.slots_T, step.first, key_1HTD, value_1HTE)
    views = step.views(sliding_window)
    queries = (query_1QTD,) if len(views) == 1 else torch.split(query_1QTD, step.sizes, 2)
    outputs = []
    for view, chunk_1QTD in zip(views, queries, strict=True):
        keys_1HKD, values_1HKE = view.of(keys_1HSD), view.of(values_1HSE)
        if softcap or s_aux is not None:
            out_1QTE = explicit_attention(chunk_1QTD, keys_1HKD, values_1HKE, view, scaling, softcap, s_aux)
        elif step.invariant:
            out_1QTE = invariant_attention(chunk_1QTD, keys_1HKD, values_1HKE, view, scaling)
        else:
            out_1QTE = fused_attention(chunk_1QTD, keys_1HKD, values_1HKE, view, scaling)
        outputs.append(out_1QTE)
    packed_1QTE = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return packed_1QTE.transpose(1, 2), None


def fused_attention(
    query_1QTD: Tensor, keys_1HKD: Tensor, values_1HKE: Tensor, view: KeyView, scaling: float | None
) -> Tensor:
    """Softmax attention by torch's fused kernel."""
    _, query_heads, tokens, size = query_1QTD.shape
    heads = keys_1HKD.shape[1]
    group = query_heads // heads
    if tokens > FOLD_BELOW:
        return scaled_dot_product_attention(
            query_1QTD, keys_1HKD, values_1HKE, attn_mask=view.mask_TK, scale=scaling, enable_gqa=group > 1
        )
    folded_1HGTD = query_1QTD.reshape(1, heads, group * tokens, size)
    mask_GTK = view.repeated_mask(group)
    out_1HGTE = scaled_dot_product_attention(folded_1HGTD, keys_1HKD, values_1HKE, attn_mask=mask_GTK, scale=scaling)
    return out_1HGTE.view(1, query_heads, tokens, -1)


def invariant_attention(
    query_1QTD: Tensor, keys_1HKD: Tensor, values_1HKE: Tensor, view: KeyView, scaling: float | None
) -> Tensor:
    """Softmax attention whose bits, per query, do not depend on the other queries.

    Sums run over the keys in the order of their positions, and what follows them (keys of later queries, padding up to
    a full block) has weight 0, which changes no partial sum. The fused kernel blocks differently by the number of
    queries; written out in bfloat16 with a float32 softmax this is also the faster one. A lone row is doubled: oneDNN
    multiplies a single row by another kernel, which adds in another order.
    """
    _, query_heads, tokens, size = query_1QTD.shape
    heads = keys_1HKD.shape[1]
    group = query_heads // heads
    scale = size**-0.5 if scaling is None else scaling
    outputs = []
    for start in range(0, tokens, FOLD_BELOW):
        part_1QTD = query_1QTD[:, :, start : start + FOLD_BELOW]
        rows = part_1QTD.shape[2]
        folded_1HGTD = part_1QTD.reshape(1, heads, group * rows, size)
        if group * rows == 1:
            folded_1HGTD = folded_1HGTD.expand(-1, -1, 2, -1)
        scores = (folded_1HGTD @ keys_1HKD.transpose(2, 3)).float().mul_(scale)
        mask_GTK = view.repeated_mask(group, start, rows)
        if mask_GTK is not None:
            scores += mask_GTK
        out_1HGTE = scores.softmax(-1).to(values_1HKE.dtype) @ values_1HKE
        outputs.append(out_1HGTE[:, :, : group * rows].reshape(1, query_heads, rows, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def explicit_attention(
    query_1QTD: Tensor,
    keys_1HKD: Tensor,
    values_1HKE: Tensor,
    view: KeyView,
    scaling: float | None,
    softcap: float | None,
    sinks_Q: Tensor | None,
) -> Tensor:
    """The same written out, for what the fused kernel lacks: capped scores and attention sinks.

    A sink is a learned score per head that takes part in the softmax and has no value.
    """
    _, query_heads, tokens, size = query_1QTD.shape
    heads = keys_1HKD.shape[1]
    folded_1HGTD = query_1QTD.reshape(1, heads, -1, size)
    scores = folded_1HGTD @ keys_1HKD.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    mask_GTK = view.repeated_mask(query_heads // heads)
    if mask_GTK is not None:
        scores = scores + mask_GTK
    precise = torch.promote_types(scores.dtype, torch.float32)
    if sinks_Q is None:
        weights_1HGTK = scores.softmax(-1, dtype=precise)
    else:
        sinks = sinks_Q.repeat_interleave(tokens).view(1, heads, -1, 1).to(scores.dtype)
        weights_1HGTK = torch.cat((scores, sinks), -1).softmax(-1, dtype=precise)[..., :-1]
    return (weights_1HGTK.to(values_1HKE.dtype) @ values_1HKE).view(1, query_heads, tokens, -1)


AttentionInterface.register(NAME, paged_attention)
