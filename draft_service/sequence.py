"""What a draft worker holds of a session, and what the engine computes for it in a step and how its rows are drawn.

Of each row the likeliest draws are taken under the coupled rule, as many as the session wants children; under the
rejection rule one token, drawn from the q that goes with it.

Tensor legend: R rows of the step, M those under the rejection rule, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from engine.cache.kv_cache import CachedSequence
from engine.host.upload import upload
from engine.interface import Chunk
from engine.levels.level_memory import Expanded
from engine.model import Model
from engine.sampling.rejection import draw_sparse
from engine.sampling.sampling import Draw, candidates
from engine.shaping.shaping import RowShaping, Shaping, shaped
from speculation.drafting.draft_session import Candidate, DraftSession
from speculation.messages import ANCHOR, Rule, Token, Verification
from speculation.trie import Node, VerificationTree
from transport.tracing import SequenceTimings, SessionLog
from transport.worker import Key, Outgoing


class Text:
    """The committed text of one session as the draft model reads it: as it is. A subclass may translate."""

    def __init__(self, committed: Sequence[Token]) -> None:
        """``committed``: the session's tokens, a list that grows as they are."""
        self.tokens = committed
        """In the draft model's tokens. Not a copy: read only."""
        self.first = 0
        """Position of the first of them."""

    @property
    def complete(self) -> bool:
        """Whether they are all of the text, so that drafts can hang from its end."""
        return True

    def own(self, token: Token) -> Token:
        """The draft model's token for a draft token."""
        return token

    def follow(self, count: int) -> None:
        """The next ``count`` tokens that were committed are drafts that the draft model has been fed."""

    def settle(self) -> int:
        """Take in all that is committed. How many of the tokens before, from the first on, are still the same."""
        return len(self.tokens)


class Reader:
    """The draft model, seen from the sessions: it has their vocabulary.

    Sessions are in the target's tokens everywhere else. A subclass has them meet the draft model's, here alone.
    """

    def __init__(self, model: Model, text: Callable[[Sequence[Token]], Text] = Text) -> None:
        self.model = model
        """The draft model, with the vocabulary of the sessions."""
        self.text = text
        """Makes the text of a session from its tokens, a list that grows as they are."""

    def read(self, logits_RV: Tensor) -> Tensor:
        """What the draft model's logits say of the sessions' tokens, ``[R, V]`` of their vocabulary; -inf: nothing."""
        return logits_RV


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
    pending: dict[Node, int] = field(default_factory=dict)
    """Nodes that were computed, by their index among the cache's pending nodes."""
    verified_at: float | None = None
    drafting_seconds: float = 0.0
    """Seconds that the steps took which drafted for it since its last push."""

    @property
    def key(self) -> Key:
        """Which session it is, at this worker."""
        return self.link, self.session.opened.session

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of the committed text that the cache does not hold."""
        return len(self.text.tokens) - self.cached.length

    def lead(self, context: int) -> tuple[int, int]:
        """The session's lead in tokens, asked for and reached, as far as a draft model of this ``context`` can go."""
        asked, reached = self.session.lead
        room = max(context + 1 - len(self.text.tokens), 0)
        return min(asked, room), min(reached, room)

    def places(self, context: int) -> Iterator[Node]:
        """The places worth expanding that a draft model of so much ``context`` can be fed, best first."""
        room = context - len(self.text.tokens)
        if room < 0 or not self.text.complete:
            return iter(())
        deepest = self.session.trie.position + room
        return (node for node in self.session.places() if node.end <= deepest)

    def frontier(self, context: int) -> Sequence[Node]:
        """Those of them to expand now."""
        return list(islice(self.places(context), self.session.width))

    def follow(self, old_root: Node, verification: Verification) -> None:
        """Take into text and cache what a verification has committed, which the trie below ``old_root`` followed."""
        pending, session, kept = self.pending, self.session, list[Node]()
        node: Node | None = old_root
        for token in session.tokens[old_root.end : verification.end]:
            node = node.children.get(token) if node else None
            if node is None or node not in pending:
                break  # the committed tokens follow no further what was computed
            kept.append(node)
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
        proposals = self.session.pushes(self.drafting_seconds)
        if proposals:
            self.drafting_seconds = 0.0
        return [(self.link, proposal) for proposal in proposals]


@dataclass(slots=True)
class DraftCounters:
    """Monotone totals since the start."""

    steps: int = 0
    step_microseconds: int = 0
    computed: int = 0
    reused: int = 0
    """Tokens taken over from the cache instead of being computed."""
    guessed: int = 0
    """Guesses computed by staged drafting ..."""
    followed: int = 0
    """... and those that the draft model drew itself, so that they count as drafts that were expanded."""
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    lost: int = 0
    asked: int = 0
    """Lead that targets asked for, added up at every verification ..."""
    delivered: int = 0
    """... and what there was of it by then."""
    features: int = 0
    """Tokens of which features came, for an EAGLE head."""
    features_late: int = 0
    """Messages with features of a session that is not open here, or was open under that epoch."""
    features_refused: int = 0
    """Messages with features that are none for this head: of another one, of another size, no numbers."""


@dataclass(slots=True)
class DraftBatchEntry:
    """One session's part of a step: feed committed tokens, or draft nodes; ``expands`` are the places to go on from."""

    sequence: DraftSequence
    tokens: Sequence[int]
    parents: Sequence[int]
    expands: Sequence[Node]
    """The nodes whose tokens come last."""
    guesses: VerificationTree = VerificationTree()
    """What the draft model may draw behind the first of ``expands``, computed after all else."""
    levels: int = 1
    """How many levels are expanded in one launch, the places first; see :mod:`draft_service.levels`."""
    reserved: Sequence[int] = ()
    """Slots of the levels below the places; those that were used, once it is known."""
    leaves: Sequence[Node] = ()
    """Other drafts that these levels may expand."""
    found: Sequence[Sequence[Expanded | None]] = ()
    """What the launch expanded, by level; empty without one."""

    @property
    def size(self) -> int:
        """How many tokens are computed."""
        return len(self.tokens) + len(self.guesses.nodes) + len(self.reserved)

    @property
    def drawn(self) -> int:
        """How many places are drawn at: those to expand, then the guesses."""
        return len(self.expands) + len(self.guesses.nodes)

    @property
    def rows(self) -> int:
        """How many rows are judged: those of the places drawn at.

        Of a text that is computed without being drawn from it is the last one, which sees all others.
        """
        return self.drawn or 1

    @property
    def computes_committed(self) -> bool:
        """Whether the tokens are committed ones."""
        return not self.expands or self.expands[0] is self.sequence.session.trie.root

    @classmethod
    def reading(
        cls, sequence: DraftSequence, frontier: Sequence[Node], most: int, counters: DraftCounters
    ) -> DraftBatchEntry:
        """Feed ``most`` committed tokens that the cache lacks; once that is all, expand ``frontier``: their end."""
        if sequence.num_uncomputed_tokens == 0:
            # The root's own logits are gone: feed its token again.
            sequence.cached.truncate(sequence.cached.length - 1)
        elif sequence.num_uncomputed_tokens > 1:
            counters.reused += sequence.cached.reuse()
        start, pending = sequence.cached.length, sequence.cached.pending
        tokens = sequence.text.tokens[start : start + most]
        complete = start + len(tokens) == len(sequence.text.tokens)
        parents = [ANCHOR, *range(pending, pending + len(tokens) - 1)]
        return cls(sequence, tokens, parents, frontier if complete else ())

    @classmethod
    def below(cls, sequence: DraftSequence, nodes: Sequence[Node]) -> DraftBatchEntry:
        """Go on from draft ``nodes``, whose parents are computed."""
        root = sequence.session.trie.root
        parents = [ANCHOR if node.above is root else sequence.pending[node.above] for node in nodes]
        return cls(sequence, [sequence.text.own(node.token) for node in nodes], parents, nodes)

    def withdraw(self) -> bool:
        """Compute no guesses and no further levels after all; whether there were any."""
        any_there = self.levels > 1 or bool(self.guesses.nodes)
        self.levels, self.guesses = 1, VerificationTree()
        return any_there

    def discarded(self) -> None:
        """Nothing of it is pending any more."""
        self.reserved, self.leaves, self.found = (), (), ()

    def chunk(self) -> Chunk:
        """What the engine computes."""
        own = len(self.tokens)
        first = self.sequence.cached.pending + own
        place = first - len(self.expands)
        parents = [place if parent == ANCHOR else first + parent for parent in self.guesses.parents]
        rows = range(self.size - self.rows, self.size)
        return Chunk(self.sequence.cached, [*self.tokens, *self.guesses.tokens], [*self.parents, *parents], rows)

    def draws(self) -> list[Draw]:
        """How the token of each place is drawn."""
        sampling = self.sequence.session.opened.sampling
        draws = [Draw(sampling, node.end, node.digest) for node in self.expands]
        return draws + [Draw(sampling, draws[0].position + guess.end) for guess in self.guesses.nodes]

    def shapes(self) -> list[RowShaping | None]:
        """How the logits of each place are shaped; None: not at all."""
        shaping, root = self.sequence.shaping, self.sequence.session.trie.root
        if shaping is None:
            return [None] * self.drawn
        paths = [[above.token for above in node.path_from(root)] for node in self.expands]
        paths += [[*paths[0], *self.guesses.tokens[: guess.end]] for guess in self.guesses.nodes]
        return [shaping.after(path) for path in paths]


def read_on(
    waiting: Mapping[DraftSequence, Sequence[Node]], room: int, most: int, counters: DraftCounters
) -> list[DraftBatchEntry]:
    """Read on with ``waiting`` texts, given with their frontiers: ``room`` tokens together, ``most`` of each.

    Half of the room goes to those that lack least, so that none waits behind long texts; what is left to those that
    come first, so that none starves. A single token is always read: its session drafts already.
    """
    entries: dict[DraftSequence, DraftBatchEntry] = {}
    shortest = sorted(islice(waiting, 1, None), key=lambda sequence: sequence.num_uncomputed_tokens)
    for order, reserved in ((shortest, room // 2), (waiting, 0)):
        for sequence in order:
            if sequence not in entries and (room > reserved or sequence.num_uncomputed_tokens <= 1):
                at_once = max(min(most, room - reserved), 1)
                entries[sequence] = DraftBatchEntry.reading(sequence, waiting[sequence], at_once, counters)
                room -= len(entries[sequence].tokens)
    return [entries[sequence] for sequence in waiting if sequence in entries]


def rows_drawn_at(logits_RV: Tensor, entries: Sequence[DraftBatchEntry]) -> Tensor:
    """The rows of the places drawn at here, without a copy if these are all."""
    drawn = [entry.drawn > 0 and entry.levels == 1 for entry in entries for _ in range(entry.rows)]
    return _picked(logits_RV, [row for row, wanted in enumerate(drawn) if wanted])


def _picked(logits_RV: Tensor, rows: Sequence[int]) -> Tensor:
    """Those ``rows``, in their order, without a copy if these are all."""
    return logits_RV if len(rows) == len(logits_RV) else logits_RV[upload(rows, logits_RV.device)]


def candidates_of(entries: Sequence[DraftBatchEntry], logits_RV: Tensor) -> list[Sequence[Candidate]]:
    """What may follow each expanded place: the likeliest draws; under the rejection rule, one draw from q.

    Nothing where shaping leaves no token.
    """
    draws = [draw for entry in entries for draw in entry.draws()]
    if not draws:
        return []
    logits_RV = shaped(logits_RV, [shape for entry in entries for shape in entry.shapes()])
    max_children = max((entry.sequence.session.children for entry in entries), default=1)
    sessions = (entry.sequence.session for entry in entries for _ in range(entry.drawn))
    from_q = [session.opened.speculation.rule is Rule.REJECTION for session in sessions]
    if any(from_q):
        return _drawn(logits_RV, draws, from_q, max_children)
    return list(candidates(logits_RV, draws, max_children))


def _drawn(
    logits_RV: Tensor, draws: Sequence[Draw], from_q: Sequence[bool], max_children: int
) -> list[Sequence[Candidate]]:
    """What may follow each place: those ``from_q``, some at least, by one draw of it."""
    found: list[Sequence[Candidate]] = [()] * len(draws)
    rows = [row for row, wanted in enumerate(from_q) if wanted]
    logits_MV = _picked(logits_RV, rows)
    # There is no q where no token is left, or logits are no numbers. Fetched after the other draws, which wait for the
    # device anyway.
    possible_M = logits_MV.amax(-1).isfinite()
    if others := [row for row, wanted in enumerate(from_q) if not wanted]:
        coupled = candidates(_picked(logits_RV, others), [draws[row] for row in others], max_children)
        for row, likeliest in zip(others, coupled, strict=True):
            found[row] = likeliest
    picked = [number for number, possible in enumerate(possible_M.tolist()) if possible]
    rows = [rows[number] for number in picked]
    for row, draft in zip(rows, draw_sparse(_picked(logits_MV, picked), [draws[row] for row in rows]), strict=True):
        found[row] = [Candidate(draft.token, draft.confidence, draft.q)]
    return found


def withdrawn(entries: Sequence[DraftBatchEntry]) -> bool:
    """Have no entry compute more than it has to; whether any was about to."""
    return sum(entry.withdraw() for entry in entries) > 0


def most_to_read(sequences: Iterable[DraftSequence], entries: Sequence[DraftBatchEntry]) -> DraftSequence:
    """Who gives way where a step finds no room: of all that hold any or want it, the one that has most to read yet.

    It drafts last of all. Among those that have read as much, it is the last of the step.
    """
    wanting, holding = [entry.sequence for entry in reversed(entries)], [one for one in sequences if one.cached.blocks]
    return max(wanting + holding, key=lambda sequence: sequence.num_uncomputed_tokens)
