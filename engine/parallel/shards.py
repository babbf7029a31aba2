"""The layers of a model split over ranks, each computing with nothing but its own slice.

transformers reads each rank's slice of the weights and computes correctly with it, but through distributed tensors and
hooks, which cost more than small products do and which cannot be packed. So the plain layers are replaced: split ones
by ordinary linear layers over the slice, which :mod:`engine.layers.linear` then packs like any other. Layers of other
kinds, such as experts, stay as transformers made them.

Tensor legend: N tokens, I inputs, O outputs, V vocabulary, D width of the embedding; each lowercase: this rank's slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.utils import is_dtensor

from engine.parallel.group import Group

MAKE_KEYS = ("k_proj", "kv_b_proj", "qkv_proj", "query_key_value")
"""How the names of layers end that keys and values come from."""


class SummedLinear(nn.Module):
    """A layer split by inputs: every rank has all outputs of a part of the inputs, and the parts are summed."""

    def __init__(self, group: Group, weight_Oi: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self._group = group
        self._bias_O = bias_O
        self.part = plain_linear(weight_Oi, None)

    def forward(self, x_Ni: Tensor) -> Tensor:
        """``[..., i] -> [..., O]``, the same on every rank."""
        sum_NO = self._group.sum(self.part(x_Ni))
        return sum_NO if self._bias_O is None else sum_NO + self._bias_O


class GatheredLinear(nn.Module):
    """A layer split by outputs, put together again. The last ranks may have fewer outputs, or none."""

    def __init__(self, group: Group, weight_oI: Tensor, bias_o: Tensor | None, outputs: int) -> None:
        super().__init__()
        self._group = group
        self._outputs = outputs
        missing = -(-outputs // group.world) - len(weight_oI)
        if missing:  # gathering takes tensors of one size
            weight_oI = pad(weight_oI, (0, 0, 0, missing))
            bias_o = None if bias_o is None else pad(bias_o, (0, missing))
        self.part = plain_linear(weight_oI, bias_o)

    def forward(self, x_NI: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``, the same on every rank."""
        return torch.cat(self._group.gather(self.part(x_NI)), -1)[..., : self._outputs]


class SummedEmbedding(nn.Module):
    """An embedding split by vocabulary: a rank has zeros for tokens of others."""

    def __init__(self, group: Group, weight_vD: Tensor, vocabulary: int) -> None:
        super().__init__()
        self._group = group
        self._first = -(-vocabulary // group.world) * group.rank
        self._own = len(weight_vD)
        # The last ranks may have no tokens; even then there has to be a row to look up.
        self._weight_vD = weight_vD if self._own else weight_vD.new_zeros(1, weight_vD.shape[1])
        self.weight = weight_vD.new_empty(0)
        """Empty, for models that ask for its device."""

    def forward(self, tokens_N: Tensor) -> Tensor:
        """``[...] -> [..., D]``, the same on every rank."""
        own_N = tokens_N - self._first
        other_N = (own_N < 0) | (own_N >= self._own)
        # Tokens of others are looked up too, since to choose between them would wait for the device.
        embedded_ND = embedding(own_N.clamp(0, len(self._weight_vD) - 1), self._weight_vD)
        return self._group.sum(embedded_ND.masked_fill(other_N[..., None], 0))


def use_slices(module: Any, group: Group) -> None:
    """Replace the plain split layers of a transformers model; call it once its weights are read."""
    plan: dict[str, str] = module.tp_plan
    for name, child in list(module.named_modules()):
        style = plan.get(replace_layer_number_by_wildcard(name))
        if style == "replicated_with_grad_allreduce":
            vars(child).pop("forward", None)  # what transformers put there is for training
        sliced = None if style is None else _sliced(child, style, group)
        if sliced is not None:
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, sliced)


def _sliced(layer: nn.Module, style: str, group: Group) -> nn.Module | None:
    """What stands for ``layer``; None: it is not plain, or split in another way. Subclasses may compute differently."""
    if type(layer) is nn.Embedding and style == "embedding_rowwise":
        return SummedEmbedding(group, own_part(layer.weight), layer.num_embeddings)
    if type(layer) is not nn.Linear:
        return None
    bias = None if layer.bias is None else own_part(layer.bias)
    match style:
        case "colwise":
            return plain_linear(own_part(layer.weight), bias)
        case "rowwise":
            return SummedLinear(group, own_part(layer.weight), bias)
        case "colwise_gather_output":
            return GatheredLinear(group, own_part(layer.weight), bias, layer.out_features)
    return None


def splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether a rank computes, and caches, only its part of the key/value heads by a model's plan.

    Where a layer's outputs are gathered, every rank has all of them.
    """
    return any(style == "colwise" and name.endswith(MAKE_KEYS) for name, style in plan.items())


def own_part(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter: its slice, or all if it is not split. Not a copy."""
    return parameter.to_local().detach() if is_dtensor(parameter) else parameter


def plain_linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    """An ordinary linear layer with these numbers, which are not copied."""
    outputs, inputs = weight_OI.shape
    linear = nn.Linear(inputs, outputs, bias=bias_O is not None, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O, requires_grad=False)
    return linear
