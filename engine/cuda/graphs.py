"""Steps recorded once, then replayed: on CUDA the host takes longer to launch their kernels than these to run.

Every step is replayed, whatever it is made of: it is laid out as rows (:mod:`engine.attention.rows`), padded to a class
of rows, and what was recorded for that class reads it from a buffer that stays where it is. A step larger than the
largest class is computed in pieces. Where nothing can be recorded the same rows are computed kernel by kernel.

A recording is compared with the computation it was made from, and all are compared again after the last was made, since
a later recording may overwrite what an earlier one holds. If any differs, or recording fails, nothing is replayed any
more, which is logged.

Tensor legend: T rows of a padded step, R of them wanted, V vocabulary with padding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.attention import Compute, PagedLayers, Step
from engine.attention.rows import ROW_CLASSES, HostBuffer, Packed, Rows, as_wanted, empty_buffer, max_numbers, packed
from engine.cache.kv_store import KVStore
from engine.cache.sequence_state import SequenceState
from engine.model import kind_and_line
from engine.sampling.sampling import DRAWN_ROWS, Draw, draw_numbers, drawn_in_step

log = logging.getLogger(__name__)

TOLERANCE = 0.02
"""Largest accepted difference between a recording and the computation, relative to the largest logit."""

VARIED = 64
"""Different tokens of what recordings are checked with: were all the same, attention could weigh them as it likes."""

CHECKED = 1024
"""Columns of each row that are kept to be compared at the end."""

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Makes of a function one that does the same again, to the same memory."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides which kernels a step launches."""

    rows: int
    noise: bool = False
    """Whether rows are drawn at temperatures above 0."""


class Inbox:
    """Where on the device a step is read from, and the memory on the host from which it gets there."""

    def __init__(self, rows: int, pages: int, store: KVStore) -> None:
        """For steps padded to ``rows`` rows; ``pages``: of the longest sequence."""
        on_cuda = store.device.type == "cuda"
        self.buffer = empty_buffer(rows, pages, store.device)
        """As :meth:`engine.attention.rows.Rows.within` finds it."""
        self._host = HostBuffer(rows, store.slots, max_numbers(rows, pages), pinned=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def fill(self, piece: Packed, draws: NDArray[np.int32] | None) -> None:
        """With a step; ``draws``: see :meth:`engine.attention.rows.HostBuffer.fill`."""
        if self._copied is not None:
            self._copied.synchronize()  # a step before this one may still be on its way
        numbers = self._host.fill(piece, draws)
        self.buffer[: numbers.numel()].copy_(numbers, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class RowSteps:
    """Computes steps of one model over one store, row by row."""

    def __init__(
        self,
        compute: Compute,
        layers: PagedLayers,
        record: Record | None = None,
        agreed: Callable[[bool], bool] = bool,
        vocabulary: int = 0,
        computed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``record``: how steps are recorded, if they are.

        ``agreed``: whether what succeeded here did so on all ranks that compute the same, which ask at the same time.
        ``vocabulary``: how many of the V are tokens to draw from, where recorded steps of up to
        :data:`~engine.sampling.sampling.DRAWN_ROWS` rows do so; 0: none does. ``computed``: told of each piece of a
        step, once it is computed, how many rows it has.
        """
        self.drawn_R2: Tensor | None = None
        """What the last step drew, as :func:`~engine.sampling.sampling.drawn_in_step` has it; None: it did not."""
        self._compute, self.layers, self.record, self._agreed = compute, layers, record, agreed
        self.store, self.attention, self.pages = layers.store, layers.attention, layers.pages
        self.classes = tuple(rows for rows in ROW_CLASSES if rows <= self.store.spare)
        """Numbers of rows that steps are padded to."""
        self._recordings: dict[StepShape, tuple[Inbox, Callable[[], Tensor]]] = {}
        """Of each shape where a step is read from, and what computes it."""
        self._vocabulary, self._told = vocabulary, computed
        self._drawn_R2 = torch.zeros(DRAWN_ROWS, 2, dtype=torch.int32, device=self.store.device)

    def run(
        self,
        tokens: Sequence[int],
        wanted: Sequence[int],
        chunks: Sequence[tuple[SequenceState, int]],
        draws: Sequence[Draw] = (),
    ) -> Tensor:
        """The rows of :class:`engine.forward.StepInput` that are wanted, ``[R, V]``.

        ``draws``: plain ones, of these rows, if they may be drawn in the step. If they are, the result is good until
        the next step only.
        """
        self.drawn_R2 = None
        order = sorted(set(wanted))
        group, max_rows = self.attention.group, self.classes[-1]
        pieces = list(packed(tokens, order, chunks, group=group, max_rows=max_rows, pages=self.pages))
        if draws and len(pieces) == 1 and order == list(wanted) and self._draws(rows := self._class(pieces[0])):
            numbers = draw_numbers(draws)
            shape = StepShape(rows, noise=bool(numbers[0].any()))
            found_RV = self._computed(shape, pieces[0], numbers)
            if self.record is not None:  # it was not given up just now
                self._told(len(pieces[0]))
                self.drawn_R2 = self._drawn_R2[: len(wanted)]
                return found_RV[: len(wanted)]
        found: list[Tensor] = []
        for piece in pieces:
            found_RV = self._computed(StepShape(self._class(piece)), piece)
            found.append(found_RV[: len(piece.wanted)].clone())  # the next replay overwrites it
            self._told(len(piece))
        return as_wanted(found, order, wanted)

    def avoid(self, rows: int) -> None:
        """Compute no more steps of this class; larger ones are cut, smaller ones padded to the next class."""
        if len(self.classes) > 1:
            self.classes = tuple(each for each in self.classes if each != rows)
            log.info("steps of %d rows are not computed: they give tokens other bits than others do", rows)

    def warm_up(self) -> bool:
        """Record a step of every shape, and see that each still computes what it did when all are recorded.

        False: nothing is recorded.
        """
        if self.record is None:
            return False
        started, before = time.perf_counter(), self._reserved()
        shapes = [
            StepShape(rows, noise)
            for rows in reversed(self.classes)
            for noise in ((False, True) if self._draws(rows) else (False,))
        ]
        expected: dict[StepShape, tuple[Packed, Tensor]] = {}
        for shape in shapes:
            piece = self._throwaway(shape.rows)
            found_RV = self._computed(shape, piece)
            if self.record is None:  # given up meanwhile
                return True
            expected[shape] = piece, found_RV[:, :CHECKED].clone()
        for shape, (piece, expected_RV) in expected.items():
            error = _difference(self._computed(shape, piece)[:, :CHECKED], expected_RV)
            if not self._agreed(error <= TOLERANCE):
                self._give_up(f"a step of {shape.rows} rows is off by {error:.2g} once all are recorded")
                return True
        taken = (self._reserved() - before) / 2**20
        log.info("%d CUDA graphs recorded in %.1f s, %.0f MiB", len(shapes), time.perf_counter() - started, taken)
        return True

    def _class(self, piece: Packed) -> int:
        return next(rows for rows in self.classes if rows >= len(piece) and piece.fits(rows, self.pages))

    def _draws(self, rows: int) -> bool:
        """Whether steps of so many rows draw."""
        return self.record is not None and self._vocabulary > 0 and rows <= DRAWN_ROWS

    def _computed(self, shape: StepShape, piece: Packed, draws: NDArray[np.int32] | None = None) -> Tensor:
        """``[R, V]`` with padding, good until the next call."""
        recording = self._recordings.get(shape)
        if recording is not None:
            inbox, replay = recording
            inbox.fill(piece, draws)
            return replay()
        inbox = Inbox(shape.rows, self.pages, self.store)
        inbox.fill(piece, draws)
        if self.record is None:
            return self.forward(shape, inbox.buffer)
        return self._first(shape, inbox)

    def _first(self, shape: StepShape, inbox: Inbox) -> Tensor:
        """Compute a step of a shape that was not seen before, and record it."""
        assert self.record is not None
        buffer = inbox.buffer
        expected_RV = self.forward(shape, buffer).clone()
        replay, why = None, "another rank cannot record one"
        try:
            replay = self.record(lambda: self.forward(shape, buffer))
        except Exception as failure:  # whatever a model does that cannot be recorded
            why = kind_and_line(failure)
        if not self._agreed(replay is not None) or replay is None:
            self._give_up(why)
            return expected_RV
        error = _difference(replay(), expected_RV)
        if not self._agreed(error <= TOLERANCE):  # also when it is NaN
            self._give_up(f"logits of a replayed step of {shape.rows} rows are off by {error:.2g}")
        else:
            self._recordings[shape] = inbox, replay
        return expected_RV

    def forward(self, shape: StepShape, buffer: Tensor) -> Tensor:
        """Compute the rows in a buffer kernel by kernel, which may be recorded: ``[R, V]``."""
        rows = Rows.within(buffer, shape.rows)
        step = Step(self.layers, rows.slots_T.long(), rows)
        found_RV = self._compute(step, rows.tokens_T.long(), rows.positions_T.long(), rows.wanted_R.long())
        if self._draws(shape.rows):
            logits_RV = found_RV[:, : self._vocabulary].float()
            drawn_R2 = drawn_in_step(logits_RV, rows.draws_3R, noise=shape.noise)
            self._drawn_R2[: len(drawn_R2)].copy_(drawn_R2)
        return found_RV

    def _throwaway(self, rows: int) -> Packed:
        """A prompt in the store's spare slots, with as many rows as fit into a class."""
        page, first = self.attention.page, self.store.slots
        count = min(rows, self.layers.context)
        slots = list(range(first, first + count))
        blocks = list(range(first // page, -(-(first + count) // page)))
        state = SequenceState(page, blocks, 0, list(range(-1, count - 1)), list(range(count)), slots)
        tokens, chunks, group = [i % VARIED for i in range(count)], [(state, count)], self.attention.group
        (piece,) = packed(tokens, [count - 1], chunks, group=group, max_rows=rows, pages=self.pages)
        return piece

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.store.device) if self.store.device.type == "cuda" else 0

    def _give_up(self, why: str) -> None:
        log.warning("steps are not replayed as CUDA graphs: %s", why)
        self.record = None
        self._recordings.clear()


def _difference(found_RV: Tensor, expected_RV: Tensor) -> float:
    """Relative to the largest logit."""
    return float((found_RV - expected_RV).abs().max() / expected_RV.abs().max())


class CudaRecorder:
    """Records CUDA graphs that share their memory: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            # One for all: libraries keep memory for each stream that they were used on.
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record what ``compute`` does, which must have run before: what is set up once must not be recorded."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            # The outer block leaves the stream also where recording fails, which the inner one then does not.
            with torch.cuda.stream(self._stream):
                compute()
                # Only what this thread does must be fit to be recorded; another may compute, such as a draft worker's.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    found_RV = compute()
            torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return found_RV

        return replay
