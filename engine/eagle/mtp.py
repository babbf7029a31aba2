"""Multi-token prediction layers that a model's own checkpoint brings (DeepSeek-V3, arXiv:2412.19437), as a head.

They lie behind the model's decoder layers: ``model.layers.{n}`` of a model with n layers is one more of these, and

    enorm, hnorm            norms of the embedding of the token after a position, and of the model's last state there
    eh_proj                 [D, 2 D], which makes one state of both, in this order
    shared_head.norm        before the output layer, which is the model's, as the embedding is

transformers leaves them out. The first of them is read, as a model of one layer of the same family, and goes on from
its own states. What it caches and who attends to what is :mod:`engine.eagle.cached`'s, as of any head.

Tensor legend: N rows, D hidden size, V the target's vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.attention.attention import NAME
from engine.eagle.config import EagleConfig
from engine.eagle.head import Attend, EagleHead
from engine.eagle.loading import EMBEDDING, OUTPUT, targets_own
from engine.model import Model, ModelError, folder_of, scales_of
from engine.parallel.shards import GatheredLinear, SummedEmbedding, plain_linear

MTP = "mtp"
"""In place of a head's folder: the model's own layer."""
FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Model types whose checkpoints have such layers in this layout, and which speculate here."""
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
NOT_NEEDED = ("embed_tokens.weight", "shared_head.head.weight")
FINAL_NORM = "shared_head.norm.weight"


class MtpHead(EagleHead):
    """The first of a model's multi-token prediction layers."""

    def __init__(self, model: Model, layer: nn.Module, tensors: dict[str, Tensor], norm: nn.Module) -> None:
        """``layer``: a decoder layer; ``tensors``: :data:`OWN`; ``norm``: the one before the output layer."""
        nn.Module.__init__(self)
        text = model.config.get_text_config(decoder=True)
        size, latent = text.hidden_size, bool(getattr(text, "kv_lora_rank", None))
        others: dict[str, Any] = {"num_hidden_layers": 1, "rope_parameters": {}, "aux_layers": (model.layers,)}
        if latent:  # spread out to all heads; a key's numbers are the mean of key and value, where they differ
            others["num_key_value_heads"] = text.num_attention_heads
            others["head_dim"] = -(-(text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2)
        self.config = EagleConfig.beside(text, **others)
        base: Any = model.module.base_model
        # Not parts of this one: a tuple hides them.
        self._target: tuple[Any, Any, Any, Callable[..., Any]] = (
            base.norm,
            _whole(model, base.embed_tokens, EMBEDDING),
            _whole(model, model.module.get_output_embeddings(), OUTPUT),  # type: ignore[operator]
            base.rotary_emb,
        )
        self.layer, self.norm = layer, norm  # type: ignore[assignment]
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        for name, tensor in tensors.items():
            self.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(tensor, requires_grad=False)
        self.register_buffer("target_ids", torch.arange(text.vocab_size), persistent=False)

    def embed(self, tokens_N: Tensor) -> Tensor:
        """The target's embeddings, ``[N, D]``."""
        rows_ND: Tensor = self._target[1](tokens_N)
        return rows_ND

    def fuse(self, aux_ND: Tensor) -> Tensor:
        """The last state as the output layer reads it, ``[N, D]``."""
        states_ND: Tensor = self._target[0](aux_ND)
        return states_ND

    def forward(
        self, embeddings_ND: Tensor, states_ND: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`engine.eagle.head.EagleHead.forward`; the layer attends by itself, over the step in progress."""
        del attend
        read_ND = torch.cat((self.enorm(embeddings_ND), self.hnorm(states_ND)), -1)
        x_1ND = self.eh_proj(read_ND)[None]
        angles = self._target[3](x_1ND, positions_N[None])
        x_1ND = self.layer(x_1ND, position_embeddings=angles, position_ids=positions_N[None])
        normed_ND: Tensor = self.norm(x_1ND[0])
        return normed_ND, normed_ND

    def logits(self, normed_ND: Tensor) -> Tensor:
        """By the target's output layer, ``[N, V]``."""
        logits_NV: Tensor = self._target[2](normed_ND)
        return logits_NV


def load_mtp(model: Model) -> MtpHead:
    """The head that the checkpoint of ``model`` brings. Raises :class:`engine.model.ModelError`."""
    if model.kind not in FAMILIES:
        raise ModelError(
            f"{model.name}: multi-token prediction layers of model type {model.kind!r} are not read, those of "
            f"{', '.join(FAMILIES)} are; give an EAGLE-3 head"
        )
    tensors = {name: tensor.to(model.device, model.dtype) for name, tensor in _stored(model).items()}
    if missing := sorted({*OWN, FINAL_NORM} - tensors.keys()):
        raise ModelError(
            f"{model.name}: lacks model.layers.{model.layers}.{missing[0]}; its checkpoint has no multi-token "
            "prediction layer, or was saved without; give an EAGLE-3 head"
        )
    if scales := scales_of(tensors):
        raise ModelError(
            f"{model.name}: its multi-token prediction layer is quantised, with scales like {scales[0]!r}, "
            "which is not read; take the original, or give an EAGLE-3 head"
        )
    own = {name: tensors.pop(name) for name in OWN}
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config._attn_implementation = 1, NAME
    for name, value in (("first_k_dense_replace", 0), ("mlp_layer_types", ["sparse"])):
        if hasattr(config, name):
            setattr(config, name, value)
    state = {"model.norm.weight": tensors.pop(FINAL_NORM)}
    state |= {f"model.layers.0.{name}": tensor for name, tensor in tensors.items() if name not in NOT_NEEDED}
    kind: Any = type(model.module)
    loaded, told = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=model.dtype, output_loading_info=True
    )
    if lost := sorted(name for name in told["missing_keys"] if name.startswith("model.layers.")):
        raise ModelError(
            f"{model.name}: its multi-token prediction layer lacks {lost[0].replace('.0.', f'.{model.layers}.', 1)}"
        )
    head = MtpHead(model, loaded.model.layers[0].to(model.device), own, loaded.model.norm.to(model.device))
    return head.eval().requires_grad_(False)


def _whole(model: Model, layer: Any, name: str) -> Any:
    """``layer``, or all of one that is split over ranks once more: this one is on rank 0 alone."""
    if not isinstance(layer, SummedEmbedding | GatheredLinear):
        return layer
    weight_VD = targets_own(folder_of(model.name), model.name, name).to(model.device, model.dtype)
    if name == OUTPUT:
        return plain_linear(weight_VD, None)
    return nn.Embedding.from_pretrained(weight_VD)  # type: ignore[no-untyped-call]


def _stored(model: Model) -> dict[str, Tensor]:
    """The tensors of the layer behind the last, by their names in it."""
    prefix, found = f"model.layers.{model.layers}.", dict[str, Tensor]()
    for file in sorted(folder_of(model.name).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            names = [name for name in sorted(stored.keys()) if name.startswith(prefix)]
            found |= {name.removeprefix(prefix): stored.get_tensor(name) for name in names}
    return found
