"""Drafting in turn: a draft model that works between the steps of a target, in the target's process (docs/drafting.md).

The target asks right before a step: the draft model goes ahead by as many levels as pay, one forward for all sessions
each, or several levels in a launch (:mod:`draft_service.levels`), and what it drafted is verified at once.

Decided here: which places a level expands and when to stop. A place is worth the chance that the text gets there times
that of one more draft to be right; it costs its share of the level, a row of the target's step and the host's time for
both trees. Drafted is what makes the most of a second, the target's step and all drafting before it counted:

    tokens a second = (tokens without drafts + those expected of drafts) / (their step + drafting + its rows)

All else is :class:`draft_service.lookahead.Lookahead`'s.

Tensor legend: R rows, V vocabulary of the draft model, T of the target.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.sequence import DraftBatchEntry, DraftSequence, Reader, read_on
from engine.model import Model
from engine.shaping.shaping import Shaping
from speculation.drafting.draft_session import Candidate, DraftLimits
from speculation.frozen import frozen
from speculation.messages import Open
from speculation.trie import Node
from speculation.verifying.payoff import DraftTurn
from transport.worker import Key, Outgoing

MAX_LEVELS = 8
"""Forwards of the draft model before one step of the target, at most."""
FIRST_LEVELS = 32
"""Levels after which their cost counts as known; until then all are worth their time."""
PROBE_EVERY, PROBES = 16, 2
"""Of so many turns in a row that do not pay, the last few draft whatever it is worth, to see whether it pays by now."""
IDLE_TURNS, IDLE_SHARE = 8, 0.01
"""After so many turns in a row that do not pay, the share of time that goes into finding out whether one would."""

MAX_PRICE = 0.2
"""A draft that is likelier to be kept is drafted whatever verifying it costs: what that is may have been disturbed."""
SMOOTHING = 0.1
"""Weight of the latest step in what growing a tree takes."""
MAX_REST_SECONDS = 4.0
"""Reading a long prompt once must not end drafting."""


def limits_in_turn(draft: DraftLimits, sessions: int = 256) -> LookaheadLimits:
    """What is drafted at once and read in between: everything is handed over at once, nothing is held back."""
    lead = min(draft.lead, 2 * MAX_LEVELS)
    bounded = replace(draft, lead=lead, hungry_width=draft.width, hold=1, enough=draft.nodes, bytes_a_token=math.inf)
    return LookaheadLimits(sessions=sessions, prefill=256, draft=bounded)


@frozen
class _Place:
    """A place that may be expanded, and what that is expected to come to."""

    sequence: DraftSequence
    node: Node
    chance: float
    """That a draft token of its session is right."""

    @property
    def gain(self) -> float:
        """Tokens that one more draft there brings."""
        return self.node.weight * self.chance

    @property
    def tokens(self) -> int:
        """Computed for it."""
        return max(self.sequence.num_uncomputed_tokens, 1) if self.node is self.sequence.session.trie.root else 1


class _TargetVocabulary(Reader):
    """Models of one tokenizer may differ in how many of its last tokens they know."""

    def __init__(self, model: Model, vocabulary: int) -> None:
        super().__init__(model)
        self._vocabulary = vocabulary

    def read(self, logits_RV: Tensor) -> Tensor:
        """``[R, T]``: -inf of tokens that the draft model has not."""
        return pad(logits_RV, (0, self._vocabulary - logits_RV.shape[-1]), value=-math.inf)


class InTurn(Lookahead):
    """The sessions of a target that a draft model in its process drafts for; never steps by itself."""

    _idle_turns = 0
    _rests_until = 0.0
    _rate = 0.0
    """Tokens a second that were expected of the last turn."""
    _growth_seconds = 0.0
    """What the host takes to grow a tree by one draft."""

    def draft(
        self, running: Collection[Key], wanted: Mapping[Key, float], plain: DraftTurn, *, probe: bool = False
    ) -> Outgoing:
        """Proposals for ``wanted`` sessions, which are about to be verified, and refusals of those that are dropped.

        ``wanted[key]``: the chance that a draft token is right. ``running``: all whose text may be read, prompts in
        parts. ``plain``: the target's step, if nothing is drafted. ``probe``: draft whatever that is worth.
        """
        began = time.perf_counter()
        outgoing = self._read([self._sequences[key] for key in running if key in self._sequences])
        row_seconds = plain.row_seconds + self._growth_seconds  # the target's tree grows by a draft, too
        price = 0.0 if probe else min(self._rate * (row_seconds + self._growth_seconds), MAX_PRICE)
        for sequence in map(self._sequences.get, wanted):
            if sequence is not None:
                sequence.session.price = price
        turn = replace(plain, row_seconds=row_seconds)
        drafted, probe = 0, probe or self._probes
        while drafted < MAX_LEVELS:
            started = time.perf_counter()
            places, levels = self._level(wanted, turn, probe=probe)
            if not places:
                break
            entries = self._entries(places)
            drafted += self._levels.plan(entries, self._engine.model.context, min(levels, MAX_LEVELS - drafted))
            outgoing += self._expand(entries, started)
        for key in wanted:
            if (sequence := self._sequences.get(key)) is not None:
                outgoing += sequence.pushes()
        if wanted:
            self._rate = turn.rate
            self._had_turn(began, idle=probe or not drafted)
        return outgoing

    def draft_for(self, vocabulary: int) -> None:
        """The target has so many tokens, whose shaping is used here. Before any session."""
        own = self._welcome.vocabulary
        if vocabulary != own:
            self._reader = _TargetVocabulary(self._engine.model, vocabulary)
            self._welcome = replace(self._welcome, vocabulary=min(own, vocabulary))

    def shape(self, key: Key, shaping: Shaping | None) -> None:
        """Draw for a session as the target does, with its own shaping of the text."""
        if (sequence := self._sequences.get(key)) is not None:
            sequence.shaping = shaping

    def rests(self) -> bool:
        """Whether it is not to be asked to draft in this turn, since that has not paid for a while."""
        return self._idle_turns >= IDLE_TURNS and time.perf_counter() < self._rests_until

    def passes(self, wanted: Mapping[Key, float], plain: DraftTurn) -> bool:
        """Whether no draft would be worth it even if it knew all that was committed; then it has had its turn.

        ``wanted``, ``plain``: see :meth:`draft`. Never so where it paid the last time.
        """
        if not self._idle_turns or self._probes or not wanted or self.counters.steps < FIRST_LEVELS:
            return False
        began, turn = time.perf_counter(), replace(plain, row_seconds=plain.row_seconds + self._growth_seconds)
        ends = [(chance, chance, 1) for chance in sorted(wanted.values(), reverse=True)[: self._limits.batch]]
        if turn.extend(ends, self._deepest(len(ends)), self._cost, self._levels.time_of(len(ends)).further)[0]:
            return False
        self._had_turn(began, idle=True)
        return True

    def _had_turn(self, began: float, *, idle: bool) -> None:
        self._idle_turns = self._idle_turns + 1 if idle else 0
        ended = time.perf_counter()
        self._rests_until = ended + min((ended - began) / IDLE_SHARE, MAX_REST_SECONDS)

    @property
    def _probes(self) -> bool:
        """Whether it drafts in this turn whatever that is worth."""
        return self._idle_turns % PROBE_EVERY >= PROBE_EVERY - PROBES

    def _open(self, link: Hashable, opened: Open, sequence: DraftSequence | None, at: float) -> Outgoing:
        refused = super()._open(link, opened, sequence, at)
        if (taken := self._sequences.get((link, opened.session))) is not None:
            # Nothing is drafted for later: what comes then will know what was committed meanwhile.
            depth = min(taken.session.limits.lead, opened.speculation.max_depth)
            taken.session.limits = replace(taken.session.limits, lead=depth)
        return refused

    def close(self) -> None:
        """Let go of the engine. The last call."""
        self._engine.close()

    def _commit(
        self, entries: Sequence[DraftBatchEntry], found: Sequence[Sequence[Sequence[Candidate]] | None]
    ) -> Outgoing:
        started, before = time.perf_counter(), self.counters.proposed
        outgoing = super()._commit(entries, found)
        if drafts := self.counters.proposed - before:
            self._growth_seconds += SMOOTHING * ((time.perf_counter() - started) / drafts - self._growth_seconds)
        return outgoing

    def _read(self, running: Iterable[DraftSequence]) -> Outgoing:
        """Get on with texts of which much is not in the cache, by so many tokens together as the limits say."""
        started, context, most = time.perf_counter(), self._engine.model.context, self._limits.prefill
        behind = {sequence: sequence.frontier(context) for sequence in running if self._is_behind(sequence)}
        return self._expand(read_on(behind, most, most, self.counters), started)

    def _is_behind(self, sequence: DraftSequence) -> bool:
        """Whether it has more to read than a level reads on the way."""
        readable = len(sequence.text.tokens) <= self._engine.model.context
        return readable and sequence.num_uncomputed_tokens >= self._limits.prefill_from

    def _level(self, wanted: Mapping[Key, float], turn: DraftTurn, *, probe: bool) -> tuple[Sequence[_Place], int]:
        """The places that are expanded next, and by how many levels in one launch; none if no number is worth it.

        ``turn`` comes to what is expected of it with them.
        """
        places = [place for key, chance in wanted.items() for place in self._places(key, chance)]
        places.sort(key=lambda place: -place.gain)
        places = places[: self._limits.batch]
        sessions = len({id(place.sequence) for place in places})
        deepest = self._deepest(sessions)
        if probe or self.counters.steps < FIRST_LEVELS:
            return places, deepest
        gains = [(place.gain, place.chance, place.tokens) for place in places]
        count, levels = turn.extend(gains, deepest, self._cost, self._levels.time_of(sessions).further)
        return places[:count], levels

    def _deepest(self, sessions: int) -> int:
        """Of a launch for so many."""
        return self._levels.time_of(sessions).levels(math.inf) if 0 < sessions <= self._levels.max_sessions else 1

    def _entries(self, places: Sequence[_Place]) -> list[DraftBatchEntry]:
        chosen: dict[DraftSequence, list[Node]] = {}
        for place in places:
            chosen.setdefault(place.sequence, []).append(place.node)
        return [
            DraftBatchEntry.reading(sequence, nodes, self._limits.prefill, self.counters)
            if nodes[0] is sequence.session.trie.root
            else DraftBatchEntry.below(sequence, nodes)
            for sequence, nodes in chosen.items()
        ]

    def _places(self, key: Key, chance: float) -> list[_Place]:
        sequence = self._sequences.get(key)
        if sequence is None or self._is_behind(sequence):
            return []
        return [_Place(sequence, node, chance) for node in sequence.frontier(self._engine.model.context)]
