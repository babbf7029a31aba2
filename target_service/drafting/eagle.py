"""An EAGLE-3 head at work in a target's process: whose states it reads, how deep it drafts, and when it leaves it.

Before each step it reads the states of the tokens that the last one computed for good, all sessions in one forward, and
goes on from its own states, level by level for all sessions at once (:mod:`speculation.drafting.heads`), as long as a
level is expected to bring more than the target would in its time. Its rows lie in a cache of its own, which outlives a
preemption.

Where a target takes over a prefix from its cache, the head mostly knows the same prefix. Of what it does not know, up
to :data:`RECOMPUTED` tokens are computed again by the target; else the session's rows begin behind the prefix. Its
guesses are hints: no failure of its ends a session, nor does a lack of room.

Tensor legend: N rows, T tokens of a step, A auxiliary states of a token, D hidden size of the head.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.cache.kv_cache import CachedSequence
from engine.eagle.cached import CachedHead, HeadChunk
from engine.host.upload import upload
from engine.interface import FATAL, Chunk, StepEngine
from engine.sampling.sampling import Draw, candidates
from engine.shaping.shaping import RowShaping, shaped
from speculation.drafting.heads import MAX_LEVELS, NODES, WIDTH, GrowingTree, GuessPlace, StateDrafts
from speculation.messages import ANCHOR, Rule, Sampling, Source, Verification
from speculation.trie import VerificationTree
from speculation.verifying.payoff import ThroughputEstimator
from target_service.drafting.state_reader import StateReader, kept_rows
from target_service.sequence import BatchEntry, TargetSequence
from target_service.step_account import TargetCounters
from target_service.verdicts import Verdict

log = logging.getLogger(__name__)

RECOMPUTED = 64
"""Tokens of a prefix that the target computes again at most, so that the head knows all of it."""
FIRST_LEVELS, PROBE_EVERY = 32, 64
"""Levels after which their cost counts as known, and steps of which one drafts whatever it is worth."""
SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class _Session:
    """What the head knows of a session."""

    drafts: StateDrafts
    text: list[int]
    """The committed tokens from the second on: row p reads the token at p + 1."""
    rows: CachedSequence
    first: int = 0
    unread: list[Tensor] = field(default_factory=list)
    """States of the positions behind the rows, fused, ``[N, D]`` each."""

    @property
    def end(self) -> int:
        """The position whose state is awaited."""
        return self.first + self.rows.length + sum(map(len, self.unread))


@dataclass(slots=True, eq=False)
class _Growing:
    """A session that is drafted for, and where the head stands in its tree."""

    sequence: TargetSequence
    session: _Session
    depth: int
    tree: GrowingTree
    places: list[GuessPlace]
    """Those to guess behind, or to go on from."""
    states_ND: Tensor
    """The next states of their rows; while these are not computed, those of the places they hang from."""
    normed_ND: Tensor
    pending: dict[int, int] = field(default_factory=lambda: {ANCHOR: ANCHOR})
    """Which pending row each place is that was gone on from."""


class EagleDrafter(StateReader):
    """The head of a worker, for all its sessions."""

    def __init__(self, head: CachedHead, vocabulary: int, counters: TargetCounters, *, adaptive: bool = True) -> None:
        """Token ids are below ``vocabulary``. ``adaptive``: see :class:`target_service.verify_loop.TargetLimits`."""
        self._head, self._vocabulary, self._counters, self._adaptive = head, vocabulary, counters, adaptive
        self._sessions: dict[TargetSequence, _Session] = {}
        # by size class of the batch
        self._throughputs: defaultdict[int, ThroughputEstimator] = defaultdict(ThroughputEstimator)
        self._turns = self._levels = 0
        self._rate = self._level_seconds = 0.0
        """Tokens a second of steps as the one at hand; what a level takes."""

    def open(self, sequence: TargetSequence) -> None:
        """Draft for a session from now on, if it allows a head."""
        opened, tokens = sequence.session.opened, sequence.session.tokens
        if not opened.speculation.allows(Source.EAGLE):
            return
        drafts = StateDrafts(Source.EAGLE, min(opened.speculation.max_depth, MAX_LEVELS))
        sequence.session.draft_from(drafts)
        text = list(tokens[1:])
        rows = self._head.cache.sequence(text, f"{tokens[0]}\0{opened.request_options.cache_scope}")
        session = self._sessions[sequence] = _Session(drafts, text, rows)
        sequence.reusable = lambda length: self._reusable(session, length)

    def drop(self, sequence: TargetSequence) -> None:
        """A session has ended, or is left alone."""
        if (session := self._sessions.pop(sequence, None)) is not None:
            session.rows.free()
            sequence.reusable = None

    def validate(self) -> None:
        """Raise AssertionError where its books contradict each other."""
        self._head.cache.validate()
        for session in self._sessions.values():
            assert not session.rows.pending, "guesses are left in the cache of a head"

    def observe(self, sessions: int, tokens: int, seconds: float) -> None:
        """A step over ``sessions``, all past their prompts, brought ``tokens``, drafting included."""
        self._throughputs[sessions.bit_length()].observe(tokens, seconds)

    # -- what the target computes --------------------------------------------------------------------------------------

    def _reusable(self, session: _Session, length: int) -> int:
        """How much of a prefix of ``length`` tokens a target may take over, as far as the head is concerned."""
        if session.end < length and not session.unread:
            session.rows.reuse()
        return session.end if session.end < length <= session.end + RECOMPUTED else length

    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
    ) -> None:
        """Keep the states of what stays of the step just computed."""
        aux_TA = engine.aux
        assert aux_TA is not None
        wanted: list[int] = []
        found: list[tuple[_Session, int]] = []
        for sequence, rows in kept_rows(chunks, entries, decided):
            if (session := self._sessions.get(sequence)) is not None:
                start = sequence.cached.length
                if session.end < start:
                    self._restart(session, start)
                if fresh := rows[session.end - start :]:
                    wanted += fresh
                    found.append((session, len(fresh)))
        if wanted:
            states_ND = self._head.fuse(aux_TA[upload(wanted, aux_TA.device)])
            parts = torch.split(states_ND, [count for _, count in found])
            for (session, _), part_ND in zip(found, parts, strict=True):
                session.unread.append(part_ND)

    def settled(self, sequence: TargetSequence, tree: VerificationTree, _verification: Verification) -> None:
        """A step of a session is over, in which ``tree`` was verified."""
        if (session := self._sessions.get(sequence)) is not None:
            session.drafts.stepped(verified=any(node.source is Source.EAGLE for node in tree.nodes))

    def _restart(self, session: _Session, first: int) -> None:
        """Know nothing of a session but what comes from position ``first`` on."""
        session.rows.free()
        session.unread.clear()
        session.rows, session.first = self._head.cache.sequence(), first

    # -- drafting ------------------------------------------------------------------------------------------------------

    def draft(
        self, _running: Sequence[TargetSequence], part: Sequence[TargetSequence], wanting: Sequence[TargetSequence]
    ) -> bool:
        """Read what the sessions that take ``part`` in the step have brought, and guess for those ``wanting``."""
        started = time.perf_counter()
        self._turns += 1
        self._rate = self._throughputs[len(part).bit_length()].rate
        reading = [
            (sequence, session)
            for sequence in part
            if (session := self._sessions.get(sequence)) is not None and session.unread and not session.drafts.rests
        ]
        try:
            growing = self._read(reading, set(wanting))
            while growing:
                growing = self._expand(growing)
        except FATAL:
            raise
        except Exception:  # such as memory that a device lacks; the text does not need it
            log.exception("the EAGLE head failed; its sessions go on without")
            for sequence, session in reading:
                session.rows.rollback()
                self._give_up(sequence)
        self.seconds = time.perf_counter() - started
        self._counters.draft_microseconds += round(self.seconds * 1e6)
        return True

    def _give_up(self, sequence: TargetSequence) -> None:
        self._counters.draft_faults += 1
        self.drop(sequence)

    def _read(self, reading: Sequence[tuple[TargetSequence, _Session]], wanting: set[TargetSequence]) -> list[_Growing]:
        """Make rows of what is unread; what comes are the sessions whose text is read to its end."""
        chunks: list[HeadChunk] = []
        taken: list[tuple[TargetSequence, _Session]] = []
        free = self._head.cache.ledger.free
        for sequence, session in reading:
            session.text += sequence.session.tokens[len(session.text) + 1 :]
            states_ND = torch.cat(session.unread)
            begin, count = session.first + session.rows.length, len(states_ND)
            needed = session.rows.blocks_needed(count)
            if needed > free:
                self._counters.draft_left_out += 1
                self._restart(session, begin + count)
                continue
            free -= needed
            parents = range(ANCHOR, count - 1)
            chunks.append(
                HeadChunk(session.rows, session.first, session.text[begin : begin + count], states_ND, parents)
            )
            taken.append((sequence, session))
        if not chunks:
            return []
        counts = [len(chunk.tokens) for chunk in chunks]
        states, normed = (torch.split(rows_ND, counts) for rows_ND in self._head.run(chunks))
        sound = torch.stack([part_ND.float().sum().isfinite() for part_ND in states]).tolist()
        growing: list[_Growing] = []
        for (sequence, session), states_ND, normed_ND, is_sound in zip(taken, states, normed, sound, strict=True):
            if not is_sound:
                session.rows.discard(len(states_ND))
                sequence.log.warning("goes on without the EAGLE head, whose states are no numbers")
                self._give_up(sequence)
                continue
            session.rows.commit(range(len(states_ND)))
            session.unread.clear()
            depth = min(session.drafts.depth, sequence.session.room)
            if sequence in wanting and depth > 0 and session.end == len(session.text):
                tree = GrowingTree(1 if sequence.session.opened.speculation.chains else WIDTH)
                growing.append(_Growing(sequence, session, depth, tree, [GuessPlace()], states_ND[-1:], normed_ND[-1:]))
        return growing

    def _expand(self, growing: Sequence[_Growing]) -> list[_Growing]:
        """Guess behind the places at hand; what comes are the sessions that one more level is worth it for."""
        started = time.perf_counter()
        normed_ND = torch.cat([one.normed_ND for one in growing])
        draws = [_draw(one.sequence, place) for one in growing for place in one.places]
        shapes = [_shape(one.sequence, place) for one in growing for place in one.places]
        found = iter(candidates(shaped(self._head.logits(normed_ND, self._vocabulary), shapes), draws, WIDTH))
        going: list[_Growing] = []
        for one in growing:
            one.tree.grow([(place, next(found)) for place in one.places])
            rows = {place.node: row for row, place in enumerate(one.places)}
            one.places = list(one.tree.frontier())
            if one.places and len(one.places[0].path) < one.depth:
                one.states_ND = one.states_ND[[rows[place.parent] for place in one.places]]
                going.append(one)
            else:
                self._finish(one)
        if not going or not self._pays(going):
            for one in going:
                self._finish(one)
            return []
        self._go_on(going)
        self._levels += 1
        seconds = time.perf_counter() - started
        self._level_seconds += SMOOTHING * (seconds - self._level_seconds)
        return going

    def _pays(self, going: Sequence[_Growing]) -> bool:
        """Whether one more level is expected to bring more than the target does in the time that it takes."""
        if not self._adaptive or self._levels < FIRST_LEVELS or self._turns % PROBE_EVERY == 0:
            return True
        gain = sum(
            place.chance * one.sequence.session.lookahead_policy.agreement for one in going for place in one.places
        )
        return gain >= self._rate * self._level_seconds

    def _go_on(self, going: list[_Growing]) -> None:
        """Compute rows for the places at hand; who finds no room for his is taken out of ``going``."""
        chunks: list[HeadChunk] = []
        free = self._head.cache.ledger.free
        for one in list(going):
            rows, tokens = one.session.rows, [place.path[-1] for place in one.places]
            needed = rows.blocks_needed(len(tokens))
            if needed > free:
                self._finish(one)
                going.remove(one)
                continue
            free -= needed
            parents = [one.pending[place.parent] for place in one.places]
            one.pending |= {place.node: rows.pending + i for i, place in enumerate(one.places)}
            chunks.append(HeadChunk(rows, one.session.first, tokens, one.states_ND, parents))
        if not chunks:
            return
        counts = [len(chunk.tokens) for chunk in chunks]
        states, normed = (torch.split(rows_ND, counts) for rows_ND in self._head.run(chunks))
        for one, states_ND, normed_ND in zip(going, states, normed, strict=True):
            one.states_ND, one.normed_ND = states_ND, normed_ND

    def _finish(self, one: _Growing) -> None:
        """Draft what was guessed."""
        one.session.rows.rollback()
        one.session.drafts.guess(one.sequence.session.trie.position, one.tree.likeliest(NODES))


def _shape(sequence: TargetSequence, place: GuessPlace) -> RowShaping | None:
    """As the target will shape its logits there."""
    return None if sequence.shaping is None else sequence.shaping.after(place.path)


def _draw(sequence: TargetSequence, place: GuessPlace) -> Draw:
    """How the token behind a place is drawn: with the noise that the target will draw with there.

    Under the rejection rule drafts must not know it.
    """
    opened = sequence.session.opened
    by_rejection = opened.speculation.rule is Rule.REJECTION
    sampling = Sampling(temperature=0.0) if by_rejection else opened.sampling
    return Draw(sampling, sequence.session.trie.position + len(place.path))
