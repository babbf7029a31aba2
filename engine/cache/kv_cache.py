"""Which slot of the cache holds which token.

Decides which slot a token gets, which blocks sequences share, and when a block is free again. Every committed token has
a *home* that follows from its position and the sequence's block table; pending nodes lie in the homes of later
positions, the lowest first, so that the first path of a tree usually is at home already. A node that is committed from
elsewhere is moved home. Blocks full of committed tokens become known by their tokens, and other sequences with the same
prefix and scope take them over. What is shared or known is never written again.

Knows nothing about masks, tensors or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch

from engine.cache.block_ledger import BlockLedger
from engine.cache.known_blocks import KnownBlock
from engine.cache.kv_store import BLOCK, CLEAR, KVStore, Move, Moves
from engine.cache.sequence_state import ROOT, SequenceState

__all__ = ["ROOT", "CacheFull", "CachedSequence", "KVCache", "SequenceState"]


class CacheFull(Exception):
    """There are not enough free slots. Nothing was changed."""


class KVCache:
    """Slots for ``capacity`` tokens (rounded up to whole blocks), in every layer.

    The books only; the tensors are in ``store``.
    """

    def __init__(
        self,
        layers: int,
        capacity: int,
        *,
        block: int = BLOCK,
        spare: int = 0,
        kernels: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """``spare``, ``kernels``: see :class:`engine.cache.kv_store.KVStore`."""
        if capacity < 1 or block < 1:
            raise ValueError(f"capacity and block must be positive, got {capacity} and {block}")
        blocks = -(-capacity // block)
        self.capacity = blocks * block
        self.block = block
        self.ledger = BlockLedger(blocks)
        self.moves = Moves()
        self.sequences: set[CachedSequence] = set()
        self.store = KVStore(layers, self.capacity, dtype=dtype, device=device, spare=spare, kernels=kernels)

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into blocks nobody holds; a sequence also has the spare slots of its own blocks."""
        return self.ledger.free * self.block

    def sequence(self, tokens: Sequence[int] | None = None, scope: str = "") -> CachedSequence:
        """A new, empty sequence. Whoever asked for it must :meth:`~CachedSequence.free` it.

        ``tokens``: the committed tokens that it will hold, prompt included, as a list that grows while the sequence is
        in use; None: it shares nothing. ``scope``: it shares with sequences of the same one only.
        """
        return CachedSequence(self, tokens, scope)

    def take_moves(self) -> list[Move]:
        """What ``store.move`` has to do, at once, before the next forward writes anything; then it counts as done.

        Appending may add moves too: take them after the last append. What was to come into a block that was given back
        since is not copied, or steps that fail for want of memory would leave ever more to copy; its slots are cleared,
        as some of them may have had to be.
        """
        is_empty, block = self.ledger.is_empty, self.block
        return [(CLEAR if is_empty(home // block) else source, home) for source, home in self.moves.take()]

    def validate(self) -> None:
        """Assert that every block is free, or held exactly as often as there are sequences with it."""
        for sequence in self.sequences:
            sequence.validate()
        self.ledger.validate(Counter(block for sequence in self.sequences for block in sequence.blocks))


class CachedSequence(SequenceState):
    """The cached state of one session, and what changes it.

    The *place* of a pending node is the position whose home it lies in.
    """

    among_others = True
    """Whether others may read across its slots, giving them no weight."""

    def __init__(self, cache: KVCache, tokens: Sequence[int] | None, scope: str = "") -> None:
        super().__init__(cache.block)
        self._cache = cache
        self._tokens, self._scope = tokens, scope
        self._places: list[int] = []  # of the pending nodes
        # of the leading full blocks; not always our own: another may have been first
        self._known: list[KnownBlock] = []
        cache.sequences.add(self)

    # -- room ----------------------------------------------------------------------------------------------------------

    def blocks_needed(self, count: int) -> int:
        """How many fewer blocks will be free once ``count`` more tokens were appended: one more than these at most."""
        if not count:
            return 0
        length, block, blocks = self.length, self.block, self.blocks
        beyond = length + len(self.parents) + count - len(blocks) * block
        needed = -(-beyond // block) if beyond > 0 else 0
        # A block that is shared is copied before the next token goes into it. Never so while nodes are pending.
        if length % block and self._cache.ledger.holders(blocks[length // block]) > 1:
            needed += 1
        return needed

    # -- pending nodes -------------------------------------------------------------------------------------------------

    def append(self, parents: Sequence[int]) -> list[int]:
        """Add one pending node per entry and return their slots. Raises :class:`CacheFull`."""
        depths, count = self.depths[:], len(parents)
        for index, parent in enumerate(parents, len(depths)):
            if not ROOT <= parent < index:
                raise ValueError(f"pending node {index} cannot have parent {parent}; a parent must precede its child")
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        assert self in self._cache.sequences, "append() to a sequence that was freed"
        places = self._free_places(count) if self._places else range(self.length, self.length + count)
        self._reserve(count)
        slots = self._homes(places)
        self.parents += parents
        self.depths = depths
        self.pending_slots += slots
        if not self._places and (count == 1 or self.is_chain):
            self._branches = [()] * count
        self._places += places
        return slots

    def retract(self, count: int) -> None:
        """Drop the ``count`` nodes appended last."""
        keep = len(self.parents) - count
        assert keep >= 0, f"cannot retract {count} of {self.pending} pending nodes"
        self._keep_pending(keep)
        self._trim()

    def regraft(self, count: int, kept: Sequence[int], parents: Sequence[int]) -> None:
        """Of the ``count`` nodes appended last keep ``kept``, ascending, under other parents, and drop the others.

        ``kept`` counts from the first of the nodes; ``parents`` are pending nodes as numbered afterwards, or -1.
        """
        first = self.pending - count
        assert first >= 0, f"cannot regraft {count} of {self.pending} pending nodes"
        assert all(-1 < a < b for a, b in pairwise([*kept, count])), f"not ascending nodes of {count}: {list(kept)}"
        for holding in (self.pending_slots, self._places):
            holding[first:] = [holding[first + node] for node in kept]
        del self.parents[first:], self.depths[first:], self._branches[first:]
        for parent in parents:
            assert ROOT <= parent < self.pending, f"{parent} is no node before {self.pending}"
            self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
            self.parents.append(parent)
        assert len(self.parents) == len(self._places), f"{len(parents)} parents for {len(kept)} nodes"
        self._trim()

    def rollback(self) -> None:
        """Drop all pending nodes."""
        self.retract(len(self.parents))

    def discard(self, count: int) -> None:
        """Drop the ``count`` nodes appended last and clear their slots: what they hold is no number.

        Whoever reads across a slot that is not his own gives it no weight, but nothing times NaN is NaN.
        """
        self._cache.moves.note([(CLEAR, slot) for slot in self.pending_slots[self.pending - count :]])
        self.retract(count)

    def advance(self, path: Sequence[int]) -> dict[int, int]:
        """Commit ``path``: pending nodes, root first, each the child of the one before.

        Descendants of its last node (with an empty path: everything) stay pending; the rest is freed. Returns the new
        index of each survivor by its old one. Costs time in the number of pending nodes, not in the prefix.
        """
        last = self._end_of(path)
        renumbered: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if parent == last or parent in renumbered:
                renumbered[node] = len(renumbered)
        self._bring_home(path, renumbered.keys() | path)
        self.length += len(path)
        self.parents = [renumbered.get(self.parents[node], ROOT) for node in renumbered]
        self.depths = [self.depths[node] - len(path) for node in renumbered]
        self._places = [self._places[node] for node in renumbered]
        self.pending_slots = self._homes(self._places)
        self._branches.clear()
        self._trim()
        self._publish()
        return renumbered

    def commit(self, path: Sequence[int]) -> None:
        """Commit ``path`` as :meth:`advance` does, and drop all other pending nodes."""
        if len(path) == len(self._places) == 1 and path[0] == 0 and self._places[0] == self.length:
            self.length += 1  # decoding: a token that is at home and alone
            self._keep_pending(0)
        else:
            self._end_of(path)
            self._bring_home(path, path)
            self.length += len(path)
            self._keep_pending(0)
            self._trim()
        self._publish()

    # -- committed tokens ----------------------------------------------------------------------------------------------

    def reuse(self) -> int:
        """Take over what the cache knows of the tokens that come next; returns how many tokens that was.

        Never the last token: it has to be computed for what follows it. Nothing may be pending. Worth a try whenever
        more than one token is to be computed: other sequences may have computed them meanwhile.
        """
        self._assert_settled("reuse()")
        if self._tokens is None:
            return 0
        self._publish()
        before, max_reused, known = self.length, len(self._tokens) - 1, self._cache.ledger.known
        if len(self._known) < self.length // self.block:  # the last full block could not be made known
            return 0
        above = self._known[-1] if self._known else known.root(self._scope)
        while (end := (len(self._known) + 1) * self.block) <= max_reused:
            found = known.find(above, tuple(self._tokens[end - self.block : end]))
            if found is None:
                break
            self._share(found, end)
            self._known.append(found)
            above = found
        start = len(self._known) * self.block
        nearest, common = known.nearest(above, self._tokens[start : min(start + self.block, max_reused)])
        if nearest is not None and start + common - self.length >= max(1, self.block // 4):  # else not worth a copy
            self._share(nearest, start + common)
        return self.length - before

    def truncate(self, length: int) -> None:
        """Shorten the committed prefix to ``length`` tokens. Nothing may be pending."""
        self._assert_settled("truncate()")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length
        del self._known[length // self.block :]
        self._trim()

    def free(self) -> None:
        """Give everything back. Harmless when done twice."""
        self._cut(0)
        self._keep_pending(0)
        self._known.clear()
        self.length = 0
        self._cache.sequences.discard(self)

    def validate(self) -> None:
        """Assert that every token has a slot to itself, and that what may be written is held by nobody else."""
        assert len(self.blocks) == self._used, f"{len(self.blocks)} blocks are held, {self._used} are used"
        assert len(set(self._places)) == len(self._places), f"two nodes share a place: {self._places}"
        assert min(self._places, default=self.length) >= self.length, "a node lies among the committed tokens"
        assert self.pending_slots == [self.home(place) for place in self._places]
        assert self.branches == SequenceState.state(self).branches, "a branch is not where it was found"
        ledger = self._cache.ledger
        for block in self.blocks[self.length // self.block if self.pending else len(self.blocks) :]:
            assert ledger.holders(block) == 1 and block not in ledger.known, f"block {block} is shared, yet written"

    # -- blocks --------------------------------------------------------------------------------------------------------

    @property
    def _used(self) -> int:
        """How many blocks it takes up to the last token, committed or pending."""
        end = max(self._places) + 1 if self._places else self.length
        return -(-end // self.block)

    def _assert_settled(self, what: str) -> None:
        if self.pending:
            raise ValueError(f"{what} with {self.pending} pending nodes; roll back or advance first")

    def _homes(self, places: Sequence[int]) -> list[int]:
        block, blocks = self.block, self.blocks
        if len(places) == 1:  # decoding
            return [blocks[places[0] // block] * block + places[0] % block]
        return [blocks[place // block] * block + place % block for place in places]

    def _free_places(self, count: int) -> Sequence[int]:
        """Lowest first: holes left by refused branches are filled before new ground is broken."""
        taken = set(self._places)
        places: list[int] = []
        place = self.length
        while len(places) < count:
            if place not in taken:
                places.append(place)
            place += 1
        return places

    def _reserve(self, count: int) -> None:
        """Make sure that there are blocks of our own for ``count`` more nodes."""
        ledger, index = self._cache.ledger, self.length // self.block
        writable = not self.length % self.block or bool(self.parents) or ledger.is_own(self.blocks[index])
        if writable and self.length + len(self.parents) + count <= len(self.blocks) * self.block:
            return
        if (needed := self.blocks_needed(count)) and needed > ledger.free:
            raise CacheFull(f"{count} tokens need {needed} free blocks, there are {ledger.free}")
        if count and not writable:
            self._own_tail()
        while len(self.blocks) * self.block < self.length + len(self.parents) + count:
            self.blocks.append(ledger.take(after=self.blocks[-1] if self.blocks else None))

    def _own_tail(self) -> None:
        """Copy the block that the next token goes into, which is one of ours and must not be written."""
        ledger, index = self._cache.ledger, self.length // self.block
        tail = self.blocks[index]
        if ledger.holders(tail) == 1 and not ledger.free:
            ledger.forget(tail)
            return
        own = ledger.take(after=self.blocks[index - 1] if index else None)
        sources = self.committed_slots(index * self.block)
        self._cut(index)
        self.blocks.append(own)
        self._cache.moves.note(zip(sources, self.committed_slots(index * self.block), strict=True))

    def _keep_pending(self, count: int) -> None:
        del self.parents[count:], self.depths[count:], self.pending_slots[count:], self._places[count:]
        del self._branches[count:]

    def _end_of(self, path: Sequence[int]) -> int:
        """The last node of a path, ROOT if it has none. Raises ValueError if it is no path from the root."""
        last, parents = ROOT, self.parents
        for node in path:
            if not 0 <= node < len(parents) or parents[node] != last:
                raise ValueError(f"pending node {node} is not a child of {last}; cannot commit {list(path)}")
            last = node
        return last

    def _bring_home(self, path: Sequence[int], kept: Collection[int]) -> None:
        """Note the moves after which the nodes of ``path`` lie at home; ``kept`` are all nodes whose data matters."""
        if [self._places[node] for node in path] == [*range(self.length, self.length + len(path))]:
            return
        node_at = {self._places[node]: node for node in kept}
        for position, node in enumerate(path, start=self.length):
            place = self._places[node]
            if place == position:
                continue
            slot, home = self.home(place), self.home(position)
            moves = [(slot, home)]
            other = node_at.get(position)
            if other is None:
                del node_at[place]
            else:
                moves.append((home, slot))
                self._places[other], node_at[place] = place, other
            self._places[node], node_at[position] = position, node
            self._cache.moves.note(moves)

    def _publish(self) -> None:
        """Make full blocks known. One that is known already from another sequence stays ours alone."""
        if self._tokens is None:
            return
        assert len(self._tokens) >= self.length, f"{self.length} tokens are cached, {len(self._tokens)} are known"
        known = self._cache.ledger.known
        while self._known and not known.holds(self._known[-1]):
            self._known.pop()
        for index in range(len(self._known), self.length // self.block):
            above = self._known[-1] if self._known else known.root(self._scope)
            tokens = tuple(self._tokens[index * self.block : (index + 1) * self.block])
            found = known.find(above, tokens) or known.add(above, tokens, self.blocks[index])
            if found is None:
                return
            self._known.append(found)

    def _share(self, known: KnownBlock, length: int) -> None:
        """Let a known block stand for the tokens behind the full blocks, up to ``length``."""
        self._cache.ledger.hold(known.block)
        self._cut((length - 1) // self.block)
        self.blocks.append(known.block)
        self.length = length

    def _trim(self) -> None:
        """Give back the blocks behind the last token."""
        if (used := self._used) < len(self.blocks):
            self._cut(used)

    def _cut(self, keep: int) -> None:
        """Give back all but the first ``keep`` blocks."""
        for block in reversed(self.blocks[keep:]):
            self._cache.ledger.give(block)
        del self.blocks[keep:]
