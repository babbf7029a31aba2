"""What a request asks of decoding: how tokens are drawn, where the text ends, what may be speculated.

Plain immutable values that router, target and drafter agree on for the whole life of a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Token = int

MAX_SHIFT = 1e4
"""Penalties and biases go up to this, so that no logit overflows."""


SourceName = str
"""Where a draft token came from: a :class:`Source`, or a name that was registered (:mod:`.sources.registry`)."""


class Source(StrEnum):
    """The draft sources that are built in. There may be others: see :data:`SourceName`."""

    DRAFT = "draft"
    """A draft model, on a draft worker."""
    LOOKUP = "lookup"
    """The session's own tokens: what followed when the same words stood there before. Made at the target."""
    PREDICTION = "prediction"
    """What the caller expects to be said (OpenAI's ``prediction``). Made at the target."""
    GRAMMAR = "grammar"
    """The only text that the session's constraint leaves open. Made at the target."""
    EAGLE = "eagle"
    """A head that reads the target's hidden states and goes on from its own (Li et al. 2025, "EAGLE-3")."""
    SUFFIX = "suffix"
    """Earlier outputs of the deployment: what followed there. Made at the target."""


class Rule(StrEnum):
    """Acceptance rule: what makes the target keep a draft token (see :mod:`speculation.acceptance`)."""

    COUPLED = "coupled"
    """It is the token the target draws itself, with noise shared by both. Temperature 0 is its greedy case."""
    REJECTION = "rejection"
    """A coin that depends on p and q (Leviathan et al. 2023, Chen et al. 2023). Chains only."""


class Schedule(StrEnum):
    """When drafting and verification take place. All but the first are baselines to compare with."""

    TRIE = "trie"
    """Drafters run ahead along the likely outcomes; the target verifies what it has."""
    SEQUENTIAL = "sequential"
    """Draft ``max_depth`` tokens, then verify them, in turn: one waits for the other."""
    PARALLEL = "parallel"
    """A chain drafted during verification, all of it dropped at a refusal; the target waits for it (as PEARL does)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn.

    Logits are shaped first: bias, repetition, frequency and presence penalty, then what is excluded. Filters apply to
    what is left, in this order: temperature, top-k, top-p, min-p.

    ``temperature`` 0 means argmax. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was generated (not of those that are in the prompt only)."""
    frequency_penalty: float = 0.0
    """Taken off it for each time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or generated (CTRL, arXiv:1909.05858)."""
    bias: tuple[tuple[Token, float], ...] = ()
    allowed: tuple[Token, ...] = ()
    """If there are any, no other token is ever drawn."""
    banned: tuple[tuple[Token, ...], ...] = ()
    """Sequences that are never completed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < 1e4:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0: off), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_SHIFT:
                raise ValueError(f"{name} must be from -{MAX_SHIFT:g} to {MAX_SHIFT:g}, got {getattr(self, name)}")
        if not 1 / MAX_SHIFT <= self.repetition_penalty <= MAX_SHIFT:
            smallest = f"{1 / MAX_SHIFT:g}"
            raise ValueError(
                f"repetition_penalty must be from {smallest} to {MAX_SHIFT:g} (1: off), got {self.repetition_penalty}"
            )
        for token, value in self.bias:
            if not abs(value) <= MAX_SHIFT:
                raise ValueError(f"the bias of token {token} must be from -{MAX_SHIFT:g} to {MAX_SHIFT:g}, got {value}")
        if not all(self.banned):
            raise ValueError("banned has an empty sequence")

    @property
    def greedy(self) -> bool:
        """Whether the token is the plain argmax, with no noise."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a session ends. ``end`` is a position, so it holds unchanged when a session is re-opened further on."""

    end: int
    """The session is finished once its sequence has this many tokens."""
    stop_tokens: frozenset[Token] = frozenset()
    min_end: int = 0
    """No stop token is drawn before the sequence has this many tokens."""


@dataclass(frozen=True, slots=True)
class AllBut:
    """Every draft source there is, known here or not, but a few."""

    names: frozenset[SourceName] = frozenset()

    def __contains__(self, name: object) -> bool:
        return name not in self.names


Sources = frozenset[SourceName] | AllBut
"""Some draft sources: only these, or all but these."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a session allows to be speculated."""

    enabled: bool = True
    max_depth: int = 32
    """Longest path of draft tokens verified in one step; under the baseline schedules, how many are drafted."""
    rule: Rule = Rule.COUPLED
    schedule: Schedule = Schedule.TRIE
    sources: Sources = AllBut()
    remember: bool = True
    """Whether what is said may be kept, to draft for later sessions of the same scope (:mod:`.sources.suffix`)."""

    def takes(self, source: SourceName) -> bool:
        """Whether drafts of a source are verified, wherever it is."""
        return self.enabled and source in self.sources

    def allows(self, source: SourceName) -> bool:
        """Whether a source in the target's process may draft; the baseline schedules are for draft workers."""
        return self.takes(source) and self.schedule is Schedule.TRIE

    @property
    def ahead(self) -> bool:
        """Whether drafters run ahead; those of the baseline schedules take turns with the target."""
        return self.schedule is Schedule.TRIE

    @property
    def chains(self) -> bool:
        """Whether drafts must be chains: no alternatives at any place."""
        return self.rule is Rule.REJECTION or not self.ahead


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What few requests ask for. It stays the same for the life of a session, wherever that is opened."""

    grammar: str = ""
    """What may be said at all, as llguidance reads it (a Lark grammar, or JSON with grammars); empty: anything."""
    prediction: tuple[Token, ...] = ()
    """What the caller expects to be said, from the end of the prompt on: a draft source."""
    logprobs: int | None = None
    """With every token its log-probability and those of so many likeliest ones; None: without any.

    They are the model's own: before penalties, bias, masks, temperature and filters."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""
    request: str = ""
    """The request's id, for logs."""
    scope: str = ""
    """Whose request it is. Empty: nobody's in particular."""
    cache_salt: str = ""
    """The caller's own division of what it sends: sessions of other salts find nothing of this one. Empty: none."""
    trace: str = ""
    """The W3C ``traceparent`` its spans belong to; empty: not traced."""

    @property
    def cache_scope(self) -> str:
        """Sessions of one such scope may take over what was computed of each other's text, and draft from it."""
        return f"{self.scope}\0{self.cache_salt}" if self.scope or self.cache_salt else ""


MAX_PRIORITY = 100
"""Priorities go from minus this to this; the lower, the sooner."""


MAX_GRAMMAR_BYTES = 1 << 18
"""Largest grammar that a router sends and a worker reads, in UTF-8."""


class Constraint(Protocol):
    """A grammar, and how far a session's text has come in it. The core knows none: a worker brings one."""

    def forced(self, path: Sequence[Token]) -> Sequence[Token]:
        """Tokens of the only text that may follow the draft tokens of ``path``; none where there is a choice.

        The text may be tokenised otherwise as well: the tokens are a draft like any other.
        """

    def ending(self, tokens: Sequence[Token]) -> int | None:
        """After how many of ``tokens``, which are committed next, nothing may follow; None: something may."""
