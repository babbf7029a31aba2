"""An EAGLE-3 head on CUDA: recorded, it says what its modules say, and launches its levels."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.row_attention import RowAttention
from engine.build import build_target
from engine.eagle.cached import CachedHead, HeadChunk
from engine.eagle.loading import save
from engine.settings import EngineSettings
from speculation.messages import ANCHOR, Source
from tests.eagle_heads import GREEDY, HIDDEN, LAYERS, VOCABULARY, WARM, loop_of, of_eagle, opening, texts, tiny_head
from tests.unit.engine.engine_models import random_tokens, save_model

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


@pytest.mark.parametrize("sessions", [1, 5])
def test_a_head_drafts_beside_its_target(sessions: int, tmp_path: Path) -> None:
    """In launches with fewer sessions than they are padded to, far up in the cache; the text is the same."""
    folder = save_model("llama", tmp_path / "model", num_hidden_layers=LAYERS, head_dim=64)
    save(tiny_head(head_dim=64), tmp_path / "head", dtype=torch.float32)
    plain = EngineSettings(folder, dtype="fp32", device="cuda", cache_tokens=8192)
    headed = loop_of(build_target(replace(plain, eagle=str(tmp_path / "head"))))
    head = of_eagle(headed)
    assert head._levels.max_sessions, "levels are not launched"
    others = head._head.cache.sequence()
    others.append(range(-1, 4000))
    openings = [opening(number, WARM if number % 2 else GREEDY) for number in range(sessions)]
    assert texts(headed, openings) == texts(loop_of(build_target(plain)), openings)
    assert headed.counters.draft_faults == 0 and headed.counters.offered_from[Source.EAGLE] > 10 * sessions
