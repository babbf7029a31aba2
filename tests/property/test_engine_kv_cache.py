"""Random lives of sequences against a model of what every slot holds: nothing is lost, doubled or mixed up.

The model names a token by its scope and all tokens up to it, so that what scopes share would be noticed. Moves and
writes happen as in a step of the engine: first everything is appended, then the moves are made at once, then the new
tokens are written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from engine.cache import known_blocks
from engine.cache.kv_cache import CachedSequence, CacheFull, KVCache
from engine.cache.kv_store import CLEAR, Move

OPERATIONS = 1_000
LIVES = 6
ALPHABET = 3
"""Different tokens: few, so that texts meet and part again all the time."""
BROKEN = -9
"""What a slot holds that is no number."""
SCOPES = {"": 0, "alice": -1, "alice\0salt": -2}
"""And the names of their empty prefixes."""


class Names:
    """A number for every token prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def extend(self, prefix: int, token: int) -> int:
        return self._numbers.setdefault((prefix, token), len(self._numbers) + 1)

    def of(self, tokens: Sequence[int], empty: int) -> list[int]:
        """The name of every prefix of ``tokens``, and ``empty`` that of none."""
        names, last = [], empty
        for token in tokens:
            last = self.extend(last, token)
            names.append(last)
        return names


@dataclass(eq=False)
class Life:
    """What one sequence should hold."""

    sequence: CachedSequence
    tokens: list[int]
    """Committed ones, also those that are not cached."""
    shares: bool
    scope: str
    nodes: list[tuple[int, int]] = field(default_factory=list)
    """Token and parent of the pending nodes."""
    fed: int = 0
    """How many of these, from the first on, are committed tokens."""

    @property
    def uncached(self) -> int:
        return len(self.tokens) - self.sequence.length

    def path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.nodes[node][1]
        return path[::-1]

    def names(self, names: Names) -> list[int]:
        """What the slots of the committed tokens, then of the pending nodes must hold."""
        empty = SCOPES[self.scope]
        committed = names.of(self.tokens[: self.sequence.length], empty)
        pending: list[int] = []
        for token, parent in self.nodes:
            above = pending[parent] if parent >= 0 else committed[-1] if committed else empty
            pending.append(names.extend(above, token))
        return committed + pending


class Machine:
    """Sequences that live at random, and the model of their cache."""

    def __init__(self, rng: random.Random, block: int, capacity: int, predicts: bool) -> None:
        """``predicts``: it also says how much can be taken over."""
        self.rng = rng
        self.predicts = predicts
        self.scopes = random.Random(capacity)
        self.cache = KVCache(0, capacity, block=block, dtype=torch.float32, device="cpu")
        self.names = Names()
        self.content: dict[int, int] = {}
        self.lives: list[Life] = []
        self.texts: list[list[int]] = [[]]
        self.seen = dict.fromkeys(("reused", "copied", "moved", "full", "evicted", "cleared"), 0)

    def operate(self) -> None:
        """One random thing happens."""
        if not self.lives or (len(self.lives) < LIVES and self.rng.random() < 0.1):
            self.open()
            return
        life = self.rng.choice(self.lives)
        weights = {
            self.run: 8,
            self.settle: 8,
            self.reuse: 3,
            self.retract: 1,
            self.discard: 0.5,
            self.truncate: 2,
            self.free: 0.7,
        }
        (action,) = self.rng.choices(list(weights), list(weights.values()))
        action(life)

    def open(self) -> None:
        """Begin like an earlier text, or not."""
        known = self.rng.choice(self.texts)
        tokens = known[: self.rng.randint(0, len(known))] + self.some_tokens(self.rng.choice([1, 1, 4, 30]))
        shares = self.rng.random() < 0.9
        scope = self.scopes.choices([*SCOPES], [8, 1, 1])[0]
        life = Life(self.cache.sequence(tokens if shares else None, scope), tokens, shares, scope)
        self.lives.append(life)
        if self.rng.random() < 0.8:
            self.reuse(life)

    def some_tokens(self, max_tokens: int) -> list[int]:
        return [self.rng.randrange(ALPHABET) for _ in range(self.rng.randint(1, max_tokens))]

    def run(self, first: Life) -> None:
        """A step of the engine over a few sequences."""
        chunks: list[tuple[Life, list[int]]] = []
        for life in {first: None} | dict.fromkeys(self.rng.sample(self.lives, min(2, len(self.lives)))):
            before = len(life.nodes)
            self.choose(life)
            fits = life.sequence.blocks_needed(len(life.nodes) - before) <= self.cache.ledger.free
            try:
                slots = life.sequence.append([parent for _, parent in life.nodes[before:]])
            except CacheFull:
                assert not fits
                self.seen["full"] += 1
                del life.nodes[before:]
                life.fed = min(life.fed, before)
                if self.rng.random() < 0.3:
                    self.free(life)
            else:
                assert fits
                chunks.append((life, slots))
        self.make(self.cache.take_moves())
        for life, slots in chunks:
            names = life.names(self.names)
            for slot, name in zip(slots, names[len(names) - len(slots) :], strict=True):
                self.write(slot, name)
        self.check_content()

    def choose(self, life: Life) -> None:
        """Nodes to append: missing committed tokens, and drafts if none are missing then."""
        if life.uncached and not life.nodes:
            life.fed = self.rng.randint(1, life.uncached)
            start = life.sequence.length
            life.nodes += [(token, i - 1) for i, token in enumerate(life.tokens[start : start + life.fed])]
            if life.fed < life.uncached or self.rng.random() < 0.5:
                return
        if life.fed >= life.uncached:
            for _ in range(self.rng.randint(1, 12)):
                node = len(life.nodes)
                parent = self.rng.randint(max(-1, node - 4), node - 1)
                life.nodes.append((self.rng.randrange(ALPHABET), max(parent, life.fed - 1)))

    def settle(self, life: Life) -> None:
        """Commit what was fed, and some path of drafts."""
        path = list(range(life.fed))
        if len(life.nodes) > life.fed and self.rng.random() < 0.8:
            path = life.path_to(self.rng.randrange(life.fed, len(life.nodes)))
        life.tokens += [life.nodes[node][0] for node in path[life.fed :]]
        if self.rng.random() < 0.5 and life.fed + len(path) and len(path) == len(life.nodes):
            life.tokens += self.some_tokens(1)  # the target's own, not cached
        survivors = life.sequence.advance(path)
        last = path[-1] if path else -1
        expected = [n for n in range(len(life.nodes)) if n not in path and (last < 0 or last in life.path_to(n))]
        assert list(survivors) == expected
        assert list(survivors.values()) == list(range(len(expected)))
        life.nodes = [(life.nodes[n][0], survivors.get(life.nodes[n][1], -1)) for n in expected]
        life.fed = 0
        if life.uncached and life.nodes:
            self.drop(life, len(life.nodes))

    def retract(self, life: Life) -> None:
        self.drop(life, self.rng.randint(0, len(life.nodes)))

    def drop(self, life: Life, count: int) -> None:
        life.sequence.retract(count)
        del life.nodes[len(life.nodes) - count :]
        life.fed = min(life.fed, len(life.nodes))

    def discard(self, life: Life) -> None:
        """What was written of the pending nodes turns out to be no numbers."""
        self.content |= dict.fromkeys(life.sequence.pending_slots, BROKEN)
        self.seen["cleared"] += len(life.nodes)
        life.sequence.discard(life.sequence.pending)
        life.nodes, life.fed = [], 0

    def reuse(self, life: Life) -> None:
        if life.nodes:
            return
        before, expected = life.sequence.length, self.findable(life)
        reused = life.sequence.reuse()
        assert life.sequence.length == before + reused
        assert not reused or life.uncached
        assert reused == expected - before or not self.predicts
        self.seen["reused"] += reused
        self.seen["copied"] += reused > 0 and life.sequence.length % self.cache.block > 0

    def findable(self, life: Life) -> int:
        """How long the sequence will be when it has taken over all it can."""
        length, block, known = life.sequence.length, self.cache.block, self.cache.ledger.known
        texts: set[tuple[int, ...]] = {tuple(life.tokens[:end]) for end in range(0, length + 1, block)}
        for each in known:
            above, text = each, ()
            while above.above is not None:
                text, above = above.tokens + text, above.above
            assert above is known.root(above.scope)
            if above.scope == life.scope:
                texts.add(text)
        max_reused = len(life.tokens) - 1
        if not life.shares or length > max_reused:
            return length
        full = max(end for end in range(0, max_reused + 1, block) if tuple(life.tokens[:end]) in texts)
        nearest = max(
            sum(
                1
                for i in range(full, min(len(text), max_reused))
                if text[full : i + 1] == tuple(life.tokens[full : i + 1])
            )
            for text in texts
            if text[:full] == tuple(life.tokens[:full])
        )
        reached = max(length, full)
        return full + nearest if full + nearest - reached >= max(1, block // 4) else reached

    def truncate(self, life: Life) -> None:
        """Shorten; then either the same tokens are fed again, or the text goes on in another way."""
        if life.nodes:
            return
        length = self.rng.randint(max(0, life.sequence.length - 20), life.sequence.length)
        life.sequence.truncate(length)
        if self.rng.random() < 0.5:
            self.texts.append(list(life.tokens))
            life.tokens[length:] = self.some_tokens(5)

    def free(self, life: Life) -> None:
        known = len(list(self.cache.ledger.known))
        life.sequence.free()
        life.sequence.free()
        assert len(list(self.cache.ledger.known)) == known
        self.lives.remove(life)
        self.texts = [*self.texts[-20:], life.tokens]

    def make(self, moves: Sequence[Move]) -> None:
        assert len({destination for _, destination in moves}) == len(moves)
        self.content |= {to: 0 if source == CLEAR else self.content.get(source, 0) for source, to in moves}
        assert BROKEN not in self.content.values()
        self.seen["moved"] += len(moves)

    def write(self, slot: int, name: int) -> None:
        block = slot // self.cache.block
        assert self.cache.ledger.holders(block) == 1 and block not in self.cache.ledger.known, "a shared block"
        self.content[slot] = name

    def check_content(self) -> None:
        """Everything that a forward could read is what it should be. No moves may be outstanding."""
        for life in self.lives:
            slots = [*life.sequence.committed_slots(0), *life.sequence.pending_slots]
            assert [self.content[slot] for slot in slots] == life.names(self.names)
        below = {id(self.cache.ledger.known.root(scope)): empty for scope, empty in SCOPES.items()}
        for known in self.cache.ledger.known:
            name = below[id(known.above)]
            for offset, token in enumerate(known.tokens):
                name = self.names.extend(name, token)
                assert self.content[known.block * self.cache.block + offset] == name
            below[id(known)] = name

    def check_shape(self) -> None:
        self.cache.validate()
        for life in self.lives:
            sequence = life.sequence
            assert sequence.parents == [parent for _, parent in life.nodes]
            assert sequence.depths == [len(life.path_to(node)) - 1 for node in range(len(life.nodes))]
            assert sequence.is_chain == (sequence.parents == list(range(-1, sequence.pending - 1)))


def live(seed: int, predicts: bool = True) -> Machine:
    rng = random.Random(seed)
    block = rng.choice([1, 4, 8, 16])
    machine = Machine(rng, block, rng.choice([60, 150, 500]), predicts)
    for _ in range(OPERATIONS):
        evictable = machine.cache.ledger.known
        known = len(list(evictable))
        machine.operate()
        machine.seen["evicted"] += len(list(evictable)) < known
        machine.check_shape()
    for life in machine.lives:
        life.sequence.free()
    machine.cache.validate()
    assert machine.cache.free_tokens == machine.cache.capacity
    return machine


@pytest.mark.parametrize("seed", range(12))
def test_random_lives(seed: int) -> None:
    machine = live(seed)
    assert machine.seen["reused"] and machine.seen["moved"] and machine.seen["cleared"], (
        f"seed {seed} saw nothing: {machine.seen}"
    )


@pytest.mark.parametrize("seed", range(3))
def test_random_lives_with_colliding_digests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks.digests, "extend_block", lambda _, tokens: sum(tokens) % 5)
    live(seed, predicts=False)
