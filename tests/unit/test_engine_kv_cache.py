"""The slot cache and its ledger: errors, limits, and sequences that lie in one piece."""

from __future__ import annotations

import pytest
import torch

from engine.block_ledger import BlockLedger
from engine.kv_cache import CacheFull, KVCache


def make(capacity: int = 64, block: int = 8) -> KVCache:
    return KVCache(1, capacity, block=block, dtype=torch.float32, device="cpu")


def in_one_piece(slots: torch.Tensor) -> bool:
    return sorted(slots.tolist()) == list(range(int(slots.min()), int(slots.max()) + 1))


def test_capacity_is_rounded_up_to_blocks() -> None:
    assert make(capacity=17, block=8).capacity == 24


def test_advance_renumbers_survivors_and_frees_the_rest() -> None:
    cache = make()
    sequence = cache.sequence()
    #        0   1  2  3  4  5
    sequence.append([-1, -1, 0, 0, 3, 1])
    before = sequence.slots().tolist()
    assert sequence.advance([0]) == {2: 0, 3: 1, 4: 2}
    assert sequence.length == 1
    assert sequence.parents == [-1, -1, 1]
    assert sequence.depths == [0, 0, 1]
    assert sequence.slots().tolist() == [before[0], before[2], before[3], before[4]]
    assert sequence.advance([1, 2]) == {}
    assert sequence.slots().tolist() == [before[0], before[3], before[4]]
    cache.check()


def test_an_empty_path_keeps_everything() -> None:
    sequence = make().sequence()
    sequence.append([-1, 0])
    assert sequence.advance([]) == {0: 0, 1: 1}
    assert sequence.pending == 2


@pytest.mark.parametrize("path", [[1], [0, 0], [2, 1], [5], [-1], [0, 2]])
def test_a_path_must_go_from_parent_to_child(path: list[int]) -> None:
    sequence = make().sequence()
    sequence.append([-1, 0, -1])
    with pytest.raises(ValueError, match="not a child"):
        sequence.advance(path)
    assert (sequence.length, sequence.pending) == (0, 3)


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1]])
def test_parents_must_precede(parents: list[int]) -> None:
    cache = make()
    sequence = cache.sequence()
    with pytest.raises(ValueError, match="must precede"):
        sequence.append(parents)
    assert sequence.pending == 0
    cache.check()


def test_truncate_refuses_pending_nodes_and_longer_lengths() -> None:
    sequence = make().sequence()
    sequence.append([-1])
    with pytest.raises(ValueError, match="pending"):
        sequence.truncate(0)
    sequence.advance([0])
    with pytest.raises(ValueError, match="cannot truncate 1 tokens to 2"):
        sequence.truncate(2)


def test_sequences_live_across_inference_mode() -> None:
    cache = make()
    with torch.inference_mode():
        sequence = cache.sequence()
        sequence.append([-1, 0])
        sequence.advance([0])
    sequence.advance([0])
    with torch.inference_mode():
        slots = sequence.slots()
    sequence.append([-1] * 40)
    sequence.advance([5])
    assert slots.tolist() == [0, 1]
    assert sequence.slots(2).tolist() == [7]


def test_the_leading_run_of_slots_is_known() -> None:
    sequence = make().sequence()
    sequence.append([-1, 0, 1])
    sequence.advance([0, 1])
    assert sequence.ascending == 2
    sequence.append([0, 0])  # slots 3 and 4 behind the pending slot 2
    sequence.advance([0, 2])
    assert sequence.committed_slots(0) == [0, 1, 2, 4]
    assert sequence.ascending == 3
    sequence.append([-1])  # fills the hole at 3
    sequence.advance([0])
    sequence.append([-1, 0])  # goes on at 5 and 6: in order again, but not with the beginning
    sequence.advance([0, 1])
    assert sequence.committed_slots(2) == [2, 4, 3, 5, 6]
    assert sequence.ascending == 3
    sequence.truncate(2)
    assert sequence.ascending == 2
    sequence.free()
    assert sequence.ascending == 0


def test_a_freed_sequence_takes_nothing_more() -> None:
    cache = make()
    sequence = cache.sequence()
    sequence.free()
    with pytest.raises(AssertionError, match="freed"):
        sequence.append([-1])
    cache.check()


def test_full_changes_nothing() -> None:
    cache = make(capacity=16)
    sequence = cache.sequence()
    sequence.append([-1] * 10)
    assert sequence.can_append(6)
    assert not sequence.can_append(7)
    with pytest.raises(CacheFull):
        sequence.append([-1] * 7)
    assert sequence.pending == 10
    cache.check()


def test_blocks_go_back_as_soon_as_they_are_unused() -> None:
    cache = make(capacity=64, block=8)
    sequence = cache.sequence()
    sequence.append(list(range(-1, 19)))
    assert cache.free_tokens == 40
    sequence.advance(range(9))
    sequence.rollback()
    assert cache.free_tokens == 48
    sequence.truncate(8)
    assert cache.free_tokens == 56


def test_sequences_growing_in_turn_stay_in_one_piece() -> None:
    cache = make(capacity=1024, block=16)
    sequences = [cache.sequence() for _ in range(4)]
    for _ in range(200):
        for sequence in sequences:
            sequence.append([-1])
            sequence.advance([0])
    assert all(in_one_piece(sequence.slots()) for sequence in sequences)


def test_holes_left_by_refused_branches_are_filled_first() -> None:
    sequence = make().sequence()
    sequence.append([-1, -1, 0, 0, 1])
    sequence.advance([0, 3])  # slots 1, 2 and 4 are free again
    sequence.append([-1, 0, 1])
    assert sorted(sequence.slots().tolist()) == [0, 1, 2, 3, 4]


def test_ledger_prefers_the_next_block_then_open_ground() -> None:
    ledger = BlockLedger(16)
    assert ledger.take(after=None) == 0
    assert ledger.take(after=None) == 8  # leaves the first one room to grow
    assert ledger.take(after=0) == 1
    assert ledger.take(after=8) == 9
    assert ledger.free == 12
    taken = {0, 1, 8, 9} | {ledger.take(after=None) for _ in range(12)}
    assert taken == set(range(16))
