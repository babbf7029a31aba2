"""Decides the shapes of the bundled pair, and how a finished model and its tokenizer are put in place.

Both models are ordinary Llama checkpoints with tied embeddings. The model vocabulary is padded beyond the
tokenizer's, as real checkpoints have it, so that everything downstream meets that case.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.model import placed

VOCABULARY = 4000
PADDED_VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that tell one Llama of this family from another."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int

    def __post_init__(self) -> None:
        assert self.hidden_size % self.heads == 0
        assert self.heads % self.kv_heads == 0
        assert self.kv_heads % 2 == 0, "tensor parallelism by two splits the kv heads"

    def config(self, context: int, end_of_text: int) -> LlamaConfig:
        """The transformers configuration of this shape."""
        return LlamaConfig(
            vocab_size=PADDED_VOCABULARY,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        )


TARGET_SHAPE = ModelShape(hidden_size=256, layers=6, heads=8, kv_heads=4, intermediate_size=704)
DRAFT_SHAPE = ModelShape(hidden_size=128, layers=2, heads=4, kv_heads=2, intermediate_size=352)


def build(shape: ModelShape, context: int, end_of_text: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model of `shape` in fp32, the same for the same seed."""
    torch.manual_seed(seed)
    return placed(LlamaForCausalLM(shape.config(context, end_of_text)), torch.float32)


def load(folder: Path, dtype: torch.dtype, device: torch.device | None = None) -> LlamaForCausalLM:
    """A checkpoint, ready to run and not to be trained."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert isinstance(model, LlamaForCausalLM)
    placed(model, dtype, device).train(False)
    return model


def parameter_count(model: LlamaForCausalLM) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """What `save_tokenizer` wrote."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer with the names that every release of transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [])
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def publish(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a bf16 checkpoint with its tokenizer to `folder`; a reader never sees half of one."""
    fresh = folder.with_name(f".{folder.name}.new")
    stale = folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig.from_dict(ids)
    placed(copy, torch.bfloat16).save_pretrained(fresh)
    save_tokenizer(tokenizer, fresh)
    for weights in fresh.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors makes them private; a checkpoint is for everyone
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)
