"""Small steps recorded once, then replayed: on CUDA the host takes longer to launch their kernels than these to run.

Decides which steps are replayed: those of few tokens, all in chains over pages (:mod:`engine.cuda.pages`), which are
decoding and verification. Such a step is padded to one of :data:`SIZES` with tokens that read and write spare slots
only. What was recorded reads its inputs from buffers that stay where they are; everything else of a step, such as
which slots were moved before, is in the cache itself.

A recording is compared with the computation it was made from. If it differs, or recording fails, nothing is replayed
any more, which is logged.

Tensor legend: T tokens of a padded step, V vocabulary (padded as in the model).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import PagedPart, Step
from engine.cuda.kernel import PagedKernel, first_line
from engine.cuda.pages import Chain, Pages, empty_pages
from engine.kv_store import KVStore
from engine.upload import upload

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Tokens that steps are padded to."""

TOLERANCE = 0.02
"""Largest accepted difference between a recording and the computation, relative to the largest logit."""

Compute = Callable[[Step, Tensor, Tensor], Tensor]
"""The logits ``[T, V]`` of a step from its tokens and their positions."""

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Makes of a function one that does the same again, to the same memory."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A step of some size: its buffers, and what computes it from them."""

    inputs_3T: Tensor
    """Tokens, positions and slots."""
    pages: Pages
    replay: Callable[[], Tensor]


class Graphs:
    """The recordings of one model over one store."""

    def __init__(
        self, compute: Compute, store: KVStore, kernel: PagedKernel, layers: int, context: int, record: Record
    ) -> None:
        """Nothing is recorded yet. ``context``: tokens of the longest sequence."""
        self.sizes = tuple(size for size in SIZES if size <= store.spare)
        """Sizes of what may be replayed; none once recording has failed."""
        self._compute, self._store, self._kernel = compute, store, kernel
        self._layers, self._context, self._record = layers, context, record
        self._recordings: dict[int, Recording] = {}

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], chains: Sequence[Chain], page: int
    ) -> Tensor | None:
        """The logits of all tokens, ``[T, V]`` with padding, good until the next call; None: not to be replayed.

        ``chains``: all tokens of the step, in packed order; their pages have ``page`` slots.
        """
        size = next((size for size in self.sizes if size >= len(tokens)), None)
        if size is None:
            return None
        padding = range(size - len(tokens))
        store = self._store
        numbers = [*tokens, *(0 for _ in padding), *positions, *padding, *slots, *(store.slots + i for i in padding)]
        inputs_3T = upload(numbers, store.device).view(3, size)
        # One sequence more than can have tokens, for the padding. It lies in the spare page.
        rest = [Chain(len(padding), len(padding), (store.slots // page,)), *[Chain(0, 0, ())] * (size - len(chains))]
        pages = Pages.of([*chains, *rest], page, store.device)
        recording = self._recordings.get(size)
        if recording is None:
            return self._first(inputs_3T, pages)
        recording.inputs_3T.copy_(inputs_3T)
        recording.pages.overwrite(pages)
        return recording.replay()

    def _first(self, inputs_3T: Tensor, pages: Pages) -> Tensor | None:
        """Compute a step of a size that was not seen before, and record it."""
        size, device = inputs_3T.shape[1], self._store.device
        width = -(-self._context // pages.page)
        buffer = empty_pages(size + 1, width, pages.page, most_queries=size, device=device)
        buffer.overwrite(pages)

        def compute() -> Tensor:
            tokens_T, positions_T, slots_T = inputs_3T
            part = PagedPart(self._kernel, buffer, frozenset())
            return self._compute(Step(self._store, (), slots_T, self._layers, paged=part), tokens_T, positions_T)

        try:
            expected_TV = compute().clone()
            recording = Recording(inputs_3T, buffer, self._record(compute))
            found_TV = recording.replay()
            error = float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())
        except Exception as failure:  # whatever a model does that cannot be recorded
            self._give_up(first_line(failure))
            return None
        if not error <= TOLERANCE:  # also when it is NaN
            self._give_up(f"logits of a replayed step of {size} tokens are off by {error:.2g}")
            return None
        self._recordings[size] = recording
        return found_TV

    def _give_up(self, why: str) -> None:
        log.warning("steps are not replayed as CUDA graphs: %s", why)
        self.sizes = ()
        self._recordings.clear()


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
                    found_TV = compute()
            torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return found_TV

        return replay
