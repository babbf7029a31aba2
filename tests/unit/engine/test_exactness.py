"""Whether bits depend on company is measured, said, and avoided where it can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from engine.cache.kv_cache import KVCache
from engine.exactness import measure, warm_up
from engine.model import Model
from engine.step import Engine
from router.sessions.snapshot import Snapshot
from speculation.messages import EXACT
from tests.by_rows import PlainRows, by_rows
from tests.unit.engine.engine_models import load_tiny, slot_engine


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("half"), dtype="bf16", head_dim=32)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("single"))


class Tilted(PlainRows):
    """Gives all rows of a step other bits when there are so many: multiplies them."""

    def __init__(self, tilts: dict[int, float]) -> None:
        super().__init__(2)
        self.tilts = tilts
        self.seen: set[int] = set()

    def __call__(self, query_TQD: Tensor, *args: object, **how: object) -> Tensor:
        self.seen.add(len(query_TQD))
        found_TQE = super().__call__(query_TQD, *args, **how)  # type: ignore[arg-type]
        return found_TQE * self.tilts.get(len(query_TQD), 1.0)


def test_half_precision_on_a_cpu_is_exact(half: Model) -> None:
    cache = KVCache(half.layers, 512, dtype=half.dtype, device=half.device)
    engine = Engine(half, cache)
    warm_up(engine)
    assert engine.exactness == EXACT
    assert cache.free_tokens == cache.capacity
    assert Engine(half, cache, invariant=False).exactness == "", "a drafter's tokens are only hints"


def test_what_changes_bits_is_named(half: Model) -> None:
    cache = KVCache(half.layers, 512, dtype=half.dtype, device=half.device)
    engine = Engine(half, cache)
    compute = engine.compute

    def tilted(inputs: object, *_: object) -> Tensor:
        logits_RV = compute(inputs)  # type: ignore[arg-type]
        return logits_RV if len(inputs.chunks) == 1 else logits_RV + 1e-3  # type: ignore[attr-defined]

    engine.compute = tilted  # type: ignore[method-assign, assignment]
    assert measure(engine) == "not exact: in a batch, 100% of the tokens have other bits than alone"


def test_where_it_cannot_be_measured_that_is_said(half: Model) -> None:
    cache = KVCache(half.layers, 64, dtype=half.dtype, device=half.device)
    engine = Engine(half, cache)
    warm_up(engine)
    assert engine.exactness == "not measured: that takes a cache of 228 tokens and a context of 49"


def test_numbers_of_rows_that_change_bits_are_not_used(half: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    attention = Tilted({32: 1.5})
    engine = by_rows(half, 800, attention)
    assert measure(engine) == EXACT
    assert engine.row_classes == (16, 64)
    assert "steps of 32 rows are not computed" in caplog.text
    attention.seen.clear()
    assert measure(engine) == EXACT
    assert attention.seen == {16, 64}


@pytest.mark.parametrize(
    ("tilts", "kept"),
    [
        pytest.param({16: 1.5}, (32, 64), id="the smallest"),
        pytest.param({64: 1.5}, (16, 32), id="the largest"),
        pytest.param({16: 1.5, 64: 1.5}, (16, 64), id="those that agree with the smallest are more"),
        pytest.param({16: 1.5, 32: 1.2}, (64,), id="all differ"),
    ],
)
def test_the_most_that_agree_are_used(half: Model, tilts: dict[int, float], kept: tuple[int, ...]) -> None:
    engine = by_rows(half, 800, Tilted(tilts))
    assert measure(engine) == EXACT
    assert engine.row_classes == kept
    assert engine.cache.free_tokens == engine.cache.capacity


def test_the_last_class_stays(single: Model) -> None:
    engine = by_rows(single, 800)
    for rows in engine.row_classes:
        engine.avoid_rows(rows)
    assert len(engine.row_classes) == 1
    plain = slot_engine(single)
    plain.avoid_rows(16)
    assert plain.row_classes == ()


def test_ready_knows_of_no_exactness_without_targets() -> None:
    assert Snapshot().exact is None


def test_measuring_needs_no_kept_folder(tmp_path: Path) -> None:
    model = load_tiny("gpt2", tmp_path)
    engine = slot_engine(model, 512)
    assert measure(engine).startswith(("exact", "not exact"))
