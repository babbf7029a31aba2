"""Steps by rows on a CPU: as large as what they compute, neither padded nor recorded.

Tensor legend: R rows wanted, X logits and whatever stands behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention import Step
from engine.cuda.attention import RowAttention
from engine.cuda.rows import FIELDS, Packed, Rows, packed
from engine.kv_store import KVStore
from engine.sequence_state import SequenceState

MAX_ROWS = 4096
"""Of a piece of a step."""

Compute = Callable[[Step, Tensor, Tensor, Tensor], Tensor]
"""See :data:`engine.cuda.graphs.Compute`."""


class CpuSteps:
    """Computes steps of one model over one store, row by row."""

    classes: Sequence[int] = ()
    """Steps are not padded."""

    def __init__(self, compute: Compute, store: KVStore, attention: RowAttention, layers: int, context: int) -> None:
        """``context``: tokens of the longest sequence."""
        self._compute, self._store, self._attention, self._layers = compute, store, attention, layers
        self._context = context

    def run(self, tokens: Sequence[int], wanted: Sequence[int], chunks: Sequence[tuple[SequenceState, int]]) -> Tensor:
        """The rows of :class:`engine.forward.StepInput` that are wanted, ``[R, X]``."""
        order = sorted(set(wanted))
        page = chunks[0][0].block
        pieces = packed(
            tokens,
            order,
            chunks,
            group=self._attention.group,
            max_rows=MAX_ROWS,
            pages=-(-self._context // page),
            wanted_at_most=MAX_ROWS,
        )
        found = [self._piece(piece, page) for piece in pieces]
        found_RX = torch.cat(found) if len(found) > 1 else found[0]
        if order == list(wanted):
            return found_RX
        place = {row: i for i, row in enumerate(order)}
        return found_RX[[place[row] for row in wanted]]

    def avoid(self, rows: int) -> None:
        """There is no class to avoid."""

    def warm_up(self) -> bool:
        """Nothing is recorded."""
        return False

    def _piece(self, piece: Packed, page: int) -> Tensor:
        columns = torch.tensor([piece.columns[name] for name in FIELDS], dtype=torch.int32)
        rows = Rows(
            wanted_R=torch.tensor(piece.wanted, dtype=torch.int64),
            numbers_F=torch.tensor(piece.numbers, dtype=torch.int32),
            **{f"{name}_T": columns[i] for i, name in enumerate(FIELDS)},
        )
        step = Step(self._store, (), rows.slots_T, self._layers, rows=rows, attention=self._attention, page=page)
        return self._compute(step, rows.tokens_T.long(), rows.positions_T.long(), rows.wanted_R)
