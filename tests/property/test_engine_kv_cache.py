"""Random lives of sequences: every slot stays accounted for, and every token keeps its slot."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kv_cache import CachedSequence, CacheFull, KVCache


class Shadow:
    """What one sequence should hold: a name per token instead of a slot."""

    def __init__(self, sequence: CachedSequence) -> None:
        self.sequence = sequence
        self.committed: list[int] = []
        self.pending: list[tuple[int, int]] = []  # (name, parent)

    def path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.pending[node][1]
        return path[::-1]

    def advance(self, path: list[int]) -> None:
        mapping = self.sequence.advance(path)
        last = path[-1] if path else -1
        expected = [n for n in range(len(self.pending)) if n not in path and (last < 0 or last in self.path_to(n))]
        assert list(mapping) == expected
        assert list(mapping.values()) == list(range(len(expected)))
        self.committed += [self.pending[node][0] for node in path]
        self.pending = [(self.pending[n][0], mapping.get(self.pending[n][1], -1)) for n in expected]

    def check(self, content: dict[int, int]) -> None:
        sequence = self.sequence
        assert sequence.length == len(self.committed)
        assert sequence.pending == len(self.pending)
        assert sequence.parents == [parent for _, parent in self.pending]
        assert sequence.depths == [len(self.path_to(node)) - 1 for node in range(len(self.pending))]
        assert sequence.is_chain == (sequence.parents == list(range(-1, sequence.pending - 1)))
        names = self.committed + [name for name, _ in self.pending]
        assert [content[slot] for slot in sequence.slots().tolist()] == names


@pytest.mark.parametrize("seed", range(12))
def test_random_lives(seed: int) -> None:
    rng = random.Random(seed)
    block = rng.choice([1, 4, 16])
    cache = KVCache(1, rng.choice([40, 100, 400]), block=block, dtype=torch.float32, device="cpu")
    content: dict[int, int] = {}  # slot -> name of the token written last
    shadows: list[Shadow] = []
    names = iter(range(10**9))
    for _ in range(300):
        if not shadows or (len(shadows) < 5 and rng.random() < 0.1):
            shadows.append(Shadow(cache.sequence()))
        shadow = rng.choice(shadows)
        action = rng.choices(["append", "advance", "rollback", "truncate", "retract", "free"], [8, 6, 2, 1, 1, 0.5])[0]
        if action == "append":
            append(rng, shadow, names, content)
        elif action == "advance":
            shadow.advance(shadow.path_to(rng.randrange(len(shadow.pending))) if shadow.pending else [])
        elif action == "rollback":
            shadow.sequence.rollback()
            shadow.pending = []
        elif action == "retract":
            count = rng.randint(0, len(shadow.pending))
            shadow.sequence.retract(count)
            del shadow.pending[len(shadow.pending) - count :]
        elif action == "truncate" and not shadow.pending:
            length = rng.randint(0, len(shadow.committed))
            shadow.sequence.truncate(length)
            del shadow.committed[length:]
        elif action == "free":
            shadow.sequence.free()
            shadow.sequence.free()
            shadows.remove(shadow)
        cache.check()
        for each in shadows:
            each.check(content)
    for shadow in shadows:
        shadow.sequence.free()
    cache.check()
    assert cache.free_tokens == cache.capacity


def append(rng: random.Random, shadow: Shadow, names: object, content: dict[int, int]) -> None:
    count = rng.randint(1, 12)
    start = len(shadow.pending)
    parents = [rng.randint(max(-1, start + i - 4), start + i - 1) for i in range(count)]
    if not shadow.sequence.can_append(count):
        with pytest.raises(CacheFull):
            shadow.sequence.append(parents)
        return
    slots = shadow.sequence.append(parents)
    for slot, parent in zip(slots, parents, strict=True):
        content[slot] = next(names)  # type: ignore[call-overload]
        shadow.pending.append((content[slot], parent))
