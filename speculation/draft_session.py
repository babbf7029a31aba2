"""One session at a draft worker: where to draft next, and what a verification leaves standing.

The drafter keeps the same trie as the target, ahead of it. It expands nodes without being asked, pushes what it adds,
and re-roots at every verification. Expanded nodes carry an index into the worker's cache; ``verified`` says which of
them survive. Knows nothing of models or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from speculation.messages import ANCHOR, Open, Proposal, Token, Verification
from speculation.pace import Pace
from speculation.trie import Node, SpeculationTrie, TrieLimits


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far a drafter may run ahead of what is committed."""

    lead: int = 24
    """Longest path below the committed prefix."""
    nodes: int = 64


class Sync(Enum):
    """What a verification did to a draft session."""

    IGNORED = auto()
    """Of another epoch, or known already."""
    ADVANCED = auto()
    LOST = auto()
    """It does not connect to what is known here: the session must be opened again."""
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token the draft model would follow a node with, and its estimate that the target does the same."""

    token: Token
    confidence: float


class DraftSession:
    """The committed tokens of a session as far as known here, and the drafts pushed beyond them."""

    def __init__(self, opened: Open, *, vocabulary: int, limits: DraftLimits = DraftLimits()) -> None:
        """Take over a session as the router opened it."""
        assert opened.tokens, "a session has at least one token"
        self.opened = opened
        trie_limits = TrieLimits(nodes=limits.nodes, depth=limits.lead)
        self.trie = SpeculationTrie(opened.tokens, vocabulary=vocabulary, limits=trie_limits)
        self.pace = Pace(limits.lead)
        self.unsent: Proposal | None = None
        """Drafts the target seems not to have; set by ``verified``, to be sent and cleared by the worker."""

    @property
    def tokens(self) -> Sequence[Token]:
        """Committed tokens, prompt included."""
        return self.trie.tokens

    def frontier(self) -> Node | None:
        """The node to expand next, or None while the lead is long enough.

        A chain is drafted: the node is the end of the only path.
        """
        node = self.trie.root
        while node.children:
            node = next(iter(node.children.values()))
        limits = self.opened.limits
        last_word = node.token in limits.stop_tokens or node.end >= limits.end - 1
        full = node.end - self.trie.position >= self.pace.lead or len(self.trie) >= self.trie.limits.nodes
        return None if last_word or full else node

    def expand(self, node: Node, candidates: Sequence[Candidate]) -> Proposal | None:
        """Add ``candidates`` below ``node`` and return the proposal that says so; None if nothing was new."""
        added = [
            child
            for candidate in candidates
            if candidate.token not in node.children
            and (child := self.trie.add(node, candidate.token, candidate.confidence))
        ]
        return self._proposal(node, added, [ANCHOR] * len(added)) if added else None

    def verified(self, verification: Verification) -> Sync:
        """Follow the target. Safe against repeats, old epochs and gaps."""
        if verification.epoch != self.opened.epoch:
            return Sync.IGNORED
        known = self.trie.position - verification.position
        if known < 0:
            return Sync.LOST
        if known >= len(verification.tokens):
            return Sync.FINISHED if verification.finish else Sync.IGNORED
        fresh = verification.tokens[known:]
        self.pace.observe(*self._followed(fresh), verification.accepted)
        if self.trie.advance(fresh) and not verification.offered and len(self.trie):
            self.unsent = self._everything()
        if self.trie.digest != verification.digest:
            return Sync.LOST
        return Sync.FINISHED if verification.finish else Sync.ADVANCED

    def _followed(self, tokens: Sequence[Token]) -> tuple[int, bool]:
        """How many drafts ``tokens`` follow, and whether they then leave the drafts for another way."""
        node = self.trie.root
        for matched, token in enumerate(tokens):
            if token not in node.children:
                return matched, bool(node.children)
            node = node.children[token]
        return len(tokens), False

    def _everything(self) -> Proposal:
        """All drafts as one proposal: the target verified none although they were pushed before, so a push was lost."""
        nodes = list(self.trie)
        index = {node: i for i, node in enumerate(nodes)}
        parents = [ANCHOR if node.parent is self.trie.root else index[_parent(node)] for node in nodes]
        return self._proposal(self.trie.root, nodes, parents)

    def _proposal(self, anchor: Node, nodes: Sequence[Node], parents: Sequence[int]) -> Proposal:
        return Proposal(
            session=self.opened.session,
            epoch=self.opened.epoch,
            anchor_position=anchor.end,
            anchor_digest=anchor.digest,
            tokens=tuple(node.token for node in nodes),
            parents=tuple(parents),
            confidence=tuple(node.confidence for node in nodes),
        )


def _parent(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
