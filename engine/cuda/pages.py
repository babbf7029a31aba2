"""Sequences as lists of pages, the way a paged attention kernel reads them.

Decides which chunks of a step such a kernel can compute: chains, since it knows no mask but the causal one, all of
whose keys lie where their positions say, one block of the cache being one page. Committed tokens always do
(:mod:`engine.kv_cache`), and so do pending ones unless branches were refused before them. Knows nothing about layers.

Tensor legend: N sequences, W pages of the longest, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.sequence_state import SequenceState
from engine.upload import upload


@dataclass(frozen=True, slots=True)
class Chain:
    """Queries at the end of a sequence whose keys fill its pages in order."""

    queries: int
    keys: int
    """Of the whole sequence, the queries' own included."""
    pages: Sequence[int]


def chain_of(state: SequenceState, tokens: int) -> Chain | None:
    """The last ``tokens`` pending nodes of a sequence as a chain, if they are one and the pages are in order."""
    if not state.is_chain:
        return None
    if any(slot != state.home(position) for position, slot in enumerate(state.pending_slots, start=state.length)):
        return None
    keys = state.length + state.pending
    return Chain(tokens, keys, state.blocks[: -(-keys // state.block)])


@dataclass(frozen=True, slots=True)
class Pages:
    """What a paged kernel is told of a step; int32 tensors on the device, the same for all layers."""

    starts_N1: Tensor
    """Where each sequence's queries start in the packed row, ``[N + 1]``."""
    key_starts_N1: Tensor
    """Keys of all sequences before, ``[N + 1]``."""
    keys_N: Tensor
    table_NW: Tensor
    page: int
    """Slots of a page."""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, chains: Sequence[Chain], page: int, device: torch.device) -> Pages:
        """For ``chains`` in packed order; made with one transfer."""
        queries, keys = [chain.queries for chain in chains], [chain.keys for chain in chains]
        width = max(len(chain.pages) for chain in chains)
        flat = [*accumulate(queries, initial=0), *accumulate(keys, initial=0), *keys]
        for chain in chains:
            flat += chain.pages
            flat += [0] * (width - len(chain.pages))
        count = len(chains)
        sizes = [count + 1, count + 1, count, count * width]
        starts_N1, key_starts_N1, keys_N, table = torch.split(upload(flat, device, torch.int32), sizes)
        return cls(starts_N1, key_starts_N1, keys_N, table.view(count, width), page, max(queries), max(keys))

    def overwrite(self, other: Pages) -> None:
        """Take the numbers of ``other``, which has as many sequences and no wider a table.

        Pages beyond the width of ``other`` stay: nobody reads behind a sequence's keys.
        """
        self.starts_N1.copy_(other.starts_N1)
        self.key_starts_N1.copy_(other.key_starts_N1)
        self.keys_N.copy_(other.keys_N)
        self.table_NW[:, : other.table_NW.shape[1]].copy_(other.table_NW)


def empty_pages(sequences: int, width: int, page: int, most_queries: int, device: torch.device) -> Pages:
    """Pages to :meth:`~Pages.overwrite`, with room for sequences of ``width`` pages."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    starts_N1, key_starts_N1 = zeros(sequences + 1), zeros(sequences + 1)
    table_NW = zeros(sequences, width)
    return Pages(starts_N1, key_starts_N1, zeros(sequences), table_NW, page, most_queries, width * page)
