"""Steps by rows say what steps sequence by sequence say, computed and replayed.

A recording here is the computation itself, on the same buffers; attention is the plain one, so this runs anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.rows import ROW_CLASSES
from engine.cache.kv_cache import KVCache
from engine.cuda.graphs import CudaRecorder, Record
from engine.exactness import warm_up
from engine.interface import Chunk
from engine.loading.loader import Model
from engine.model import ModelError
from engine.step import Engine
from tests.by_rows import PlainRows, Recorder, Twins, by_rows
from tests.unit.engine.engine_models import load_tiny, random_tokens, slot_engine


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    sizes = {"n_layer": 2} if request.param == "gpt2" else {"num_hidden_layers": 2}
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param), **sizes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.mark.parametrize("recorded", [False, True], ids=["computed", "replayed"])
@pytest.mark.parametrize("seed", range(2))
def test_random_steps(model: Model, seed: int, recorded: bool) -> None:
    """Prefixes shared and copied, chains and trees side by side, moves, rollbacks; windows, soft caps, sinks."""
    record, attention = Recorder(), PlainRows(2)
    engine = by_rows(model, attention=attention, record=record if recorded else None)
    twins = Twins(seed, engine, slot_engine(model, 400), branches=0.3)
    for _ in range(3):
        twins.open()
    moved = 0
    for step in range(14):
        moved += len(twins.engines[0].cache.moves._sources)
        found, expected = twins.step()
        bound = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=bound, rtol=1e-5, msg=f"seed {seed}, step {step}")
        if step % 5 == 4:
            twins.close()
            twins.open()
    assert moved, f"seed {seed} moves nothing"
    assert attention.calls and (record.replayed > 10) == recorded, "every step of a size seen before is replayed"


def test_padding_writes_spare_slots_only(llama: Model) -> None:
    engine = by_rows(llama)
    engine.run([Chunk(engine.cache.sequence(), random_tokens(6, 1))])
    (keys_SHD,) = engine.cache.store._keys
    assert keys_SHD is not None
    written = keys_SHD.flatten(1).any(1).nonzero().flatten().tolist()
    spare = engine.cache.store.slots
    assert written == [*range(6), *range(spare, spare + 10)], "six rows are padded to sixteen"


def test_one_recording_for_each_class_of_rows(llama: Model) -> None:
    record, attention = Recorder(), PlainRows(2)
    engine = by_rows(llama, attention=attention, record=record)
    sequence = engine.cache.sequence()
    for count, recorded in [(1, 1), (2, 1), (16, 1), (17, 2), (33, 3), (64, 3), (65, 3)]:
        logits_RV = engine.run([Chunk(sequence, random_tokens(count, count), rows=range(count))])
        assert record.recorded == recorded, f"{count} tokens"
        assert logits_RV.shape == (count, llama.vocabulary)
        sequence.rollback()
    assert attention.max_rows == 64
    assert engine.run([Chunk(sequence, [7])]).shape == (0, llama.vocabulary)


def test_long_branches_take_a_larger_class(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows may need more slots than the buffer of their class has room for."""
    monkeypatch.setattr("engine.attention.rows.max_numbers", lambda rows, pages: pages + rows)
    record = Recorder()
    engine, plain = by_rows(llama, record=record), slot_engine(llama, 400)
    parents = [-1, -1, *range(1, 10)]  # the second branch lies beside the first
    for _ in range(2):
        found, expected = (
            each.run([Chunk(each.cache.sequence(), random_tokens(11, 4), parents, range(11))])
            for each in (engine, plain)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert record.places[0].shape[0] == 32


def test_a_step_with_more_than_fits_is_cut(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, by rows that are wanted, and by pages; rows that are wanted come in any order, also twice."""
    monkeypatch.setattr("engine.attention.rows.MAX_WANTED", 20)
    monkeypatch.setattr("engine.attention.rows.max_numbers", lambda rows, pages: pages + 4)
    engine, plain = by_rows(llama), slot_engine(llama, 400)
    sequences = [(engine.cache.sequence(), plain.cache.sequence()) for _ in range(5)]
    for tokens in (30, 40):
        found, expected = (
            each.run(
                [
                    Chunk(pair[i], random_tokens(tokens, n), rows=[*range(tokens - 1, -1, -2), 3])
                    for n, pair in enumerate(sequences)
                ]
            )
            for i, each in enumerate((engine, plain))
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for pair in sequences:
            for sequence in pair:
                sequence.advance(range(tokens))


def test_rows_outlive_the_next_replay(llama: Model) -> None:
    engine = by_rows(llama, record=Recorder())
    sequence = engine.cache.sequence()
    first_RV = engine.run([Chunk(sequence, [7], rows=[0])])
    kept_RV = first_RV.clone()
    sequence.advance([0])
    engine.run([Chunk(sequence, [9], rows=[0])])
    assert torch.equal(first_RV, kept_RV)


def test_warm_up_records_every_class_and_leaves_nothing(llama: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    record = Recorder()
    engine = by_rows(llama, record=record)
    warm_up(engine)
    assert record.recorded == 2 * sum(rows <= 64 for rows in ROW_CLASSES), "with and without noise"
    assert engine.cache.free_tokens == engine.cache.capacity
    assert f"{record.recorded} CUDA graphs recorded in " in caplog.text
    warm_up(engine)
    assert record.recorded == 2 * sum(rows <= 64 for rows in ROW_CLASSES)
    drafter = by_rows(llama, record=(of_drafter := Recorder()), invariant=False)
    warm_up(drafter)
    assert of_drafter.recorded == sum(rows <= 64 for rows in ROW_CLASSES), "what does not draw needs no noise"
    warm_up(slot_engine(llama))


def test_a_recording_that_a_later_one_overwrites_is_found(llama: Model, caplog: pytest.LogCaptureFixture) -> None:
    record = Recorder()

    def overwriting(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = record(compute)
        number = record.recorded
        return lambda: replay() if record.recorded == number else replay() * 2

    engine = by_rows(llama, record=overwriting)
    warm_up(engine)
    assert "a step of 64 rows is off by " in caplog.text and "once all are recorded" in caplog.text
    replayed = record.replayed
    engine.run([Chunk(engine.cache.sequence(), [5], rows=[0])])
    assert record.replayed == replayed


def test_on_cuda_warming_up_makes_the_cache(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is recorded; on a CPU memory is taken only once it is used."""
    ran: list[int] = []

    def run(engine: Engine, chunks: list[Chunk]) -> Tensor:
        ran.append(len(chunks[0].tokens))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Engine, "run", run)
    warm_up(Engine(llama, KVCache(llama.layers, 64, dtype=llama.dtype, device=llama.device)))
    assert not ran
    cache = KVCache(llama.layers, 64, dtype=llama.dtype, device="cpu")
    with pytest.raises(ModelError, match="a cache of 64 tokens does not fit beside the weights"):
        warm_up(Engine(replace(llama, device=torch.device("cuda")), cache))
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
    engine, plain = by_rows(llama, record=record), slot_engine(llama)
    one, other = engine.cache.sequence(), plain.cache.sequence()
    for token in (5, 6, 7):
        found_RV, expected_RV = (e.run([Chunk(s, [token], rows=[0])]) for e, s in ((engine, one), (plain, other)))
        torch.testing.assert_close(found_RV, expected_RV, atol=1e-4, rtol=1e-4)
        one.advance([0])
        other.advance([0])
    assert len(caplog.records) == 1, "said once"
    assert caplog.records[0].message.startswith("steps are not replayed as CUDA graphs: ")
    assert "\n" not in caplog.text.strip()
