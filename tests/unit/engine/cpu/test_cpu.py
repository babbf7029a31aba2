"""Decoder layers in one call of C++: what the plain path computes; the same bits for a token in every kind of step."""

from __future__ import annotations

import logging
import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.attention.row_attention import RowAttention
from engine.build import welcome
from engine.cache.kv_cache import CachedSequence, KVCache
from engine.cpu import library as built
from engine.cpu.library import Library, find_library
from engine.cpu.rows import CpuRows
from engine.cpu.stack import CpuStack, RowLinear
from engine.cpu.thread_choice import MIN_ROWS, ThreadChoice, set_threads
from engine.exactness import EXACT, warm_up
from engine.interface import Chunk
from engine.loading.loader import Model, load
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import Loading
from tests.by_rows import Twins
from tests.cluster.processes import PATIENCE, running
from tests.unit.engine.engine_models import TINY, load_tiny, random_tokens, save_model

pytestmark = pytest.mark.skipif(find_library() is None, reason="no C++ compiler, or a processor without AVX2")

SIZES: dict[str, Any] = {**TINY, "head_dim": 32, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
SIZES |= {"max_position_embeddings": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@pytest.fixture(autouse=True)
def _without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose oneDNN does not multiply in tiles."""
    monkeypatch.setattr("engine.cpu.stack.has_tiles", lambda: False)


@pytest.fixture(scope="session")
def pairs_in_software(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as for a processor that multiplies pairs of bfloat16 numbers, to be had on any."""
    path = tmp_path_factory.mktemp("pairs") / "kernels.so"
    header = Path(__file__).with_name("pairs_in_software.h")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(built, "FLAGS", (*built.FLAGS, "-O2", f'-DPAIRS_IN_SOFTWARE="{header}"'))
        built._compile("c++", "x86-64-v3", path)
    return path


@pytest.fixture(params=["float32", "bfloat16", "bfloat16 by pairs"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """What numbers are held in, and how they are multiplied."""
    if "pairs" not in request.param:
        yield getattr(torch, request.param)
        return
    path = request.getfixturevalue("pairs_in_software")
    monkeypatch.setattr(built, "build", lambda _: path)
    find_library.cache_clear()
    yield torch.bfloat16
    find_library.cache_clear()


@pytest.fixture
def library() -> Library:
    found = find_library()
    assert found is not None
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Whatever a test sets ends with it."""
    yield
    set_threads(1)


def engine_of(model: Model, capacity: int = 2048) -> Engine:
    return Engine(model, KVCache(model.layers, capacity, block=model.block, dtype=model.dtype, device="cpu"))


@pytest.mark.parametrize("outputs", [1, 31, 32, 70])
def test_packing_loses_nothing(dtype: torch.dtype, library: Library, outputs: int) -> None:
    weight_OI = torch.randn(outputs, 48).to(dtype)
    packed_PIW = library.pack(weight_OI)
    assert packed_PIW.shape == (-(-outputs // (2 * library.width)), 48, 2 * library.width)
    assert torch.equal(library.unpack(packed_PIW, outputs), weight_OI)


def test_products(dtype: torch.dtype, library: Library, one_thread: None) -> None:
    """Right, and a row has the same bits among any others and on any number of threads."""
    generator = torch.Generator().manual_seed(3)
    weight_OI, bias_O = torch.randn(150, 608, generator=generator).to(dtype), torch.randn(150, generator=generator)
    x_TI = torch.randn(230, 608, generator=generator)
    if dtype == torch.bfloat16 and library.pairs:
        x_TI = x_TI.bfloat16().float()  # as it is rounded anyway: see the next test
    packed_PIW = library.pack(weight_OI)
    expected_TO = (x_TI.double() @ weight_OI.double().T + bias_O.double()).float()
    whole_TO = library.product(packed_PIW, bias_O, 150, x_TI)
    torch.testing.assert_close(whole_TO, expected_TO, rtol=1e-4, atol=1e-4)
    for threads in (1, 3):
        set_threads(threads)
        for rows in (*range(1, 27), 95, 96, 97, 200):
            start = (rows * 7) % (230 - rows)
            some_TO = library.product(packed_PIW, bias_O, 150, x_TI[start : start + rows].contiguous())
            assert torch.equal(some_TO, whole_TO[start : start + rows]), (threads, rows)


def test_pairs_round_what_goes_in(dtype: torch.dtype, library: Library) -> None:
    """To nearest, as torch does; without pairs nothing is rounded."""
    generator = torch.Generator().manual_seed(4)
    packed_PIW = library.pack(torch.randn(40, 320, generator=generator).bfloat16())
    x_TI = torch.randn(29, 320, generator=generator)
    given_TO = library.product(packed_PIW, None, 40, x_TI)
    rounded_TO = library.product(packed_PIW, None, 40, x_TI.bfloat16().float())
    assert torch.equal(given_TO, rounded_TO) == library.pairs


def computed(choice: ThreadChoice, rows: int, seconds: dict[int, float], steps: int) -> list[int]:
    """With how many threads so many steps are computed that take so long."""
    found = []
    for _ in range(steps):
        found.append(choice.choose(rows))
        choice.observe(rows, found[-1], seconds[found[-1]])
    return found


def test_more_threads_are_used_where_they_are_faster(one_thread: None) -> None:
    """Sizes apart from each other; what was slower is tried again, ever more rarely."""
    set_threads(2, 6)
    choice = ThreadChoice()
    assert set(computed(choice, MIN_ROWS - 1, {2: 1.0, 6: 0.1}, 50)) == {2}
    faster = computed(choice, 100, {2: 1.0, 6: 0.5}, 1000)
    assert faster[:3] == [6, 2, 6] and 3 <= faster.count(2) <= 8
    slower = computed(choice, 10, {2: 1.0, 6: 2.0}, 1000)
    assert slower[2] == 2 and 3 <= slower.count(6) <= 8
    turned = computed(choice, 100, {2: 0.5, 6: 2.0}, 2000)
    assert turned[-100:].count(2) >= 98


def test_one_disturbed_measurement_is_soon_forgotten(one_thread: None) -> None:
    set_threads(1, 2)
    choice = ThreadChoice()
    computed(choice, 40, {1: 1.0, 2: 50.0}, 1)
    assert computed(choice, 40, {1: 1.0, 2: 0.6}, 200)[-50:].count(2) >= 49


def test_without_more_threads_there_is_no_choice(one_thread: None) -> None:
    set_threads(3)
    assert set(computed(ThreadChoice(), 500, {3: 1.0}, 20)) == {3}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_steps_are_those_of_the_plain_path(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path, **{**SIZES, **FAMILIES[family]})
    one, other = (load(folder, dtype=DTYPES[dtype], device="cpu", by_rows=by_rows) for by_rows in (True, False))
    assert isinstance(one.attention, CpuRows) and type(other.attention) is RowAttention
    twins = Twins(7, engine_of(one), engine_of(other), branches=0.5)
    for number in range(40):
        if number < 4 or twins.rng.random() < 0.2:
            twins.open()
        if number > 8 and twins.rng.random() < 0.2 and len(twins.lives[0]) > 2:
            twins.close()
        found_RV, expected_RV = twins.step()
        spread = expected_RV.std()
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        assert float((found_RV - expected_RV).abs().max() / spread) < tolerance, f"step {number}"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_token_has_the_same_bits_in_every_step(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Over several splits of keys: fed at once, in pieces, one by one, in trees, with neighbours."""
    model = load_tiny(family, tmp_path, DTYPES[dtype], by_rows=True, **{**SIZES, **FAMILIES[family]})
    engine, text, rng = engine_of(model), random_tokens(700, seed=1), random.Random(2)
    expected_TV = fed(engine, text, [700], rng)
    for pieces in ([16] * 44, [300, 1, 255, 1, 143], [1] * 520 + [180]):
        assert torch.equal(fed(engine, text, pieces, rng, neighbours=2), expected_TV)
    for start in (0, 250, 690):
        assert torch.equal(as_branch(engine, text, start, rng), expected_TV[start : start + 10])
    warm_up(engine)
    assert engine.exactness == EXACT


def fed(engine: Engine, text: list[int], pieces: list[int], rng: random.Random, neighbours: int = 0) -> Tensor:
    """Logits of all tokens, fed in such pieces, ``neighbours`` computed beside each."""
    sequence, found = engine.cache.sequence(), []
    others = [engine.cache.sequence() for _ in range(neighbours)]
    for size in pieces:
        piece = text[sequence.length : sequence.length + size]
        beside = [Chunk(other, random_tokens(rng.randint(1, 9), seed=rng.randrange(99))) for other in others]
        logits_RV = engine.run([*beside[:1], Chunk(sequence, piece, rows=range(len(piece))), *beside[1:]])
        found.append(logits_RV)
        sequence.advance(range(len(piece)))
        for other in others:
            other.rollback()
    for each in (sequence, *others):
        each.free()
    return torch.cat(found)


def as_branch(engine: Engine, text: list[int], start: int, rng: random.Random) -> Tensor:
    """Logits of ten tokens, each of them with a sibling that comes before it."""
    sequence: CachedSequence = engine.cache.sequence()
    if start:
        engine.run([Chunk(sequence, text[:start])])
        sequence.advance(range(start))
    tokens, parents = list[int](), list[int]()
    for i, token in enumerate(text[start : start + 10]):
        parents += [2 * i - 1] * 2
        tokens += [rng.randrange(3, 250), token]
    logits_RV = engine.run([Chunk(sequence, tokens, parents, range(1, 20, 2))])
    sequence.free()
    return logits_RV


def test_threads_change_no_bit(tmp_path: Path, library: Library, one_thread: None) -> None:
    engine, text = engine_of(load_tiny("llama", tmp_path, by_rows=True, **SIZES)), random_tokens(90, seed=4)
    found = []
    for threads in ((1,), (2,), (5,), (1, 3)):
        set_threads(*threads)
        found += [fed(engine, text, [60, 1, 4, 1, 24], random.Random(1))]
    assert all(torch.equal(found[0], one) for one in found[1:])


def test_what_is_no_number_stays_with_its_sequence(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nor do rows before it read it, though their keys and values may lie in one word with its own."""
    model = load_tiny("llama", tmp_path, DTYPES[dtype], by_rows=True, **SIZES)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[5] = float("nan")  # type: ignore[operator, union-attr]
    engine = engine_of(model)
    one, other = engine.cache.sequence(), engine.cache.sequence()
    text = [token if token != 5 else 6 for token in random_tokens(20, seed=6)]
    logits_RV = engine.run([Chunk(one, [7, 5, 8], rows=[0, 1, 2]), Chunk(other, text, rows=range(20))])
    assert logits_RV[0].isfinite().all() and logits_RV[1:3].isnan().all()
    assert torch.equal(logits_RV[3:], fed(engine, text, [20], random.Random(1)))


def test_a_wrong_result_is_found_at_load_and_computed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model("qwen2", tmp_path, **SIZES)
    plain = load(folder, dtype="fp32", device="cpu", by_rows=False)
    right = CpuStack.forward
    told: list[Loading] = []

    def wrong(self: CpuStack, *args: Any, **how: Any) -> Tensor:
        return right(self, *args, **how).roll(1, 1)

    monkeypatch.setattr(CpuStack, "forward", wrong)
    model = load(folder, dtype="fp32", device="cpu", progress=told.append)
    assert isinstance(model.attention, CpuRows) and not model.attention.all_layers
    assert any("one operation at a time: " in each.doing and "differ" in each.doing for each in told), told
    text = random_tokens(40, seed=8)
    model = replace(model, attention=plain.attention)
    found = [fed(engine_of(each), text, [30, 10], random.Random(1)) for each in (plain, model)]
    assert torch.equal(*found)  # with the very same weights


@pytest.mark.parametrize(("family", "changes", "reason"), [
    ("llama", {"head_dim": 8}, "heads of 8, no multiple of"),
    ("llama", {"hidden_size": 44}, "a hidden size of 44"),
    ("llama", {"intermediate_size": 90}, "an intermediate size of 90"),
    ("gpt2", {}, "layers of model type 'gpt2' are not known"),
])  # fmt: skip
def test_other_models_stay_as_they_are(family: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    told: list[Loading] = []
    folder = save_model(family, tmp_path, **({**SIZES, **changes} if changes else {}))
    model = load(folder, dtype="fp32", device="cpu", progress=told.append)
    assert isinstance(model.attention, CpuRows) and not model.attention.all_layers
    assert any(reason in each.doing for each in told), told


def copy_of_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is compiled from now on; the file that includes the others."""
    for file in (built.SOURCE, *built.SOURCE.parent.glob("*.h")):
        shutil.copy(file, folder)
    monkeypatch.setattr(built, "SOURCE", folder / built.SOURCE.name)
    return folder / built.SOURCE.name


@pytest.mark.parametrize(("compiler", "why"), [("", "there is no C\\+\\+ compiler"), ("false", "cannot compile")])
def test_without_a_compiler(
    compiler: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy_of_sources(tmp_path, monkeypatch).write_text("// another")
    monkeypatch.setattr(built, "COMPILERS", ())
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(built.Unbuildable, match=why):
        built.build("x86-64-v3")
    assert not list(tmp_path.glob("built/*"))
    find_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            model = load(save_model("llama", tmp_path / "model", **SIZES), dtype="fp32", device="cpu")
        assert type(model.attention) is RowAttention and "computed without C++, which is slower" in caplog.text
    finally:
        find_library.cache_clear()


def test_the_processor_decides_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    features = built.cpu_features()
    monkeypatch.setattr(built, "cpu_features", lambda: features - {"avx512_vl"})
    assert built.level_here() == "x86-64-v3"
    for level, needed in built.LEVELS.items():
        monkeypatch.setattr(built, "cpu_features", lambda needed=needed: needed)
        assert built.level_here() == level
    monkeypatch.setattr(built, "cpu_features", lambda: features - {"avx2"})
    with pytest.raises(built.Unbuildable, match="lacks avx2"):
        built.level_here()


def test_workers_that_are_not_root_may_read_what_root_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image, and under systemd: else each start would compile it anew, or go without."""
    monkeypatch.setattr(built, "_compile", lambda _, __, path: path.write_bytes(b"x"))
    monkeypatch.setattr(built, "SOURCE", tmp_path / "kernels.cpp")
    (tmp_path / "kernels.cpp").write_text("// nothing")
    before = os.umask(0o022)
    try:
        folder = built.build("x86-64-v3").parent
    finally:
        os.umask(before)
    assert folder.name == "built" and stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_compiler_that_takes_too_long_is_ended_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    started: list[psutil.Process] = []
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\nsleep 6000 & echo $! > {pid}; wait")
    compiler.chmod(0o755)

    def communicate(process: subprocess.Popen[str], timeout: float) -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        started.append(psutil.Process(int(pid.read_text())))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(subprocess.TimeoutExpired):
        built._compile(str(compiler), "x86-64-v3", tmp_path / "kernels.so")
    assert started and not running(started, PATIENCE)


@pytest.mark.thorough
@pytest.mark.parametrize("level", built.LEVELS)
def test_every_level_is_built_once_and_kept(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = copy_of_sources(tmp_path, monkeypatch)
    path = built.build(level)
    assert level in path.name and path.parent == tmp_path / "built"
    monkeypatch.setenv("CXX", "false")
    assert built.build(level) == path
    for changed in (source, source.with_name("vectors.h")):
        before = changed.read_text()
        changed.write_text(before + "// changed")
        with pytest.raises(built.Unbuildable, match="cannot compile"):
            built.build(level)
        changed.write_text(before)


def test_where_the_checkout_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the folder for temporary files, unless that is somebody else's."""
    monkeypatch.setattr(built, "_compile", lambda _, __, path: path.write_bytes(b"x"))
    monkeypatch.setattr(
        built, "_writable", lambda folder, right=built._writable: folder.name != "built" and right(folder)
    )
    monkeypatch.setattr(built, "SOURCE", tmp_path / "kernels.cpp")
    (tmp_path / "kernels.cpp").write_text("// nothing")
    monkeypatch.setattr(built.tempfile, "gettempdir", lambda: str(tmp_path))
    path = built.build("x86-64-v3")
    assert path.parent.parent == tmp_path and path.parent.name != "built"
    monkeypatch.setattr(built.os, "getuid", lambda: 123456)
    with pytest.raises(built.Unbuildable, match="nowhere to put it"):
        built.build("x86-64-v3")


def test_the_output_layer_is_exact_too(tmp_path: Path) -> None:
    model = load_tiny("llama", tmp_path, "bf16", by_rows=True, **SIZES)
    head = model.module.lm_head  # type: ignore[union-attr]
    assert isinstance(head, RowLinear)
    x_TD = torch.randn(30, 48, dtype=torch.bfloat16)
    whole_TV = head(x_TD)
    assert all(torch.equal(head(x_TD[i : i + 1]), whole_TV[i : i + 1]) for i in range(30))


@pytest.mark.parametrize(("dtype", "apart"), [("fp32", False), ("bf16", True)])
def test_who_may_go_on_with_a_text(dtype: str, apart: bool, tmp_path: Path) -> None:
    """In bfloat16 only who computes in the same way."""
    settings = EngineSettings(save_model("llama", tmp_path, **SIZES), dtype=dtype)
    models = [load(settings.model, dtype=dtype, device="cpu", self_test=False, by_rows=b) for b in (True, False)]
    one, other = (welcome(settings, model, "target").revision for model in models)
    assert (one != other) == apart


def test_by_default_weights_stay_as_they_are_stored_where_they_are_widened_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a processor without bfloat16; whatever is computed in another way is float32 there."""
    monkeypatch.setattr("engine.loading.checkpoint.computes_bfloat16", lambda _: False)
    half, single, odd = (tmp_path / name for name in ("half", "single", "odd"))
    for folder, sizes in ((half, SIZES), (single, SIZES), (odd, {**SIZES, "head_dim": 12})):
        save_model("llama", folder, **sizes)
    for folder in (half, odd):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    found = load(str(half), device="cpu")
    assert found.dtype == torch.bfloat16
    assert isinstance(found.attention, CpuRows)
    others = (half, {"pack": False}), (half, {"by_rows": False}), (single, {}), (odd, {})
    assert {load(str(folder), device="cpu", **how).dtype for folder, how in others} == {torch.float32}
    assert load(str(half), device="cpu", dtype="fp32").dtype == torch.float32
