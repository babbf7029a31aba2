"""What a rank of several groups compares with the definition of a sum. It imports no more than that takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.parallel import group as groups
from engine.parallel.group import Group, rendezvous

SHAPES = [(1,), (1, 1, 7), (5, 64), (64, 64), (513, 3)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parts_of(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]


def compare_in_groups(rank: int, ports: Mapping[int, int]) -> None:
    """Be a rank of one group after the other. ``ports``: where the ranks of a group meet, by their number."""
    torch.set_num_threads(1)
    for world, port in ports.items():
        if rank < world:
            group = Group(rank, world, rendezvous(world, port), torch.device("cpu"), 60.0)
            compare(group)
            group.meet()
            group.leave()


def compare(group: Group) -> None:
    """Compare what a group of ranks adds up with the definition."""
    for most in (groups.GATHERED_BYTES, 0):
        groups.GATHERED_BYTES, kept = most, groups.GATHERED_BYTES
        for dtype in DTYPES:
            for shape in SHAPES:
                parts = parts_of(group.world, shape, dtype)
                total = parts[0].float()
                for part in parts[1:]:
                    total = total + part.float()
                found = group.sum(parts[group.rank].clone())
                where = f"{shape} of {dtype} on {group.world} ranks, at most {most} bytes gathered"
                assert torch.equal(found, total.to(dtype)), where
                assert found.is_contiguous()
                gathered = group.gather(parts[group.rank])
                assert all(torch.equal(one, part) for one, part in zip(gathered, parts, strict=True))
        groups.GATHERED_BYTES = kept
