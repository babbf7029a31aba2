"""Attention by rows on a CPU: by :mod:`engine.cpu.library`, where it is there and knows the sizes, else by torch.

Tensor legend: T rows, Q query heads, H key/value heads, S slots, D key head size, E value head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.row_attention import RowAttention, RowPlan, Scoring
from engine.attention.rows import Rows
from engine.cpu.library import DTYPES, ROW_COLUMNS, CLayer, CRows, CStack, Library, find_library
from engine.cpu.thread_choice import COUNTS

READ_TOGETHER = 64
"""Queries that read keys together at most, all heads that share a key head counted."""

WORTH_A_TEAM = 1 << 27
"""Multiplications, some ten milliseconds of them, from which on more than one thread attends: torch's threads, which
have multiplied before, look for more to do for a while and would keep the library's from their cores."""


def described(rows: Rows, page: int) -> CRows:
    """Rows as the library reads them, as long as they stay."""
    columns = {name: getattr(rows, f"{name}_T").data_ptr() for name in ROW_COLUMNS}
    return CRows(count=len(rows), page=page, numbers=rows.numbers_F.data_ptr(), **columns)


@dataclass(frozen=True, slots=True)
class CpuPlan(RowPlan):
    """With the rows as the library reads them, and how many keys all of them see."""

    described: CRows | None = None
    keys: int = 0


class CpuRows(RowAttention):
    """See the module."""

    def __init__(self, library: Library, heads_per_key: int, *, all_layers: bool = False) -> None:
        """``heads_per_key``: query heads that share a key head.

        ``all_layers``: decoder layers are the library's, too, all of what they compute.
        """
        super().__init__(max(1, READ_TOGETHER // heads_per_key))
        self.all_layers = all_layers
        self._library = library

    def arithmetic(self, dtype: torch.dtype) -> str:
        """See :meth:`.RowAttention.arithmetic`."""
        if dtype == torch.float32:  # 1e-6 of a logit, and no text was seen to change
            return ""
        rows = f"rows of {self._library.width}" + (", pairs" if self._library.pairs else "")
        return rows if self.all_layers else f"attention in {rows}"

    def plan(self, rows: Rows) -> RowPlan:
        """See :meth:`.RowAttention.plan`."""
        return CpuPlan(rows, described=described(rows, self.page), keys=int(rows.keys_T.sum()))

    def __call__(
        self, query_TQD: Tensor, keys_SHD: Tensor, values_SHE: Tensor, plan: RowPlan, how: Scoring = Scoring()
    ) -> Tensor:
        """See :class:`.RowAttention`."""
        assert isinstance(plan, CpuPlan) and plan.described is not None
        (_, query_heads, size), (_, key_heads, value_size) = query_TQD.shape, values_SHE.shape
        library, dtype = self._library, query_TQD.dtype
        if dtype not in DTYPES or size % (2 * library.width) or value_size % library.width:
            return super().__call__(query_TQD, keys_SHD, values_SHE, plan, how)
        stack = CStack(
            query_heads=query_heads,
            key_heads=key_heads,
            head_size=size,
            value_size=value_size,
            half=dtype == torch.bfloat16,
        )
        sinks_Q = None if how.sinks_Q is None else how.sinks_Q.float().contiguous()
        layer = CLayer(
            keys=keys_SHD.data_ptr(),
            values=values_SHE.data_ptr(),
            sinks=None if sinks_Q is None else sinks_Q.data_ptr(),
            scaling=how.scale(size),
            window=how.window or 0,
            cap=how.cap or 0.0,
        )
        work = plan.keys * query_heads * (size + value_size)
        threads = COUNTS.few if work > WORTH_A_TEAM else 1
        found_TQE = library.attend(stack, layer, plan.described, query_TQD.float().contiguous(), threads)
        return found_TQE.to(dtype)


def on_cpu(heads_per_key: int, device: torch.device) -> CpuRows | None:
    """For a model whose layers are computed one operation at a time; None elsewhere, or where there is no library."""
    library = find_library() if device.type == "cpu" else None
    return None if library is None else CpuRows(library, heads_per_key)
