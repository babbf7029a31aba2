"""Replayed steps say what computed ones say; a recording here is the computation itself, on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cuda.graphs import SIZES, CudaRecorder, Record
from engine.kv_cache import KVCache
from engine.kv_store import KVStore
from engine.loader import Model
from engine.medusa import MedusaHeads
from engine.model import ModelError
from engine.step import Chunk, Engine
from tests.paged import Twins, plain_kernel
from tests.unit.engine_models import load_tiny, random_tokens, slot_engine

BLOCK = 8


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    sizes = {"n_layer": 2} if request.param == "gpt2" else {"num_hidden_layers": 2}
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param), **sizes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@dataclass
class Recorder:
    """Records by calling again, into one place as a graph does; counts."""

    recorded: int = 0
    replayed: int = 0
    wrong: float = 0.0
    places: list[Tensor] = field(default_factory=list)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        place_TV = compute().clone()
        self.places.append(place_TV)

        def replay() -> Tensor:
            self.replayed += 1
            return place_TV.copy_(compute() + self.wrong)

        return replay


def recording_engine(
    model: Model, record: Record, capacity: int = 400, spare: int = BLOCK, heads: MedusaHeads | None = None
) -> Engine:
    kernel, _ = plain_kernel(BLOCK)
    cache = KVCache(model.layers, capacity, block=BLOCK, dtype=model.dtype, device=model.device)
    cache.store = KVStore(model.layers, cache.capacity, dtype=model.dtype, device=model.device, spare=spare)
    return Engine(replace(model, paged=kernel), cache, record=record, heads=heads)


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_replayed(model: Model, seed: int) -> None:
    """Every few steps chains only; between them what cannot be replayed, and what moves and drops tokens."""
    record = Recorder()
    twins = Twins(seed, recording_engine(model, record), slot_engine(model, 400), branches=0.2)
    for _ in range(3):
        twins.open()
    for step in range(24):
        found, expected = twins.step(most=3)
        bound = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=bound, rtol=1e-5, msg=f"seed {seed}, step {step}")
        if step % 7 == 6:
            twins.close()
            twins.open()
    assert record.recorded >= 2 and record.replayed >= 8, f"seed {seed}: {record.replayed} steps were replayed"


def test_padding_writes_spare_slots_only(llama: Model) -> None:
    engine = recording_engine(llama, Recorder())
    engine.run([Chunk(engine.cache.sequence(), random_tokens(6, 1))])
    (keys_SHD,) = engine.cache.store._keys
    assert keys_SHD is not None
    written = keys_SHD.flatten(1).any(1).nonzero().flatten().tolist()
    spare = engine.cache.store.slots
    assert written == [*range(6), spare, spare + 1], "six tokens are padded to eight"


def test_one_recording_for_each_size(llama: Model) -> None:
    record = Recorder()
    engine = recording_engine(llama, record)
    sequence = engine.cache.sequence()
    for count, recorded in [(1, 1), (2, 2), (3, 3), (4, 3), (1, 3), (8, 4), (9, 4)]:
        logits_RV = engine.run([Chunk(sequence, random_tokens(count, count), rows=range(count))])
        assert record.recorded == recorded, f"{count} tokens"
        assert logits_RV.shape == (count, llama.vocabulary)
        sequence.advance(range(count))
    assert engine.run([Chunk(sequence, [7])]).shape == (0, llama.vocabulary)


def test_rows_outlive_the_next_replay(llama: Model) -> None:
    engine = recording_engine(llama, Recorder())
    sequence = engine.cache.sequence()
    first_RV = engine.run([Chunk(sequence, [7], rows=[0])])
    kept_RV = first_RV.clone()
    sequence.advance([0])
    engine.run([Chunk(sequence, [9], rows=[0])])
    assert torch.equal(first_RV, kept_RV)


def test_warm_up_records_every_size_and_leaves_nothing(llama: Model) -> None:
    record = Recorder()
    engine = recording_engine(llama, record, spare=24)
    engine.warm_up()
    assert record.recorded == sum(size <= 24 for size in SIZES)
    assert engine.cache.free_tokens == engine.cache.capacity
    engine.warm_up()
    assert record.recorded == sum(size <= 24 for size in SIZES)
    slot_engine(llama).warm_up()


def test_on_cuda_warming_up_makes_the_cache(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is recorded; on a CPU memory is taken only once it is used."""
    ran: list[int] = []

    def run(engine: Engine, chunks: list[Chunk]) -> Tensor:
        ran.append(len(chunks[0].tokens))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Engine, "run", run)
    slot_engine(llama).warm_up()
    assert not ran
    cache = KVCache(llama.layers, 64, dtype=llama.dtype, device="cpu")
    with pytest.raises(ModelError, match="a cache of 64 tokens does not fit beside the weights"):
        Engine(replace(llama, device=torch.device("cuda")), cache).warm_up()
    assert ran == [1]


class Streams:
    """Stands for ``torch.cuda`` in recording: like torch, it stays on the stream of a recording that cannot end."""

    def __init__(self) -> None:
        self.current: Any = "default"
        self.made = 0

    def new(self) -> Any:
        self.made += 1
        return SimpleNamespace(wait_stream=lambda _: None, number=self.made)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def recording(self, graph: Any, *, stream: Any = None, **_: Any) -> Iterator[None]:
        self.current = stream or self.new()
        yield
        raise RuntimeError("capture failed")


def test_a_recording_that_fails_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, seen = Streams(), []
    default = SimpleNamespace(wait_stream=lambda _: None)
    faked = {"Stream": streams.new, "stream": streams.on, "graph": streams.recording, "CUDAGraph": object}
    faked |= {"current_stream": lambda: default, "device": nullcontext, "graph_pool_handle": object}
    for name, stand_in in faked.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    record = CudaRecorder(torch.device("cuda"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="capture failed"):
            record(lambda: seen.append(streams.current) or torch.zeros(1))
        assert streams.current == "default"
    assert [stream.number for stream in seen] == [1, 1, 1, 1]


def refuse(_: Callable[[], Tensor]) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing\nand a long explanation")


@pytest.mark.parametrize("record", [refuse, Recorder(wrong=0.5), Recorder(wrong=float("nan"))])
def test_a_wrong_recording_ends_replaying(llama: Model, record: Record, caplog: pytest.LogCaptureFixture) -> None:
    engine, plain = recording_engine(llama, record), slot_engine(llama)
    one, other = engine.cache.sequence(), plain.cache.sequence()
    for token in (5, 6, 7):
        found_RV, expected_RV = (e.run([Chunk(s, [token], rows=[0])]) for e, s in ((engine, one), (plain, other)))
        torch.testing.assert_close(found_RV, expected_RV, atol=1e-4, rtol=1e-4)
        one.advance([0])
        other.advance([0])
    assert len(caplog.records) == 1, "said once"
    assert caplog.records[0].message.startswith("steps are not replayed as CUDA graphs: ")
    assert "\n" not in caplog.text.strip()


def test_a_model_with_other_layers_is_not_replayed(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Soft caps are not for the kernel, so a step that has nothing else to compute them by cannot be recorded."""
    gemma = load_tiny("gemma2", tmp_path_factory.mktemp("gemma2"), num_hidden_layers=1)
    record = Recorder()
    engine, plain = recording_engine(gemma, record), slot_engine(gemma)
    tokens = random_tokens(5, 3)
    found_RV, expected_RV = (e.run([Chunk(e.cache.sequence(), tokens, rows=range(5))]) for e in (engine, plain))
    torch.testing.assert_close(found_RV, expected_RV, atol=1e-4, rtol=1e-4)
    assert not record.recorded and "a layer of a recorded step cannot be computed over pages" in caplog.text


def test_hidden_states_of_replayed_steps_are_those_of_the_step(llama: Model) -> None:
    record = Recorder()
    heads = MedusaHeads(64, 256, 1, 0)
    replaying, computing = recording_engine(llama, record, heads=heads), slot_engine(llama)
    engines = (replaying, Engine(llama, computing.cache, heads=heads))
    sequences = [engine.cache.sequence() for engine in engines]
    tokens = random_tokens(15, seed=8)
    for start in range(0, 15, 3):
        for engine, sequence in zip(engines, sequences, strict=True):
            engine.run([Chunk(sequence, tokens[start : start + 3], rows=(0, 2))])
            sequence.advance(range(3))
        found_RD, expected_RD = (engine.hidden for engine in engines)
        assert found_RD is not None and found_RD.shape == (2, 64)
        torch.testing.assert_close(found_RD, expected_RD, atol=1e-4, rtol=1e-4)
    assert record.replayed >= 4
