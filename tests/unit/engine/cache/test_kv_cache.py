"""The slot cache and its ledger: errors, limits, and sequences that lie in one piece."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
import torch

from engine.cache.block_ledger import BlockLedger
from engine.cache.kv_cache import CachedSequence, CacheFull, KVCache, SequenceState
from engine.cache.kv_store import Moves


def make(capacity: int = 64, block: int = 8) -> KVCache:
    return KVCache(1, capacity, block=block, dtype=torch.float32, device="cpu")


def fill(sequence: CachedSequence, count: int) -> None:
    """Commit so many more tokens."""
    sequence.append(range(-1, count - 1))
    sequence.advance(range(count))


def slots_of(sequence: SequenceState) -> list[int]:
    """Of all its tokens, the pending ones last."""
    return [*sequence.committed_slots(0), *sequence.pending_slots]


def in_one_piece(slots: list[int]) -> bool:
    return sorted(slots) == list(range(min(slots), max(slots) + 1))


def test_capacity_is_rounded_up_to_blocks() -> None:
    assert make(capacity=17, block=8).capacity == 24


def test_advance_renumbers_survivors_and_frees_the_rest() -> None:
    cache = make()
    sequence = cache.sequence()
    #        0   1  2  3  4  5
    sequence.append([-1, -1, 0, 0, 3, 1])
    assert slots_of(sequence) == [0, 1, 2, 3, 4, 5]
    assert sequence.advance([0]) == {2: 0, 3: 1, 4: 2}
    assert sequence.length == 1
    assert sequence.parents == [-1, -1, 1]
    assert sequence.depths == [0, 0, 1]
    assert slots_of(sequence) == [0, 2, 3, 4]
    assert cache.take_moves() == []
    assert sequence.advance([1, 2]) == {}
    assert slots_of(sequence) == [0, 1, 2]
    assert sorted(cache.take_moves()) == [(3, 1), (4, 2)]
    cache.validate()


@pytest.mark.parametrize("seed", range(20))
def test_commit_is_advance_and_rollback(seed: int) -> None:
    """Committed tokens are what they were, wherever dropped nodes lay; the books are the same."""
    rng = random.Random(seed)
    lengths, contents = [], []
    for at_once in (True, False):
        rng.seed(seed)
        cache = make(200, 4)
        sequence, content, held, names = cache.sequence(), dict[int, int](), list[int](), itertools.count()
        for _ in range(12):
            if rng.random() < 0.4:  # survivors of one step, of which some come away from home in the next
                kept = [node for node in range(sequence.pending) if sequence.parents[node] == -1][:1]
                held += [content[sequence.pending_slots[node]] for node in kept]
                sequence.advance(kept)
            slots = sequence.append([rng.randint(-1, sequence.pending + i - 1) for i in range(rng.randint(1, 6))])
            content |= {to: content[source] for source, to in cache.take_moves()}
            content |= zip(slots, names, strict=False)
            path: list[int] = []
            node = rng.randrange(-1, sequence.pending)
            while node >= 0:
                path.insert(0, node)
                node = sequence.parents[node]
            held += [content[sequence.pending_slots[node]] for node in path]
            if at_once:
                sequence.commit(path)
            else:
                sequence.advance(path)
                sequence.rollback()
            cache.validate()
            content |= {to: content[source] for source, to in cache.take_moves()}
            assert [content[slot] for slot in slots_of(sequence)] == held
        lengths.append((sequence.length, list(sequence.blocks), cache.ledger.free))
        contents.append(held)
    assert lengths[0] == lengths[1] and contents[0] == contents[1]


def test_an_empty_path_keeps_everything() -> None:
    sequence = make().sequence()
    sequence.append([-1, 0])
    assert sequence.advance([]) == {0: 0, 1: 1}
    assert sequence.pending == 2
    sequence.commit([])
    assert sequence.pending == 0


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
    cache.validate()


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
        assert slots_of(sequence) == [0, 1]
    sequence.append([-1] * 40)
    sequence.advance([5])
    assert sequence.committed_slots(2) == [2]


def test_what_is_committed_from_elsewhere_changes_places_with_what_stays_pending() -> None:
    cache = make()
    sequence = cache.sequence()
    sequence.append([-1, 0, 0])
    assert sequence.advance([0]) == {1: 0, 2: 1}
    sequence.append([1])  # nodes in the homes of positions 1, 2 and 3; the path through 2 and 3 will survive
    sequence.append([2, 2])
    assert sequence.pending_slots == [1, 2, 3, 4, 5]
    assert sequence.advance([1, 2]) == {3: 0, 4: 1}
    assert sequence.committed_slots(0) == [0, 1, 2]
    assert sequence.pending_slots == [4, 5]
    assert sorted(cache.take_moves()) == [(2, 1), (3, 2)]
    sequence.append([1])  # in the hole at 3
    assert sequence.advance([1]) == {2: 0}
    assert sequence.pending_slots == [5], "it gave way to what is committed now"
    assert sorted(cache.take_moves()) == [(3, 5), (5, 3)]
    cache.validate()


def test_a_path_behind_a_refused_draft_moves_up_by_one_and_nothing_else_is_copied() -> None:
    cache = make()
    sequence = cache.sequence()
    sequence.append([-1, -1, 1, 2])
    sequence.advance([1, 2, 3])
    assert cache.take_moves() == [(1, 0), (2, 1), (3, 2)]


def test_moves_that_follow_one_another_are_made_at_once() -> None:
    moves = Moves()
    moves.note([(3, 1), (1, 3)])
    moves.note([(3, 2)])
    moves.note([(1, 3)])
    assert sorted(moves.take()) == [(1, 2), (3, 1)]
    assert moves.take() == []


def test_slots_follow_the_blocks() -> None:
    cache = make(capacity=64, block=4)
    one, two = cache.sequence(), cache.sequence()
    fill(one, 7)
    fill(two, 1)
    fill(one, 30)  # runs into the other one
    assert list(two.blocks) == [9]
    assert list(one.blocks) == [*range(9), 13]
    assert one.committed_slots(34) == [34, 35, 52]
    one.truncate(18)
    assert one.committed_slots(17) == [17]


def test_a_state_stays_as_it_was_and_travels() -> None:
    cache = make(block=4)
    sequence = cache.sequence()
    fill(sequence, 6)
    sequence.append([-1, 0, 0])
    state = pickle.loads(pickle.dumps(sequence.state()))
    assert type(state) is SequenceState
    expected = slots_of(sequence)
    sequence.advance([0, 2])
    assert (state.length, state.pending, state.parents, state.depths) == (6, 3, [-1, 0, 0], [0, 1, 1])
    assert slots_of(state) == expected
    assert (state.pending_slots, state.is_chain) == ([6, 7, 8], False)
    assert len(pickle.dumps(state)) < 500


def test_a_freed_sequence_takes_nothing_more() -> None:
    cache = make()
    sequence = cache.sequence()
    sequence.free()
    with pytest.raises(AssertionError, match="freed"):
        sequence.append([-1])
    cache.validate()


def test_full_changes_nothing() -> None:
    cache = make(capacity=16)
    sequence = cache.sequence()
    sequence.append([-1] * 10)
    assert sequence.blocks_needed(6) <= cache.ledger.free < sequence.blocks_needed(7)
    with pytest.raises(CacheFull):
        sequence.append([-1] * 7)
    assert sequence.pending == 10
    cache.validate()


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
    assert all(in_one_piece(slots_of(sequence)) for sequence in sequences)


def test_holes_left_by_refused_branches_are_filled_first() -> None:
    sequence = make().sequence()
    sequence.append([-1, -1, 0, 0, 1])
    sequence.advance([0, 3])  # slots 1, 2 and 4 are free again
    sequence.append([-1, 0, 1])
    assert sorted(slots_of(sequence)) == [0, 1, 2, 3, 4]


def test_ledger_prefers_the_next_block_then_open_ground() -> None:
    ledger = BlockLedger(16)
    assert ledger.take(after=None) == 0
    assert ledger.take(after=None) == 8  # leaves the first one room to grow
    assert ledger.take(after=0) == 1
    assert ledger.take(after=8) == 9
    assert ledger.free == 12
    taken = {0, 1, 8, 9} | {ledger.take(after=None) for _ in range(12)}
    assert taken == set(range(16))


def test_regrafted_nodes_keep_their_slots_under_other_parents() -> None:
    cache = make()
    sequence = cache.sequence()
    fill(sequence, 3)
    sequence.append([-1, 0])
    reserved = sequence.append([1] * 7)
    assert len(sequence.blocks) == 2
    sequence.regraft(7, [1, 2, 4], [0, 2, -1])
    assert sequence.pending_slots == [3, 4, reserved[1], reserved[2], reserved[4]]
    assert sequence.parents == [-1, 0, 0, 2, -1] and sequence.depths == [0, 1, 1, 2, 0]
    assert sequence.advance([0, 2, 3]) == {}
    assert sequence.committed_slots(0) == [0, 1, 2, 3, 4, 5]
    assert sorted(cache.take_moves()) == [(reserved[1], 4), (reserved[2], 5)]
    cache.validate()


def test_what_was_read_of_nodes_before_they_were_regrafted_counts_no_more() -> None:
    cache = make()
    sequence = cache.sequence()
    fill(sequence, 3)
    sequence.append([-1])
    reserved = sequence.append([0] * 3)
    assert sequence.branches == [(), (), (reserved[1],), (reserved[2],)]
    sequence.regraft(3, [1, 2], [0, 1])
    assert sequence.branches == [(), (reserved[1],), (reserved[1], reserved[2])]
    cache.validate()


def test_regrafting_nothing_gives_everything_back() -> None:
    cache = make()
    sequence = cache.sequence()
    sequence.append([-1])
    sequence.append([0] * 20)
    sequence.regraft(20, [], [])
    assert sequence.pending == 1 and len(sequence.blocks) == 1
    cache.validate()
    sequence.append([0] * 3)
    for kept, parents in ([2, 1], [0, 0]), ([3], [0]), ([0], [1]), ([0], [0, 0]):
        with pytest.raises(AssertionError):
            sequence.regraft(3, kept, parents)


def test_a_lineage_is_at_home_up_to_the_first_node_elsewhere() -> None:
    sequence = make().sequence()
    fill(sequence, 6)
    assert sequence.lineage(-1) == (6, [])
    sequence.append([-1, 0, 0, 1, 2])  # two branches behind the first node; the other one lies beside
    assert sequence.lineage(0) == (7, [])
    assert sequence.lineage(1) == (8, []) and sequence.lineage(3) == (8, [9])
    assert sequence.lineage(2) == (7, [8]) and sequence.lineage(4) == (7, [8, 10])
