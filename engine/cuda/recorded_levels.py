"""Several levels of draft trees on CUDA: a level is recorded once and replayed as often as levels are wanted.

So the host neither lays out nor draws anything between them. What is recorded is compared with what it was made from.

Tensor legend: as in :mod:`engine.levels.level_memory`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.graphs import TOLERANCE, RowSteps, StepShape
from engine.host.upload import to_device
from engine.levels.level_memory import LevelExpansion, LevelMemory, TreePlace
from engine.levels.level_ops import LevelOps
from engine.levels.levels import Levels
from engine.model import kind_and_line
from speculation.messages import Sampling
from speculation.verifying.calibration import RANKS, OddsTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """What decides which kernels a level launches."""

    sessions: int
    noisy: bool
    """Whether any session draws with noise."""


class RecordedLevels(Levels):
    """Levels of steps that are recorded."""

    def __init__(
        self,
        steps: RowSteps,
        vocabulary: int,
        dtype: torch.dtype,
        *,
        width: int,
        children: int,
        by_token: Callable[[Tensor], Tensor] | None = None,
        ops: LevelOps | None = None,
    ) -> None:
        """``by_token``: makes logits of tokens of the model's outputs, unless that is what they are.

        ``ops``: how levels are computed; None: as is best on the store's device. All else as of a :class:`Levels`.
        Nothing is recorded before :meth:`record`.
        """
        super().__init__(steps.layers, vocabulary, dtype, steps.classes, width=width, children=children)
        self._steps, self._by_token = steps, by_token
        self._ops = ops or _ops_of(self._device)
        self._recordings: dict[LaunchKind, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}
        """What the first level says, and a further one."""

    def _expand(self, memory: LevelMemory, levels: int, *, noisy: bool) -> None:
        kind = LaunchKind(memory.sessions, noisy)
        first, further = self._recordings.get(kind) or self._functions(memory, kind)
        first()
        for _ in range(levels - 1):
            further()

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
        if self._by_token is not None:
            logits_MX = self._by_token(logits_MX)
        self._ops.expand(memory, logits_MX, noisy=kind.noisy)
        return memory.found_KNWX

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
        first_slot, page = self._layers.store.slots, self._layers.attention.page
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
        self._fill(memory, to_device(logits_MV.to(self._dtype), self._device), growths, OddsTable())
        first, further = self._recordings.get(kind) or self._functions(memory, kind)
        first()
        return further()[:2].clone()


def recorded_levels(
    steps: RowSteps,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    width: int,
    children: int,
    by_token: Callable[[Tensor], Tensor] | None = None,
) -> RecordedLevels | None:
    """Recorded as :class:`RecordedLevels`; None where steps are not recorded, or their levels cannot be."""
    if steps.record is None:
        return None
    levels = RecordedLevels(steps, vocabulary, dtype, width=width, children=children, by_token=by_token)
    return levels if levels.max_sessions and levels.record() else None


def _ops_of(device: torch.device) -> LevelOps:
    if device.type != "cuda":
        return LevelOps()
    # Imported here: torch's builds for CPUs come without Triton.
    from engine.cuda.level_kernels import TritonLevelOps

    return TritonLevelOps(device)
