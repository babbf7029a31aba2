"""Which full blocks of the cache are known by the tokens in them, so that another sequence can take them over.

Known blocks form a tree: a block is known by its tokens and by all blocks before it, and named by a digest chained over
them, the same in every process. A digest only finds a block; what is found is compared token by token, so that two
texts with the same digest are never mixed up. Every scope has a tree of its own, and finds nothing of another's.
Decides what is found; knows nothing about who holds a block, or when one has to give way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from speculation import digest as digests


@dataclass(eq=False, slots=True)
class KnownBlock:
    """A full block, and what is in it."""

    block: int
    tokens: tuple[int, ...]
    digest: int
    """Names all tokens up to the last one of the block."""
    above: KnownBlock | None
    """The block before it; None: this is the tree's root, which is no block."""
    below: list[KnownBlock] = field(default_factory=list)
    """The blocks that may follow, in the order of their tokens."""
    scope: str = ""
    """Of a root: whose tree it is."""


_tokens: Callable[[KnownBlock], tuple[int, ...]] = attrgetter("tokens")


class KnownBlocks:
    """The trees of known blocks."""

    def __init__(self) -> None:
        self._roots: dict[str, KnownBlock] = {}
        """By scope, where any block is known."""
        self._by_digest: dict[int, KnownBlock] = {}
        self._by_block: dict[int, KnownBlock] = {}

    def __contains__(self, block: int) -> bool:
        """Whether the block is known."""
        return block in self._by_block

    def __iter__(self) -> Iterator[KnownBlock]:
        """All known blocks, each after the one above it."""
        return iter(self._by_block.values())

    def root(self, scope: str = "") -> KnownBlock:
        """What a scope's first blocks hang from; good until blocks are forgotten."""
        return self._roots.get(scope) or KnownBlock(-1, (), digests.empty_of(scope), None, scope=scope)

    def holds(self, known: KnownBlock) -> bool:
        """Whether it was not forgotten since it was found or added."""
        return self._by_block.get(known.block) is known

    def find(self, above: KnownBlock, tokens: tuple[int, ...]) -> KnownBlock | None:
        """The block with exactly these tokens below ``above``."""
        found = self._by_digest.get(digests.extend_block(above.digest, tokens))
        return found if found is not None and found.above is above and found.tokens == tokens else None

    def nearest(self, above: KnownBlock, tokens: Sequence[int]) -> tuple[KnownBlock | None, int]:
        """The block below ``above`` that begins with the most of ``tokens``, and how many these are."""
        wanted = tuple(tokens)
        place = bisect_left(above.below, wanted, key=_tokens)
        # In the order of tokens, what has most in common with them stands right before or after their place.
        beside = above.below[max(place - 1, 0) : place + 1]
        found = max(beside, key=lambda known: _common(known.tokens, wanted), default=None)
        return found, _common(found.tokens, wanted) if found else 0

    def add(self, above: KnownBlock, tokens: tuple[int, ...], block: int) -> KnownBlock | None:
        """Make ``block`` known, which must not be already; None if other tokens go by the same digest."""
        assert block not in self._by_block, f"block {block} is known already"
        digest = digests.extend_block(above.digest, tokens)
        if digest in self._by_digest:
            return None
        known = KnownBlock(block, tokens, digest, above)
        if above.above is None:
            self._roots[above.scope] = above
        insort(above.below, known, key=_tokens)
        self._by_digest[digest] = self._by_block[block] = known
        return known

    def forget(self, block: int) -> list[int]:
        """Forget a block and all below it, which nobody could find any more; returns them."""
        known = self._by_block[block]
        assert known.above is not None
        siblings = known.above.below
        del siblings[bisect_left(siblings, known.tokens, key=_tokens)]
        if known.above.above is None and not siblings:
            del self._roots[known.above.scope]
        forgotten: list[int] = []
        stack = [known]
        while stack:
            known = stack.pop()
            del self._by_digest[known.digest], self._by_block[known.block]
            forgotten.append(known.block)
            stack += known.below
        return forgotten


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
