"""What a draft worker holds of a session: its drafts, its cache, and what shapes its logits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from draft_service.translation.reading import Text
from engine.cache.kv_cache import CachedSequence, KVCache
from engine.interface import Chunk
from engine.model import Model
from engine.shaping.shaping import Shaping
from speculation.drafting.draft_session import DraftSession
from speculation.messages import Verification
from speculation.trie import Node
from transport.session_log import SessionLog
from transport.tracing import SequenceTimings
from transport.worker import Outgoing


class DraftEngine(Protocol):
    """What a draft worker drafts with: :class:`engine.step.Engine`, or a head alone."""

    @property
    def model(self) -> Model:
        """Whose tokens it says."""

    @property
    def cache(self) -> KVCache:
        """Where its sequences come from."""

    @property
    def forward_seconds(self) -> float:
        """How long the last step took it."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute; see :meth:`engine.step.Engine.run`."""

    def close(self) -> None:
        """Let go of what it has beyond this process. The last call."""


@dataclass(eq=False, slots=True)
class DraftSequence:
    """A session that this worker drafts for, and where its nodes are in the cache."""

    link: Hashable
    session: DraftSession
    text: Text
    """What the draft model reads of it; the cache is filled with its tokens."""
    cached: CachedSequence
    log: SessionLog
    timings: SequenceTimings
    shaping: Shaping | None = None
    """What it does to its logits, if anything."""
    pending: dict[Node, int] = field(default_factory=dict)
    """Nodes that were computed, by their index among the cache's pending nodes."""
    verified_at: float | None = None
    """When it was verified last; None: it was not yet."""
    drafting_seconds: float = 0.0
    """Seconds that the steps took which drafted for it since its last push."""

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of the committed text that the cache does not hold."""
        return len(self.text.tokens) - self.cached.length

    def frontier(self, context: int) -> Sequence[Node]:
        """The places worth expanding that a draft model of so much ``context`` can be fed."""
        room = context - len(self.text.tokens)
        if room < 0 or not self.text.complete:
            return ()
        deepest = self.session.trie.position + room
        return [node for node in self.session.frontier() if node.end <= deepest]

    def follow(self, old_root: Node, verification: Verification) -> None:
        """Take into text and cache what a verification has committed, which the trie below ``old_root`` followed."""
        pending, session = self.pending, self.session
        kept = _computed_path(old_root, verification, session.tokens, pending)
        self.text.follow(len(kept))
        renumbered = self.cached.advance([pending[node] for node in kept])
        if len(kept) < session.trie.position - old_root.end or not len(session.trie):
            # The target went another way, or further than was computed: nothing computed beyond the path can be used.
            self.rewind(min(self.cached.length, self.text.settle()))
        else:
            self.pending = {node: renumbered[i] for node, i in pending.items() if i in renumbered}

    def rewind(self, length: int) -> None:
        """Keep so many of the committed tokens in the cache, and none of the nodes: these are to be computed anew."""
        self.cached.rollback()
        self.pending = {}
        self.cached.truncate(length)
        self.session.redraft()

    def pushes(self) -> Outgoing:
        """What is to be sent now, with the time that drafting it took."""
        proposals = self.session.pushes()
        if not proposals:
            return []
        took, self.drafting_seconds = round(self.drafting_seconds * 1e6), 0.0
        return [(self.link, replace(proposal, took_us=took)) for proposal in proposals]


def _computed_path(
    root: Node, verification: Verification, tokens: Sequence[int], pending: dict[Node, int]
) -> list[Node]:
    """The computed nodes below the old ``root`` that the newly committed tokens follow."""
    path: list[Node] = []
    node: Node | None = root
    for token in tokens[root.end : verification.end]:
        node = node.children.get(token) if node else None
        if node is None or node not in pending:
            break
        path.append(node)
    return path
