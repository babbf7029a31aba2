"""Fused decoder layers compute what transformers' own do; models that are not known stay as they are."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.attention import NAME, forward_context
from engine.attention.row_attention import Scoring
from engine.cache.kv_store import KVStore
from engine.layers.fused import FAMILIES, FusedStack, RowOpsStack, unfuse
from engine.layers.fused import fuse as fuse_with
from engine.layers.layer_ops import LayerOps
from engine.loading.checkpoint import STOCK
from engine.loading.quantisation import quantise
from tests.unit.engine.engine_models import FAMILIES as CONFIGS
from tests.unit.engine.engine_models import TINY, random_tokens

MIXED = {**TINY, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
KNOWN: dict[str, dict[str, Any]] = {
    "cwm": {**MIXED, "head_dim": 16},
    "gemma": {**TINY, "head_dim": 24, "rms_norm_eps": 1e-3},
    "llama": {**TINY, "attention_bias": True, "mlp_bias": True},
    "ministral": {**MIXED, "head_dim": 20},
    "mistral": CONFIGS["mistral"],
    "qwen2": {**MIXED, "use_sliding_window": True},
    "qwen3": {**CONFIGS["qwen3"], "rms_norm_eps": 1e-3},
}
WINDOWS = {"cwm": [5, None, 5], "ministral": [5, None, 5], "mistral": [8, 8, 8], "qwen2": [5, None, 5]}
TOKENS = 13
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.01}
"""Largest accepted distance of logits, relative to their spread."""
PLAIN = LayerOps()


def triton_ops() -> LayerOps:
    """Interpreted. bfloat16 is cut off in the interpreter instead of being rounded."""
    pytest.importorskip("triton")
    from engine.layers.layer_kernels import TritonOps

    return TritonOps()


def fuse(module: Any, ops: LayerOps) -> str:
    """By products of torch and these row operations."""
    return fuse_with(module, ops.dtypes, lambda base: RowOpsStack(base, ops))


def tiny(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model in which every parameter matters."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**KNOWN.get(family, TINY), **changes}))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (0.5 if parameter.dim() == 1 else 0.0))
    return module.to(dtype).eval().requires_grad_(False)


class OneSequence:
    """A step of one sequence whose tokens lie in scattered slots."""

    def __init__(self, layers: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.store = KVStore(layers, 3 * TOKENS, dtype=dtype, device=device)
        self.slots_T = torch.arange(3 * TOKENS, dtype=torch.int32, device=device).flip(0)[::3].contiguous()
        self.calls: list[int] = []

    def keep(self, layer: int, states_TD: Tensor) -> None:
        """Nothing asks for states between layers."""

    def attend(self, layer: int, query_TQE: Tensor, keys_SHE: Tensor, values_SHE: Tensor, how: Scoring) -> Tensor:
        self.calls.append(layer)
        group = query_TQE.shape[1] // keys_SHE.shape[1]
        keys_KQE = keys_SHE[self.slots_T].repeat_interleave(group, 1)
        values_KQE = values_SHE[self.slots_T].repeat_interleave(group, 1)
        positions_T = torch.arange(TOKENS, device=query_TQE.device)
        behind_TK = positions_T[:, None] - positions_T
        hidden_TK = (behind_TK < 0) | (behind_TK >= (how.window or TOKENS))
        scores_QTK = torch.einsum("tqe,kqe->qtk", query_TQE, keys_KQE) * how.scale(query_TQE.shape[-1])
        weights_QTK = scores_QTK.float().masked_fill(hidden_TK, -torch.inf).softmax(-1).to(query_TQE.dtype)
        return torch.einsum("qtk,kqe->tqe", weights_QTK, values_KQE).contiguous()


def logits_of(module: Any, step: Any = None) -> Tensor:
    """``step``: the one that fused layers belong to."""
    tokens_1T = torch.tensor([random_tokens(TOKENS, seed=3)], device=module.device)
    positions_1T = torch.arange(TOKENS, device=module.device)[None]
    with forward_context(step) if step else nullcontext(), torch.inference_mode():
        logits_1TV: Tensor = module(input_ids=tokens_1T, position_ids=positions_1T, use_cache=False).logits
    return logits_1TV[0].float()


def stock_logits(module: Any) -> Tensor:
    module.set_attn_implementation(STOCK)
    logits_TV = logits_of(module)
    module.set_attn_implementation(NAME)
    return logits_TV


def distance(found_TV: Tensor, expected_TV: Tensor) -> float:
    return float((found_TV - expected_TV).norm() / (expected_TV - expected_TV.mean(-1, keepdim=True)).norm())


def test_every_known_family_is_tested() -> None:
    assert KNOWN.keys() == FAMILIES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", KNOWN)
def test_a_fused_model_computes_what_transformers_does(family: str, dtype: torch.dtype) -> None:
    module = tiny(family, dtype)
    expected_TV = stock_logits(module)
    step = OneSequence(3, dtype)
    assert fuse(module, PLAIN) == ""
    assert distance(logits_of(module, step), expected_TV) <= TOLERANCE[dtype]
    assert step.calls == [0, 1, 2]
    stack = module.model.layers[0]
    assert [layer.sliding_window for layer in stack.layers] == WINDOWS.get(family, [None] * 3)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in KNOWN), ("gemma", torch.float16), ("qwen3", torch.float16)],
)
def test_and_so_it_does_with_kernels(family: str, dtype: torch.dtype) -> None:
    module = tiny(family, dtype)
    expected_TV = stock_logits(module)
    step = OneSequence(3, dtype)
    assert fuse(module, triton_ops()) == ""
    assert distance(logits_of(module, step), expected_TV) <= TOLERANCE[dtype]


def test_weights_are_joined_without_being_kept_twice() -> None:
    module = tiny("qwen2")
    count = sum(parameter.numel() for parameter in module.parameters())
    attention = module.model.layers[1].self_attn
    freed = [
        weakref.ref(attention.q_proj.weight.untyped_storage()),
        weakref.ref(attention.k_proj.bias.untyped_storage()),
    ]
    assert fuse(module, PLAIN) == ""
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    joined = module.model.layers[0].layers[1].qkv.weight.untyped_storage()
    assert attention.q_proj.weight.untyped_storage().data_ptr() == joined.data_ptr()
    assert joined.nbytes() == 4 * sum(
        part.weight.numel() for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    assert [storage() for storage in freed] == [None, None]


def test_fusing_can_be_taken_back() -> None:
    module = tiny("qwen3")
    expected_TV = stock_logits(module)
    assert fuse(module, PLAIN) == ""
    unfuse(module)
    assert torch.equal(stock_logits(module), expected_TV)
    assert not any(isinstance(part, FusedStack) for part in module.modules())


def test_quantised_layers_are_fused_around_products_of_their_own() -> None:
    module = tiny("llama")
    quantise(module, "int8")
    expected_TV = stock_logits(module)
    step = OneSequence(3, torch.float32)
    assert fuse(module, PLAIN) == ""
    assert distance(logits_of(module, step), expected_TV) <= 1e-5


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "phi", "qwen2_moe"])
def test_other_families_stay_as_they_are(family: str) -> None:
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS.get(family, TINY)))
    before = list(module.named_modules())
    assert fuse(module, PLAIN) == f"layers of model type '{family}' are not known"
    assert list(module.named_modules()) == before


class Adapted(nn.Linear):
    pass


def adapt(module: Any) -> None:
    module.model.layers[1].self_attn.q_proj = Adapted(64, 64)


def hook(module: Any) -> None:
    module.model.layers[2].mlp.register_forward_hook(lambda *_: None)


def patch(module: Any) -> None:
    module.model.layers[2].mlp.forward = module.model.layers[1].mlp.forward


def lengthen(module: Any) -> None:
    module.model.norm.float()


def exact_gelu(module: Any) -> None:
    module.model.layers[0].mlp.act_fn = nn.GELU()


def subclass(module: Any) -> None:
    module.model.__class__ = type("MyModel", (type(module.model),), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (adapt, "layers.1.self_attn.q_proj is a Adapted"),
        (hook, "layers.2.mlp has a hook"),
        (patch, "layers.2.mlp has a hook"),
        (lengthen, "its weights are bfloat16, float32"),
        (exact_gelu, "layers.0.mlp.act_fn is a GELU"),
        (subclass, "its MyModel is not transformers' own"),
    ],
)
def test_what_was_changed_stays_as_it_is(change: Any, reason: str) -> None:
    module = tiny("llama", torch.bfloat16)
    change(module)
    before = list(module.named_modules())
    assert fuse(module, PLAIN) == reason
    assert list(module.named_modules()) == before


def test_a_number_format_that_the_backend_does_not_compute() -> None:
    assert fuse(tiny("llama", torch.float64), triton_ops()) == "its weights are float64"


def test_a_mask_is_refused_rather_than_ignored() -> None:
    module = tiny("llama")
    assert fuse(module, PLAIN) == ""
    module.set_attn_implementation(STOCK)
    with pytest.raises(AssertionError, match="packed steps only"):
        logits_of(module)
