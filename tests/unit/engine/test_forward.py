"""Packed forwards over the slot cache equal the stock forward, whatever the order in which tokens arrive."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.row_attention import RowAttention
from engine.cache.kv_cache import CachedSequence, CacheFull, KVCache
from engine.interface import Chunk
from engine.loading.loader import Model
from engine.step import Engine
from tests.unit.engine.engine_models import Stock, load_tiny

EQUAL = ["llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_oss"]


@pytest.fixture(scope="module", params=EQUAL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Stock]:
    folder = tmp_path_factory.mktemp(request.param)
    return load_tiny(request.param, folder), Stock(str(folder))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"))


def engine_of(model: Model, capacity: int = 512) -> Engine:
    model = replace(model, attention=RowAttention(page=8))
    return Engine(model, KVCache(model.layers, capacity, block=8, dtype=model.dtype, device=model.device))


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


def prefill(engine: Engine, sequence: CachedSequence, prompt: list[int]) -> None:
    engine.run([Chunk(sequence, prompt)])
    sequence.advance(range(len(prompt)))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=1e-4)


def test_chunked_and_mixed(pair: tuple[Model, Stock]) -> None:
    model, stock = pair
    engine = engine_of(model)
    first, second = engine.cache.sequence(), engine.cache.sequence()
    a, b = tokens(40, 1), tokens(23, 2)
    got_a, got_b = [], []
    for end_a, end_b in [(20, 0), (25, 9), (26, 10), (27, 18), (40, 23)]:
        part_a, part_b = a[first.length : end_a], b[second.length : end_b]
        chunks = [Chunk(first, part_a, rows=range(len(part_a)))]
        if part_b:
            chunks.insert(0, Chunk(second, part_b, rows=range(len(part_b))))
        logits = engine.run(chunks)
        got_b.append(logits[: len(part_b)])
        got_a.append(logits[len(part_b) :])
        first.advance(range(first.pending))
        second.advance(range(second.pending))
    assert_close(torch.cat(got_a), stock(a))
    assert_close(torch.cat(got_b), stock(b))


def test_random_trees_with_rollback_and_advance(pair: tuple[Model, Stock]) -> None:
    """A node's logits are those of the stock forward on the path to it; two sequences step together."""
    model, stock = pair
    engine = engine_of(model)
    rng = random.Random(5)
    lives = []
    for seed in (3, 4):
        sequence = engine.cache.sequence()
        prompt = tokens(rng.randint(5, 30), seed)
        prefill(engine, sequence, prompt)
        lives.append((sequence, prompt, []))
    for round_ in range(6):
        chunks = []
        for sequence, _, nodes in lives:
            count = rng.choice([1, 4, 9])
            start = sequence.pending
            parents = [rng.randint(max(-1, start + i - 3), start + i - 1) for i in range(count)]
            new = tokens(count, rng.randrange(1000))
            nodes += zip(new, parents, strict=True)
            chunks.append(Chunk(sequence, new, parents, range(count)))
        logits = iter(engine.run(chunks))
        for (_, committed, nodes), chunk in zip(lives, chunks, strict=True):
            for node in range(len(nodes) - len(chunk.tokens), len(nodes)):
                assert_close(next(logits), stock(committed + [nodes[n][0] for n in path(nodes, node)])[-1])
        for sequence, committed, nodes in lives:
            if round_ % 3 == 2:
                sequence.rollback()
                nodes.clear()
                continue
            taken = path(nodes, rng.randrange(len(nodes)))
            survivors = sequence.advance(taken)
            committed += [nodes[node][0] for node in taken]
            nodes[:] = [(nodes[old][0], survivors.get(nodes[old][1], -1)) for old in survivors]
        engine.cache.validate()


def path(nodes: list[tuple[int, int]], node: int) -> list[int]:
    taken: list[int] = []
    while node >= 0:
        taken.append(node)
        node = nodes[node][1]
    return taken[::-1]


def test_blocks_that_lie_apart_give_the_same_logits(pair: tuple[Model, Stock]) -> None:
    model, stock = pair
    engine = engine_of(model, capacity=96)
    others = [engine.cache.sequence() for _ in range(6)]
    for other in others:
        prefill(engine, other, tokens(14, 1))
    for other in sorted(others, key=lambda other: other.committed_slots(0)[0])[::2]:
        other.free()
    sequence = engine.cache.sequence()
    prompt = tokens(40, 9)
    prefill(engine, sequence, prompt[:30])
    slots = sequence.committed_slots(0)
    assert max(slots) - min(slots) + 1 > len(slots)
    rows = engine.run([Chunk(sequence, prompt[30:], rows=range(10))])
    assert_close(rows, stock(prompt)[30:])


def test_a_chain_continues_from_the_last_pending_node(llama: Model) -> None:
    engine = engine_of(llama)
    one, two = engine.cache.sequence(), engine.cache.sequence()
    text = tokens(12, 3)
    at_once = engine.run([Chunk(one, text, rows=[11])])
    engine.run([Chunk(two, text[:5])])
    engine.run([Chunk(two, text[5:9], parents=[4, 5, 6, 7])])
    in_parts = engine.run([Chunk(two, text[9:], rows=[2])])
    assert_close(in_parts, at_once)
    assert two.parents == list(range(-1, 11))


def test_moves_outlive_a_step_that_fails_while_making_them(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers moved, or moves forgotten, would be another text from then on."""
    rows = []
    for fails in range(2 * llama.layers + 1):  # the last time not at all
        engine = engine_of(llama)
        sequence = engine.cache.sequence()
        prefill(engine, sequence, tokens(9, 1))
        engine.run([Chunk(sequence, [7, 8, 9, 10], [-1, -1, 1, 2])])
        sequence.advance([1, 2, 3])
        assert engine.cache.moves._sources
        calls = 0
        select = torch.Tensor.index_select

        def short_of_memory(tensor: torch.Tensor, *args: Any, fails: int = fails, select: Any = select) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == fails + 1 <= 2 * llama.layers:
                raise torch.OutOfMemoryError
            found: torch.Tensor = select(tensor, *args)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_select", short_of_memory)
            if fails < 2 * llama.layers:
                with pytest.raises(torch.OutOfMemoryError):
                    engine.run([Chunk(sequence, [11])])
        rows.append(engine.run([Chunk(sequence, [11], rows=[0])]))
    assert all(torch.equal(row, rows[-1]) for row in rows)


def test_the_time_in_the_model_is_known(llama: Model) -> None:
    engine = engine_of(llama)
    assert engine.forward_seconds == 0.0
    engine.run([Chunk(engine.cache.sequence(), [5])])
    assert engine.forward_seconds > 0.0


def test_rows_come_in_chunk_order_and_only_when_asked(llama: Model) -> None:
    engine = engine_of(llama)
    one, two = engine.cache.sequence(), engine.cache.sequence()
    a, b = tokens(6, 1), tokens(4, 2)
    every = engine.run([Chunk(one, a, rows=range(6)), Chunk(two, b, rows=range(4))])
    one.rollback()
    two.rollback()
    some = engine.run([Chunk(one, a, rows=[5, 2]), Chunk(two, b, rows=[3])])
    assert some.dtype == torch.float32
    assert_close(some, every[[5, 2, 9]])
    one.rollback()
    assert engine.run([Chunk(one, a)]).shape == (0, llama.vocabulary)
    assert engine.run([]).shape == (0, llama.vocabulary)


def test_float64_stays_float64(tmp_path: Path) -> None:
    model = load_tiny("llama", tmp_path, dtype="float64")
    engine = engine_of(model)
    assert engine.run([Chunk(engine.cache.sequence(), [5, 6], rows=[1])]).dtype == torch.float64


def test_the_same_step_gives_the_same_bits(llama: Model) -> None:
    runs = []
    for _ in range(2):
        engine = engine_of(llama)
        sequence = engine.cache.sequence()
        prefill(engine, sequence, tokens(20, 1))
        runs.append(engine.run([Chunk(sequence, [7, 8, 9], [-1, -1, 0], range(3))]))
    assert torch.equal(*runs)


def test_a_full_cache_changes_nothing(llama: Model) -> None:
    engine = engine_of(llama, capacity=32)
    one, two = engine.cache.sequence(), engine.cache.sequence()
    prefill(engine, one, tokens(10, 1))
    with pytest.raises(CacheFull):  # each fits alone, both do not
        engine.run([Chunk(one, tokens(10, 2)), Chunk(two, tokens(12, 3))])
    assert (one.length, one.pending, two.pending) == (10, 0, 0)
    engine.cache.validate()


@pytest.mark.parametrize(
    ("chunk_tokens", "parents", "rows", "message"),
    [
        ([], None, [], "without tokens"),
        ([300], None, [], "token ids must be in"),
        ([-1], None, [], "token ids must be in"),
        ([5], None, [1], "row 1"),
        ([5, 6], [-1], [], "1 parents for 2 tokens"),
        ([5, 6], [-1, 1], [], "must precede"),
        ([5] * 257, None, [], "beyond the model's context"),
    ],
)
def test_a_bad_chunk_changes_nothing(
    llama: Model, chunk_tokens: list[int], parents: list[int] | None, rows: list[int], message: str
) -> None:
    engine = engine_of(llama)
    good, bad = engine.cache.sequence(), engine.cache.sequence()
    with pytest.raises(ValueError, match=message):
        engine.run([Chunk(good, [5, 6]), Chunk(bad, chunk_tokens, parents, rows)])
    assert good.pending == bad.pending == 0
    engine.cache.validate()


def test_one_chunk_per_sequence(llama: Model) -> None:
    engine = engine_of(llama)
    sequence = engine.cache.sequence()
    with pytest.raises(ValueError, match="only one chunk"):
        engine.run([Chunk(sequence, [5]), Chunk(sequence, [6])])


def test_a_failing_forward_changes_nothing(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llama)
    sequence = engine.cache.sequence()
    prefill(engine, sequence, [5, 6, 7])
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.store, "write", raise_memory_error)
        with pytest.raises(MemoryError):
            engine.run([Chunk(sequence, [8])])
    assert sequence.pending == 0
    assert engine.run([Chunk(sequence, [8], rows=[0])]).isfinite().all()


def raise_memory_error(*_: object) -> None:
    raise MemoryError
