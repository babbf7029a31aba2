"""Several ranks compute as on GPUs: fused layers over slices, by rows, replayed; and sums that depend on no size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from engine.interface import Chunk
from engine.layers.fused import FusedStack
from engine.loading import loader
from engine.parallel.group import rendezvous
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import EXACT
from tests.by_rows import Twins
from tests.ranks import needs_no_gpu, on_ranks
from tests.rows_on_ranks import CANNOT_RECORD, ByRows, Replays, stand_ins
from tests.sums_on_ranks import compare_in_groups
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import random_tokens, save_model, slot_engine

pytestmark = needs_no_gpu


def test_numbers_are_added_in_the_order_of_ranks() -> None:
    stores = {world: rendezvous(world) for world in (2, 3, 4)}
    spawn(compare_in_groups, ({world: store.port for world, store in stores.items()},), max(stores))


def settings(folder: Path, ranks: int, dtype: str = "fp32", **changes: object) -> EngineSettings:
    """Heads of 16 numbers, one key head to a rank."""
    sizes = {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks, "head_dim": 16, "vocab_size": 251}
    family = str(changes.pop("family", "llama"))
    path = save_model(family, folder, num_hidden_layers=2, intermediate_size=48 * ranks, **sizes, **changes)
    return EngineSettings(path, dtype=dtype, device="cpu", cache_tokens=800)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stand_ins(monkeypatch.setattr)
    monkeypatch.setattr(Replays, "replayed", 0)
    return


def fused(engine: Engine) -> bool:
    return isinstance(engine.model.module.base_model.layers[0], FusedStack)  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("family", "ranks"), mostly_thorough([("llama", 2), ("qwen3", 3), ("llama", 4)], quick=[("llama", 2)])
)
def test_a_token_has_the_same_bits_in_every_step(family: str, ranks: int, tmp_path: Path) -> None:
    """Alone, in a chain, in a tree, in a batch, with every number of rows, and in other pieces; all of it replayed."""
    of_ranks = settings(tmp_path, ranks, family=family)
    alone = slot_engine(loader.load(of_ranks.model, dtype="fp32", device="cpu", by_rows=False), 800)
    with on_ranks(of_ranks, ByRows(), ranks) as engine:
        assert fused(engine)
        assert engine.exactness == EXACT
        assert engine.row_classes == (16, 32, 64)
        text, sequence = random_tokens(150, 3), engine.cache.sequence()
        whole_NV = engine.run([Chunk(sequence, text, rows=range(150))])
        sequence.rollback()
        for start, count in ((0, 1), (1, 8), (9, 70), (79, 71)):
            found_NV = engine.run([Chunk(sequence, text[start : start + count], rows=range(count))])
            assert torch.equal(found_NV, whole_NV[start : start + count]), f"{count} tokens from {start} on"
            sequence.advance(range(count))
        sequence.free()
        says_what_one_says(engine, alone)
        # Ranks follow the first one's choice, or their parts of a sum would differ in size.
        engine.avoid_rows(16)
        says_what_one_says(engine, alone)
        assert Replays.replayed > 40


def says_what_one_says(engine: Engine, alone: Engine) -> None:
    """Over random lives of sequences."""
    twins = Twins(3, engine, alone, branches=0.3)
    for _ in range(3):
        twins.open()
    for step in range(6):
        found, expected = twins.step()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=f"step {step}")
    for _ in range(3):
        twins.close()


def test_where_one_rank_cannot_record_none_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = ByRows()
    start = ranks.start

    def planted(tasks: object) -> None:
        with monkeypatch.context() as patch:
            patch.setenv(CANNOT_RECORD, "1")
            start(tasks)  # type: ignore[arg-type]

    monkeypatch.setattr(ranks, "start", planted)
    with on_ranks(settings(tmp_path, 2), ranks) as engine:
        assert engine.exactness == EXACT
        assert not Replays.replayed
        assert "steps are not replayed as CUDA graphs: another rank cannot record one" in caplog.text
