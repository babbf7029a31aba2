"""The engine over a paged kernel says what it says without; the kernel is a plain one, so this runs anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cuda.kernel import PagedKernel, first_right, plain_attention
from engine.cuda.pages import Chain, Pages, chain_of
from engine.kv_cache import KVCache
from engine.loader import Model, load
from engine.step import Chunk
from tests.paged import FLOATS, PlainVarlen, Twins, gathering_kernel, plain_kernel
from tests.unit.engine_models import load_tiny, save_model, slot_engine

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    sizes = {"n_layer": 2} if request.param == "gpt2" else {"num_hidden_layers": 2}
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param), **sizes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def assert_same(found: torch.Tensor, expected: torch.Tensor, told: str) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5, msg=told)


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_over_pages(model: Model, seed: int) -> None:
    """Prefixes shared and copied, chains and trees side by side, moves, rollbacks; windows, soft caps, sinks."""
    kernel, attend = plain_kernel()
    twins = Twins(seed, slot_engine(replace(model, paged=kernel), 400), slot_engine(model, 400), branches=0.3)
    for _ in range(3):
        twins.open()
    moved = 0
    for step in range(14):
        moved += len(twins.engines[0].cache.moves._sources)
        found, expected = twins.step()
        assert_same(found, expected, f"seed {seed}, step {step}")
        if step % 5 == 4:
            twins.close()
            twins.open()
    assert moved, f"seed {seed} moves nothing"
    assert bool(attend.calls) == (model.kind not in ("gemma2", "gpt_oss")), "soft caps and sinks are not for the kernel"


def test_chains_beside_trees_are_paged_and_trees_are_not(llama: Model) -> None:
    kernel, attend = plain_kernel()
    engine = slot_engine(replace(llama, paged=kernel))
    chain, tree = engine.cache.sequence(), engine.cache.sequence()
    engine.run([Chunk(chain, [5, 6, 7]), Chunk(tree, [8, 9], [-1, -1])])
    assert (attend.calls, attend.most_sequences) == (1, 1)
    engine.run([Chunk(chain, [8])])
    assert attend.calls == 2
    engine.run([Chunk(tree, [9])])
    assert attend.calls == 2, "a node below a tree is not in page order"


def test_what_is_a_chain() -> None:
    cache = KVCache(1, 64, block=4, dtype=torch.float32, device="cpu")
    sequence = cache.sequence()
    sequence.append(range(-1, 5))
    sequence.advance(range(6))
    sequence.append([-1, 0, 1])
    assert chain_of(sequence.state(), 2) == Chain(2, 9, sequence.blocks)
    sequence.rollback()
    sequence.append([-1, -1, 1])
    assert chain_of(sequence.state(), 3) is None, "a tree"
    sequence.advance([1])
    assert sequence.pending == 1 and sequence.is_chain
    assert chain_of(sequence.state(), 1) is None, "its key is not at home"
    sequence.advance([0])
    sequence.append([-1])
    assert chain_of(sequence.state(), 1) == Chain(1, 9, sequence.blocks)


def test_pages_of_other_sizes_are_gathered(llama: Model) -> None:
    kernel, attend = plain_kernel(page=16)
    engine = slot_engine(replace(llama, paged=kernel))  # blocks of 8
    engine.run([Chunk(engine.cache.sequence(), [5, 6, 7])])
    assert not attend.calls


def test_which_layers_the_kernel_takes() -> None:
    half = PagedKernel(PlainVarlen())
    query, keys = torch.zeros(1, 4, 3, 64), torch.zeros(16, 2, 64)
    assert not half.takes(query, keys, keys)
    query, keys = query.bfloat16(), keys.bfloat16()
    assert half.takes(query, keys, keys)
    assert not half.takes(query, keys, keys[..., :32]), "values of another size"
    assert not half.takes(query[..., :60], keys[..., :60], keys[..., :60]), "would be padded"
    wide = torch.zeros(16, 2, 512, dtype=torch.bfloat16)
    assert not half.takes(torch.zeros(1, 4, 3, 512, dtype=torch.bfloat16), wide, wide)


def test_a_kernel_that_fails_the_load_time_test_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model("llama", tmp_path, num_hidden_layers=1)
    right, attend = plain_kernel()
    monkeypatch.setattr("engine.loader.find_kernel", lambda dtype, device: right)
    assert load(folder, dtype="fp32", device="cpu").paged is right and attend.calls
    assert load(folder, dtype="fp32", device="cpu", paged=False).paged is None
    assert not caplog.records
    for wrong in (refuses, lambda query, *_, **__: torch.zeros_like(query)):
        monkeypatch.setattr(
            "engine.loader.find_kernel", lambda dtype, device, wrong=wrong: replace(right, attend=wrong)
        )
        assert load(folder, dtype="fp32", device="cpu").paged is None
        (record,) = caplog.records
        assert record.message.startswith("attention is not computed over pages: ") and "\n" not in record.message
        caplog.clear()


def test_torchs_kernel_takes_the_arguments() -> None:
    """On tensors without data, so on any computer: names and shapes, not what is computed."""
    from torch.nn.attention.varlen import varlen_attn

    pages = Pages.of([Chain(2, 300, (3, 1)), Chain(1, 5, (2,))], 256, CPU)
    query, cached = (torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 8, 64), (1024, 2, 64)))
    found = PagedKernel(varlen_attn)(query, cached, cached, pages, None, 100)
    assert found.shape == query.shape and found.dtype == query.dtype


@pytest.mark.parametrize("window", [None, 1, 11])
def test_the_plain_kernels_agree(window: int | None) -> None:
    """The one that is tried against at load, and those written for the tests."""
    torch.manual_seed(3)
    chains = [Chain(1, 20, (3, 0, 5)), Chain(4, 4, (1,)), Chain(9, 17, (2, 4, 6))]
    query, keys, values = torch.randn(14, 4, 16), torch.randn(64, 2, 16), torch.randn(64, 2, 16)
    expected = plain_attention(query, keys, values, chains, 8, window)
    for kernel in (plain_kernel()[0], gathering_kernel()):
        found = kernel(query, keys, values, Pages.of(chains, 8, CPU), None, window)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class Unwritten(PlainVarlen):
    """Forgets the second sequence where only single tokens are decoded, as split keys once did."""

    def __call__(self, query: torch.Tensor, *args: object, **how: object) -> torch.Tensor:
        out = super().__call__(query, *args, **how)  # type: ignore[arg-type]
        if args[4] == 1 and len(out) > 1:
            out[1] = 0
        return out


class OffByOne(PlainVarlen):
    """Counts a window without the query itself."""

    def __call__(self, *args: object, **how: object) -> torch.Tensor:
        left, right = how["window_size"]  # type: ignore[misc]
        how["window_size"] = (left - 1 if left > 0 else left, right)
        return super().__call__(*args, **how)  # type: ignore[arg-type]


def refuses(*_: object, **how: object) -> torch.Tensor:
    raise RuntimeError(f"num_splits must be None, got {how['num_splits']}\nand a long explanation")


def test_the_first_variant_that_is_right_is_used(caplog: pytest.LogCaptureFixture) -> None:
    right = PagedKernel(PlainVarlen(), page=8, dtypes=FLOATS)
    for wrong in (refuses, Unwritten(), OffByOne()):
        broken = replace(right, attend=wrong)
        assert first_right([broken, right], torch.float32, CPU) is right, wrong
        assert not caplog.records
        assert first_right([broken], torch.float32, CPU) is None
        (record,) = caplog.records
        assert "torch's kernel was tried, and" in record.message and "\n" not in record.message
        caplog.clear()
    assert first_right([replace(right, attend=refuses)], torch.float32, CPU) is None
    assert "num_splits must be None, got 1" in caplog.text and "long explanation" not in caplog.text
