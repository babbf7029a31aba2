"""Draft sources at the target: proposals that need no worker, made where they are verified.

Such a source reads what is committed and says how the text may go on. It is asked once at every place, just before a
step that could verify its drafts, and should answer in microseconds. What its word is worth is learned from what the
target keeps, under its name; how much of it is verified is for the budget. Like every
draft source it can make decoding faster, never different.

A new one is a class with the members of :class:`.registry.LocalSource`, in a module of its own that registers it
(:mod:`registry`). One that needs more than the text (a grammar's state, hidden states of the model) is made
by the worker and handed to the session beside these.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation.messages import Open
from speculation.sources.lookup import LONGEST, SHORTEST, PromptLookup
from speculation.sources.prediction import PredictionSource
from speculation.sources.registry import LocalSource, made_for


@dataclass(frozen=True, slots=True)
class LookupBounds:
    """How many equal tokens make prompt lookup follow an earlier place."""

    shortest: int = SHORTEST
    longest: int = LONGEST
    """Beyond so many the latest place is taken."""


def local_sources(opened: Open, bounds: LookupBounds = LookupBounds()) -> list[LocalSource]:
    """Those that a session can have by its text and its request alone."""
    sources: list[LocalSource] = [PromptLookup(shortest=bounds.shortest, longest=bounds.longest)]
    if opened.request_options.prediction:
        sources.append(PredictionSource(opened.request_options.prediction, opened.prompt or len(opened.tokens)))
    return [*sources, *made_for(opened)]
