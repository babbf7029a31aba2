"""Draft sources at the target: proposals that need no worker, made where they are verified.

Such a source reads what is committed and says how the text may go on. It is asked once at every place, just before a
step that could verify its drafts, and should answer in microseconds. What its word is worth is learned from what the
target keeps, under its name; how much of it is verified is for the budget. Like every
draft source it can make decoding faster, never different.

A new one is a class with the members of :class:`LocalSource`, in a module of its own that registers it
(:mod:`registry`). One that needs more than the text (a grammar's state, hidden states of the model) is made
by the worker and handed to the session beside these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from speculation.messages import Open, SourceName, Token
from speculation.sources.lookup import LONGEST, SHORTEST, PromptLookup
from speculation.sources.prediction import Prediction
from speculation.sources.registry import made_for


class Suggestion(Protocol):
    """A small tree of drafts from the end of the committed text, mostly a chain; it may be empty."""

    @property
    def tokens(self) -> tuple[Token, ...]:
        """What may come next, parents before children, of siblings the likeliest first."""
        ...

    @property
    def parents(self) -> Sequence[int]:
        """For each token, the index of the one it follows; -1: the end of the text."""
        ...

    @property
    def confidence(self) -> tuple[float, ...]:
        """For each token, the probability that it is right if those it follows are."""
        ...


class LocalSource(Protocol):
    """What makes drafts from the committed text of one session.

    Under the rejection rule its tokens count as chosen (:class:`speculation.acceptance.Chosen`): it must not know the
    noise that the target draws with.
    """

    @property
    def source(self) -> SourceName:
        """The name that its drafts are calibrated and credited under."""
        ...

    @property
    def depth(self) -> int:
        """How many tokens ahead it is asked for at most."""
        ...

    def extend(self, tokens: Sequence[Token]) -> None:
        """The next committed tokens, those of the prompt first; in parts of any size, never twice."""
        ...

    def propose(self, depth: int) -> Suggestion:
        """Tokens that may follow what is committed, at most ``depth`` deep. Changes nothing."""
        ...


@dataclass(frozen=True, slots=True)
class LookupBounds:
    """How many equal tokens make prompt lookup follow an earlier place."""

    shortest: int = SHORTEST
    longest: int = LONGEST
    """Beyond so many the latest place is taken."""


def local_sources(opened: Open, bounds: LookupBounds = LookupBounds()) -> list[LocalSource]:
    """Those that a session can have by its text and its request alone."""
    sources: list[LocalSource] = [PromptLookup(shortest=bounds.shortest, longest=bounds.longest)]
    if opened.extras.prediction:
        sources.append(Prediction(opened.extras.prediction, opened.prompt or len(opened.tokens)))
    return [*sources, *made_for(opened)]
