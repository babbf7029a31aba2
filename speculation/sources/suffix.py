"""Suffix decoding: drafts copied from earlier outputs of the same target (Oliaro et al. 2024, arXiv:2411.04975).

Where the last few tokens of a text stood in an earlier output, what followed there is likely to follow here. Decided
here: what is kept (the latest used, within a number of tokens, apart for every *scope*), which earlier places are
followed (those with the longest equal context), and where they part (the way most of them went, one voice for each time
a text was said). How many drafts are verified is for the budget, after calibration.

An index of places by the :data:`CONTEXTS` tokens before each, rather than the paper's suffix tree: a place costs the
same few entries whatever stands around it, so that texts can be taken in and forgotten token by token, between steps
(:meth:`SuffixStore.work`), and what is held is known exactly. The rest of the context is compared in the text itself.

A text is kept once its session has ended here: finished, or closed by the router, which is how it ends at a stop string
and when the client leaves. Not kept is what was given up, and what its router lost or opens again: it is kept, once and
whole, where it ends. A text that moves to another target is closed here too, and kept as far as it came. Nothing of it
is ever logged.

Under the rejection rule such drafts must not be used: an earlier output may have been drawn with the very noise that
the session decides by, and a draft that depends on the coin biases the text. Under the coupled rule that can only help.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from speculation.frozen import frozen
from speculation.messages import ANCHOR, Open, Rule, Source, Token
from speculation.sources.lookup import common_end, confidence
from speculation.sources.registry import LocalSource

CONTEXTS = (8, 3)
"""Numbers of tokens that places are looked for by, the surest first."""
COUNTED = 32
"""Equal tokens before a place beyond which it is as good as any; also how much of a prompt is kept with its answer."""
PLACES = 8
"""Latest places known for one context."""
SHORTEST = 4
"""Answers of fewer tokens are not kept."""
IN_STEP = 32
"""Tokens indexed or forgotten in a step, and twice as many as it commits: some 2 us each."""
IN_PAUSE = 256
"""The same while there is nothing to compute, before messages are looked at again."""
_END_BITS = 20
"""A place is one number: that of its text, and where in it the next token stands."""


class SuffixScope(StrEnum):
    """Whose earlier outputs a session drafts from."""

    KEY = "key"
    """Those of the same API key and ``cache_salt``; requests with neither share theirs."""
    ALL = "all"
    """Everybody's."""
    OFF = "off"
    """Nobody's: none are kept."""


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """How much is kept, and for whom."""

    tokens: int = 0
    """Most tokens kept; 0: none."""
    scope: SuffixScope = SuffixScope.KEY


@dataclass(slots=True)
class SuffixCounters:
    """Monotone totals since the start."""

    asked: int = 0
    """How often a session asked how its text goes on ..."""
    found: int = 0
    """... and how often there was an answer."""
    indexed: int = 0
    """Tokens of outputs taken into the index ..."""
    forgotten: int = 0
    """... and taken out again."""


@dataclass(eq=False, slots=True)
class _Text:
    """An output, and the end of what it answered."""

    scope: str
    tokens: array[int]
    times: int = 1
    indexed: int = 0
    """Places of it that are in the index: those of its first tokens."""
    number: int = 0
    """Its own, from when it is in the index."""
    key: int = field(init=False)
    """The same for all texts that say the same in one scope. Kept: a long text needs it at each that it evicts."""

    def __post_init__(self) -> None:
        self.key = hash((self.scope, self.tokens.tobytes()))

    def contexts(self, first: int, until: int) -> Iterator[tuple[int, int]]:
        """The keys of its places ``first`` to ``until``, each with the place as it is in the index."""
        start = max(first - CONTEXTS[0], 0)
        window = tuple(self.tokens[start:until])
        for end in range(first - start, until - start):
            for length in CONTEXTS:
                if start + end >= length:
                    yield hash((self.scope, window[end - length : end])), self.number << _END_BITS | start + end


_Voice = tuple[Sequence[Token], int, int]
"""What an earlier text said at a place, how often, and its number."""


@frozen
class Followed:
    """A chain of drafts, and the numbers of the texts that its first token is from."""

    tokens: tuple[Token, ...] = ()
    confidence: tuple[float, ...] = ()
    texts: tuple[int, ...] = ()

    @property
    def parents(self) -> range:
        """Each token follows the one before it."""
        return range(ANCHOR, len(self.tokens) - 1)


class SuffixStore:
    """Earlier outputs of one target, at most ``capacity`` tokens of all scopes together.

    Three quarters of that are for texts that can be found, one for those that wait to be indexed. The text that was of
    no use for the longest time goes first.
    """

    def __init__(self, capacity: int, scope: SuffixScope = SuffixScope.KEY) -> None:
        self._scope, capacity = scope, 0 if scope is SuffixScope.OFF else capacity
        self._room, self._longest = capacity - capacity // 4, capacity // 4
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        """Those in the index, wholly or in part; the latest used last."""
        self._waiting: deque[_Text] = deque()
        self._leaving: _Text | None = None  # the text that is being taken out of the index; it is not found any more
        self._indexing: _Text | None = None  # the text that is being indexed
        self._places: dict[int, list[int]] = {}
        """By hash of the scope and the tokens before: what is found is compared."""
        self._known: dict[int, int] = {}
        """Numbers of texts by their keys."""
        self._count = 0
        self._held = self._queued = 0
        self.counters = SuffixCounters()

    @property
    def held(self) -> int:
        """Tokens in memory now."""
        return self._held + self._queued

    @property
    def idle(self) -> bool:
        """Whether there is nothing to :meth:`work` at."""
        return not self._waiting and self._leaving is None and self._indexing is None

    def sources(self, opened: Open) -> list[LocalSource]:
        """What a session can draft with; nothing under the rejection rule."""
        if not self._room or opened.speculation.rule is Rule.REJECTION:
            return []
        return [SuffixLookup(self, self._scope_of(opened))]

    def keep(self, opened: Open, tokens: Sequence[Token]) -> None:
        """Take in the text of a session that has ended, unless it is not to be remembered."""
        if opened.speculation.remember:
            self.record(self._scope_of(opened), tokens, opened.prompt_length)

    def _scope_of(self, opened: Open) -> str:
        return opened.request_options.cache_scope if self._scope is SuffixScope.KEY else ""

    def record(self, scope: str, tokens: Sequence[Token], prompt: int) -> None:
        """Keep a text whose first ``prompt`` tokens were given. It can be found once it was worked in."""
        if len(tokens) - prompt < SHORTEST:
            return
        kept = array("I", tokens[max(prompt - COUNTED, len(tokens) - self._longest, 0) :])
        if len(kept) < SHORTEST:
            return
        self._waiting.append(_Text(scope, kept))
        self._queued += len(kept)
        while self._queued > self._longest:
            self._queued -= len(self._waiting.popleft().tokens)

    def work(self, max_tokens: int) -> None:
        """Index or forget up to ``max_tokens`` tokens."""
        while max_tokens > 0 and not self.idle:
            if self._leaving is not None:
                max_tokens -= self._forget(self._leaving, max_tokens)
            elif self._indexing is not None:
                max_tokens -= self._index(self._indexing, max_tokens)
            else:
                self._admit()
                max_tokens -= 1

    def follow(self, scope: str, recent: Sequence[Token], depth: int) -> Followed:
        """At most ``depth`` tokens that followed in earlier texts of the scope where they last read like ``recent``."""
        self.counters.asked += 1
        places, matched = self._alike(scope, recent)
        texts = ((number, self._texts[number], end) for number, end in places)
        voices = [(text.tokens[end : end + depth], text.times, number) for number, text, end in texts]
        followed = _majority([voice for voice in voices if voice[0]], matched)
        self.counters.found += bool(followed.tokens)
        return followed

    def used(self, texts: Sequence[int]) -> None:
        """These texts were of use: they are forgotten last."""
        for number in texts:
            if number in self._texts:
                self._texts.move_to_end(number)

    def validate(self) -> None:
        """Assert that the accounts are right. Slow: for tests."""
        texts = [*self._texts.values(), *([self._leaving] if self._leaving else [])]
        assert self._held == sum(len(text.tokens) for text in texts) <= self._room
        assert self._queued == sum(len(text.tokens) for text in self._waiting) <= self._longest
        assert self.counters.indexed - self.counters.forgotten == sum(text.indexed for text in texts)
        own = {text.number for text in texts}
        assert {place >> _END_BITS for places in self._places.values() for place in places} <= own
        assert set(self._known.values()) <= own
        assert sum(map(len, self._places.values())) <= len(CONTEXTS) * sum(text.indexed for text in texts)
        assert all(0 < len(places) <= PLACES for places in self._places.values())

    # -- the index -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin with the next text that waits, or make room for it."""
        text = self._waiting[0]
        twin = self._texts.get(self._known.get(text.key, 0))
        if twin is not None and (twin.scope, twin.tokens) == (text.scope, text.tokens):
            twin.times += 1
            self._texts.move_to_end(twin.number)
        elif self._held + len(text.tokens) > self._room:
            _, self._leaving = self._texts.popitem(last=False)
            return
        else:
            self._count = text.number = self._count + 1
            self._texts[text.number] = self._indexing = text
            self._known[text.key] = text.number
            self._held += len(text.tokens)
        self._waiting.popleft()
        self._queued -= len(text.tokens)

    def _index(self, text: _Text, max_tokens: int) -> int:
        """Add up to ``max_tokens`` places of a text to the index; returns how many."""
        first, size = text.indexed, len(text.tokens)
        text.indexed = until = min(first + max_tokens, size)
        for key, place in text.contexts(first, until):
            known = self._places.setdefault(key, [])
            known.append(place)
            if len(known) > PLACES:
                del known[0]
        if until == size:
            self._indexing = None
        self.counters.indexed += until - first
        return until - first

    def _forget(self, text: _Text, max_tokens: int) -> int:
        """Take up to ``max_tokens`` places of a text out of the index, the last first; returns how many."""
        until = text.indexed
        text.indexed = first = max(until - max_tokens, 0)
        for key, place in text.contexts(first, until):
            known = self._places.get(key, [])
            if place in known:
                known.remove(place)
                if not known:
                    del self._places[key]
        self.counters.forgotten += until - first
        if first == 0:
            self._held -= len(text.tokens)
            if self._known.get(text.key) == text.number:
                del self._known[text.key]
            self._leaving = None
        return until - first

    def _alike(self, scope: str, recent: Sequence[Token]) -> tuple[list[tuple[int, int]], int]:
        """Places, as text and position, before which a text reads like ``recent`` the longest; and for how long."""
        for length in CONTEXTS:
            if len(recent) < length:
                continue
            found = []
            for place in reversed(self._places.get(hash((scope, tuple(recent[-length:]))), [])):
                number, end = place >> _END_BITS, place & (1 << _END_BITS) - 1
                text = self._texts.get(number)
                if text is not None and text.scope == scope:
                    found.append((common_end(text.tokens[max(end - COUNTED, 0) : end], recent), number, end))
            longest = max((equal for equal, _, _ in found), default=0)
            if longest >= length:
                return [(number, end) for equal, number, end in found if equal == longest], longest
        return [], 0


class SuffixLookup:
    """One session's view of earlier outputs. A :class:`speculation.sources.registry.LocalSource`."""

    source = Source.SUFFIX
    depth = 16

    def __init__(self, store: SuffixStore, scope: str) -> None:
        self._store, self._scope = store, scope
        self._recent: list[Token] = []
        self._said = Followed()

    def extend(self, tokens: Sequence[Token]) -> None:
        """The next committed tokens."""
        if tokens and self._said.tokens[:1] == (tokens[0],):
            self._store.used(self._said.texts)
        self._said = Followed()
        self._recent = [*self._recent, *tokens[-COUNTED:]][-COUNTED:]

    def propose(self, depth: int) -> Followed:
        """At most ``depth`` tokens that followed before; none if nothing like the end of the text was said."""
        self._said = self._store.follow(self._scope, self._recent, depth)
        return self._said


def _majority(voices: Sequence[_Voice], matched: int) -> Followed:
    """The way that most of them went after ``matched`` equal tokens; where they are as many, the latest.

    The confidence of a token is its share of the voices, and less where few tokens were equal before and few voices
    speak. It is to be calibrated by what is kept.
    """
    tokens: list[Token] = []
    sure: list[float] = []
    agreeing: Sequence[_Voice] = ()
    while going := [voice for voice in voices if len(voice[0]) > len(tokens)]:
        place, votes = len(tokens), dict[Token, int]()
        for words, times, _ in going:
            votes[words[place]] = votes.get(words[place], 0) + times
        token = max(votes, key=votes.__getitem__)
        sure.append(confidence(matched + place + votes[token] - 1) * votes[token] / sum(votes.values()))
        tokens.append(token)
        voices = [voice for voice in going if voice[0][place] == token]
        agreeing = agreeing or voices
    return Followed(tuple(tokens), tuple(sure), tuple(text for _, _, text in agreeing))
