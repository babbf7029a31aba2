"""An EAGLE-3 head on CUDA: recorded, it says what its modules say, and launches its levels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from engine.attention.row_attention import RowAttention
from engine.eagle.cached import CachedHead, HeadChunk
from speculation.messages import ANCHOR
from tests.eagle_heads import HIDDEN, VOCABULARY, tiny_head
from tests.unit.engine.engine_models import random_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: heads there are not checked")

KINDS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {"draft_vocab_size": VOCABULARY},
    "two layers": {"num_hidden_layers": 2, "norm_before_residual": True, "norm_output": True, "fc_norm": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_recorded(kind: str, dtype: torch.dtype) -> None:
    """A prompt and a tree behind it, which hangs from what the head made of the prompt's last row."""
    head = tiny_head(head_dim=64, **KINDS[kind]).to("cuda", dtype)
    states_ND = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(4)).to("cuda", dtype)
    found: list[list[torch.Tensor]] = []
    for attention in (None, RowAttention()):
        cached = CachedHead(copy.deepcopy(head), 2048, 512, attention=attention)
        recorded = cached._steps is not None and cached._steps.record is not None
        assert recorded is (attention is None)
        assert (cached.levels(VOCABULARY, width=4, children=3) is None) is not recorded
        sequence = cached.cache.sequence()
        sequence.first = 4
        prompt = HeadChunk(sequence, random_tokens(40, 2), dict(enumerate(states_ND)), range(-1, 39), [39])
        found.append([cached.run([prompt], VOCABULARY)])
        sequence.advance(range(40))
        for parents in ([ANCHOR, ANCHOR], [0, 0, 1, 1]):
            tokens = random_tokens(len(parents), 3 + len(parents))
            found[-1].append(cached.run([HeadChunk(sequence, tokens, {}, parents, range(len(parents)))], VOCABULARY))
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
