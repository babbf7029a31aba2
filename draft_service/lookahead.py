"""The lookahead of a draft worker: every step expands, in one forward, the places of all sessions that are worth most.

It never waits to be asked. A place is worth the chance that the text gets there, so a session without drafts comes
first, and among the branches of one session the likely outcomes of the verification now in flight. How many places go
into a step is the target's own rule: as many as make the most of a second, but eight at least if there are so many
(:mod:`speculation.verifying.budget`). A verification re-roots the trie and the cache together, and what survives is
kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from draft_service.head_engine import HeadEngine
from draft_service.levels import DraftAccount, DraftLevels, first_level, grow
from draft_service.sequence import (
    DraftBatchEntry,
    DraftCounters,
    DraftSequence,
    Reader,
    Text,
    candidates_of,
    most_to_read,
    read_on,
    rows_drawn_at,
    withdrawn,
)
from draft_service.staged_drafting import StagedDrafting
from engine.cache.kv_cache import CachedSequence, CacheFull
from engine.interface import FATAL
from engine.recorder import Recorder
from engine.shaping.compiling import Compiling
from engine.shaping.grammar import GrammarConstraint, Grammars
from engine.shaping.shaping import Shaping
from engine.step import Engine
from speculation.demand import DraftDemand
from speculation.drafting.draft_session import Candidate, DraftLimits, DraftSession, Sync
from speculation.messages import (
    Close,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Token,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.trie import Node
from speculation.verifying.budget import StepCost, best_places
from speculation.verifying.calibration import Calibration
from transport.tracing import SequenceTimings, SessionLog, Tracing
from transport.worker import Key, Outgoing

log = logging.getLogger(__name__)

NOT_FINITE = (
    "the draft model's logits are not finite (NaN or infinite) after {} tokens; its weights or its kernels are broken"
)


@dataclass(frozen=True, slots=True)
class LookaheadLimits:
    """Bounds on what one draft worker takes on."""

    sessions: int = 256
    batch: int = 64
    """Places expanded in one step."""
    prefill: int = 512
    """Most committed tokens computed for one session in one step, ..."""
    step_prefill: int = 2048
    """... and of all sessions together, but for one token of each that misses no more."""
    prefill_from: int = 32
    """Committed tokens missing in the cache of a session that drafts nothing, before they are computed all the same."""
    draft: DraftLimits = DraftLimits()


class Lookahead:
    """All sessions of a draft worker. Implements :class:`transport.worker.Machine`."""

    def __init__(
        self,
        engine: Engine | HeadEngine,
        welcome: Welcome,
        limits: LookaheadLimits = LookaheadLimits(),
        recorder: Recorder | None = None,
        tracing: Tracing | None = None,
        reader: Reader | None = None,
        staged: StagedDrafting | None = None,
        levels: DraftLevels | None = None,
    ) -> None:
        """Nothing is open. The lookahead owns ``engine`` and its cache.

        ``reader``: None if all have one vocabulary. ``staged``: what guesses for the draft model. ``levels``: not with
        a ``reader`` that translates.
        """
        self._engine, self._welcome, self._limits = engine, welcome, limits
        self._reader = reader or Reader(engine.model)
        self._sequences: dict[Key, DraftSequence] = {}
        self._compiling: Compiling[DraftSequence] = Compiling(lambda: Grammars(self._reader.model))
        self._calibration = Calibration()
        self._cost = StepCost()
        self._resting = False
        """Whether the last verification told its drafter to rest: then so does a new session, until it hears more."""
        self._recorder, self._tracing = recorder, tracing
        self._staged = staged or StagedDrafting(welcome.vocabulary)
        self._levels = levels or DraftLevels()
        self.counters = DraftCounters()
        self._account = DraftAccount(self.counters, self._cost, self._levels, recorder)

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""
        return self._welcome

    def load(self) -> Load:
        """How busy it is."""
        return Load(
            sessions=len(self._sequences),
            free_tokens=self._engine.cache.free_tokens,
            capacity_tokens=self._engine.cache.capacity,
            counters=asdict(self.counters),
        )

    def demand(self) -> DraftDemand:
        """What it was asked for and what it delivered."""
        return DraftDemand(self.counters.asked, self.counters.delivered, self.counters.step_microseconds / 1e6)

    # -- messages ------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When to step although no message came: a grammar may be compiled by then."""
        return self._compiling.due

    def receive(self, link: Hashable, message: ToWorker, at: float = 0.0) -> Outgoing:
        """Take one message of a router."""
        sequence = self._sequences.get((link, message.session))
        match message:
            case Open():
                return self._open(link, message, sequence, at)
            case Verification():
                return self._verified(link, message, sequence)
            case Close() if sequence is not None and sequence.session.opened.epoch <= message.epoch:
                self._drop(sequence, "closed")
            case Proposal():
                log.warning("a router sent a proposal to a drafter; ignored")
        return []

    def _open(self, link: Hashable, opened: Open, sequence: DraftSequence | None, at: float) -> Outgoing:
        if sequence is not None:
            if sequence.session.opened.epoch >= opened.epoch:
                return []
            self._drop(sequence, "opened again")
        if why := self._reason_to_refuse(opened.tokens):
            return _refused(link, opened, RefusalCode.INVALID, why)
        # Before a session is made of it, which takes long for a long text. A text that is translated may be shorter.
        size, cache = len(opened.tokens) if self._reader.text is Text else 0, self._engine.cache
        if size > cache.capacity:
            return _too_long(link, opened, size, cache.capacity)
        no_room = _refused(link, opened, RefusalCode.OVERLOADED, "no room for another session")
        if len(self._sequences) >= self._limits.sessions or size > cache.free_tokens:
            return no_room
        limits, vocabulary = self._limits.draft, self._welcome.vocabulary
        session = DraftSession(
            opened, vocabulary=vocabulary, limits=limits, calibration=self._calibration, resting=self._resting
        )
        text = self._reader.text(session.tokens)
        if (size := len(text.tokens)) > cache.free_tokens:
            return no_room if size <= cache.capacity else _too_long(link, opened, size, cache.capacity)
        session.outcomes = [] if self._recorder else None
        session_log = SessionLog(log, opened.session, opened.request_options.request)
        session_log.info("opened with %d tokens, epoch %d", len(opened.tokens), opened.epoch)
        rows, shaping = self._rows(opened, text.tokens), Shaping.of(opened, session.tokens, vocabulary)
        sequence = DraftSequence(link, session, text, rows, session_log, SequenceTimings(at), shaping)
        self._sequences[link, opened.session] = sequence
        if opened.request_options.grammar:
            self._compiling.add(sequence, opened, time.perf_counter())
        return []

    def _rows(self, opened: Open, tokens: Sequence[Token]) -> CachedSequence:
        """What the cache holds of a session that is opened."""
        return self._engine.cache.sequence(tokens, opened.request_options.cache_scope)

    def _constrain(self, now: float) -> None:
        """Go on with the sessions whose grammar is compiled; without it where that fails: drafts are only hints."""
        for sequence, constraint in self._compiling.ready(now):
            if isinstance(constraint, GrammarConstraint):
                session = sequence.session
                sequence.shaping = Shaping(session.opened, session.tokens, self._welcome.vocabulary, constraint)
            else:
                sequence.log.warning("drafting without a grammar: %s", constraint)

    def _verified(self, link: Hashable, verification: Verification, sequence: DraftSequence | None) -> Outgoing:
        if sequence is None:
            return _refused(link, verification, RefusalCode.UNKNOWN_SESSION, "not opened here")
        self._resting = verification.lead == 0
        old_root, lead = sequence.session.trie.root, sequence.lead(self._engine.model.context)
        sync = sequence.session.verified(verification)
        self._account.note(sequence.session)
        if sync is Sync.IGNORED:
            return []
        sequence.timings.counts(verification)
        if sync is Sync.LOST:
            self.counters.lost += 1
            self._drop(sequence, "lost its place")
            return _refused(link, verification, RefusalCode.UNKNOWN_SESSION, "does not connect to what is known")
        self._account.verified(verification, *lead)
        if sync is Sync.FINISHED:
            self._drop(sequence, "finished")
            return []
        self._levels.verified(sequence, time.perf_counter())
        if why := self._reason_to_refuse(verification.tokens):
            return self._give_back(sequence, RefusalCode.INVALID, why)
        sequence.follow(old_root, verification)
        if len(sequence.text.tokens) > self._engine.model.context:
            sequence.rewind(0)  # nothing is drafted for it any more: others may have its room
        # A target that ran out of drafts may need what was drafted but not sent; the next step would hold it up.
        return sequence.pushes()

    def _reason_to_refuse(self, tokens: Sequence[Token]) -> str:
        """Why a text with these tokens cannot be drafted for, if so: a target may have more than the draft model."""
        worst, vocabulary = max(tokens), self._welcome.vocabulary
        return f"token {worst} is outside the vocabulary of {vocabulary}" if worst >= vocabulary else ""

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""
        for sequence in [sequence for (owner, _), sequence in self._sequences.items() if owner is link]:
            self._drop(sequence, "the router went")

    def _drop(self, sequence: DraftSequence, why: str) -> None:
        sequence.log.info("ended (%s) after %d steps", why, sequence.timings.steps)
        if self._tracing is not None:
            self._tracing.session("draft", sequence.session.opened, sequence.timings, why)
        sequence.cached.free()
        self._staged.drop(sequence)
        self._compiling.remove(sequence)
        del self._sequences[sequence.key]

    def validate(self) -> None:
        """Raise AssertionError where the books contradict each other: of the cache and each session."""
        self._engine.cache.validate()
        for sequence in self._sequences.values():
            sequence.session.trie.validate()

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> Outgoing | None:
        """Expand what is worth most, and push what has come together."""
        started = time.perf_counter()
        self._constrain(started)
        entries = self._plan()
        context = self._engine.model.context
        if launched := self._levels.time_of(len(entries)).cheap:
            self._levels.plan(entries, context)
        self._staged.hang(entries, self._cost, context)
        if not launched:
            self._levels.plan(entries, context)
        outgoing = self._expand(entries, started)
        for sequence in self._sequences.values():
            outgoing += sequence.pushes()
        if not entries and self._recorder:
            self._recorder.flush()
        return outgoing if entries or outgoing else None

    def _expand(self, entries: Sequence[DraftBatchEntry], started: float) -> Outgoing:
        """Compute a planned step, which began at ``started``; nothing is pushed yet."""
        if not entries:
            return []
        for entry in entries:
            entry.sequence.timings.begins(started)
        outgoing = self._compute(entries)
        took = time.perf_counter() - started
        for entry in entries:
            entry.sequence.drafting_seconds += took if entry.expands else 0.0
        self._account.observe(entries, started, time.perf_counter(), self._engine.forward_seconds, self._staged.seconds)
        return outgoing

    def _plan(self) -> list[DraftBatchEntry]:
        """Missing committed tokens are computed first; of the draft places, as many as pay are expanded."""
        waiting: dict[DraftSequence, Sequence[Node]] = {}
        frontiers: dict[DraftSequence, Sequence[Node]] = {}
        context, limits = self._engine.model.context, self._limits
        for sequence in self._sequences.values():
            if sequence in self._compiling:
                continue
            frontier, missing = sequence.frontier(context), sequence.num_uncomputed_tokens
            behind = missing >= limits.prefill_from and len(sequence.text.tokens) <= context
            if frontier and frontier[0] is not sequence.session.trie.root:
                frontiers[sequence] = frontier
            elif frontier or behind:
                waiting[sequence] = frontier
        entries = read_on(waiting, limits.step_prefill, limits.prefill, self.counters)
        scheduled = sum(len(entry.tokens) for entry in entries)
        chosen = best_places(frontiers, limits.batch, scheduled, len(entries), self._cost)
        return entries + [DraftBatchEntry.below(sequence, nodes) for sequence, nodes in chosen.items()]

    def _compute(self, entries: Sequence[DraftBatchEntry]) -> Outgoing:
        """Run the entries in one forward and commit what it found.

        Where the cache has no room, the session that has most to read is given back to its router. If the forward fails
        otherwise, each entry is computed alone and without guesses, so that a fault hits only its own session. The same
        goes for those whose logits are no numbers: they may have read across what another one wrote.
        """
        if not (entries := [entry for entry in entries if entry.sequence.key in self._sequences]):
            return []
        try:
            found = self._run(entries)
        except CacheFull:
            if withdrawn(entries):
                return self._compute(entries)
            needy = most_to_read(self._sequences.values(), entries)
            return self._give_back(needy, RefusalCode.OVERLOADED, "no room in the draft cache") + self._compute(entries)
        except FATAL:
            raise
        except Exception as error:  # whatever a model may raise; the culprit is found below
            if not withdrawn(entries) and len(entries) == 1:
                entries[0].sequence.log.exception("a step failed")
                return self._give_back(entries[0].sequence, RefusalCode.INTERNAL, f"{type(error).__name__}: {error}")
            return [message for entry in entries for message in self._compute([entry])]
        return self._commit(entries, found)

    def _run(self, entries: Sequence[DraftBatchEntry]) -> list[Sequence[Sequence[Candidate]] | None]:
        """For each entry, what may follow its places; None if its logits are no numbers.

        The tokens of all entries are pending then; after any exception they are not.
        """
        logits_RV = self._engine.run([entry.chunk() for entry in entries])
        try:
            self._levels.launch(entries, logits_RV, self._calibration, self._engine.model.context)
            alone = [entry for entry in entries if entry.levels == 1]
            # The largest logit of a row is NaN if any is. Fetched after the draws, so that a device is waited for once.
            sound_R = logits_RV.amax(-1).isfinite()
            found = iter(candidates_of(alone, self._reader.read(rows_drawn_at(logits_RV, entries))) if alone else ())
            sound = iter(sound_R.tolist())
            self._levels.fetch()
        except Exception:
            for entry in entries:
                entry.sequence.cached.retract(entry.size)
                entry.discarded()
            raise
        rows = [first_level(entry) if entry.found else list(islice(found, entry.drawn)) for entry in entries]
        return [row if all(list(islice(sound, entry.rows))) else None for entry, row in zip(entries, rows, strict=True)]

    def _commit(
        self, entries: Sequence[DraftBatchEntry], found: Sequence[Sequence[Sequence[Candidate]] | None]
    ) -> Outgoing:
        """Grow the tries by what was found; compute again alone whatever is no number."""
        now = time.perf_counter()
        outgoing: Outgoing = []
        again: list[DraftBatchEntry] = []
        for entry, rows in zip(entries, found, strict=True):
            if rows is not None:
                self._settle(entry, rows, now)
                continue
            entry.sequence.cached.discard(entry.size)
            entry.discarded()
            if entry.withdraw() or len(entries) > 1:
                again.append(entry)
            else:
                why = NOT_FINITE.format(len(entry.sequence.session.tokens))
                entry.sequence.log.error("given up: %s", why)
                outgoing += self._give_back(entry.sequence, RefusalCode.INTERNAL, why)
        return outgoing + [message for entry in again for message in self._compute([entry])]

    def _give_back(self, sequence: DraftSequence, code: RefusalCode, why: str) -> Outgoing:
        """Draft no more for a session; its router may ask another drafter."""
        self._drop(sequence, why)
        return _refused(sequence.link, sequence.session.opened, code, why)

    def _settle(self, entry: DraftBatchEntry, found: Sequence[Sequence[Candidate]], now: float) -> None:
        """Note where in the cache an entry is; expand its places, and what was guessed behind, by ``found``."""
        sequence, session = entry.sequence, entry.sequence.session
        first = sequence.cached.pending - entry.size
        if entry.computes_committed:
            sequence.cached.advance(range(first, first + len(entry.tokens)))
        else:
            sequence.pending.update((node, first + i) for i, node in enumerate(entry.expands))
        if entry.expands:
            sequence.timings.draws(now)
        before = len(session.trie)
        for node, drawn in zip(entry.expands, found, strict=False):
            session.expand(node, drawn)
        self.counters.guessed += len(entry.guesses.nodes)
        self.counters.followed += len(self._staged.follow(entry, found))
        if entry.found:
            grow(entry)
        self.counters.proposed += len(session.trie) - before


def _refused(link: Hashable, about: Open | Verification, code: RefusalCode, message: str) -> Outgoing:
    return [(link, Refused(about.session, about.epoch, code, message))]


def _too_long(link: Hashable, opened: Open, tokens: int, capacity: int) -> Outgoing:
    why = f"a text of {tokens} tokens; the draft cache has room for {capacity}"
    return _refused(link, opened, RefusalCode.INVALID, why)
