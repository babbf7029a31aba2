"""Layers split over ranks compute what whole ones do; here each rank is asked in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.parallel.shards import SummedEmbedding


def split(weight_VD: torch.Tensor, world: int) -> list[SummedEmbedding]:
    """All ranks' parts, which sum nothing up."""
    each = -(-len(weight_VD) // world)
    groups: list[Any] = [SimpleNamespace(world=world, rank=rank, sum=lambda part: part) for rank in range(world)]
    parts = [weight_VD[each * rank : each * (rank + 1)] for rank in range(world)]
    return [SummedEmbedding(group, part, len(weight_VD)) for group, part in zip(groups, parts, strict=True)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_embedding_split_by_vocabulary(world: int) -> None:
    """Bit for bit; over four ranks the last has no token. What others hold does not show, be it no number."""
    weight_VD = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    weight_VD[0] = torch.nan
    tokens = torch.tensor([[5, 1, 2], [3, 4, 1]])
    parts = [rank(tokens) for rank in split(weight_VD, world)]
    assert torch.equal(torch.stack(parts).sum(0), weight_VD[tokens])


def test_looking_up_waits_for_nothing() -> None:
    """On ``meta`` whatever depends on the numbers in a tensor is refused."""
    (first, _) = split(torch.empty(6, 8, device="meta"), 2)
    assert first(torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 8)
