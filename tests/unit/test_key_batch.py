from __future__ import annotations

from random import Random

import pytest
import torch

from engine.key_batch import FEW_KEYS, FEW_QUERIES, KeyBatch, together
from engine.visibility import HIDDEN, KeyView

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
