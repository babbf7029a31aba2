"""Steps by rows on a CPU: as large as what they compute, neither padded nor recorded.

Tensor legend: R rows wanted, X logits and whatever stands behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.attention.attention import Compute, Step
from engine.attention.row_attention import RowAttention
from engine.attention.rows import Packed, Rows, as_wanted, packed
from engine.cache.kv_store import KVStore
from engine.cache.sequence_state import SequenceState
from engine.sampling.sampling import Draw

MAX_ROWS = 4096
"""Of a piece of a step."""


class CpuSteps:
    """Computes steps of one model over one store, row by row."""

    classes: Sequence[int] = ()
    """Steps are not padded."""
    drawn_R2: Tensor | None = None
    """Nothing is drawn in a step."""

    def __init__(
        self,
        compute: Compute,
        store: KVStore,
        attention: RowAttention,
        layers: int,
        context: int,
        computed: Callable[[int], None],
    ) -> None:
        """``context``: tokens of the longest sequence. ``computed``: told of each piece of a step how many rows."""
        self._compute, self._store, self._attention, self._layers = compute, store, attention, layers
        self._computed = computed
        self._context = context

    def run(
        self,
        tokens: Sequence[int],
        wanted: Sequence[int],
        chunks: Sequence[tuple[SequenceState, int]],
        draws: Sequence[Draw] = (),  # noqa: ARG002
    ) -> Tensor:
        """The rows of :class:`engine.forward.StepInput` that are wanted, ``[R, X]``; nothing is drawn here."""
        order, page = sorted(set(wanted)), self._attention.page
        assert all(state.block == page for state, _ in chunks), "pages are the cache's blocks"
        pages = -(-self._context // page)
        pieces = packed(tokens, order, chunks, group=self._attention.group, max_rows=MAX_ROWS, pages=pages)
        return as_wanted([self._piece(piece) for piece in pieces], order, wanted)

    def avoid(self, rows: int) -> None:
        """There is no class to avoid."""

    def warm_up(self) -> bool:
        """Nothing is recorded."""
        return False

    def _piece(self, piece: Packed) -> Tensor:
        rows = Rows.within(piece.host_buffer(len(piece), 0), len(piece))
        step = Step(self._store, (), rows.slots_T, self._layers, rows=rows, attention=self._attention)
        wanted_R = rows.wanted_R[: len(piece.wanted)].long()
        found_RX = self._compute(step, rows.tokens_T.long(), rows.positions_T.long(), wanted_R)
        self._computed(len(piece))
        return found_RX
