"""Products with int8 weights on CUDA: half the bytes of bfloat16 ones are read, and made wide in registers.

torchao decides the weights (values, and a scale for each row of them); multiplied in eager mode it writes each weight
out in the model's own format first, four times slower than bfloat16 weights. The activations stay as they are.

The weight is the first operand of the tensor cores and the rows of a step are the columns of the second, so few rows
waste little. Each sum runs over the same pieces of the inputs in the same order whatever the number of rows; pieces of
one product that several programs add up are added in a fixed order by a second kernel. What is launched depends on
sizes of the model and the number of rows alone, and can be recorded.

Only for use on CUDA: it imports Triton, which builds of torch for CPUs come without. With ``TRITON_INTERPRET=1`` set
before the import it also runs on a CPU, slowly.

Tensor legend: T rows, I inputs, O outputs, P pieces of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

OUTPUTS, INPUTS, ROWS = 64, 128, (16, 32, 64)
"""Of a tile: outputs, inputs that are read at a time, and rows, the fewest that hold all of a step."""
WARPS, STAGES = 4, {2: 4, 4: 2}
"""How many tiles are under way, by the bytes of an activation: what a small GPU has shared memory for."""
PROGRAMS = 256
"""That a product should have: sums are cut in as many pieces as that takes."""
SHORTEST = 512
"""Inputs of a piece, at least."""
MOST_ROWS = 512
"""That are multiplied at a time: partial sums of all pieces are in memory."""
SUMMED = 1024
"""Outputs that a program of the second kernel adds up."""


@triton.jit(do_not_specialize=["T"])
def _multiply(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, T, SIZE_I: tl.constexpr, SIZE_O: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BIAS: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program is a piece of the sums of a tile; ``WHOLE``: it is all of them, and writes what is wanted."""
    t, o, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, outputs = t * BLOCK_T + tl.arange(0, BLOCK_T), o * BLOCK_O + tl.arange(0, BLOCK_O)
    there, wanted = rows < T, outputs < SIZE_O
    i = tl.arange(0, BLOCK_I)
    x_at = x_ptr + rows[None, :].to(tl.int64) * SIZE_I
    weight_at = weight_ptr + outputs[:, None].to(tl.int64) * SIZE_I
    sum_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for start in range(0, PIECE, BLOCK_I):
        inputs = piece * PIECE + start + i
        inside = inputs < SIZE_I
        weight_OI = tl.load(weight_at + inputs[None, :], mask=wanted[:, None] & inside[None, :], other=0)
        x_IT = tl.load(x_at + inputs[:, None], mask=inside[:, None] & there[None, :], other=0.0)
        sum_OT = tl.dot(weight_OI.to(x_IT.dtype), x_IT, sum_OT, input_precision=PRECISION)
    inside_OT = wanted[:, None] & there[None, :]
    at = rows[None, :].to(tl.int64) * SIZE_O + outputs[:, None]
    if WHOLE:
        sum_OT = sum_OT * tl.load(scale_ptr + outputs, mask=wanted, other=0.0)[:, None]
        if BIAS:
            sum_OT += tl.load(bias_ptr + outputs, mask=wanted, other=0.0)[:, None]
        tl.store(out_ptr + at, sum_OT.to(out_ptr.dtype.element_ty), mask=inside_OT)
    else:
        tl.store(out_ptr + piece.to(tl.int64) * T * SIZE_O + at, sum_OT, mask=inside_OT)


@triton.jit(do_not_specialize=["T"])
def _add(
    sums_ptr, scale_ptr, bias_ptr, out_ptr, T, SIZE_O: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """A program is a part of a row."""
    t, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = o < SIZE_O
    sum_O = tl.load(sums_ptr + t * SIZE_O + o, mask=wanted, other=0.0)
    for piece in tl.static_range(1, PIECES):
        sum_O += tl.load(sums_ptr + (t + piece * T) * SIZE_O + o, mask=wanted, other=0.0)
    sum_O *= tl.load(scale_ptr + o, mask=wanted, other=0.0)
    if BIAS:
        sum_O += tl.load(bias_ptr + o, mask=wanted, other=0.0)
    tl.store(out_ptr + t * SIZE_O + o, sum_O.to(out_ptr.dtype.element_ty), mask=wanted)


class Int8Product(nn.Module):
    """``x @ (values * scale[:, None]).T + bias``, one or several linear layers that torchao quantised as one."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """``parts``: linear layers of the same inputs, whose weights become views of the joined ones.

        :func:`engine.layers.int8_linear.weights_alone` must hold of these. All have a bias, or none.
        """
        super().__init__()
        weights: list[Any] = [part.weight for part in parts]
        sizes = [len(weight.qdata) for weight in weights]
        values_OI = torch.cat([weight.qdata for weight in weights])
        for weight, view in zip(weights, torch.split_with_sizes(values_OI, sizes), strict=True):
            weight.qdata = view
        scale_O = torch.cat([weight.scale.flatten().float() for weight in weights])
        self.values_OI = nn.Parameter(values_OI, requires_grad=False)
        self.scale_O = nn.Parameter(scale_O, requires_grad=False)
        biases: list[Any] = [part.bias for part in parts]
        self.bias_O = None if biases[0] is None else torch.cat([bias.detach().float() for bias in biases])
        self.out_features, self.in_features = self.values_OI.shape
        tiles = -(-self.out_features // OUTPUTS)
        pieces = max(1, min(-(-PROGRAMS // tiles), self.in_features // SHORTEST))
        self._piece = -(-self.in_features // (pieces * INPUTS)) * INPUTS
        self._pieces = -(-self.in_features // self._piece)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I] -> [..., O]`` in the dtype of ``x``."""
        x_TI = x.reshape(-1, self.in_features).contiguous()
        out_TO = x_TI.new_empty(len(x_TI), self.out_features)
        for start in range(0, len(x_TI), MOST_ROWS):
            self._into(out_TO[start : start + MOST_ROWS], x_TI[start : start + MOST_ROWS])
        return out_TO.view(*x.shape[:-1], self.out_features)

    def _into(self, out_TO: Tensor, x_TI: Tensor) -> None:
        rows, outputs = out_TO.shape
        block = next((block for block in ROWS if rows <= block), ROWS[-1])
        whole = self._pieces == 1
        sums = out_TO if whole else out_TO.new_empty((self._pieces, rows, outputs), dtype=torch.float32)
        bias_O = self.scale_O if self.bias_O is None else self.bias_O
        biased = self.bias_O is not None
        _multiply[(-(-rows // block), -(-outputs // OUTPUTS), self._pieces)](
            x_TI, self.values_OI, self.scale_O, bias_O, sums, rows, self.in_features, outputs, self._piece,
            block, OUTPUTS, INPUTS, biased, whole, "ieee" if x_TI.dtype == torch.float32 else "tf32",
            num_warps=WARPS, num_stages=STAGES[x_TI.element_size()],
        )  # fmt: skip
        if not whole:
            grid = rows, -(-outputs // SUMMED)
            _add[grid](sums, self.scale_O, bias_O, out_TO, rows, outputs, self._pieces, SUMMED, biased)
