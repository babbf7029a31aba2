"""Several levels of drafts in one launch: for which sessions, how many, and what becomes of what the device found.

:mod:`engine.levels.levels` expands them without Python, for sessions under the coupled rule whose logits are drawn
from as they are, in the draft model's own vocabulary, without guesses in the step; all others are drafted level by
level. What a commit contradicts is drafted for nothing and no commit is heard meanwhile: so a launch has as many levels
as fit into a part of the time between two verifications, or take as long as the first, most of which is the host's
time.

The trees that come of it are those of so many steps: the same calls in the same order, with what was drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from draft_service.sequence import DraftBatchEntry, DraftCounters, DraftSequence
from engine.cache.kv_cache import ROOT, CacheFull
from engine.levels.level_memory import MAX_BRANCH, MAX_LEVELS, MAX_STOPS, Expanded, Leaf, LevelExpansion, TreePlace
from engine.levels.levels import Levels
from engine.recorder import Recorder
from speculation.drafting.draft_session import Candidate, DraftSession
from speculation.messages import Rule, Source, Verification
from speculation.trie import Node
from speculation.verifying.budget import StepCost
from speculation.verifying.calibration import Calibration

SHARE = 0.25
"""Of the time between two verifications that a launch takes at most, or twice as long as a step of a single level."""

PROBE_EVERY = 64
"""Launches of which one has a single level, to see what that takes."""

SMOOTHING, SHORTER = 0.1, 0.5
"""Weight of a new measurement, and of one that is shorter than expected: what disturbs a step makes it longer."""


class LaunchTime:
    """What a step over about so many sessions and each further level of a launch take, in seconds."""

    def __init__(self) -> None:
        self.step: float | None = None
        self.level: float | None = None
        """One more of a launch."""
        self._asked = 0

    def observe(self, levels: int, seconds: float) -> None:
        """A step took so long that only drafted."""
        if levels == 1:
            self.step = _shorter(self.step, seconds)
        elif self.step is not None:
            self.level = _shorter(self.level, max(seconds - self.step, 0.0) / (levels - 1))

    @property
    def further(self) -> float:
        """Seconds of one more level, as far as is known: a step is a level and what the host does for it."""
        known = [seconds for seconds in (self.step, self.level) if seconds is not None]
        return min(known, default=0.0)

    @property
    def cheap(self) -> bool:
        """Whether a further level is known to take so little that guesses would save nothing."""
        return self.step is not None and self.level is not None and 2 * self.level <= self.step

    def levels(self, interval: float | None) -> int:
        """How many the next launch has, at most. ``interval``: of verifications of a session; None: unknown."""
        self._asked += 1
        if self.step is None or self._asked % PROBE_EVERY == 1:
            return 1
        if self.level is None or interval is None:
            return MAX_LEVELS
        room = max(SHARE * interval - self.step, self.step)
        return MAX_LEVELS if room >= (MAX_LEVELS - 1) * self.further else 1 + int(room / self.further)


class DraftLevels:
    """The launches of a draft worker; without ``levels`` every step expands one."""

    def __init__(self, levels: Levels | None = None) -> None:
        self._times: defaultdict[int, LaunchTime] = defaultdict(LaunchTime)  # by size class of the batch
        self._interval: float | None = None
        self._levels = levels
        self._launched: list[DraftBatchEntry] = []
        self._found_KNWX = torch.empty(0)

    def time_of(self, sessions: int) -> LaunchTime:
        """Of launches over about so many."""
        return self._times[sessions.bit_length()]

    @property
    def max_sessions(self) -> int:
        """Of a launch of several levels; 0: none has several."""
        return 0 if self._levels is None else self._levels.max_sessions

    def verified(self, sequence: DraftSequence, now: float) -> None:
        """A verification of a session was heard ``now``."""
        if sequence.verified_at is not None:
            self._interval = _smoothed(self._interval, now - sequence.verified_at)
        sequence.verified_at = now

    def plan(self, entries: Sequence[DraftBatchEntry], context: int, max_levels: int | None = None) -> int:
        """Decide how many levels each entry of a step has; return how many that are at most.

        ``context``: the draft model's. ``max_levels``: how many are wanted; None: as many as there is time for.
        """
        able = [entry for entry in entries if _is_able(entry, context)] if self._levels is not None else []
        if self._levels is None or not 0 < len(able) <= self._levels.max_sessions:
            return 1
        levels = self.time_of(len(entries)).levels(self._interval) if max_levels is None else max_levels
        levels = min(levels, max(entry.sequence.session.levels_below(node) for entry in able for node in entry.expands))
        for entry in able:
            entry.levels = levels
        return levels

    def launch(
        self, entries: Sequence[DraftBatchEntry], logits_RV: Tensor, calibration: Calibration, context: int
    ) -> None:
        """Expand the further levels of a step whose entries are pending; the device may still be at it.

        Where the cache has no room for them, or a text nearly fills the model's context, there are none.
        """
        self._launched = []  # of a step that failed
        deep = [entry for entry in entries if entry.levels > 1]
        if self._levels is None or not deep or not self._reserve(deep):
            return
        growths: list[LevelExpansion] = []
        row = 0
        for entry in entries:
            if entry.levels > 1:
                entry.leaves = _leaves(entry, self._levels.leaves, context)
                growths.append(_growth(entry, row, context))
            row += entry.rows
        self._launched = deep
        odds = calibration.table(Source.DRAFT)
        self._found_KNWX = self._levels.launch(logits_RV, growths, odds, deep[0].levels)

    def _reserve(self, deep: Sequence[DraftBatchEntry]) -> bool:
        """Slots for all that the levels of a launch may expand; False: there is no room."""
        assert self._levels is not None
        try:
            for entry in deep:
                cached = entry.sequence.cached
                count = (entry.levels - 1) * self._levels.width
                entry.reserved = cached.append([cached.pending - 1] * count)
        except CacheFull:
            for entry in deep:
                entry.sequence.cached.retract(len(entry.reserved))
                entry.discarded()
                entry.withdraw()
            return False
        return True

    def fetch(self) -> None:
        """Tell the entries of the launch what it found; waits for the device."""
        if self._levels is not None and self._launched:
            for entry, found in zip(self._launched, self._levels.read(self._found_KNWX), strict=True):
                entry.found = found


class DraftAccount:
    """What the steps of a draft worker took and what became of its drafts: counted, recorded and learned from.

    Only steps that drafted and read nothing else tell what a forward costs: what one of several levels takes is known
    as a step of one level and the further ones. Times are in seconds.
    """

    def __init__(
        self, counters: DraftCounters, cost: StepCost, launches: DraftLevels, recorder: Recorder | None
    ) -> None:
        """``cost`` and ``launches`` learn from the steps."""
        self._counters, self._cost, self._launches, self._recorder = counters, cost, launches, recorder
        self._outcomes: list[dict[str, object]] = []  # for the record of the next step

    def note(self, session: DraftSession) -> None:
        """Keep for the record what the session has learned about its candidates."""
        if session.outcomes:
            found = [[[round(c, 4) for c in one.confidences], one.right] for one in session.outcomes]
            self._outcomes.append({"session": session.opened.session, "outcomes": found})
            session.outcomes.clear()

    def verified(self, verification: Verification, asked: int, reached: int) -> None:
        """A verification was heard; drafting should have been ``asked`` tokens ahead, and had ``reached`` so many."""
        self._counters.asked += asked
        self._counters.delivered += reached
        self._counters.verified += 1
        self._counters.accepted += verification.accepted

    def observe(
        self, entries: Sequence[DraftBatchEntry], started: float, ended: float, forward: float, guessing: float
    ) -> None:
        """A step is over. ``forward``, ``guessing``: what the draft model took of it, and what guessed for it."""
        tokens, levels = sum(entry.size for entry in entries), max(entry.levels for entry in entries)
        self._counters.steps += 1
        self._counters.step_microseconds += round((ended - started) * 1e6)
        self._counters.computed += tokens
        if all(len(entry.tokens) == len(entry.expands) for entry in entries):
            took, first = ended - started - guessing, sum(len(entry.tokens) for entry in entries)
            launch = self._launches.time_of(len(entries))
            launch.observe(levels, took)
            # Not less than an even share, however long further levels are thought to take.
            self._cost.observe(first, max(took - (levels - 1) * launch.further, took / levels))
        if self._recorder:
            self._recorder.write(
                role="draft",
                start=started,
                end=ended,
                forward=forward,
                tokens=tokens,
                levels=levels,
                sessions=[entry.sequence.session.opened.session for entry in entries],
                learned=self._outcomes,
            )
            self._outcomes = []


def first_level(entry: DraftBatchEntry) -> list[Sequence[Candidate]]:
    """What may follow each place that a launch began with."""
    return [_candidates(expanded) for expanded in entry.found[0][: len(entry.expands)]]


def grow(entry: DraftBatchEntry) -> None:
    """Expand the further levels of an entry whose first is expanded; what was computed for nothing leaves the cache.

    All of it does, if a logit is no number: the next step will see whether its session is to blame.
    """
    sequence, session, found = entry.sequence, entry.sequence.session, entry.found
    count = len(entry.reserved)
    if not all(expanded.sound for level in found for expanded in level if expanded is not None):
        sequence.cached.discard(count)
        entry.discarded()
        return
    first, width = sequence.cached.pending - count, len(found[0])
    kept: list[int] = []
    parents: list[int] = []
    levels: list[list[Node | None]] = [[*entry.expands, *[None] * (width - len(entry.expands))]]
    for number, level in enumerate(found[1:]):
        levels.append([])
        for place, expanded in enumerate(level):
            node = _node(entry, expanded, levels)
            levels[-1].append(node)
            if node is None:
                continue
            session.expand(node, _candidates(expanded))
            kept.append(number * width + place)
            parents.append(_above(entry, node))
            sequence.pending[node] = first + len(kept) - 1
    sequence.cached.regraft(count, kept, parents)
    entry.reserved = [entry.reserved[at] for at in kept]


def _node(entry: DraftBatchEntry, expanded: Expanded | None, levels: Sequence[Sequence[Node | None]]) -> Node | None:
    """The draft that a place of a further level is; None if it is none after all, or not worth expanding."""
    if expanded is None:
        return None
    if expanded.leaf is not None:
        leaf = entry.leaves[expanded.leaf]
        return entry.sequence.session.draft_below(leaf.above, leaf.token)
    assert expanded.above is not None, "the first level is expanded already"
    level, place = expanded.above
    above = levels[level][place]
    return None if above is None else entry.sequence.session.draft_below(above, expanded.token)


def _candidates(expanded: Expanded | None) -> list[Candidate]:
    return [] if expanded is None else [Candidate(token, confidence) for token, confidence in expanded.draws]


def _is_able(entry: DraftBatchEntry, context: int) -> bool:
    """Whether a launch may expand further levels below its places."""
    sequence, opened = entry.sequence, entry.sequence.session.opened
    if not entry.expands or entry.guesses.nodes or sequence.shaping is not None:
        return False
    sampling = opened.sampling
    filtered = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if opened.speculation.rule is not Rule.COUPLED or (filtered and not sampling.greedy):
        return False
    if len(opened.limits.stop_tokens) > MAX_STOPS or len(sequence.text.tokens) + MAX_LEVELS > context:
        return False
    at_home = (
        sequence.text.first
        + sequence.cached.length
        + (len(entry.tokens) if entry.computes_committed and not sequence.cached.pending else 0)
    )
    return max(node.end for node in entry.expands) - at_home + MAX_LEVELS <= MAX_BRANCH


def _growth(entry: DraftBatchEntry, row: int, context: int) -> LevelExpansion:
    """``row``: where the logits of its places begin in the step's."""
    sequence, session = entry.sequence, entry.sequence.session
    first = sequence.cached.pending - len(entry.reserved) - len(entry.expands)
    position = session.trie.position
    room = min(session.levels_below(session.trie.root) - 1, context - len(sequence.text.tokens))
    return LevelExpansion(
        sampling=session.opened.sampling,
        stops=tuple(session.opened.limits.stop_tokens),
        position=position,
        max_end=position + room,
        min_weight=session.min_weight,
        width=session.width,
        children=session.children,
        factors=session.calibration.factors(Source.DRAFT),
        blocks=sequence.cached.blocks,
        rows=range(row, row + len(entry.expands)),
        places=[_place(sequence, node.end, first + i) for i, node in enumerate(entry.expands)],
        weights=[node.weight for node in entry.expands],
        leaves=[
            Leaf(node.token, node.weight, _place(sequence, node.end - 1, _above(entry, node))) for node in entry.leaves
        ],
        slots=entry.reserved,
        before=sequence.text.first,
    )


def _place(sequence: DraftSequence, end: int, pending: int) -> TreePlace:
    home, branch = sequence.cached.lineage(pending)
    return TreePlace(end, sequence.text.first + home, branch)


def _leaves(entry: DraftBatchEntry, max_leaves: int, context: int) -> list[Node]:
    """The best drafts from before the launch that it may expand besides."""
    if entry.computes_committed:
        return []  # there is none yet
    expands, at_home = set(entry.expands), entry.sequence.text.first + entry.sequence.cached.length
    deepest = at_home + MAX_BRANCH - MAX_LEVELS
    places = islice(entry.sequence.places(context), len(expands) + max_leaves)
    return [node for node in places if node not in expands and node.end <= deepest][:max_leaves]


def _above(entry: DraftBatchEntry, node: Node) -> int:
    """The pending node that a draft hangs from, or ROOT."""
    return ROOT if node.above is entry.sequence.session.trie.root else entry.sequence.pending[node.above]


def _shorter(known: float | None, measured: float) -> float:
    if known is None or measured >= known:
        return _smoothed(known, measured)
    return known + SHORTER * (measured - known)


def _smoothed(known: float | None, measured: float) -> float:
    return measured if known is None else known + SMOOTHING * (measured - known)
