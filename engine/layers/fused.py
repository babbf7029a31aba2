"""The decoder layers of stock transformers models as one module of few, large products and row operations.

Decides which models are recognised: those whose layers are Llama's but for what :data:`FAMILIES` and the checks here
cover, in exactly transformers' own classes and untouched. Queries, keys and values are then one product, gate and up
another; a residual is added together with the next norm, also across layers. Embedding, rotary table and output layer
stay the model's own. What is not recognised stays as it is. Of a model that is split
over ranks, each joins its slices. Knows no device: row operations are :mod:`engine.layers.layer_ops`' and attention is
the step's.

Tensor legend: T tokens, D hidden size, Q query heads, H key/value heads, E head size, S slots, I intermediate size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.distributed.utils import is_dtensor

from engine.attention.attention import current_step
from engine.attention.row_attention import Scoring
from engine.layers.layer_ops import Activation, LayerOps, Norm
from engine.parallel.shards import SummedLinear, plain_linear

FAMILIES = frozenset({"cwm", "gemma", "llama", "ministral", "mistral", "qwen2", "qwen3"})
"""Model types whose layers are recognised. Names of their classes begin with that, capitalised."""

PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
"""How these names end."""

ACTIVATIONS: dict[type[nn.Module], Activation] = {SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh"}


class FusedLayer(nn.Module):
    """The weights of a decoder layer, joined."""

    def __init__(self, layer: Any) -> None:
        """``layer``: one of transformers', recognised. Its own weights become views of the joined ones."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size: int = attention.head_dim
        self.heads: int = attention.q_proj.out_features // self.head_size
        self.key_heads: int = attention.k_proj.out_features // self.head_size
        self.scaling: float = attention.scaling
        self.sliding_window = _sliding_window(attention)
        self.activation = ACTIVATIONS[type(mlp.act_fn)]
        self.input_norm = _norm(layer.input_layernorm)
        self.qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.query_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.output: nn.Module = attention.o_proj
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        self.gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self.down: nn.Module = mlp.down_proj


class Unrecognised(Exception):
    """A model is computed as transformers wrote it. One line says why."""


class FusedStack(nn.Module):
    """All decoder layers and the final norm, in the place of one decoder layer; a subclass computes them."""

    def __init__(self, stock: Any) -> None:
        """``stock``: the recognised model of layers and norm."""
        super().__init__()
        self.layers: Sequence[FusedLayer] = nn.ModuleList(map(FusedLayer, stock.layers))  # type: ignore[assignment]
        self.norm = _norm(stock.norm)
        self._stock: tuple[nn.ModuleList, nn.Module] = (stock.layers, stock.norm)  # a tuple: they do not count twice

    def restore(self) -> tuple[nn.ModuleList, nn.Module]:
        """The layers and the norm that this stands for, with their weights."""
        return self._stock


class RowOpsStack(FusedStack):
    """Computed by products of torch and the row operations of a device."""

    def __init__(self, stock: Any, ops: LayerOps) -> None:
        super().__init__(stock)
        self._ops = ops
        for layer in self.layers:
            for name in ("qkv", "output", "gate_up", "down"):
                product = getattr(layer, name)
                parts = product.parts if isinstance(product, _SideBySide) else [product]
                setattr(layer, name, ops.product(list(parts)) or product)

    def forward(
        self,
        hidden_1TD: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """As transformers calls a decoder layer, with all tokens of the step in one row; ``[1, T, D]``."""
        assert len(hidden_1TD) == 1 and attention_mask is None, "a fused model computes packed steps only"
        ops, step = self._ops, current_step()
        angles = (position_embeddings[0][0], position_embeddings[1][0])
        residual_TD, delta_TD = hidden_1TD[0], None
        for index, layer in enumerate(self.layers):
            residual_TD, normed_TD = ops.add_norm(residual_TD, delta_TD, layer.input_norm)
            step.keep(index, residual_TD)
            cached = step.store.layer(index, layer.key_heads, layer.head_size, layer.head_size)
            norms = (layer.query_norm, layer.key_norm)
            query_TQE = ops.rotate_and_store(layer.qkv(normed_TD), angles, step.slots_T, cached, norms)
            found_TQE = step.attend(index, query_TQE, *cached, Scoring(layer.scaling, layer.sliding_window))
            delta_TD = layer.output(found_TQE.flatten(1))
            residual_TD, normed_TD = ops.add_norm(residual_TD, delta_TD, layer.mlp_norm)
            delta_TD = layer.down(ops.gate(layer.gate_up(normed_TD), layer.activation))
        residual_TD, normed_TD = ops.add_norm(residual_TD, delta_TD, self.norm)
        step.keep(len(self.layers), residual_TD)
        return normed_TD[None]


def fuse(module: Any, dtypes: Collection[torch.dtype], build: Callable[[Any], FusedStack]) -> str:
    """Have a transformers model compute its decoder layers fused; return why not, one line, empty if it does.

    ``dtypes``: number formats that can be computed. ``build``: what makes a stack of the recognised model of layers
    and norm, or raises :class:`Unrecognised`. Weights are joined layer by layer, so memory peaks one layer above
    the model. :func:`unfuse` takes it back. A model that is not fused has not changed.
    """
    if reason := _obstacle(module, dtypes):
        return reason
    base = module.base_model
    try:
        stack = build(base)
    except Unrecognised as refusal:
        return str(refusal)
    base.layers, base.norm = nn.ModuleList([stack]), nn.Identity()
    return ""


def unfuse(module: Any) -> bool:
    """Have a fused model compute as transformers does again, with the same weights; False: it does."""
    if (stack := fused_stack(module)) is None:
        return False
    module.base_model.layers, module.base_model.norm = stack.restore()
    return True


def fused_stack(module: Any) -> FusedStack | None:
    """What a model has in the place of its decoder layers, if it is fused."""
    stack = next(iter(getattr(module.base_model, "layers", ())), None)
    return stack if isinstance(stack, FusedStack) else None


def fused_logits(module: Any, tokens_T: Tensor, positions_T: Tensor, rows_R: Tensor) -> Tensor | None:
    """What a fused model says at some rows of a step, ``[R, V]``; None if it is not fused.

    As its own forward computes it, which in all families known here is no more than this, without what that prepares
    for caches and masks: as long as all layers of a small model take.
    """
    base, stack = module.base_model, fused_stack(module)
    if stack is None or type(module).__module__ != type(base).__module__:
        return None
    hidden_1TD = base.embed_tokens(tokens_T[None])
    angles = base.rotary_emb(hidden_1TD, position_ids=positions_T[None])
    hidden_1TD = base.norm(stack(hidden_1TD, position_embeddings=angles))
    logits_RV: Tensor = module.lm_head(hidden_1TD[:, rows_R])[0]
    return logits_RV


def _obstacle(module: Any, known_dtypes: Collection[torch.dtype]) -> str:
    """What keeps a model from being fused; empty if nothing does."""
    base: Any = module.base_model
    family = base.config.model_type
    if family not in FAMILIES:
        return f"layers of model type {family!r} are not known"
    code = sys.modules[type(base).__module__]
    if code.__name__ != f"transformers.models.{family}.modeling_{family}":
        return f"its {type(base).__name__} is not transformers' own"
    stock = {part: getattr(code, family.capitalize() + part) for part in PARTS}
    known = {*stock.values(), *ACTIVATIONS, nn.Linear, nn.ModuleList, SummedLinear}
    if (type(base), type(base.rotary_emb)) != (stock["Model"], stock["RotaryEmbedding"]):
        return f"it is a {type(base).__name__} that rotates by a {type(base.rotary_emb).__name__}"
    if reason := _changed_part(base, known):
        return reason
    weights = [*base.layers.parameters(), *base.norm.parameters()]
    if any(is_dtensor(weight) for weight in weights):
        return "its weights are split over ranks"
    if len(dtypes := {weight.dtype for weight in weights}) > 1 or not dtypes <= set(known_dtypes):
        return f"its weights are {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
    return ""


def _changed_part(base: Any, known: Collection[type]) -> str:
    """The first part of a model's layers that is not of a known class, or has a hook; empty if there is none."""
    for name, part in (*base.layers.named_modules(prefix="layers"), ("norm", base.norm)):
        if type(part) not in known:
            return f"{name} is a {type(part).__name__}"
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return f"{name} has a hook"
    return ""


def _sliding_window(attention: Any) -> int | None:
    """How far back an attention layer of transformers looks, itself included."""
    config = getattr(attention, "config", None)
    holder = config if getattr(config, "model_type", "") == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _norm(stock: Any) -> Norm:
    """Of a norm of transformers: Gemma's multiplies by one more than its weight, and in float32."""
    if hasattr(stock, "variance_epsilon"):
        return Norm(stock.weight.detach(), stock.variance_epsilon)
    return Norm(1.0 + stock.weight.detach().float(), stock.eps)


class _SideBySide(nn.Module):
    """Linear layers whose weights cannot be joined, quantised ones for example, as one."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_TD: Tensor) -> Tensor:
        """The outputs of all, one behind the other."""
        return torch.cat([part(x_TD) for part in self.parts], -1)


def _joined(parts: Sequence[nn.Linear]) -> nn.Module:
    """Linear layers of the same input as one. Where their weights are plain, they become views of the joined one."""
    tensors = [tensor for part in parts for tensor in (part.weight, part.bias) if tensor is not None]
    biased = parts[0].bias is not None
    if any(type(tensor.data) is not Tensor for tensor in tensors) or any((p.bias is not None) != biased for p in parts):
        return _SideBySide(parts)
    sizes = [part.out_features for part in parts]
    joined: dict[str, Tensor] = {}
    for name in ("weight", "bias") if biased else ("weight",):
        own = [getattr(part, name) for part in parts]
        joined[name] = torch.cat([tensor.detach() for tensor in own])
        for tensor, view in zip(own, torch.split_with_sizes(joined[name], sizes), strict=True):
            tensor.data = view
    return plain_linear(joined["weight"], joined.get("bias"))
