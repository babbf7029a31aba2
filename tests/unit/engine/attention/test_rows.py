"""The layout of a step says of every row which slots it reads and in which order, and tells it from padding."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.rows import Rows, empty_buffer, packed
from engine.cache.kv_cache import KVCache
from engine.cache.sequence_state import SequenceState
from tests.by_rows import check_groups

PAGE, PAGES = 8, 24
SPARE = 9_000


def path_slots(state: SequenceState, node: int) -> list[int]:
    """Slots of all tokens that a pending node sees, in the order of their positions."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, state.pending_slots[node])
        node = state.parents[node]
    return state.committed_slots(0) + path


def seen_slots(rows: Rows, row: int) -> list[int]:
    """The same, as the kernels find them."""
    keys, home, pages, branch = (int(column[row]) for column in (rows.keys_T, rows.home_T, rows.pages_T, rows.branch_T))
    numbers = rows.numbers_F.tolist()
    return [
        numbers[pages + p // PAGE] * PAGE + p % PAGE if p < home else numbers[branch + p - home] for p in range(keys)
    ]


def random_chunks(rng: random.Random, cache: KVCache) -> list[tuple[SequenceState, int]]:
    """Prompts, chains and trees, behind texts of which some were drafts in other places."""
    chunks: list[tuple[SequenceState, int]] = []
    for _ in range(rng.randint(1, 6)):
        sequence = cache.sequence()
        length = rng.randint(0, 60)
        if length:
            sequence.append(range(-1, length - 1))
            sequence.advance(range(length))
        for _ in range(rng.randint(0, 3)):
            nodes = sequence.pending
            sequence.append([rng.randint(-1, nodes + i - 1) for i in range(rng.randint(1, 8))])
            kept = rng.choice([sequence.parents.index(-1), *range(nodes)]) if rng.random() < 0.7 else None
            path: list[int] = []
            while kept is not None and kept >= 0:
                path.insert(0, kept)
                kept = sequence.parents[kept]
            sequence.advance(path)
        if rng.random() < 0.5:
            sequence.rollback()
        start, count = sequence.pending, rng.choice([1, 3, rng.randint(1, 30)])
        tree = rng.random() < 0.5
        sequence.append([rng.randint(-1, start + i - 1) if tree else start + i - 1 for i in range(count)])
        chunks.append((sequence, rng.randint(1, sequence.pending) if tree else count))
    return chunks


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut"])
@pytest.mark.parametrize("seed", range(40))
def test_every_row_finds_its_keys(seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.rows.SLICE", 16)
    monkeypatch.setattr("tests.by_rows.SLICE", 16)
    if not whole:
        monkeypatch.setattr("engine.attention.rows.MAX_WANTED", 9)
        monkeypatch.setattr("engine.attention.rows.max_numbers", lambda *_: PAGES + 40)
    rng = random.Random(seed)
    chunks = random_chunks(rng, KVCache(1, 2048, block=PAGE, dtype=torch.float32, device="cpu"))
    count = sum(tokens for _, tokens in chunks)
    tokens = [rng.randrange(1000) for _ in range(count)]
    wanted = sorted(rng.sample(range(count), rng.randint(0, count)))
    max_rows = 512 if whole else 32
    found: list[tuple[int, int, int, list[int]]] = []
    found_wanted: list[int] = []
    pieces = 0
    for piece in packed(tokens, wanted, chunks, group=4, max_rows=max_rows, pages=PAGES):
        pieces += 1
        rows = next(rows for rows in (16, 32, 512) if rows >= len(piece))
        buffer = empty_buffer(rows, PAGES, torch.device("cpu")).fill_(-7)
        numbers = piece.host_buffer(rows, SPARE)
        assert len(numbers) <= len(buffer)
        buffer[: len(numbers)] = numbers
        laid_out = Rows.within(buffer, rows)
        check_groups(laid_out)
        assert laid_out.wanted_R[: len(piece.wanted)].tolist() == list(piece.wanted)
        assert not laid_out.wanted_R[len(piece.wanted) :].any()
        found_wanted += [len(found) + row for row in piece.wanted]
        tail = slice(len(piece), rows)
        assert not laid_out.keys_T[tail].any() and not laid_out.group_T[tail].any(), "padding"
        assert laid_out.slots_T[tail].tolist() == list(range(SPARE, SPARE + rows - len(piece)))
        columns = (laid_out.tokens_T, laid_out.positions_T, laid_out.slots_T)
        for row, (token, position, slot) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            if row < len(piece):
                found.append((token, position, slot, seen_slots(laid_out, row)))
    nodes = [(state, node) for state, each in chunks for node in range(state.pending - each, state.pending)]
    assert found == [
        (token, state.length + state.depths[node], state.pending_slots[node], path_slots(state, node))
        for token, (state, node) in zip(tokens, nodes, strict=True)
    ]
    assert found_wanted == wanted
    assert pieces == 1 if whole else pieces >= -(-len(wanted) // 9)
