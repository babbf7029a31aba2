"""What sequences share: whole blocks in place, parts of a block as a copy; and what gives way in a full cache."""

from __future__ import annotations

import torch

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.cache.kv_store import CLEAR
from speculation import digest as digests

TEXT = list(range(100, 200))


def make(blocks: int = 16, block: int = 4) -> KVCache:
    return KVCache(0, blocks * block, block=block, dtype=torch.float32, device="cpu")


def cached(cache: KVCache, tokens: list[int], count: int | None = None, scope: str = "") -> CachedSequence:
    """A sequence that takes over what it can and computes the rest of its first ``count`` tokens (all but the last)."""
    sequence = cache.sequence(tokens, scope)
    sequence.reuse()
    compute(sequence, (len(tokens) - 1 if count is None else count) - sequence.length)
    return sequence


def compute(sequence: CachedSequence, count: int) -> None:
    sequence.append(range(-1, count - 1))
    sequence.advance(range(count))


def test_whole_blocks_are_shared_in_place() -> None:
    cache = make()
    one = cached(cache, TEXT[:11])
    free = cache.ledger.free
    two = cache.sequence([*TEXT[:8], 1, 2, 3])
    assert two.reuse() == 8
    assert two.blocks == one.blocks[:2]
    assert cache.ledger.free == free
    assert cache.take_moves() == []
    one.free()
    assert cache.ledger.free == 14
    cache.validate()
    two.free()
    assert cache.ledger.free == 16
    cache.validate()


def test_scopes_find_nothing_of_each_other() -> None:
    cache = make()
    held = [cached(cache, TEXT[:11], scope=scope) for scope in ("", "alice", "bob", "alice")]
    assert [sequence.length for sequence in held] == [10] * 4
    assert held[1].blocks[:2] == held[3].blocks[:2]
    assert len({block for sequence in held for block in sequence.blocks[:2]}) == 6
    for scope, expected in (("", 8), ("alice", 8), ("bob", 8), ("carol", 0), ("alice\0salt", 0)):
        assert cache.sequence([*TEXT[:8], 1, 2, 3], scope).reuse() == expected, scope
        assert cache.sequence([*TEXT[:6], 1, 2, 3], scope).reuse() == expected * 6 // 8, "of parts of blocks neither"
    cache.validate()


def test_a_scope_of_which_nothing_is_known_leaves_nothing() -> None:
    cache = make(blocks=4)
    for number in range(100):
        cached(cache, TEXT[:17], scope=f"salt {number}").free()
        assert len(cache.ledger.known._roots) == 1
    cache.validate()
    assert cache.ledger.free == 4
    assert cache.sequence(TEXT[:17], "salt 99").reuse() == 16
    assert cache.sequence(TEXT[:17], "salt 98").reuse() == 0


def test_the_last_token_is_never_taken_over() -> None:
    cache = make()
    cached(cache, TEXT[:9]).free()
    again = cache.sequence(TEXT[:8])
    assert again.reuse() == 7
    assert cache.sequence(TEXT[:1]).reuse() == 0


def test_a_part_of_a_block_is_copied_once_it_is_written_to() -> None:
    cache = make()
    one = cached(cache, TEXT[:9])
    two = cache.sequence([*TEXT[:6], 1, 2, 3])
    assert two.reuse() == 6
    assert two.blocks == one.blocks
    assert two.blocks_needed(2) == 1
    assert two.blocks_needed(0) == 0
    compute(two, 2)
    assert two.blocks[0] == one.blocks[0] and two.blocks[1] != one.blocks[1]
    source, destination = one.blocks[1] * 4, two.blocks[1] * 4
    assert cache.take_moves() == [(source, destination), (source + 1, destination + 1)]
    cache.validate()


def test_what_was_to_be_copied_for_a_sequence_that_is_gone_is_copied_no_more() -> None:
    """However often steps fail for want of memory, what they leave is to be copied for those that are still there."""
    cache = make()
    cached(cache, TEXT[:9])
    kept, gone = (cache.sequence([*TEXT[:6], number, 2, 3]) for number in (1, 7))
    for sequence in (kept, gone):
        sequence.reuse()
        compute(sequence, 1)
    moves = cache.take_moves()
    assert len(moves) == 4
    cache.moves.note(moves)  # they were not made
    block = gone.blocks[1]
    gone.free()
    ours, theirs = [move for move in moves if move[1] // 4 != block], [move for move in moves if move[1] // 4 == block]
    assert cache.take_moves() == [*ours, *((CLEAR, slot) for _, slot in theirs)]


def test_a_few_tokens_are_not_worth_a_copy() -> None:
    cache = make(block=16)
    cached(cache, TEXT[:33])
    assert cache.sequence([*TEXT[:19], 1, 2, 3, 4]).reuse() == 16
    assert cache.sequence([*TEXT[:20], 1, 2, 3, 4]).reuse() == 20


def test_what_others_computed_meanwhile_is_taken_over_later() -> None:
    cache = make()
    one, two = cache.sequence(TEXT[:20]), cache.sequence(TEXT[:20])
    assert (one.reuse(), two.reuse()) == (0, 0)
    compute(one, 6)
    compute(two, 2)
    assert two.reuse() == 2
    compute(one, 12)
    assert two.reuse() == 12
    assert two.blocks == one.blocks[:4]
    cache.validate()


def test_of_two_equal_blocks_one_is_known() -> None:
    cache = make()
    one, two = cache.sequence(TEXT), cache.sequence(TEXT)
    compute(one, 8)
    compute(two, 8)
    assert one.blocks != two.blocks
    third = cache.sequence(TEXT)
    assert third.reuse() == 8
    assert third.blocks == one.blocks
    for each in (one, third):
        each.free()
    assert cache.ledger.free == 14
    compute(two, 4)
    two.free()
    assert cache.sequence(TEXT).reuse() == 12
    cache.validate()


def test_committed_output_is_known_as_well_as_a_prompt() -> None:
    cache = make()
    text = TEXT[:3]
    sequence = cached(cache, text)
    sequence.append([-1, -1, 0, 2])
    text += [7, 8, 9]
    sequence.advance([0, 2, 3])
    sequence.free()
    assert cache.sequence([*text, 1]).reuse() == 4


def test_a_sequence_without_tokens_shares_nothing() -> None:
    cache = make()
    compute(cache.sequence(), 8)
    assert not list(cache.ledger.known)
    assert cache.sequence().reuse() == 0


def test_empty_blocks_are_taken_first_then_the_least_recently_used_the_last_of_a_chain_first() -> None:
    cache = make(blocks=8)
    old, new = TEXT[:13], TEXT[50:63]
    cached(cache, old).free()
    cached(cache, new).free()
    assert cached(cache, old).length == 12
    for sequence in list(cache.sequences):
        sequence.free()  # so the first text is the one used last
    other = cache.sequence([1] * 40)
    compute(other, 8)
    assert len(list(cache.ledger.known)) == 8, "two blocks were empty"
    compute(other, 4)
    found = {name: cache.sequence(text).reuse() for name, text in (("old", old), ("new", new))}
    assert found == {"old": 12, "new": 8}
    cache.validate()


def test_a_lone_sequence_can_fill_the_cache_although_it_began_with_a_part_of_a_block() -> None:
    cache = make(blocks=4)
    cached(cache, TEXT[:17]).free()
    sequence = cache.sequence([*TEXT[:14], 1, 2, 3])
    assert sequence.reuse() == 14
    compute(sequence, 2)
    assert sequence.length == 16
    cache.validate()


def test_the_only_block_left_is_written_in_place_and_no_longer_known() -> None:
    cache = make(blocks=2)
    other = cache.sequence()
    compute(other, 4)
    cached(cache, TEXT[:5]).free()
    sequence = cache.sequence([*TEXT[:2], 1, 2, 3])
    assert sequence.reuse() == 2
    compute(sequence, 2)
    assert cache.take_moves() == []
    assert cache.sequence(TEXT[:5]).reuse() == 2, "only what both texts have in common is left"


def test_cutting_into_a_known_block_leaves_it_as_it_is() -> None:
    cache = make()
    text = TEXT[:9]
    sequence = cached(cache, text)
    sequence.truncate(7)
    text[7:] = [1, 2]
    compute(sequence, 1)
    assert len(cache.take_moves()) == 3
    assert cache.sequence(TEXT[:9]).reuse() == 8
    assert cache.sequence([*TEXT[:7], 1, 2]).reuse() == 8
    cache.validate()


def test_digests_of_blocks_are_chained_and_the_same_everywhere() -> None:
    first = digests.extend_block(digests.EMPTY, range(16))
    assert first == 14653518983790889069
    assert digests.extend_block(first, range(16)) not in (first, digests.extend_block(digests.EMPTY, range(32)))
