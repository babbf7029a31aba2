"""Paged attention kernels for any device, and what drives two engines at random to compare them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.cuda.kernel import PagedKernel
from engine.kv_cache import CachedSequence
from engine.step import Chunk, Engine

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass
class PlainVarlen:
    """What ``torch.nn.attention.varlen.varlen_attn`` promises, for paged keys; counts its calls."""

    calls: int = 0
    most_sequences: int = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        assert seqused_k is not None and block_table is not None
        assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
        assert cu_seq_k is None or cu_seq_k.shape == cu_seq_q.shape
        assert block_table.stride(-1) == 1 and query.stride(-1) == 1 and key.dim() == 4
        left, right = window_size
        assert right == 0
        self.calls += 1
        self.most_sequences = max(self.most_sequences, len(seqused_k))
        group = query.shape[1] // key.shape[2]
        assert enable_gqa or group == 1
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out = torch.full_like(query, float("nan"))
        for n, keys in enumerate(seqused_k.tolist()):
            start, stop = int(cu_seq_q[n]), int(cu_seq_q[n + 1])
            assert stop - start <= max_q and keys <= max_k and (start == stop or keys >= stop - start)
            page = key.shape[1]
            for t in range(start, stop):
                position = keys - (stop - t)
                oldest = 0 if left < 0 else max(0, position - left)
                slots = [int(block_table[n, p // page]) * page + p % page for p in range(oldest, position + 1)]
                seen_KHD, worth_KHD = key.flatten(0, 1)[slots], value.flatten(0, 1)[slots]
                for head in range(query.shape[1]):
                    scores_K = seen_KHD[:, head // group] @ query[t, head] * scale
                    out[t, head] = scores_K.softmax(0) @ worth_KHD[:, head // group]
        return out


def gathering_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    seqused_k: Tensor,
    block_table: Tensor,
    **_: Any,
) -> Tensor:
    """The same in tensors alone, as a CUDA graph can record it: every query gathers all pages of its sequence."""
    tokens_T = torch.arange(len(query), device=query.device, dtype=torch.int32)
    sequences_T = torch.searchsorted(cu_seq_q[1:], tokens_T, right=True)
    positions_T1 = (seqused_k[sequences_T] - cu_seq_q[sequences_T + 1] + tokens_T)[:, None]
    page, group = key.shape[1], query.shape[1] // key.shape[2]
    slots_TWB = block_table[sequences_T][..., None] * page + torch.arange(page, device=query.device)
    slots_TK = slots_TWB.flatten(1).long()
    behind_TK = positions_T1 - torch.arange(slots_TK.shape[1], device=query.device)
    seen_TK = (behind_TK >= 0) & (behind_TK <= (window_size[0] if window_size[0] >= 0 else slots_TK.shape[1]))
    keys_TQKD, values_TQKD = (
        cached.flatten(0, 1)[slots_TK].transpose(1, 2).repeat_interleave(group, 1) for cached in (key, value)
    )
    mask_T11K = torch.zeros_like(seen_TK, dtype=query.dtype).masked_fill(~seen_TK, float("-inf"))[:, None, None]
    return scaled_dot_product_attention(query[:, :, None], keys_TQKD, values_TQKD, mask_T11K, scale=scale)[:, :, 0]


def gathering_kernel(page: int = 8) -> PagedKernel:
    """A kernel for any device."""
    return PagedKernel(gathering_varlen, page=page, dtypes=FLOATS)


def plain_kernel(page: int = 8) -> tuple[PagedKernel, PlainVarlen]:
    """A kernel for any computer, and the counter of its calls."""
    attend = PlainVarlen()
    return PagedKernel(attend, page=page, dtypes=FLOATS), attend


@dataclass
class Life:
    """A sequence, its committed tokens, and its pending nodes as (token, parent)."""

    cached: CachedSequence
    text: list[int]
    nodes: list[tuple[int, int]] = field(default_factory=list)


class Twins:
    """Two engines fed the same random work. :meth:`step` gives the logits of both."""

    def __init__(self, seed: int, one: Engine, other: Engine, *, branches: float, prefix: int = 30) -> None:
        """``branches``: how many of the pending chunks are trees. ``prefix``: tokens that prompts may share."""
        self.rng = random.Random(seed)
        self.engines = (one, other)
        self.lives: tuple[list[Life], list[Life]] = ([], [])
        self._branches = branches
        self._prefix = self._tokens(prefix)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, 250) for _ in range(count)]

    def open(self) -> None:
        """A sequence whose prompt shares a prefix with others, perhaps up to the middle of a block."""
        shared = int(len(self._prefix) * self.rng.choice([0, 0.4, 0.8, 1]))
        prompt = self._prefix[:shared] + self._tokens(self.rng.randint(1, 12))
        for engine, lives in zip(self.engines, self.lives, strict=True):
            text = list(prompt)
            lives.append(Life(engine.cache.sequence(text), text))

    def close(self) -> None:
        """Free one of them."""
        index = self.rng.randrange(len(self.lives[0]))
        for lives in self.lives:
            lives.pop(index).cached.free()

    def step(self, most: int = 7) -> tuple[Tensor, Tensor]:
        """Compute some tokens of some sequences, then commit, drop or keep what is pending."""
        chosen = [i for i in range(len(self.lives[0])) if self.rng.random() < 0.8] or [0]
        work: list[tuple[int, list[int], list[int]]] = []
        chunks: tuple[list[Chunk], list[Chunk]] = ([], [])
        for i in chosen:
            life = self.lives[0][i]
            count = self.rng.randint(1, most)
            for lives in self.lives:
                cached = lives[i].cached
                if not cached.pending and len(lives[i].text) - cached.length > 1:
                    cached.reuse()
            feeding = life.text[life.cached.length :][:count] if not life.nodes else []
            pending = life.cached.pending
            if feeding:
                tokens, parents = feeding, list(range(-1, len(feeding) - 1))
            else:
                tokens, parents = self._tokens(count), list(range(pending - 1, pending + count - 1))
                if self.rng.random() < self._branches:
                    parents = [self.rng.randint(max(-1, pending + j - 3), pending + j - 1) for j in range(count)]
            work.append((i, tokens, parents))
            for lives, mine in zip(self.lives, chunks, strict=True):
                mine.append(Chunk(lives[i].cached, tokens, parents, range(len(tokens))))
        found = [engine.run(mine) for engine, mine in zip(self.engines, chunks, strict=True)]
        for i, tokens, parents in work:
            self._settle(i, tokens, parents)
        for engine in self.engines:
            engine.cache.check()
        return found[0], found[1]

    def _settle(self, i: int, tokens: list[int], parents: list[int]) -> None:
        fate, pick = self.rng.random(), self.rng.random()
        for lives in self.lives:
            life = lives[i]
            if life.cached.length < len(life.text):  # the prompt
                life.cached.advance(range(len(tokens)))
                continue
            life.nodes += zip(tokens, parents, strict=True)
            if fate < 0.2:
                life.cached.rollback()
                life.nodes.clear()
            elif fate < 0.8:
                node, path = int(pick * len(life.nodes)), list[int]()
                while node >= 0:
                    path.insert(0, node)
                    node = life.nodes[node][1]
                life.text += [life.nodes[each][0] for each in path]
                survivors = life.cached.advance(path)
                life.nodes[:] = [(life.nodes[old][0], survivors.get(life.nodes[old][1], -1)) for old in survivors]
