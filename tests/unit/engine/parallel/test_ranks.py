"""Packed forwards on two ranks equal those on one, whatever the steps."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build
from engine.cache.kv_cache import CacheFull
from engine.forward import StepInput
from engine.interface import Chunk
from engine.parallel.group import FRAME_BYTES
from engine.settings import EngineSettings
from engine.step import Engine
from tests.ranks import Forked, Watched, needs_no_gpu, on_ranks
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import save_model

pytestmark = needs_no_gpu

CACHE = 256
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {},
}
"""What is special: heads share keys in all, qwen3 norms its heads, gemma2 slides, caps scores and scales embeddings."""


@pytest.fixture(scope="module", params=mostly_thorough(FAMILIES, quick=["llama"]))
def pair(request, tmp_path_factory) -> Iterator[tuple[Engine, Engine]]:
    """The same tiny model on one rank and on two; 251 tokens do not divide by two."""
    changes = {"num_hidden_layers": 2, "vocab_size": 251, **FAMILIES[request.param]}
    folder = save_model(request.param, tmp_path_factory.mktemp("tp"), **changes)
    randomise_biases(Path(folder))
    settings = EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=CACHE)
    ranks = Watched() if request.param == "llama" else Forked()  # one as a worker starts it
    with on_ranks(settings, ranks) as two:
        yield build(settings), two


def randomise_biases(folder: Path) -> None:
    """They are zero otherwise, and may be added as often as one likes."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name, weight in weights.items():
        if name.endswith("bias"):
            weight.normal_(generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_random_lives_of_sequences(pair):
    """Prefills in parts, trees, commits, rollbacks, a full cache, sequences that give way and are computed again."""
    seed = 11
    rng = random.Random(seed)
    sequences = [[engine.cache.sequence() for engine in pair] for _ in range(4)]
    full = moved = 0
    for _ in range(60):
        chunks, used = ([], []), []
        for both in rng.sample(sequences, rng.randint(1, 4)):
            if both[0].length > 90 or rng.random() < 0.05:
                keep = rng.choice([0, both[0].length // 2])
                for sequence in both:
                    sequence.rollback()
                    sequence.truncate(keep)
            count = rng.choice([1, 1, 4, 9, 30])
            start = both[0].pending
            new = [rng.randrange(3, 250) for _ in range(count)]
            parents = [rng.randint(max(-1, start + i - 3), start + i - 1) for i in range(count)]
            tree = parents if rng.random() < 0.7 else None
            rows = sorted(rng.sample(range(count), rng.randint(0, count)))
            for chosen, sequence in zip(chunks, both, strict=True):
                chosen.append(Chunk(sequence, new, tree, rows))
            used.append(both)
        try:
            one_RV, two_RV = (engine.run(chosen) for engine, chosen in zip(pair, chunks, strict=True))
        except CacheFull:
            full += 1
            with pytest.raises(CacheFull):
                pair[1].run(chunks[1])
            for both in sequences[:2]:
                for sequence in both:
                    sequence.rollback()
                    sequence.truncate(0)
            continue
        torch.testing.assert_close(two_RV, one_RV, atol=1e-4, rtol=1e-4, msg=lambda text: f"seed {seed}: {text}")
        for both in used:
            if rng.random() < 0.2:
                for sequence in both:
                    sequence.rollback()
                continue
            path, node = [], rng.randrange(both[0].pending)
            while node >= 0:
                path.insert(0, node)
                node = both[0].parents[node]
            moved += path != list(range(len(path)))
            for sequence in both:
                sequence.advance(path)
    assert full > 0 < moved
    for both in sequences:
        for sequence in both:
            sequence.free()
    for engine in pair:
        engine.cache.validate()


def test_a_bad_chunk_leaves_the_ranks_in_step(pair):
    two = pair[1]
    sequence = two.cache.sequence()
    with pytest.raises(ValueError, match="token ids"):
        two.run([Chunk(sequence, [999])])
    assert two.run([]).shape == (0, 251)
    assert two.run([Chunk(sequence, [5], rows=[0])]).isfinite().all()
    sequence.free()


def test_ranks_listen_on_loopback_only(pair):
    """Nothing that they say to each other is encrypted. Torch itself would open its store on all interfaces."""
    (rank,) = pair[1]._leader._ranks.pids.values()
    for process in (psutil.Process(), psutil.Process(rank)):
        hosts = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert hosts
        assert all(ipaddress.ip_address(host).is_loopback for host in hosts)


def test_a_step_too_large_for_one_broadcast(pair):
    rng = random.Random(3)
    sequences = [engine.cache.sequence() for engine in pair]
    new = [rng.randrange(3, 250) for _ in range(200)]
    rows = [range(200)] * 50
    chunks = [Chunk(sequence, new, rows=[row for each in rows for row in each]) for sequence in sequences]
    encoded = StepInput(new, chunks[0].rows, [(sequences[0].state(), 200)], [], False).encoded()
    assert len(encoded) > FRAME_BYTES
    one_RV, two_RV = (engine.run([chunk]) for engine, chunk in zip(pair, chunks, strict=True))
    torch.testing.assert_close(two_RV, one_RV, atol=1e-4, rtol=1e-4)
    for sequence in sequences:
        sequence.free()
