"""Steps by rows on any computer, and what drives two engines at random to compare them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.row_attention import RowAttention, RowPlan, Scoring
from engine.attention.rows import SLICE, Rows
from engine.cache.kv_cache import CachedSequence, KVCache
from engine.cache.kv_store import PAGE
from engine.interface import Chunk
from engine.model import Model
from engine.step import Engine


class PlainRows(RowAttention):
    """The plain computation in place of the kernels, for any computer; counts its calls and checks its rows."""

    replayed, spare = True, 64

    def __init__(self, heads_per_key: int = 1) -> None:
        super().__init__(group=64 // heads_per_key, page=8)
        self.calls = 0
        self.max_rows = 0

    def __call__(
        self, query_TQD: Tensor, keys_SHD: Tensor, values_SHE: Tensor, plan: RowPlan, how: Scoring = Scoring()
    ) -> Tensor:
        self.calls += 1
        self.max_rows = max(self.max_rows, len(query_TQD))
        check_groups(plan.rows)
        found_TQE = plain_attention(query_TQD, keys_SHD, values_SHE, plan.rows, page=self.page, **how._asdict())
        return found_TQE.to(query_TQD.dtype)


def check_groups(rows: Rows) -> None:
    """Every row is read for by exactly one, and shares with the rows of its group what it is said to."""
    columns = (rows.keys_T, rows.home_T, rows.pages_T, rows.group_T, rows.common_T, rows.reach_T)
    keys, homes, pages, groups, commons, reaches = (column.tolist() for column in columns)
    real = [t for t, seen in enumerate(keys) if seen]
    covered: list[int] = []
    for t in real:
        of_group = range(t, t + groups[t])
        covered += of_group
        whole = all(homes[other] == keys[other] for other in of_group)
        furthest = max((keys[other] for other in of_group), default=0) if whole else 0
        for other in of_group:
            assert other // SLICE == t // SLICE
            assert pages[other] == pages[t] and commons[other] == commons[t] <= homes[other]
            assert reaches[other] == furthest
    assert covered == real


def slots_seen(rows: Rows, page: int) -> list[list[int]]:
    """The slots of the keys of every row, in the order of their positions."""
    numbers = rows.numbers_F.tolist()
    columns = (rows.keys_T, rows.home_T, rows.pages_T, rows.branch_T)
    return [
        [numbers[pages + p // page] * page + p % page if p < home else numbers[branch + p - home] for p in range(keys)]
        for keys, home, pages, branch in zip(*(column.tolist() for column in columns), strict=True)
    ]


def plain_attention(
    query_TQD: Tensor,
    keys_SHD: Tensor,
    values_SHE: Tensor,
    rows: Rows,
    *,
    page: int = PAGE,
    scaling: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """What attention by rows is, row by row in float32, ``[T, Q, E]``."""
    heads, group = keys_SHD.shape[1], query_TQD.shape[1] // keys_SHD.shape[1]
    out_TQE = torch.zeros(*query_TQD.shape[:2], values_SHE.shape[-1], device=query_TQD.device)
    for t, seen in enumerate(slots_seen(rows, page)):
        slots = seen[-window:] if window else seen
        if not slots:
            continue
        query_HGD = query_TQD[t].float().view(heads, group, -1)
        scores_HGK = torch.einsum("hgd,khd->hgk", query_HGD, keys_SHD[slots].float())
        scores_HGK = scores_HGK * (query_TQD.shape[-1] ** -0.5 if scaling is None else scaling)
        if cap is not None:
            scores_HGK = cap * torch.tanh(scores_HGK / cap)
        if sinks_Q is not None:
            scores_HGK = torch.cat((scores_HGK, sinks_Q.float().view(heads, group, 1)), -1)
        weights_HGK = scores_HGK.softmax(-1)[..., : len(slots)]
        out_TQE[t] = torch.einsum("hgk,khe->hge", weights_HGK, values_SHE[slots].float()).flatten(0, 1)
    return out_TQE


def by_rows(model: Model, capacity: int = 400, attention: RowAttention | None = None, **how: Any) -> Engine:
    """An engine that computes steps by rows, with the plain computation unless another is given."""
    model = replace(model, attention=attention or PlainRows(2))
    cache = KVCache(
        model.layers, capacity, block=model.block, spare=model.spare, dtype=model.dtype, device=model.device
    )
    return Engine(model, cache, **how)


@dataclass
class Recorder:
    """Records by calling again, into one place as a graph does; counts."""

    recorded: int = 0
    replayed: int = 0
    wrong: float = 0.0
    places: list[Tensor] = field(default_factory=list)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        place_TV = compute().clone()
        self.places.append(place_TV)

        def replay() -> Tensor:
            self.replayed += 1
            return place_TV.copy_(compute() + self.wrong)

        return replay


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

    def step(self, max_tokens: int = 7) -> tuple[Tensor, Tensor]:
        """Compute some tokens of some sequences, then commit, drop or keep what is pending."""
        chosen = [i for i in range(len(self.lives[0])) if self.rng.random() < 0.8] or [0]
        work: list[tuple[int, list[int], list[int]]] = []
        chunks: tuple[list[Chunk], list[Chunk]] = ([], [])
        for i in chosen:
            life = self.lives[0][i]
            count = self.rng.randint(1, max_tokens)
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
            engine.cache.validate()
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
