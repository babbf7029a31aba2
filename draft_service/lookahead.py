"""The lookahead of a draft worker: every step expands, in one forward, the places of all sessions that are worth most.

It never waits to be asked. A place is worth the chance that the text gets there, so a session without drafts comes
first, and among the branches of one session the likely outcomes of the verification now in flight. How many places go
into a step is the target's own rule: as many as make the most of a second (:mod:`speculation.budget`). A verification
re-roots the trie and the cache together, and what survives is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor

from engine.kv_cache import CachedSequence, CacheFull
from engine.recorder import Recorder
from engine.rejection import draw_sparse
from engine.sampling import Draw, candidates
from engine.step import Chunk, Engine
from speculation.budget import StepCost
from speculation.calibration import Calibration
from speculation.demand import DraftDemand
from speculation.draft_session import Candidate, DraftLimits, DraftSession, Lead, Sync, best_places
from speculation.messages import (
    ANCHOR,
    Close,
    FromWorker,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Rule,
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
    """Places expanded in one step."""
    prefill: int = 512
    """Most committed tokens fed for one session in one step."""
    warm: int = 32
    """Committed tokens missing in the cache of a session that drafts nothing, before they are fed all the same."""
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
    """One session's part of a step: feed committed tokens, or draft nodes; ``expands`` are the places to go on from."""

    drafted: Drafted
    tokens: Sequence[int]
    parents: Sequence[int]
    expands: Sequence[Node]
    """The nodes whose tokens come last."""

    @property
    def feeds_committed(self) -> bool:
        """Whether the tokens are committed ones."""
        return not self.expands or self.expands[0] is self.drafted.session.trie.root

    def chunk(self) -> Chunk:
        """What the engine computes."""
        count = len(self.tokens)
        return Chunk(self.drafted.cached, self.tokens, self.parents, range(count - len(self.expands), count))

    def draws(self) -> list[Draw]:
        """How the token after each expanded place is drawn."""
        return [Draw(self.drafted.session.opened.sampling, node.end) for node in self.expands]


@dataclass(slots=True)
class Counters:
    """Monotone totals since the start."""

    steps: int = 0
    step_microseconds: int = 0
    computed: int = 0
    reused: int = 0
    """Tokens taken over from the cache instead of being computed."""
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    lost: int = 0
    asked: int = 0
    """Lead that targets asked for, added up at every verification ..."""
    delivered: int = 0
    """... and what there was of it by then."""


class Lookahead:
    """All sessions of a draft worker. Implements :class:`transport.worker.Machine`."""

    def __init__(
        self,
        engine: Engine,
        welcome: Welcome,
        limits: LookaheadLimits = LookaheadLimits(),
        recorder: Recorder | None = None,
    ) -> None:
        """Nothing is open. The lookahead owns ``engine`` and its cache."""
        self._engine, self._welcome, self._limits = engine, welcome, limits
        self._held: dict[tuple[Hashable, SessionId], Drafted] = {}
        self._calibration = Calibration()
        self._cost = StepCost()
        self._recorder = recorder
        self._outcomes: list[dict[str, object]] = []  # for the record of the next step
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

    def demand(self) -> DraftDemand:
        """What it was asked for and what it delivered."""
        counters = self.counters
        return DraftDemand(counters.asked, counters.delivered, counters.step_microseconds / 1e6)

    # -- messages ------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Never to be woken but by a message."""
        return None

    def receive(self, link: Hashable, message: ToWorker, at: float = 0.0) -> Outgoing:  # noqa: ARG002
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
        session = DraftSession(
            opened,
            vocabulary=self._welcome.vocabulary,
            limits=self._limits.draft,
            calibration=self._calibration,
        )
        session.outcomes = [] if self._recorder else None
        self._held[link, opened.session] = Drafted(link, session, self._engine.cache.sequence(session.tokens))
        return []

    def _verified(self, link: Hashable, verification: Verification, held: Drafted | None) -> Outgoing:
        if held is None:
            why = "not opened here"
            return [_refused(link, verification, RefusalCode.UNKNOWN_SESSION, why)]
        old_root = held.session.trie.root
        pending = held.pending
        lead = held.session.lead
        sync = held.session.verified(verification)
        self._note(held.session)
        match sync:
            case Sync.IGNORED:
                return []
            case Sync.LOST:
                self.counters.lost += 1
                self._drop(held)
                return [_refused(link, verification, RefusalCode.UNKNOWN_SESSION, "does not connect to what is known")]
            case Sync.FINISHED:
                self._count(verification, lead)
                self._drop(held)
                return []
            case Sync.ADVANCED:
                self._count(verification, lead)
        kept = _fed_path(old_root, verification, held.session.tokens, pending)
        renumbered = held.cached.advance([pending[node] for node in kept])
        if len(kept) < held.session.trie.position - old_root.end or not len(held.session.trie):
            # The target went another way, or further than was fed: nothing fed beyond the path can be used.
            held.cached.rollback()
            held.pending = {}
        else:
            held.pending = {node: renumbered[i] for node, i in pending.items() if i in renumbered}
        # A target that ran out of drafts may need what was drafted but not sent; the next step would hold it up.
        return [(link, proposal) for proposal in held.session.pushes()]

    def _note(self, session: DraftSession) -> None:
        """Keep for the record what the session has learned about its candidates."""
        if session.outcomes:
            found = [[[round(c, 4) for c in one.confidences], one.right] for one in session.outcomes]
            self._outcomes.append({"session": session.opened.session, "outcomes": found})
            session.outcomes.clear()

    def _count(self, verification: Verification, lead: Lead) -> None:
        self.counters.asked += lead.asked
        self.counters.delivered += lead.reached
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
        """Expand what is worth most, and push what has come together."""
        started = time.perf_counter()
        pieces = self._plan()
        outgoing = self._compute(pieces) if pieces else []
        for held in self._held.values():
            outgoing += ((held.link, proposal) for proposal in held.session.pushes())
        if not pieces:
            if self._recorder:
                self._recorder.flush()
            return outgoing or None
        self._account(pieces, started)
        return outgoing

    def _account(self, pieces: Sequence[Piece], started: float) -> None:
        ended = time.perf_counter()
        tokens = sum(len(piece.tokens) for piece in pieces)
        self.counters.steps += 1
        self.counters.step_microseconds += round((ended - started) * 1e6)
        self.counters.computed += tokens
        if all(len(piece.tokens) == len(piece.expands) for piece in pieces):
            self._cost.observe(tokens, ended - started)
        if self._recorder:
            self._recorder.write(
                role="draft",
                start=started,
                end=ended,
                forward=self._engine.forward_seconds,
                tokens=tokens,
                sessions=[piece.drafted.session.opened.session for piece in pieces],
                learned=self._outcomes,
            )
            self._outcomes = []

    def _plan(self) -> list[Piece]:
        """Missing committed tokens are fed first; of the draft places, as many as pay are expanded."""
        pieces: list[Piece] = []
        frontiers: list[tuple[Drafted, Sequence[Node]]] = []
        for held in self._held.values():
            frontier = held.session.frontier()
            if frontier and frontier[0] is held.session.trie.root:
                pieces.append(self._root_piece(held, frontier))
            elif frontier:
                frontiers.append((held, frontier))
            elif held.uncached >= self._limits.warm:
                pieces.append(self._root_piece(held, ()))
        fed = sum(len(piece.tokens) for piece in pieces)
        chosen: dict[Drafted, list[Node]] = {}
        for held, node in best_places(frontiers, self._limits.batch, fed, len(pieces), self._cost):
            chosen.setdefault(held, []).append(node)
        return pieces + [self._piece(held, nodes) for held, nodes in chosen.items()]

    def _root_piece(self, held: Drafted, frontier: Sequence[Node]) -> Piece:
        """Feed the committed tokens that the cache lacks; once that is all, expand ``frontier``: their end, if any."""
        if held.uncached == 0:
            # The root's own logits are gone: feed its token again.
            held.cached.truncate(held.cached.length - 1)
        elif held.uncached > 1:
            self.counters.reused += held.cached.reuse()
        start = held.cached.length
        tokens = held.session.tokens[start : start + self._limits.prefill]
        complete = start + len(tokens) == len(held.session.tokens)
        pending = held.cached.pending
        parents = [ANCHOR, *range(pending, pending + len(tokens) - 1)]
        return Piece(held, tokens, parents, frontier if complete else ())

    @staticmethod
    def _piece(held: Drafted, nodes: Sequence[Node]) -> Piece:
        root = held.session.trie.root
        parents = [
            ANCHOR if node.parent is root or node.parent is None else held.pending[node.parent] for node in nodes
        ]
        return Piece(held, [node.token for node in nodes], parents, nodes)

    def _compute(self, pieces: Sequence[Piece]) -> Outgoing:
        """Run the pieces in one forward; a session that the cache has no room for is given back to its router."""
        try:
            logits_RV = self._engine.run([piece.chunk() for piece in pieces])
        except CacheFull:
            victim = pieces[-1].drafted
            self._drop(victim)
            why = _refused(victim.link, victim.session.opened, RefusalCode.OVERLOADED, "no room in the draft cache")
            return [why, *(self._compute(pieces[:-1]) if len(pieces) > 1 else [])]
        found = iter(self._candidates(pieces, logits_RV))
        for piece in pieces:
            self._settle(piece)
            for node in piece.expands:
                self.counters.proposed += piece.drafted.session.expand(node, next(found))
        return []

    @staticmethod
    def _candidates(pieces: Sequence[Piece], logits_RV: Tensor) -> list[Sequence[Candidate]]:
        """What may follow each expanded place: the likeliest draws; under the rejection rule, one draw from q."""
        draws = [draw for piece in pieces for draw in piece.draws()]
        drawn_from_q = [
            row
            for row, session in enumerate(piece.drafted.session for piece in pieces for _ in piece.expands)
            if session.opened.speculation.rule is Rule.REJECTION
        ]
        most = max((piece.drafted.session.children for piece in pieces), default=1)
        found: list[Sequence[Candidate]] = list(candidates(logits_RV, draws, k=most))
        if drawn_from_q:
            drafts = draw_sparse(logits_RV[drawn_from_q], [draws[row] for row in drawn_from_q])
            for row, draft in zip(drawn_from_q, drafts, strict=True):
                found[row] = [Candidate(draft.token, draft.confidence, draft.q)]
        return found

    @staticmethod
    def _settle(piece: Piece) -> None:
        held = piece.drafted
        first = held.cached.pending - len(piece.tokens)
        if piece.feeds_committed:
            held.cached.advance(range(first, held.cached.pending))
        else:
            held.pending.update((node, first + i) for i, node in enumerate(piece.expands))


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
