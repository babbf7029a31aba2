from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch

from engine.attention.invariance import chain_segments, position_ordered
from engine.attention.key_batch import FEW_KEYS, FEW_QUERIES, KeyBatch, View, together
from engine.attention.visibility import HIDDEN, ChainView, KeyView, is_plain, slot_ordered
from engine.cache.sequence_state import SequenceState

SLOTS = 8192
HEADS, SIZE = 2, 4


def view_of(rng: Random, queries: int, keys: int) -> KeyView:
    """Any slots, any mask, cut into segments anywhere."""
    scattered = rng.random() < 0.5
    slots_K = torch.tensor(rng.sample(range(SLOTS), keys)) if scattered else None
    base = 0 if scattered else rng.randrange(SLOTS - keys)
    mask_TK = torch.zeros(queries, keys)
    mask_TK[torch.rand(queries, keys, generator=torch.Generator().manual_seed(rng.randrange(99))) < 0.3] = HIDDEN
    mask_TK[:, 0] = 0.0
    cut = rng.randrange(1, keys) if keys > 1 and rng.random() < 0.5 else keys
    segments = [(0, cut), (cut, keys)] if cut < keys else [(0, keys)]
    return KeyView(queries, keys, base, slots_K, None if rng.random() < 0.2 else mask_TK, segments)


def seen_alone(view: KeyView, start: int) -> dict[int, set[int]]:
    """Packed query to the slots it sees."""
    slots = range(view.base, view.base + view.keys) if view.slots_K is None else view.slots_K.tolist()
    mask_TK = torch.zeros(view.queries, view.keys) if view.mask_TK is None else view.mask_TK
    return {
        start + t: {slot for slot, hidden in zip(slots, mask_TK[t].tolist(), strict=True) if hidden == 0.0}
        for t in range(view.queries)
    }


def seen_together(batch: KeyBatch, packed: int) -> dict[int, set[int]]:
    """The same, read from the tensors that attention gets: a store whose every key says which slot it is in."""
    cached_SHD = torch.arange(SLOTS, dtype=torch.float64).view(SLOTS, 1, 1).expand(SLOTS, HEADS, SIZE).contiguous()
    query_QPD = torch.arange(packed, dtype=torch.float64).view(1, packed, 1).expand(4, packed, SIZE)
    keys_NHK = batch.keys_of(cached_SHD).view(batch.views, HEADS, batch.keys, SIZE)[..., 0]
    assert torch.equal(keys_NHK[:, 0], keys_NHK[:, 1])
    query_NT = batch.queries_of(query_QPD)[:, 0, :, 0]
    mask_N1TK = batch.mask(torch.float32)
    mask_NTK = torch.zeros(batch.views, batch.queries, batch.keys) if mask_N1TK is None else mask_N1TK[:, 0]
    out_PQE = torch.full((packed, 1, 1), -1.0, dtype=torch.float64)
    numbers_NT = torch.arange(batch.views * batch.queries, dtype=torch.float64).view(batch.views, batch.queries)
    batch.put(out_PQE, numbers_NT[:, :, None, None])
    found = {}
    for query, number in enumerate(out_PQE[:, 0, 0].long().tolist()):
        if number >= 0:
            n, t = divmod(number, batch.queries)
            assert query_NT[n, t] == query
            shown = zip(keys_NHK[n, 0].tolist(), mask_NTK[n, t].tolist(), strict=True)
            found[query] = {int(slot) for slot, hidden in shown if hidden == 0.0}
    return found


@pytest.mark.parametrize("seed", range(12))
def test_every_query_sees_what_it_would_see_alone(seed: int) -> None:
    rng = Random(seed)
    views = [
        view_of(rng, rng.choice([1, 1, 2, 9, 16, 40]), rng.choice([1, 64, 65, 320, 700, 2500]))
        for _ in range(rng.randrange(1, 9))
    ]
    packed = sum(view.queries for view in views)
    start, alone = 0, {}
    for view in views:
        alone |= seen_alone(view, start)
        start += view.queries
    found: dict[int, set[int]] = {}
    for batch in together(views):
        part = seen_together(batch, packed)
        assert not part.keys() & found.keys(), f"seed {seed}"
        found |= part
    assert found == alone, f"seed {seed}"


def test_segments_stay_apart() -> None:
    """Each view's sums are cut where they would be cut alone."""
    rng = Random(3)
    short, long = view_of(rng, 1, 70), view_of(rng, 1, 100)
    short.segments, long.segments = [(0, 10), (10, 70)], [(0, 70), (70, 100)]
    (batch,) = together([short, long])
    assert batch.segments == [(0, 70), (70, 130)]


def test_who_is_computed_together() -> None:
    rng = Random(1)

    def sizes(*shapes: tuple[int, int]) -> list[int]:
        return sorted(batch.views for batch in together([view_of(rng, *shape) for shape in shapes]))

    assert sizes((1, 200)) == [1]
    assert sizes(*[(1, 200)] * 16) == [16]
    assert sizes((1, 200), (FEW_QUERIES + 1, 200), (3, 210)) == [1, 2]
    assert sizes((1, FEW_KEYS), (1, FEW_KEYS + 1), (1, FEW_KEYS)) == [1, 2]
    assert sizes((1, 64), (1, 64), (1, 400), (1, 400)) == [2, 2], "not padded to many times what is needed"


BLOCK = 16


def chain_of(rng: Random, length: int, tokens: int) -> SequenceState:
    """A text of ``length`` tokens in any blocks, a chain of ``tokens`` at its end."""
    blocks = rng.sample(range(SLOTS // BLOCK), -(-(length + tokens) // BLOCK))
    if rng.random() < 0.5:
        blocks = list(range(blocks[0] % 100, blocks[0] % 100 + len(blocks)))
    adjacent = next((i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1), len(blocks))
    state = SequenceState(BLOCK, blocks, adjacent, length, list(range(-1, tokens - 1)), list(range(tokens)))
    state.pending_slots = [state.home(position) for position in range(length, length + tokens)]
    return state


def placed_alone(state: SequenceState, tokens: int, *, invariant: bool) -> KeyView:
    if invariant:
        (view,) = position_ordered(state, tokens, None, SLOTS)
        return view
    return slot_ordered(state, tokens, None, torch.float32)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("invariant", [True, False])
def test_chains_laid_out_at_once_are_as_laid_out_one_by_one(invariant: bool, seed: int) -> None:
    """Also beside views of other kinds, and around every boundary of segments."""
    rng = Random(seed)
    sizes = [(rng.choice([0, 1, 15, 16, 63, 64, 300, 383, 384, 385, 440]), rng.choice([1, 1, 2, 16])) for _ in range(9)]
    views: list[View] = []
    apart: list[KeyView] = []
    for length, tokens in sizes:
        state = chain_of(rng, length, tokens)
        assert is_plain(state, tokens, None)
        assert is_plain(state, tokens, length + tokens)
        assert not is_plain(state, tokens, length + tokens - 1), "a window hides the first"
        view = placed_alone(state, tokens, invariant=invariant)
        segments = chain_segments(length + tokens) if invariant else [(0, length + tokens)]
        assert not invariant or list(view.segments) == segments
        apart.append(view)
        views.append(
            ChainView(state, tokens, segments[-1][1], segments, lambda view=view: [view])
            if rng.random() < 0.8
            else view
        )
    packed = sum(view.queries for view in views)
    found = [
        {query: seen for batch in together(each) for query, seen in seen_together(batch, packed).items()}
        for each in (views, apart)
    ]
    assert found[0] == found[1], f"seed {seed}"
    assert len(found[0]) == packed
    if invariant:
        assert [batch.segments for batch in together(views)] == [batch.segments for batch in together(apart)]


def test_what_is_no_chain_at_home() -> None:
    rng = Random(0)
    state = chain_of(rng, 40, 4)
    assert is_plain(state, 4, None)
    assert not is_plain(state, 3, None), "one more is pending"
    state.pending_slots[1], state.pending_slots[2] = state.pending_slots[2], state.pending_slots[1]
    assert not is_plain(state, 4, None), "not in order"
    tree = chain_of(rng, 40, 3)
    tree.parents, tree.depths = [-1, 0, 0], [0, 1, 1]
    assert not is_plain(tree, 3, None)


def test_columns_without_a_key_read_nobody_elses_slots() -> None:
    rng = Random(5)
    short, long = chain_of(rng, 70, 1), chain_of(rng, 100, 2)
    own = [{state.home(position) for position in range(state.length + state.pending)} for state in (short, long)]
    views: list[View] = []
    for state in (short, long):
        alone = partial(placed_alone, state, state.pending, invariant=True)
        segments = chain_segments(state.length + state.pending)
        views.append(ChainView(state, state.pending, segments[-1][1], segments, alone))
    (batch,) = together(views)
    assert batch.slots_F is not None
    assert [set(row) for row in batch.slots_F.view(2, batch.keys).tolist()] == own
