"""Several levels of draft trees in one launch: what a level expands is chosen on the device by what the last one said.

A step computes the first level as any other (:mod:`engine.cuda.graphs`). Its logits stay on the device: the likeliest
draws of every place become leaves, the best leaves of every session the rows of the next level, and so on
(:mod:`engine.cuda.level_ops`); one download at the end tells what was expanded and what may follow. A level is recorded
once and replayed as often as levels are wanted, so the host neither lays out nor draws anything between them.

Decided here: what a launch is told, in one upload, and what was found. The leaves that a level expands are those that
:meth:`speculation.drafting.draft_session.DraftSession.frontier` would choose one level later: of all leaves of the
session, new ones and the best that were left over, the likeliest by what :mod:`speculation.verifying.calibration` makes
of the draws. What is expanded for nothing costs time, never a wrong draft.

Tensor legend: as in :mod:`engine.cuda.level_memory`; R rows of the first level.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cuda.graphs import TOLERANCE, RowSteps, StepShape
from engine.cuda.level_memory import (
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
from engine.cuda.level_ops import LevelOps
from engine.host.upload import to_device
from engine.model import kind_and_line
from engine.sampling.noise import signed
from speculation.messages import Sampling
from speculation.noise import MASK64, splitmix64
from speculation.verifying.calibration import CELLS, RANKS, OddsTable

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ROWS = 64
"""Of a level. So many sessions are computed together that the host has time for one level after the other."""

LEAVES = 8
"""Leaves of a session from before the launch that it may expand."""


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """What decides which kernels a level launches."""

    sessions: int
    noisy: bool
    """Whether any session draws with noise."""


class Levels:
    """Launches several levels over the store of one model."""

    def __init__(
        self,
        steps: RowSteps,
        vocabulary: int,
        dtype: torch.dtype,
        *,
        width: int,
        children: int,
        ops: LevelOps | None = None,
    ) -> None:
        """``dtype``: of the logits. ``width``: most places of a session in a level; ``children``: most at a place.

        ``ops``: how levels are computed; None: as is best on the store's device.
        """
        self.width, self.children = 1 << (width - 1).bit_length(), children
        self.leaves = LEAVES
        width = self.width
        self._steps, self._vocabulary, self._dtype = steps, vocabulary, dtype
        self._device = steps.store.device
        self._ops = ops or _ops_of(self._device)
        self.classes = tuple(rows // width for rows in steps.classes if width <= rows <= MAX_ROWS)
        """Numbers of sessions that launches are padded to, ascending."""
        places = product(range(MAX_LEVELS), range(width))
        self._drafts = [(place, rank) for place in places for rank in range(children)]
        """What a launch drafts, in the order of its leaves: level and place that it hangs from, and its rank."""
        self._memories: dict[int, LevelMemory] = {}
        self._recordings: dict[LaunchKind, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}
        """What the first level says, and a further one."""
        self._group = max(size for size in range(1, width + 1) if width % size == 0 and size <= steps.attention.group)

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
        kind = LaunchKind(sessions, any(not growth.sampling.greedy for growth in growths))
        memory = self._memory(sessions)
        self._fill(memory, logits_RV, growths, odds)
        first, further = self._recordings.get(kind) or self._functions(memory, kind)
        found_KNWX = first()
        for _ in range(levels - 1):
            found_KNWX = further()
        return found_KNWX[:levels, : len(growths)]

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
        tail: list[int] = []
        sources = [0] * memory.count
        for number, growth in enumerate(growths):
            sampling, leaves = growth.sampling, growth.leaves[:max_leaves]
            above = _padded([leaf.above for leaf in leaves], max_leaves, NOWHERE)
            places = [*above, *_padded(growth.places, width, NOWHERE)]
            homes = [place.home for place in places]
            table = memory.tail_start + len(tail)
            tail += growth.blocks[: -(-max(homes) // self._steps.attention.page)]
            branches = []
            for place in places:
                branches.append(memory.tail_start + len(tail))
                tail += place.branch
            sources[number * width : number * width + len(growth.rows)] = growth.rows
            # In the order of the fields.
            temperature = 0.0 if sampling.greedy else max(sampling.temperature, tiny)
            real = [*growth.factors, temperature, growth.min_weight, *_padded(growth.weights, width, 0.0)]
            reals.append([*real, *_padded([leaf.weight for leaf in leaves], max_leaves, 0.0)])
            seed = signed(splitmix64(sampling.seed & MASK64), 64)
            whole = [seed, growth.width, growth.children, growth.position, growth.max_end, table]
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
        tail: Sequence[int],
    ) -> None:
        """``reals``, ``wholes``: by session, its floating-point numbers and its integers."""
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
                spare=self._steps.store.slots,
                pages=self._steps.pages,
                vocabulary=self._vocabulary,
                dtype=self._dtype,
                device=self._device,
            )
        return self._memories[sessions]

    # -- what is computed, and may be recorded -------------------------------------------------------------------------

    def _functions(self, memory: LevelMemory, kind: LaunchKind) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        return (lambda: self._first(memory, kind)), (lambda: self._further(memory, kind))

    @torch.inference_mode()
    def _first(self, memory: LevelMemory, kind: LaunchKind) -> Tensor:
        """Take in what the launch was told, and what the first level says."""
        self._ops.begin(memory)
        self._ops.expand(memory, memory.logits_MV, noisy=kind.noisy)
        return memory.found_KNWX

    @torch.inference_mode()
    def _further(self, memory: LevelMemory, kind: LaunchKind) -> Tensor:
        """Compute the rows that the last level made, and take in what they say."""
        logits_MX = self._steps.forward(StepShape(memory.count), memory.buffer)
        self._ops.expand(memory, logits_MX, noisy=kind.noisy)
        return memory.found_KNWX

    # -- recording -----------------------------------------------------------------------------------------------------

    def record(self) -> bool:
        """Record levels of every kind, and see that each says the same as computed; False: they are not to be used."""
        started = time.perf_counter()
        try:
            error = self._recorded()
        except Exception as failure:  # whatever a model does that cannot be recorded, or too little memory
            why = kind_and_line(failure)
        else:
            if error <= TOLERANCE:  # not if it is NaN
                log.info("draft levels recorded in %.1f s", time.perf_counter() - started)
                return True
            why = f"replayed ones are off by {error:.2g}"
        log.warning("draft levels are computed one by one: %s", why)
        return False

    @torch.inference_mode()
    def _recorded(self) -> float:
        """Record all; the largest difference between what is replayed and what was computed."""
        assert self._steps.record is not None
        kinds = [LaunchKind(sessions, noisy) for sessions in reversed(self.classes) for noisy in (False, True)]
        expected: dict[LaunchKind, Tensor] = {}
        for kind in kinds:
            memory = self._memory(kind.sessions)
            expected[kind] = self._trial(memory, kind)
            first, further = self._functions(memory, kind)
            self._recordings[kind] = self._steps.record(first), self._steps.record(further)
        # Once all are recorded: a later one may overwrite what an earlier one holds.
        errors = [
            (self._trial(self._memory(kind.sessions), kind) - found_KNWX).abs().max()
            for kind, found_KNWX in expected.items()
        ]
        return float(torch.stack(errors).max())  # NaN stays NaN

    def _trial(self, memory: LevelMemory, kind: LaunchKind) -> Tensor:
        """What two levels say that begin with random logits, in slots that are nobody's."""
        first_slot, page = self._steps.store.slots, self._steps.attention.page
        generator = torch.Generator().manual_seed(kind.sessions)
        logits_MV = 8 * torch.randn(memory.count, self._vocabulary, generator=generator)
        sampling = Sampling(temperature=0.8, seed=3) if kind.noisy else Sampling(temperature=0.0)
        growths = [
            LevelExpansion(
                sampling=sampling,
                stops=(),
                position=1,
                max_end=1 << 30,
                min_weight=0.0,
                width=self.width,
                children=self.children,
                factors=[1.0] * RANKS,
                blocks=[first_slot // page],
                rows=range(session * self.width, (session + 1) * self.width),
                places=[TreePlace(1, 1, ())] * self.width,
                weights=[1.0] * self.width,
                leaves=(),
                slots=range(first_slot + session * self.width, first_slot + (session + 1) * self.width),
            )
            for session in range(kind.sessions)
        ]
        odds = OddsTable([1.0] * RANKS, [1.0] * CELLS, [0.0] * CELLS)
        self._fill(memory, to_device(logits_MV.to(self._dtype), self._device), growths, odds)
        first, further = self._recordings.get(kind) or self._functions(memory, kind)
        first()
        return further()[:2].clone()


NOWHERE = TreePlace(0, 0, ())


def _ops_of(device: torch.device) -> LevelOps:
    if device.type != "cuda":
        return LevelOps()
    # Imported here: torch's builds for CPUs come without Triton.
    from engine.cuda.level_kernels import TritonLevelOps

    return TritonLevelOps(device)


def _padded(values: Sequence[T], size: int, fill: T) -> list[T]:
    return [*values, *[fill] * (size - len(values))]
