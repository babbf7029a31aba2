"""What a loaded model is, as the rest of the engine sees it.

Decides nothing: a plain value that :mod:`engine.loading.loader` fills in. And what loading, heads and training share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.utils.hub import cached_file

from engine.attention.row_attention import RowAttention
from engine.cache.kv_cache import KVCache
from engine.cache.kv_store import BLOCK

SCALE = re.compile(r"(weight|proj)_scale|scale_inv$|\.SCB$")


class ModelError(Exception):
    """A model cannot be served. One line that names the path or model type and says what would be right."""


class CannotSpeculate(ModelError):
    """A model cannot draft, nor take drafts. :mod:`engine.stateful` may still serve it without."""

    def __init__(self, model: Model, reason: str) -> None:
        super().__init__(f"model type {model.kind!r} cannot speculate: {reason}")


def first_line(error: BaseException | str) -> str:
    """What an exception, or a message, says, in one line; with the next, where a colon at its end leads there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """The same behind the name of its class."""
    return f"{type(error).__name__}: {first_line(error)}"


def scales_of(names: Iterable[str]) -> list[str]:
    """Those of tensors that a quantised weight is multiplied by; scales of a cache or of inputs are none."""
    return sorted(name for name in names if SCALE.search(name))


def folder_of(model: str) -> Path:
    """Where the files of a folder, or of a hub id that was loaded before, lie. Raises OSError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    found = cached_file(model, "config.json", local_files_only=True)
    if found is None:
        raise FileNotFoundError(model)
    return Path(found).parent


def layers_of(config: Any) -> list[Any]:
    """What a text model's configuration says of each layer.

    In some families heads differ in size or number from layer to layer, and asked for all at once transformers raises.
    """
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * getattr(config, "num_hidden_layers", 1)  # some models of bytes say none


def key_heads_of(layer: Any) -> int:
    """How many key-value heads one of :func:`layers_of` has; 0 if it has no attention."""
    named = (getattr(layer, name, None) for name in ("num_key_value_heads", "num_attention_heads"))
    return next(filter(None, named), 0)


def positions_of(config: Any) -> int | None:
    """For how many tokens a text model's configuration is made; None where it does not say."""
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next(filter(None, named), None)


Module = TypeVar("Module", bound=nn.Module)


def placed(module: Module, dtype: torch.dtype, device: torch.device | None = None) -> Module:
    """The module, moved, its parameters cast.

    Buffers stay as precise as they are: rounded to bfloat16, the frequencies by which positions are told apart are
    others.
    """
    nn.Module.to(module, device=device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


@dataclass(frozen=True)
class Model:
    """A causal language model whose attention goes through :mod:`engine.attention.attention`, if it can speculate."""

    name: str
    module: nn.Module
    config: Any
    vocabulary: int
    """Usable token ids are below this; padded embedding rows are not counted."""
    context: int
    """Longest sequence in tokens."""
    stop_tokens: frozenset[int]
    tokenizer_digest: int
    """64-bit digest of the id-to-token map; 0 without a tokenizer."""
    dtype: torch.dtype
    device: torch.device
    layers: int
    no_speculation: str = ""
    """Why it runs in :mod:`engine.stateful`, one line; empty: it speculates."""
    whole_prompts: bool = False
    """Whether it must be fed prompts in one go there, since its cache may go wrong otherwise."""

    @property
    def block(self) -> int:
        """Slots of a block of its cache."""
        return BLOCK if self.attention is None else self.attention.page

    @property
    def spare(self) -> int:
        """Slots that its cache has for padding."""
        return 0 if self.attention is None else self.attention.spare

    def new_cache(self, capacity: int) -> KVCache:
        """A cache for so many of its tokens, as its attention wants it."""
        return KVCache(
            self.layers,
            capacity,
            block=self.block,
            spare=self.spare,
            kernels=self.attention is not None and self.attention.replayed,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def kind(self) -> str:
        """The model type, as configurations call it."""
        kind: str = getattr(self.config, "model_type", type(self.module).__name__)
        return kind

    attention: RowAttention | None = None
    """What computes its attention; None: transformers does, as it cannot speculate."""
    weights: str = ""
    """How the weights are quantised and what that saves, for people; empty if they are not."""
