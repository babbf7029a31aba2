"""Decides how a small checkpoint grows to the cost of a large one while computing the same function.

Benchmarks need a target that costs what real ones cost and a draft that is often right about it, without
downloads. So a trained model is given more width, heads, MLP units and layers that contribute exactly
nothing:

- the residual stream is padded with dimensions that are always zero; RMSNorm's mean square shrinks by
  old/new, so its weights are scaled by sqrt(old/new) and its epsilon by old/new;
- added heads and MLP units are dense and busy, but the output projections have zero columns for them;
- added layers are dense and busy, but their output projections are zero.

Every weight that can be non-zero without being heard is random, so the arithmetic is as costly as it looks.
`noise` replaces the zeros of the output projections (in the rows of the old dimensions) by Gaussians: the
larger it is, the less often the stretched model agrees with the small one, which sets the acceptance rate of
a draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from engine.eagle.head import EagleHead
from engine.model import placed


@dataclass(frozen=True, slots=True)
class Growth:
    """The sizes before and after. Head size and query heads per kv head stay as they are."""

    old: LlamaConfig
    hidden_size: int
    layers: int
    intermediate_size: int

    def __post_init__(self) -> None:
        assert not self.old.attention_bias, "biases are not supported"
        assert not self.old.mlp_bias, "biases are not supported"
        if self.hidden_size < self.old.hidden_size or self.hidden_size % (self.head_dim * self.group):
            raise ValueError(f"hidden_size must be at least the old one and divide by {self.head_dim * self.group}")
        if self.layers < self.old.num_hidden_layers:
            raise ValueError("layers must not be fewer than before")
        if self.intermediate_size < self.old.intermediate_size:
            raise ValueError("intermediate_size must not be smaller than before")

    @property
    def head_dim(self) -> int:
        """Size of a head, before and after."""
        return int(self.old.head_dim or self.old.hidden_size // self.old.num_attention_heads)

    @property
    def group(self) -> int:
        """Query heads that share one kv head, before and after."""
        return int(self.old.num_attention_heads // (self.old.num_key_value_heads or self.old.num_attention_heads))

    @property
    def norm_scale(self) -> float:
        """What RMSNorm weights are multiplied by to undo the padding."""
        return math.sqrt(self.old.hidden_size / self.hidden_size)

    def config(self) -> LlamaConfig:
        """The grown configuration."""
        heads = max(self.hidden_size // self.head_dim, self.old.num_attention_heads)
        grown = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // self.group,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.old.rms_norm_eps * self.old.hidden_size / self.hidden_size,
        }
        return LlamaConfig(**(self.old.to_dict() | grown))

    def origin(self, place: int) -> int | None:
        """Which old layer stands at `place` after growing, spread evenly; None for an added one."""
        count = self.old.num_hidden_layers
        return {old * self.layers // count: old for old in range(count)}.get(place)


def stretch(model: LlamaForCausalLM, *, noise: float = 0.0, seed: int = 0, **sizes: int | None) -> LlamaForCausalLM:
    """Grow `model` to the sizes of :func:`grow_to`, in its own dtype, where it is; with no noise logits stay the same.

    The MLP grows in proportion to the hidden size unless told otherwise. Raises ValueError for sizes smaller
    than before or a hidden size that does not divide into whole groups of heads.
    """
    growth = grow_to(model, **sizes)
    with no_init_weights(), model.device:
        grown = placed(LlamaForCausalLM(growth.config()), model.dtype)
    grown.train(False)
    grown.tie_weights()  # skipped together with the initialisation
    if model.generation_config is not None:
        grown.generation_config = model.generation_config
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        _pad_embeddings(grown, model)
        for place, layer in enumerate(grown.model.layers):
            origin = growth.origin(place)
            _fill_layer(layer, None if origin is None else model.model.layers[origin], growth, generator)
        _pad_norm(grown.model.norm, model.model.norm, growth)
        set_noise(grown, growth, noise, seed)
    return grown


def grow_to(
    model: LlamaForCausalLM,
    hidden_size: int | None = None,
    layers: int | None = None,
    intermediate_size: int | None = None,
) -> Growth:
    """The growth of `model` to the given sizes; what is left out follows the model."""
    old = model.config
    hidden = hidden_size or old.hidden_size
    return Growth(
        old=old,
        hidden_size=hidden,
        layers=layers or old.num_hidden_layers,
        intermediate_size=intermediate_size or old.intermediate_size * hidden // old.hidden_size,
    )


def _pad_embeddings(grown: LlamaForCausalLM, model: LlamaForCausalLM) -> None:
    width = model.config.hidden_size
    pairs = [(grown.model.embed_tokens, model.model.embed_tokens)]
    if not model.config.tie_word_embeddings:
        pairs.append((grown.lm_head, model.lm_head))
    for new, old in pairs:
        new.weight.zero_()
        new.weight[:, :width] = old.weight


def _pad_norm(new: nn.Module, old: nn.Module | None, growth: Growth) -> None:
    """Scaled old weights; the rest is never heard, since what it multiplies is zero."""
    assert isinstance(new.weight, Tensor)
    new.weight.fill_(growth.norm_scale)
    if old is not None:
        assert isinstance(old.weight, Tensor)
        new.weight[: growth.old.hidden_size] = old.weight * growth.norm_scale


def _fill_layer(new: nn.Module, old: nn.Module | None, growth: Growth, generator: torch.Generator) -> None:
    """Random dense inputs, silent outputs, and the old weights in the upper left corner of each matrix."""
    old_norms = {} if old is None else dict(old.named_modules())
    for name, module in new.named_modules():
        if name.endswith("layernorm"):
            _pad_norm(module, old_norms.get(name), growth)
        if not isinstance(module, nn.Linear):
            continue
        if name.endswith(("o_proj", "down_proj")):
            module.weight.zero_()
        else:
            # Keeps activations of the added units near one, as a trained layer's are.
            module.weight.normal_(0.0, growth.old.hidden_size**-0.5, generator=generator)
        if old is not None:
            corner = old.get_submodule(name).weight
            assert isinstance(corner, Tensor)
            module.weight[: corner.shape[0], : corner.shape[1]] = corner


@torch.no_grad()
def set_noise(grown: LlamaForCausalLM, growth: Growth, noise: float, seed: int) -> None:
    """Set the free entries of all output projections to Gaussians, in place; the same for a seed and kind of device.

    `noise` is roughly the size of the disturbance of the residual stream after all layers, whatever the sizes.
    """
    rows = growth.old.hidden_size
    for place, layer in enumerate(grown.model.layers):
        added = growth.origin(place) is None
        generator = torch.Generator(grown.device).manual_seed(seed * 1_000_003 + place + 1)
        for linear, old_columns in (
            (layer.self_attn.o_proj, growth.old.num_attention_heads * growth.head_dim),
            (layer.mlp.down_proj, growth.old.intermediate_size),
        ):
            free = linear.weight[:rows, 0 if added else old_columns :]
            if noise == 0.0:
                free.zero_()
            elif free.numel():
                free.normal_(0.0, noise * (free.shape[1] * growth.layers) ** -0.5, generator=generator)


@torch.no_grad()
def stretch_eagle(head: EagleHead, growth: Growth) -> EagleHead:
    """An EAGLE-3 head of the old model for the grown one: it drafts the same from its hidden states.

    Those are the old ones and zeros, read in front of layers that stand elsewhere now. So only what fuses them grows,
    by columns that read zeros; the embedding cannot be the target's any more.
    """
    assert not head.config.norm_before_fc and not head.config.fc_norm, "norms before fc are not supported"
    layers = growth.old.num_hidden_layers
    aux = tuple(layer * growth.layers // layers for layer in head.config.aux_layers_of(layers))
    grown = EagleHead(replace(head.config, target_hidden_size=growth.hidden_size, aux_layers=aux))
    parts = zip(grown.fc.weight.zero_().chunk(len(aux), 1), head.fc.weight.chunk(len(aux), 1), strict=True)
    for new, old in parts:
        new[:, : old.shape[1]] = old
    grown.load_state_dict(head.state_dict() | {"fc.weight": grown.fc.weight.to(head.fc.weight.dtype)}, assign=True)
    grown.target_ids = head.target_ids
    return grown
