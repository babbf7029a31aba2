"""Draft sources that are not built in: each a name, and what makes one for a session.

A source of your own is one module, which targets are started with (``target.sources: my_drafts``)::

    from collections.abc import Sequence

    from speculation.sources.lookup import Continuation
    from speculation.messages import Open, Token
    from speculation.sources.registry import register

    class Again:
        '''Whatever was said last is said again.'''

        source = "again"
        depth = 2

        def __init__(self, opened: Open) -> None:
            self._last: tuple[Token, ...] = ()

        def extend(self, tokens: Sequence[Token]) -> None:
            self._last = (*self._last, *tokens)[-1:]

        def propose(self, depth: int) -> Continuation:
            return Continuation(self._last[:depth], matched=1)

    register(Again.source, Again)

It reads what is committed and is asked once at every place, just before a step that could verify its drafts, so it
should answer in microseconds. Of a long prompt found in the cache it is told over several steps, and asked after them.
Everything else knows it by its name: what its drafts are worth is learned, what became of them is counted and told, and
requests may ask for it or leave it out. It makes decoding faster or does nothing, never different: one that raises, or
says what is no suggestion, is not asked again in that session (:attr:`Guarded.fault`).

Names are few and never come from a request, so they can label metrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from speculation.events import Own
from speculation.messages import ANCHOR, Open, Source, SourceName, Token, depths_of
from speculation.sources.lookup import LONGEST, SHORTEST, Continuation, PromptLookup
from speculation.sources.prediction import PredictionSource

MAX_SOURCES = 32
"""That can be registered in one process."""
MAX_TOKENS = 256
"""In one suggestion."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


class Suggestion(Protocol):
    """A small tree of drafts from the end of the committed text, mostly a chain; it may be empty."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """What may come next, parents before children, of siblings the likeliest first."""

    @property
    def parents(self) -> Sequence[int]:
        """For each token, the index of the one it follows; -1: the end of the text."""

    @property
    def confidence(self) -> tuple[float, ...]:
        """For each token, the probability that it is right if those it follows are."""


class LocalSource(Protocol):
    """What makes drafts from the committed text of one session.

    Under the rejection rule its tokens count as chosen (:class:`speculation.acceptance.Chosen`): it must not know the
    noise that the target draws with.
    """

    @property
    def source(self) -> SourceName:
        """The name that its drafts are calibrated and credited under."""

    @property
    def depth(self) -> int:
        """How many tokens ahead it is asked for at most."""

    def extend(self, tokens: Sequence[Token]) -> None:
        """The next committed tokens, those of the prompt first; in parts of any size, never twice."""

    def propose(self, depth: int) -> Suggestion:
        """Tokens that may follow what is committed, at most ``depth`` deep. Changes nothing."""


Maker = Callable[[Open], LocalSource | None]
"""Makes a source for a session that is opened; None: it has nothing for this one."""

_makers: dict[SourceName, Maker] = {}


class SourceError(ValueError):
    """A source that cannot be registered. One line, for the operator."""


def register(name: SourceName, maker: Maker) -> None:
    """Let sessions opened from now on in this process draft with it, too. Raises :class:`SourceError`."""
    if not NAME.fullmatch(name):
        raise SourceError(f"draft source {name!r}: a name has up to 32 lower-case letters, digits, - and _")
    if name in (*Source, *Own) or _makers.get(name, maker) != maker:
        raise SourceError(f"draft source {name!r}: the name is taken; choose another")
    if len(_makers) >= MAX_SOURCES and name not in _makers:
        raise SourceError(f"draft source {name!r}: there are {MAX_SOURCES} already, which is all there can be")
    _makers[name] = maker


def registered() -> tuple[SourceName, ...]:
    """Names, in the order they came."""
    return tuple(_makers)


class Guarded:
    """A source of someone else's, whose faults cost its drafts and nothing else.

    A :class:`LocalSource`.
    """

    def __init__(self, name: SourceName, maker: Maker, opened: Open) -> None:
        self.source = name
        self.depth = 0
        self.fault = ""
        """Why it is not asked any more, in one line; empty while it is."""
        self._inner: LocalSource | None = None
        with self._watched():
            self._inner = maker(opened)
            if self._inner is not None:
                self.depth = int(self._inner.depth)

    @property
    def absent(self) -> bool:
        """Whether the maker had nothing for the session."""
        return self._inner is None and not self.fault

    def extend(self, tokens: Sequence[Token]) -> None:
        """Pass committed tokens on."""
        if self._inner is not None:
            with self._watched():
                self._inner.extend(tokens)

    def propose(self, depth: int) -> Suggestion:
        """What it says, if that is a suggestion."""
        if self._inner is not None:
            with self._watched():
                return _checked(self._inner.propose(depth), depth)
        return Continuation()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Whatever the source raises silences it."""
        try:
            yield
        except Exception as error:
            self._inner, self.fault = None, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _checked(suggestion: Suggestion, depth: int) -> Suggestion:
    tokens, parents, confidence = suggestion.tokens, suggestion.parents, suggestion.confidence
    if not len(tokens) == len(parents) == len(confidence):
        raise SourceError(f"{len(parents)} parents and {len(confidence)} confidences for {len(tokens)} tokens")
    if len(tokens) > MAX_TOKENS:
        raise SourceError(f"{len(tokens)} tokens were proposed; at most {MAX_TOKENS} are taken")
    if not all(type(token) is int for token in tokens) or not all(isinstance(sure, float | int) for sure in confidence):
        raise SourceError("tokens must be whole numbers, and confidences numbers")
    for i, parent in enumerate(parents):
        if not ANCHOR <= parent < i:
            raise SourceError(f"token {i} has parent {parent}, which is not before it")
    deepest = max(depths_of(parents), default=0)
    if deepest > depth:
        raise SourceError(f"drafts {deepest} deep were proposed; asked for were at most {depth}")
    return suggestion


LOOKUP = SHORTEST, LONGEST
"""Equal tokens that make prompt lookup follow an earlier place, and beyond which it takes the latest."""


def local_sources(opened: Open, lookup: tuple[int, int] = LOOKUP) -> list[LocalSource]:
    """Those that a session can have by its text and its request alone."""
    sources: list[LocalSource] = [PromptLookup(shortest=lookup[0], longest=lookup[1])]
    if opened.request_options.prediction:
        sources.append(PredictionSource(opened.request_options.prediction, opened.prompt_length))
    registered_ones = (Guarded(name, maker, opened) for name, maker in _makers.items())
    return [*sources, *(source for source in registered_ones if not source.absent)]
