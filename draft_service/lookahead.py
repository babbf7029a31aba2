"""The lookahead of a draft worker: every step extends the drafts of many sessions by one forward.

It never waits to be asked. A session is extended while its lead over the committed tokens is short of the limit; the
sessions with the shortest lead come first, because their targets will run out of drafts soonest. A verification
re-roots the trie and the cache together, and what survives is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from engine.kv_cache import CachedSequence, CacheFull
from engine.sampling import Draw, candidates
from engine.step import Chunk, Engine
from speculation.draft_session import DraftLimits, DraftSession, Sync
from speculation.messages import (
    ANCHOR,
    Close,
    FromWorker,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    SessionId,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.trie import Node
from transport.worker import Outgoing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LookaheadLimits:
    """Bounds on what one draft worker takes on."""

    sessions: int = 256
    batch: int = 64
    """Sessions extended in one step."""
    prefill: int = 512
    """Most committed tokens fed for one session in one step."""
    draft: DraftLimits = DraftLimits()


@dataclass(eq=False, slots=True)
class Drafted:
    """A session that this worker drafts for, and where its nodes are in the cache."""

    link: Hashable
    session: DraftSession
    cached: CachedSequence
    pending: dict[Node, int] = field(default_factory=dict)
    """Nodes that were fed, by their index among the cache's pending nodes."""

    @property
    def uncached(self) -> int:
        """Committed tokens that the cache does not hold."""
        return len(self.session.tokens) - self.cached.length


@dataclass(slots=True)
class Piece:
    """One session's part of a step: feed committed tokens, or one draft node; ``expands`` tells what follows."""

    drafted: Drafted
    node: Node
    tokens: Sequence[int]
    parent: int
    expands: bool

    def chunk(self) -> Chunk:
        """What the engine computes."""
        parents = [self.parent, *range(self.drafted.cached.pending, self.drafted.cached.pending + len(self.tokens) - 1)]
        return Chunk(self.drafted.cached, self.tokens, parents, [len(self.tokens) - 1] if self.expands else [])


@dataclass(slots=True)
class Counters:
    """Monotone totals since the start."""

    steps: int = 0
    step_microseconds: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    lost: int = 0


class Lookahead:
    """All sessions of a draft worker. Implements :class:`transport.worker.Machine`."""

    def __init__(self, engine: Engine, welcome: Welcome, limits: LookaheadLimits = LookaheadLimits()) -> None:
        """Nothing is open. The lookahead owns ``engine`` and its cache."""
        self._engine, self._welcome, self._limits = engine, welcome, limits
        self._held: dict[tuple[Hashable, SessionId], Drafted] = {}
        self.counters = Counters()

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""
        return self._welcome

    def load(self) -> Load:
        """How busy it is."""
        return Load(
            sessions=len(self._held),
            free_tokens=self._engine.cache.free_tokens,
            capacity_tokens=self._engine.cache.capacity,
            counters=asdict(self.counters),
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive(self, link: Hashable, message: ToWorker) -> Outgoing:
        """Take one message of a router."""
        held = self._held.get((link, message.session))
        match message:
            case Open():
                return self._open(link, message, held)
            case Verification():
                return self._verified(link, message, held)
            case Close():
                if held is not None and held.session.opened.epoch <= message.epoch:
                    self._drop(held)
            case Proposal():
                log.warning("a router sent a proposal to a drafter; ignored")
        return []

    def _open(self, link: Hashable, opened: Open, held: Drafted | None) -> Outgoing:
        if held is not None:
            if held.session.opened.epoch >= opened.epoch:
                return []
            self._drop(held)
        worst = max(opened.tokens)
        if worst >= self._welcome.vocabulary:
            why = f"token {worst} is outside the vocabulary of {self._welcome.vocabulary}"
            return [_refused(link, opened, RefusalCode.INVALID, why)]
        if len(self._held) >= self._limits.sessions or len(opened.tokens) > self._engine.cache.free_tokens:
            return [_refused(link, opened, RefusalCode.OVERLOADED, "no room for another session")]
        session = DraftSession(opened, vocabulary=self._welcome.vocabulary, limits=self._limits.draft)
        self._held[link, opened.session] = Drafted(link, session, self._engine.cache.sequence())
        return []

    def _verified(self, link: Hashable, verification: Verification, held: Drafted | None) -> Outgoing:
        if held is None:
            why = "not opened here"
            return [_refused(link, verification, RefusalCode.UNKNOWN_SESSION, why)]
        old_root = held.session.trie.root
        pending = held.pending
        sync = held.session.verified(verification)
        match sync:
            case Sync.IGNORED:
                return []
            case Sync.LOST:
                self.counters.lost += 1
                self._drop(held)
                return [_refused(link, verification, RefusalCode.UNKNOWN_SESSION, "does not connect to what is known")]
            case Sync.FINISHED:
                self._count(verification)
                self._drop(held)
                return []
            case Sync.ADVANCED:
                self._count(verification)
        kept = _fed_path(old_root, verification, held.session.tokens, pending)
        renumbered = held.cached.advance([pending[node] for node in kept])
        if len(kept) < held.session.trie.position - old_root.end:
            # The target went another way, or further than was fed: nothing fed beyond the path can be used.
            held.cached.rollback()
            held.pending = {}
        else:
            held.pending = {node: renumbered[i] for node, i in pending.items() if i in renumbered}
        return []

    def _count(self, verification: Verification) -> None:
        self.counters.verified += 1
        self.counters.accepted += verification.accepted

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""
        for held in [held for (owner, _), held in self._held.items() if owner is link]:
            self._drop(held)

    def _drop(self, held: Drafted) -> None:
        held.cached.free()
        del self._held[held.link, held.session.opened.session]

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> Outgoing | None:
        """Extend the drafts of the sessions that need it most."""
        outgoing: Outgoing = []
        for held in self._held.values():
            if held.session.unsent is not None:
                outgoing.append((held.link, held.session.unsent))
                held.session.unsent = None
        pieces = self._plan()
        if not pieces:
            return outgoing or None
        started = time.perf_counter()
        outgoing += self._compute(pieces)
        self.counters.steps += 1
        self.counters.step_microseconds += round((time.perf_counter() - started) * 1e6)
        return outgoing

    def _plan(self) -> list[Piece]:
        wanted = [(held, node) for held in self._held.values() if (node := held.session.frontier()) is not None]
        wanted.sort(key=lambda pair: pair[1].end - pair[0].session.trie.position)
        return [self._piece(held, node) for held, node in wanted[: self._limits.batch]]

    def _piece(self, held: Drafted, node: Node) -> Piece:
        """Feed what the cache lacks of the committed tokens first, then the node to expand."""
        root = held.session.trie.root
        if node is root and held.uncached == 0:
            # The root's own logits are gone: feed its token again.
            held.cached.truncate(held.cached.length - 1)
        if held.uncached:
            start = held.cached.length
            tokens = held.session.tokens[start : start + self._limits.prefill]
            complete = start + len(tokens) == len(held.session.tokens)
            return Piece(held, root, tokens, ANCHOR, expands=complete and node is root)
        assert node.parent is not None
        parent = ANCHOR if node.parent is root else held.pending[node.parent]
        return Piece(held, node, [node.token], parent, expands=True)

    def _compute(self, pieces: Sequence[Piece]) -> Outgoing:
        """Run the pieces in one forward; a session that the cache has no room for is given back to its router."""
        try:
            logits_RV = self._engine.run([piece.chunk() for piece in pieces])
        except CacheFull:
            victim = pieces[-1].drafted
            self._drop(victim)
            why = _refused(victim.link, victim.session.opened, RefusalCode.OVERLOADED, "no room in the draft cache")
            return [why, *(self._compute(pieces[:-1]) if len(pieces) > 1 else [])]
        expanding = [piece for piece in pieces if piece.expands]
        draws = [Draw(piece.drafted.session.opened.sampling, piece.node.end) for piece in expanding]
        found = iter(candidates(logits_RV, draws, k=1))
        outgoing: Outgoing = []
        for piece in pieces:
            self._settle(piece)
            if piece.expands and (proposal := piece.drafted.session.expand(piece.node, next(found))):
                self.counters.proposed += len(proposal.tokens)
                outgoing.append((piece.drafted.link, proposal))
        return outgoing

    @staticmethod
    def _settle(piece: Piece) -> None:
        held = piece.drafted
        if piece.node is held.session.trie.root:
            held.cached.advance(range(held.cached.pending - len(piece.tokens), held.cached.pending))
        else:
            held.pending[piece.node] = held.cached.pending - 1


def _fed_path(root: Node, verification: Verification, tokens: Sequence[int], pending: dict[Node, int]) -> list[Node]:
    """The fed nodes below the old ``root`` that the newly committed tokens follow."""
    path: list[Node] = []
    node: Node | None = root
    for token in tokens[root.end : verification.end]:
        node = node.children.get(token) if node else None
        if node is None or node not in pending:
            break
        path.append(node)
    return path


def _refused(
    link: Hashable, about: Open | Verification, code: RefusalCode, message: str
) -> tuple[Hashable, FromWorker]:
    return link, Refused(about.session, about.epoch, code, message)
