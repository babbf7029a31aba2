"""Several levels of draft trees in one launch: what a level expands is chosen by what the last one said.

A step computes the first level as any other. Its logits stay where they are: the likeliest draws of every place become
leaves, the best leaves of every session the rows of the next level, and so on (:mod:`engine.levels.level_ops`); at the
end it is told what was expanded and what may follow. :mod:`engine.cuda.recorded_levels` records a level and replays it,
in :mod:`engine.cpu.levels` all are one call.

Decided here: what a launch is told, in one upload, and what was found. The leaves that a level expands are those that
:meth:`speculation.drafting.draft_session.DraftSession.frontier` would choose one level later: of all leaves of the
session, new ones and the best that were left over, the likeliest by what :mod:`speculation.verifying.calibration` makes
of the draws. What is expanded for nothing costs time, never a wrong draft.

Tensor legend: as in :mod:`engine.levels.level_memory`; R rows of the first level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.attention import PagedLayers
from engine.levels.level_memory import (
    GIVEN,
    MAX_LEVELS,
    MAX_STOPS,
    NO_LEAF,
    TOLD,
    Expanded,
    LevelExpansion,
    LevelMemory,
    TreePlace,
)
from engine.sampling.noise import signed
from speculation.noise import MASK64, splitmix64
from speculation.verifying.calibration import OddsTable

T = TypeVar("T")

MAX_ROWS = 64
"""Of a level. So many sessions are computed together that the host has time for one level after the other."""

LEAVES = 8
"""Leaves of a session from before the launch that it may expand."""


class Levels(ABC):
    """Launches several levels over the store of one model. A subclass computes them."""

    def __init__(
        self,
        layers: PagedLayers,
        vocabulary: int,
        dtype: torch.dtype,
        row_classes: Sequence[int],
        *,
        width: int,
        children: int,
    ) -> None:
        """``dtype``: of the logits. ``row_classes``: numbers of rows that a level may have memory for, ascending.

        ``width``: most places of a session in a level; ``children``: most at a place.
        """
        self.width, self.children = 1 << (width - 1).bit_length(), children
        self.leaves = LEAVES
        width = self.width
        self._layers, self._vocabulary, self._dtype = layers, vocabulary, dtype
        self._device = layers.store.device
        self.classes = tuple(rows // width for rows in row_classes if width <= rows <= MAX_ROWS)
        """Numbers of sessions that launches are padded to, ascending."""
        places = product(range(MAX_LEVELS), range(width))
        self._drafts = [(place, rank) for place in places for rank in range(children)]
        """What a launch drafts, in the order of its leaves: level and place that it hangs from, and its rank."""
        self._memories: dict[int, LevelMemory] = {}
        group = layers.attention.group
        self._group = max(size for size in range(1, width + 1) if width % size == 0 and size <= group)

    @property
    def max_sessions(self) -> int:
        """Of a launch; 0: there is none."""
        return max(self.classes, default=0)

    # -- launching -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, logits_RV: Tensor, growths: Sequence[LevelExpansion], odds: OddsTable, levels: int) -> Tensor:
        """Expand ``levels`` in all, the first of which was computed with ``logits_RV``; see :meth:`read`.

        Returns at once; the device may still be at it.
        """
        assert 1 <= levels <= MAX_LEVELS
        sessions = next(each for each in self.classes if each >= len(growths))
        memory = self._memory(sessions)
        self._fill(memory, logits_RV, growths, odds)
        self._expand(memory, levels, noisy=any(not growth.sampling.greedy for growth in growths))
        return memory.found_KNWX[:levels, : len(growths)]

    @abstractmethod
    def _expand(self, memory: LevelMemory, levels: int, *, noisy: bool) -> None:
        """Compute what a launch was told. ``noisy``: whether any session draws with noise."""

    def read(self, found_KNWX: Tensor) -> list[list[list[Expanded | None]]]:
        """By session and level, what its places are, None where there was none. Waits for the device."""
        numbers_KNWX: NDArray[np.float64] = found_KNWX.cpu().numpy()
        levels, count, width, _ = numbers_KNWX.shape
        sessions: list[list[list[Expanded | None]]] = [[[None] * width for _ in range(levels)] for _ in range(count)]
        there_KNW = numbers_KNWX[..., 0] != NO_LEAF
        behind = TOLD + self.children
        # Levels in their order: what a place hangs from is known before it.
        for (level, session, at), row in zip(
            np.argwhere(there_KNW).tolist(), numbers_KNWX[there_KNW].tolist(), strict=True
        ):
            chosen, sound, draws = int(row[0]), row[1] == 1, int(row[2])
            mine = [*zip(map(int, row[TOLD : TOLD + draws]), row[behind : behind + draws], strict=True)]
            if chosen == GIVEN or chosen < self.leaves:
                found = Expanded(None if chosen == GIVEN else chosen, None, 0, mine, sound)
            else:
                place, rank = self._drafts[chosen - self.leaves]
                above = sessions[session][place[0]][place[1]]
                assert above is not None, "a draft that hangs from nothing was expanded"
                found = Expanded(None, place, above.draws[rank][0], mine, sound)
            sessions[session][level][at] = found
        return sessions

    # -- what is given in ----------------------------------------------------------------------------------------------

    def _fill(self, memory: LevelMemory, logits_RV: Tensor, growths: Sequence[LevelExpansion], odds: OddsTable) -> None:
        """Upload what the levels are told, and put the logits of every place where they look for them."""
        max_leaves, width, tiny = self.leaves, self.width, torch.finfo(self._dtype).tiny
        reals: list[list[float]] = []
        wholes: list[list[int]] = []
        tail = array("i")  # tables of long texts, copied at once
        sources = [0] * memory.count
        for number, growth in enumerate(growths):
            sampling, leaves = growth.sampling, growth.leaves[:max_leaves]
            above = _padded([leaf.above for leaf in leaves], max_leaves, NOWHERE)
            places = [*above, *_padded(growth.places, width, NOWHERE)]
            homes = [place.home for place in places]
            table = memory.tail_start + len(tail)
            tail.extend(growth.blocks[: -(-max(homes) // self._layers.attention.page)])
            branches = []
            for place in places:
                branches.append(memory.tail_start + len(tail))
                tail.extend(place.branch)
            sources[number * width : number * width + len(growth.rows)] = growth.rows
            # In the order of the fields.
            temperature = 0.0 if sampling.greedy else max(sampling.temperature, tiny)
            real = [*growth.factors, temperature, growth.min_weight, *_padded(growth.weights, width, 0.0)]
            reals.append([*real, *_padded([leaf.weight for leaf in leaves], max_leaves, 0.0)])
            seed = signed(splitmix64(sampling.seed & MASK64), 64)
            whole = [seed, growth.width, growth.children, growth.position, growth.max_end, growth.before, table]
            whole += [*_padded(growth.stops, MAX_STOPS, -1), *_padded([leaf.token for leaf in leaves], max_leaves, 0)]
            whole += _padded(growth.slots, (MAX_LEVELS - 1) * width, 0)
            wholes.append([*whole, *(place.end for place in places), *homes, *branches])
        self._upload(memory, odds, sources, reals, wholes, tail)
        torch.index_select(logits_RV, 0, memory.source_M, out=memory.logits_MV)

    def _upload(
        self,
        memory: LevelMemory,
        odds: OddsTable,
        sources: Sequence[int],
        reals: Sequence[Sequence[float]],
        wholes: Sequence[Sequence[int]],
        tail: array[int],
    ) -> None:
        """``reals``, ``wholes``: by session, its floating-point numbers and its integers; ``tail``: of 32 bits."""
        first = memory.count + len(memory.odds_F)  # of the sessions' numbers
        fixed = first + memory.record_NS.numel()
        size = fixed + -(-len(tail) // 2)
        host_F = torch.empty(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        flat: NDArray[np.int64] = host_F.numpy()
        flat[: memory.count] = sources
        flat[memory.count : first].view(np.float64)[:] = [*odds.factors, *odds.slopes, *odds.offsets]
        records = flat[first:fixed].reshape(memory.record_NS.shape)
        records[len(reals) :] = 0
        records.view(np.float64)[: len(reals), : len(reals[0])] = reals
        records[: len(wholes), len(reals[0]) :] = wholes
        flat[fixed:].view(np.int32)[: len(tail)] = tail
        memory.inputs_F[:size].copy_(host_F, non_blocking=True)

    def _memory(self, sessions: int) -> LevelMemory:
        """Taken at the first use, and kept."""
        if sessions not in self._memories:
            self._memories[sessions] = LevelMemory(
                sessions,
                self.width,
                self.children,
                self.leaves,
                group=self._group,
                spare=self._layers.store.slots,
                pages=self._layers.pages,
                vocabulary=self._vocabulary,
                dtype=self._dtype,
                device=self._device,
            )
        return self._memories[sessions]


NOWHERE = TreePlace(0, 0, ())


def _padded(values: Sequence[T], size: int, fill: T) -> list[T]:
    return [*values, *[fill] * (size - len(values))]
