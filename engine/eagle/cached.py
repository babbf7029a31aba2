"""An EAGLE-3 head over a cache of its own: rows of many sessions in one forward, chains or trees.

The cache is kept as the target's is (:mod:`engine.cache.kv_cache`), one slot a row: what sessions begin with is shared,
and guesses are pending nodes that are dropped. Row p of a session is what the head makes of the target's state at
position p and the token after it (:mod:`engine.eagle.head`). A session's rows need not begin at position 0.

Where the head drafts on another worker, its fused states travel as bytes: decided here is how they are rounded
(:class:`speculation.messages.FeatureFormat`), and what a receiver takes for numbers.

Tensor legend: N rows of a forward, R of them, D hidden size of the head, Q query heads, K key/value heads, E head
size, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.attention import PagedLayers, forward_context, paged_attention, steps_of
from engine.attention.row_attention import RowAttention
from engine.cache.kv_cache import CachedSequence, KVCache
from engine.cpu.levels import HeadStates, levels_of
from engine.cpu.rows import on_cpu
from engine.eagle.cpu_head import pack
from engine.eagle.head import EagleHead
from engine.host.upload import upload
from engine.layers.linear import products
from engine.levels.levels import Levels
from speculation.messages import FeatureFormat, Features

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
MAX_FEATURE = 1e6
"""Larger ones are none that a head makes."""


class HeadChunk(NamedTuple):
    """Rows to append to one sequence, as pending nodes."""

    sequence: CachedSequence
    first: int
    """Position of the sequence's first row."""
    tokens: Sequence[int]
    """The token after each row's position."""
    states_ND: Tensor
    """What :meth:`engine.eagle.head.EagleHead.fuse` made of the target's states there, or the head's own next state."""
    parents: Sequence[int]
    """As of :class:`engine.forward.Chunk`."""


def row_bytes(head: EagleHead) -> int:
    """What a row takes in the cache."""
    config = head.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * head.norm.weight.itemsize


class CachedHead:
    """Computes rows of a head; the books of the cache are the caller's to keep."""

    def __init__(self, head: EagleHead, capacity: int) -> None:
        """``capacity``: rows that fit, of all sessions together."""
        config, weight = head.config, head.norm.weight
        self.head = head
        self.cache = KVCache(config.num_hidden_layers, capacity, dtype=weight.dtype, device=weight.device)
        is_cpu = weight.device.type == "cpu"
        in_cpp = on_cpu(config.num_attention_heads // config.num_key_value_heads) if is_cpu else None
        attention = in_cpp or RowAttention(page=self.cache.block)
        self._paged = PagedLayers(self.cache.store, attention, config.num_hidden_layers, self.cache.capacity)
        self._packed = pack(head) if type(head) is EagleHead and is_cpu else None
        self._says_all = head.target_ids.tolist() == list(range(config.vocab_size))
        self._layers: list[Any] = [SimpleNamespace(layer_idx=layer) for layer in range(config.num_hidden_layers)]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.cache.store.device

    @torch.inference_mode()
    def run(self, chunks: Sequence[HeadChunk]) -> tuple[Tensor, Tensor]:
        """Next and normed states of all rows, in the order of the chunks, ``[N, D]`` each.

        The rows become pending nodes of their sequences. Raises :class:`engine.cache.kv_cache.CacheFull`; then, as
        after any other exception, no sequence has changed.
        """
        appended: list[tuple[CachedSequence, int]] = []
        try:
            for chunk in chunks:
                chunk.sequence.append(chunk.parents)
                appended.append((chunk.sequence, len(chunk.tokens)))
            self.cache.store.move(self.cache.take_moves())
            tokens = [token for chunk in chunks for token in chunk.tokens]
            firsts_N = upload([chunk.first for chunk in chunks for _ in chunk.tokens], self.device)
            states_ND = torch.cat([chunk.states_ND for chunk in chunks])
            found: list[tuple[Tensor, Tensor]] = []
            for piece, step, tokens_T, positions_T in steps_of(tokens, (), appended, self._paged):
                own = slice(piece.first, piece.first + len(piece))
                with forward_context(step), products(invariant=False):
                    embeddings_TD = self.head.embed(tokens_T)
                    found.append(self._forward(embeddings_TD, states_ND[own], positions_T + firsts_N[own]))
            if len(found) == 1:
                return found[0]
            next_ND, normed_ND = (torch.cat(parts) for parts in zip(*found, strict=True))
            return next_ND, normed_ND
        except BaseException:
            for sequence, count in appended:
                sequence.retract(count)
            raise

    @torch.inference_mode()
    def logits(self, normed_RD: Tensor, vocabulary: int) -> Tensor:
        """What it says of the target's tokens below ``vocabulary``, ``[R, V]`` float32; -inf of those it cannot say."""
        with products(invariant=False):
            own_RV = self.head.logits(normed_RD).float()
        if self._says_all:
            return own_RV[:, :vocabulary]
        logits_RV = own_RV.new_full((len(own_RV), self.head.config.vocab_size), float("-inf"))
        return logits_RV.index_copy_(1, self.head.target_ids, own_RV)[:, :vocabulary]

    def levels(self, next_SD: Tensor, vocabulary: int, *, width: int, children: int) -> Levels | None:
        """What expands several levels in one launch; None where that cannot be had.

        ``next_SD``: the next state of the row in each slot, which the caller and the levels write.
        """
        head = self.head
        if self._packed is None:
            return None
        states = HeadStates(next_SD, head.config.norm_output, None if self._says_all else head.target_ids)
        sizes = {"width": width, "children": children}
        return levels_of(head, self._packed, head.lm_head, self._paged, vocabulary, states, **sizes)

    def _forward(self, embeddings_ND: Tensor, states_ND: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`engine.eagle.head.EagleHead.forward`."""
        if self._packed is None:
            return self.head(embeddings_ND, states_ND, positions_N, self._attend)  # type: ignore[no-any-return]
        cos_N1E, sin_N1E = self.head.rotation(positions_N, states_ND)
        hidden_ND, normed_ND = self._packed.states(embeddings_ND, states_ND, (cos_N1E[:, 0], sin_N1E[:, 0]))
        return (normed_ND if self.head.config.norm_output else hidden_ND).to(states_ND), normed_ND

    def _attend(self, layer: int, q_NQE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
        q_1QNE, k_1KNE, v_1KNE = (x.transpose(0, 1)[None] for x in (q_NQE, k_NKE, v_NKE))
        found_1NQE, _ = paged_attention(self._layers[layer], q_1QNE, k_1KNE, v_1KNE, None)
        return found_1NQE[0]


def packed(states_ND: Tensor, wanted: FeatureFormat) -> tuple[bytes, bytes]:
    """The numbers of ``[N, D]`` in that format, and its scales if it has any."""
    if wanted is FeatureFormat.BF16:
        return _bytes(states_ND.to(torch.bfloat16)), b""
    states_ND = states_ND.float()
    scales_N1 = states_ND.abs().amax(-1, keepdim=True).clamp_min(1e-12) / MAX_FP8
    return _bytes((states_ND / scales_N1).to(FP8)), _bytes(scales_N1)


def unpacked(features: Features, width: int, dtype: torch.dtype) -> Tensor:
    """``[N, D]`` on the CPU. Raises ValueError if they are no features of a head of this ``width``."""
    if features.width != width:
        raise ValueError(f"features of {features.width} numbers a token, for a head of {width}")
    own = torch.bfloat16 if features.format is FeatureFormat.BF16 else FP8
    states_ND = torch.frombuffer(bytearray(features.values), dtype=own).view(-1, width).float()
    if features.scales:
        states_ND *= torch.frombuffer(bytearray(features.scales), dtype=torch.float32)[:, None]
    if not bool((states_ND.abs() <= MAX_FEATURE).all()):  # NaN is not
        raise ValueError("features that are no numbers, or beyond all bounds")
    return states_ND.to(dtype)


def _bytes(numbers: Tensor) -> bytes:
    return numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes()
