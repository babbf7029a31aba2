"""What a loaded model is, as the rest of the engine sees it.

Decides nothing: a plain value that :mod:`engine.loader` fills in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class ModelError(Exception):
    """A model cannot be served. One line that names the path or model type and says what would be right."""


@dataclass(frozen=True)
class Model:
    """A causal language model whose attention goes through :mod:`engine.attention`."""

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
