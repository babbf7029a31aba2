"""The speculation trie: draft tokens hanging from the committed prefix.

The trie is where drafting and verification meet. Draft sources insert proposals at any time and in any amount; each
target step selects the part most likely to be kept, and re-roots the trie at what was committed. What hangs below the
new root survives and is verified next.

A trie decides what is *worth* verifying, never what is committed. Insertion is idempotent: a proposal that arrives
twice, or for a branch that was refused, changes nothing; of a late one, what is still ahead of the text is taken.
Everything is bounded by :class:`TrieLimits`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from speculation import digest as digests
from speculation.frozen import frozen
from speculation.messages import ANCHOR, Proposal, Source, SourceName, Support, Token

DEFAULT_CONFIDENCE = 0.7
"""Assumed probability of a draft token when its proposal does not say."""
MIN_CONFIDENCE = 1e-6
"""Neither the confidence nor the odds of a node are below this, so that no weight is 0."""


@dataclass(frozen=True, slots=True)
class TrieLimits:
    """Bounds of one session's trie. What lies beyond them is cut; proposals of which nothing is left are counted."""

    nodes: int = 256
    depth: int = 64
    children: int = 8


@dataclass(eq=False, slots=True)
class Node:
    """A place after the committed prefix: the root itself or one draft token. Compared by identity.

    A source proposes A with confidence 0.6 and then B with 0.3 after the same text::

        confidence  A 0.6   B 0.3    the source's word for this token alone, given its parent
        claim       A 0.6   B 0.75   the same if its earlier siblings are wrong: 0.3 / (1 - 0.6)
        odds        A 0.5   B 0.3    calibrated, P(kept | parent kept): A was right half the time, B in 0.6 of the rest
        weight      the product of the odds along the path: P(kept). Re-rooting starts it again from 1.
    """

    token: Token
    end: int
    """Length of the prefix that ends with this token, so ``end - 1`` is the token's position."""
    digest: int
    """Names that prefix."""
    confidence: float = 1.0
    claim: float = 1.0
    odds: float = 1.0
    weight: float = 1.0
    source: SourceName = Source.DRAFT
    rank: int = 0
    """How many siblings were there first. Sources propose the likeliest first."""
    ahead: int = 0
    """How many draft tokens it had above it when it was added."""
    q: Support | None = None
    """What it was drawn from; None if it was chosen."""
    parent: Node | None = None
    children: dict[Token, Node] = field(default_factory=dict)

    @property
    def above(self) -> Node:
        """The place that a draft token hangs from; the root of a trie hangs from none."""
        assert self.parent is not None, "this is a root"
        return self.parent

    def path_from(self, root: Node) -> list[Node]:
        """Nodes below ``root`` down to this one; empty if this is the root."""
        path: list[Node] = []
        node = self
        while node is not root:
            path.append(node)
            node = node.above
        return path[::-1]


class InsertResult(StrEnum):
    """What became of a proposal. Only the first is useful; none is an error of the session."""

    PLACED = "placed"
    STALE = "stale"
    """Everything in it was decided or present already."""
    CUT = "cut"
    """All that is new in it lies beyond a limit."""
    UNKNOWN_ANCHOR = "unknown_anchor"
    CONFLICT = "conflict"
    """Its anchor contradicts the committed prefix, or is a part of what the session was opened with."""
    INVALID_TOKEN = "invalid_token"
    MISSING_Q = "missing_q"
    """It does not say what its tokens were drawn from, in a session under the rejection rule."""


@frozen
class VerificationTree:
    """Draft tokens chosen for one verification, parents first. ``parents[i]`` indexes this offer; -1 is the root."""

    nodes: tuple[Node, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The draft tokens, in offer order."""
        return tuple([node.token for node in self.nodes])

    @property
    def odds(self) -> list[float]:
        """Probability of each token to be kept together with all above it; falls along the offer if best first."""
        return [node.weight for node in self.nodes]

    def first(self, count: int) -> VerificationTree:
        """The part that was chosen first; a parent always comes before its children."""
        return self if count >= len(self.nodes) else VerificationTree(self.nodes[:count], self.parents[:count])

    @property
    def branched(self) -> bool:
        """Whether any token has a sibling here."""
        return len(self.parents) > 1 and len(set(self.parents)) < len(self.parents)

    def chain(self) -> VerificationTree:
        """The best of it that does not branch: of each token the child that was chosen first."""
        nodes: list[Node] = []
        end = ANCHOR
        for i, (node, parent) in enumerate(zip(self.nodes, self.parents, strict=True)):
            if parent == end:
                nodes.append(node)
                end = i
        return VerificationTree(tuple(nodes), tuple(range(-1, len(nodes) - 1)))

    def depth_first(self) -> VerificationTree:
        """The same tokens branch by branch, the likeliest branch first, so that runs of parent and child are long."""
        if len(self.parents) < 2 or self.parents == tuple(range(ANCHOR, len(self.parents) - 1)):
            return self  # a chain
        below: list[list[int]] = [[] for _ in range(len(self.nodes) + 1)]  # the root's come last
        for i, parent in enumerate(self.parents):
            below[parent].append(i)
        nodes: list[Node] = []
        parents: list[int] = []
        stack = [(i, ANCHOR) for i in reversed(below[ANCHOR])]
        while stack:
            i, parent = stack.pop()
            nodes.append(self.nodes[i])
            parents.append(parent)
            stack.extend((child, len(nodes) - 1) for child in reversed(below[i]))
        return VerificationTree(tuple(nodes), tuple(parents))


NO_DRAFTS = VerificationTree()

Odds = Callable[[Node], float]
"""The probability that a new node is kept if its parent is and the siblings before it are not."""


class SpeculationTrie:
    """The committed tokens of one session and the draft tree that hangs from their end."""

    def __init__(
        self,
        tokens: Sequence[Token],
        *,
        vocabulary: int,
        limits: TrieLimits = TrieLimits(),
        odds: Odds,
        digest: int = 0,
    ) -> None:
        """Start with ``tokens`` committed and nothing drafted. Draft tokens must be below ``vocabulary``.

        ``digest``: of the tokens, if it is known; 0: to compute it takes some 0.7 us a token.
        """
        self.limits = limits
        self._odds = odds
        self._vocabulary = vocabulary
        self._tokens = list(tokens)
        self.tokens: Sequence[Token] = self._tokens
        """The committed sequence, prompt included. Not a copy: read only."""
        self._opened = len(self._tokens)
        self._digests = [digest or digests.of(tokens)]  # [i]: of the first _opened + i tokens
        self._plant(Node(token=-1, end=len(self._tokens), digest=self._digests[-1]))

    @property
    def position(self) -> int:
        """Length of the committed sequence: the position of the next token."""
        return len(self._tokens)

    @property
    def digest(self) -> int:
        """Names the committed sequence."""
        return self._digests[-1]

    @property
    def root(self) -> Node:
        """The end of the committed prefix."""
        return self._root

    @property
    def lead(self) -> int:
        """How many tokens the deepest draft is ahead of what is committed."""
        return max(node.end for node in self._by_digest.values()) - self.position

    def __len__(self) -> int:
        """Number of draft tokens held."""
        return len(self._by_digest) - 1

    def __iter__(self) -> Iterator[Node]:
        """All draft tokens, parents before children."""
        nodes = (node for node in self._by_digest.values() if node is not self._root)
        return iter(sorted(nodes, key=lambda node: node.end))

    def validate(self) -> None:
        """Raise AssertionError where places, digests, chances or bounds contradict each other. Slow."""
        root, limits, reached = self._root, self.limits, [self._root]
        assert self._digests[-1] == digests.of(self._tokens), "the digest is not that of the committed tokens"
        assert (root.end, root.digest, root.weight) == (self.position, self.digest, 1.0), f"the root is at {root.end}"
        assert root.parent is None, "the root hangs from what was before"
        for node in reached:
            assert node.end - self.position <= limits.depth, f"a draft is {node.end - self.position} tokens deep"
            assert len(node.children) <= limits.children, f"{len(node.children)} children at {node.end}"
            for token, child in node.children.items():
                here, digest = f"token {token} at {node.end}", digests.extend(node.digest, token)
                assert child.parent is node and child.token == token, f"{here} hangs from elsewhere"
                assert 0 <= token < self._vocabulary, f"{here} is outside the vocabulary"
                assert (child.end, child.digest) == (node.end + 1, digest), f"{here} says that it is elsewhere"
                assert child.weight == node.weight * child.odds <= node.weight, f"{here} has the weight {child.weight}"
                assert self._by_digest.get(digest) is child, f"{here} is not found by its digest"
            reached += node.children.values()
        assert len(reached) == len(self._by_digest), f"{len(self._by_digest)} nodes, {len(reached)} below the root"
        assert len(self) <= limits.nodes, f"{len(self)} draft tokens, {limits.nodes} are allowed"

    # -- insertion -----------------------------------------------------------------------------------------------

    def insert(self, proposal: Proposal) -> InsertResult:
        """Add the tokens of a proposal. Never raises, whatever a drafter sends.

        A q that reaches beyond the vocabulary is as bad as such a token: to refuse it only where one was drawn would be
        to leave drafts out by their value.
        """
        named = chain(proposal.tokens, *(support.tokens for support in proposal.q))
        if not all(0 <= token < self._vocabulary for token in named):
            return InsertResult.INVALID_TOKEN
        anchor = self._locate(proposal.anchor_position, proposal.anchor_digest)
        if isinstance(anchor, InsertResult):
            return anchor
        added = cut = False
        # Of each token: the draft it is, its place inside the committed text (where it ends), or nowhere.
        places: list[Node | int | None] = []
        for i, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            above = anchor if parent == ANCHOR else places[parent]
            if isinstance(above, Node):
                place = above.children.get(token)
                if place is None:
                    q, confidence = _drawn_from(proposal, i)
                    place = self.add(above, token, confidence, proposal.source, q)
                    added |= place is not None
                    cut |= place is None
                places.append(place)
            elif above is None or self._tokens[above] != token:
                places.append(None)
            else:  # follow a late proposal through tokens decided meanwhile
                places.append(self._root if above + 1 == self.position else above + 1)
        return InsertResult.PLACED if added else InsertResult.CUT if cut else InsertResult.STALE

    def add(
        self, parent: Node, token: Token, confidence: float, source: SourceName = Source.DRAFT,
        q: Support | None = None, min_weight: float = 0.0,
    ) -> Node | None:  # fmt: skip
        """Add one draft token below ``parent``.

        None if a limit forbids it, the vocabulary has no such token, or its chance is below ``min_weight``.
        """
        assert token not in parent.children
        limits, ahead = self.limits, parent.end - self.position
        if len(self) >= limits.nodes or ahead >= limits.depth or len(parent.children) >= limits.children:
            return None
        if not 0 <= token < self._vocabulary:
            return None
        confidence = min(confidence, 1.0) if confidence > MIN_CONFIDENCE else MIN_CONFIDENCE
        said, left = 0.0, 1.0
        for elder in parent.children.values():
            left -= elder.odds
            if elder.source == source:
                said += elder.confidence
        if parent.weight * max(left, MIN_CONFIDENCE) < min_weight:
            return None
        digest, claim = digests.extend(parent.digest, token), confidence / max(1.0 - said, confidence)
        node = Node(token, parent.end + 1, digest, confidence, claim, source=source, ahead=ahead, q=q, parent=parent)
        node.rank = len(parent.children)
        node.odds = max(left * self._odds(node), MIN_CONFIDENCE)
        node.weight = parent.weight * node.odds
        if node.weight < min_weight:
            return None
        parent.children[token] = node
        self._by_digest[node.digest] = node
        return node

    def remove(self, leaf: Node) -> None:
        """Take a draft token without children back."""
        assert not leaf.children
        del leaf.above.children[leaf.token], self._by_digest[leaf.digest]

    def clear(self) -> None:
        """Forget all drafts."""
        self._plant(Node(-1, len(self._tokens), self._digests[-1]))

    def _locate(self, position: int, digest: int) -> Node | int | InsertResult:
        """The place an anchor names: a node, or a position strictly inside the committed prefix."""
        if 0 <= position < self.position:
            # Drafters are opened with no less than this was: none names a place before that.
            known = position >= self._opened and self._digests[position - self._opened] == digest
            return position if known else InsertResult.CONFLICT
        node = self._by_digest.get(digest)
        if node is not None and node.end == position:
            return node
        return InsertResult.CONFLICT if position == self.position else InsertResult.UNKNOWN_ANCHOR

    # -- selection and re-rooting --------------------------------------------------------------------------------

    def select(self, budget: int, depth: int | None = None) -> VerificationTree:
        """The subtree of at most ``budget`` tokens that is most likely to be kept, at most ``depth`` deep.

        Best first by path probability. A child is never likelier than its parent, so every prefix of the result is
        the best subtree of its own size.
        """
        if not self._root.children:
            return NO_DRAFTS
        deepest = self.position + (self.limits.depth if depth is None else depth)
        nodes: list[Node] = []
        parents: list[int] = []
        heap: list[tuple[float, int, Node, int]] = []
        serial = 0

        def consider(children: dict[Token, Node], parent: int) -> None:
            nonlocal serial
            for child in children.values():
                if child.end <= deepest:
                    heapq.heappush(heap, (-child.weight, serial, child, parent))
                    serial += 1

        consider(self._root.children, ANCHOR)
        while heap and len(nodes) < budget:
            _, _, node, parent = heapq.heappop(heap)
            nodes.append(node)
            parents.append(parent)
            consider(node.children, len(nodes) - 1)
        return VerificationTree(tuple(nodes), tuple(parents))

    def advance(self, tokens: Sequence[Token]) -> None:
        """Commit ``tokens`` and re-root below them; where no draft followed all of them, the trie is empty then."""
        node: Node | None = self._root
        for token in tokens:
            node = node.children.get(token) if node else None
        self._commit(tokens)
        if node is None:
            self.clear()
        else:
            node.parent = None
            self._plant(node)

    def _commit(self, tokens: Sequence[Token]) -> None:
        digest = self._digests[-1]
        for token in tokens:
            self._digests.append(digest := digests.extend(digest, token))
        self._tokens += tokens

    def _plant(self, root: Node) -> None:
        """Make ``root`` the root: what was its chance is a fact now, so the weights below start from it."""
        self._root = root
        self._by_digest = {root.digest: root}
        root.weight = 1.0
        if not root.children:
            return
        stack = [root]
        while stack:
            node = stack.pop()
            self._by_digest[node.digest] = node
            for child in node.children.values():
                child.weight = node.weight * child.odds
            stack.extend(node.children.values())


def _drawn_from(proposal: Proposal, i: int) -> tuple[Support | None, float]:
    """The q of a proposed token, and the confidence in it: q's alone if there is one, whatever the proposal says.

    Under the rejection rule, what decides whether a token is verified must not depend on the token.
    """
    if proposal.q:
        return proposal.q[i], proposal.q[i].peak
    return None, proposal.confidence[i] if proposal.confidence else DEFAULT_CONFIDENCE
