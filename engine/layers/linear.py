"""Linear layers whose weights are stored the way oneDNN multiplies them.

``torch.nn.functional.linear`` re-orders the weight on every call, which costs more than the product itself when there
are few tokens: exactly the steps of decoding and verification. Here the weight is re-ordered once, at load. And since
a call costs about 10 us however small the product, layers that read the same input are multiplied together.

Decides nothing about which device or dtype to run; :func:`can_pack` says where packing applies. Weights that are
quantised already get the layers of :mod:`engine.layers.int8_linear`.

Tensor legend: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.host.memory import collapse
from engine.layers.int8_linear import Int8Linear, planes_of

EXPECTED_TOKENS = 16
"""Row count the packed layout is chosen for.

At 1024 inputs in fp32, a layout chosen for 8 or 16 rows is up to twice as fast as one chosen for 1 row, for 1 row
too; in bf16 all choices are equal.
"""

LONE_ROW_INPUTS = 1024
"""Inputs up to which a single bfloat16 row is added up in the same order as a row among others."""

TILE_ROWS = 32
"""With AMX, bfloat16 rows up to which oneDNN adds each of them up in an order that depends on the inputs only."""

TILE_INPUTS = 256
"""Inputs up to which it does so for any number of rows."""

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that, side by side in one module, usually read the same input. A wrong guess costs speed only."""


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has packed kernels for this weight here."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    plain = type(weight.data) is Tensor  # a quantised one only claims the dtype
    computes = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and packs_bfloat16())
    return available and plain and weight.device.type == "cpu" and computes


def packs_bfloat16() -> bool:
    """Whether oneDNN multiplies packed bfloat16 weights here: it takes AVX-512 (or AVX-NE-CONVERT)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_tiles() -> bool:
    """Whether oneDNN multiplies bfloat16 in tiles here: AMX."""
    return bool(torch.cpu._is_amx_tile_supported())


class _Wanted(threading.local):
    invariant = True


_wanted = _Wanted()


@contextmanager
def products(*, invariant: bool) -> Iterator[None]:
    """Whether a row of a packed bfloat16 product inside must have the same bits whatever the others; else it is faster.

    By default it must.
    """
    before, _wanted.invariant = _wanted.invariant, invariant
    try:
        yield
    finally:
        _wanted.invariant = before


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with a packed weight; stands in for :class:`torch.nn.Linear` at inference."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        # Plain attributes, not parameters: an opaque layout can be neither moved, cast nor saved.
        weight_OI = weight_OI.detach().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, EXPECTED_TOKENS)
        collapse(torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed))
        self._bias_O = None if bias_O is None else bias_O.detach()
        half = weight_OI.dtype == torch.bfloat16
        self._lone_row_differs = half and self.in_features > LONE_ROW_INPUTS
        self._many_rows_differ = half and self.in_features > TILE_INPUTS and has_tiles()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.weight = weight_OI.new_empty(0)
        """Empty, for models that ask for its dtype; the numbers are packed."""

    def forward(self, x_NI: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``.

        In bfloat16 a row's result has the same bits alone and among others, as decoding and verification must agree,
        unless :func:`products` says otherwise.
        For many inputs oneDNN multiplies a lone row by another kernel, so it is given a companion; with AMX it cuts
        the sums of many rows by their number, so they are multiplied some at a time.
        """
        rows = x_NI.numel() // self.in_features
        differs = self._lone_row_differs if rows == 1 else self._many_rows_differ and rows > TILE_ROWS
        if not (differs and _wanted.invariant):
            return self._product(x_NI)
        flat_NI = x_NI.reshape(rows, self.in_features)
        parts = [self._few_rows(flat_NI[start : start + TILE_ROWS]) for start in range(0, rows, TILE_ROWS)]
        return torch.cat(parts).view(*x_NI.shape[:-1], self.out_features)

    def _few_rows(self, x_NI: Tensor) -> Tensor:
        if len(x_NI) == 1 and self._lone_row_differs:
            return self._product(x_NI.expand(2, -1))[:1]
        return self._product(x_NI)

    def _product(self, x_NI: Tensor) -> Tensor:
        product: Tensor = self._multiply(x_NI, self._packed, self._bias_O, "none", [], "")
        return product


class SharedProduct:
    """Several linear layers as one: computed when the first is called, handed out to the others.

    The input is recognised by identity, so a layer called with another tensor just computes again. Nothing is kept
    once the last layer has its part, or a long prefill would hold the products of every layer of the model.
    """

    def __init__(self, linear: PackedLinear | Int8Linear, sizes: Sequence[int]) -> None:
        """``sizes``: how many outputs of ``linear`` belong to each layer, in order."""
        self._linear = linear
        self._sizes = sizes
        self._input_NI: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, index: int, x_NI: Tensor) -> Tensor:
        """What layer ``index`` makes of ``x_NI``."""
        if x_NI is not self._input_NI:
            self._input_NI = x_NI
            self._parts = torch.split_with_sizes(self._linear.forward(x_NI), self._sizes, -1)
        part = self._parts[index]
        if index == len(self._sizes) - 1:
            self._input_NI, self._parts = None, ()
        return part


class PartialLinear(nn.Module):
    """One of the layers of a :class:`SharedProduct`, in the place of the original."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self._shared = shared
        self._index = index

    def forward(self, x_NI: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``."""
        return self._shared.part(self._index, x_NI)


def pack_linears(module: nn.Module) -> int:
    """Replace every packable linear layer inside ``module``; return how many.

    Each plain weight is dropped as soon as its packed copy exists, so memory peaks one layer above the model. A weight
    tied to the embedding stays for the embedding.
    """
    packed = 0
    for parent in module.modules():
        for names in SIBLINGS:
            packed += _pack_siblings(parent, names)
        for name, child in parent.named_children():
            if type(child) is nn.Linear and (layer := _packed([child])):
                setattr(parent, name, layer)
            elif type(child) is Conv1D and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight.t(), child.bias))
            else:
                continue
            packed += 1
    return packed


def _pack_siblings(parent: nn.Module, names: Sequence[str]) -> int:
    """Pack the named children of ``parent`` together, if they are alike enough; return how many were packed."""
    layers = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
    if len(layers) < len(names) or not (linear := _packed(layers)):
        return 0
    shared = SharedProduct(linear, [layer.out_features for layer in layers])
    for index, name in enumerate(names):
        setattr(parent, name, PartialLinear(shared, index))
    return len(names)


def _packed(layers: Sequence[nn.Linear]) -> PackedLinear | Int8Linear | None:
    """One packed layer with the outputs of all; None if they are not alike enough, or cannot be packed."""
    planes = planes_of(layers[0].weight)
    if not planes and not can_pack(layers[0].weight):
        return None
    if (
        len({(layer.in_features, layer.bias is None, layer.weight.dtype, planes_of(layer.weight)) for layer in layers})
        > 1
    ):
        return None
    bias_O = None if layers[0].bias is None else _joined([layer.bias.detach() for layer in layers])
    if not planes:
        return PackedLinear(_joined([layer.weight.detach() for layer in layers]), bias_O)
    weights: list[Any] = [layer.weight for layer in layers]
    values_OI = _joined([weight.qdata for weight in weights])
    return Int8Linear(values_OI, _joined([weight.scale.flatten() for weight in weights]), bias_O, planes)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one below the other, without a copy where there is only one."""
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
