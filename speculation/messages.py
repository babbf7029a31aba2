"""The words that cross the wire, as plain values.

Everything here is immutable and knows nothing about protobuf, sockets or clocks. ``transport.codec`` turns these into
protobuf and back; ``speculation.session`` and the simulator exchange them directly.

A session id is chosen by the router and is scoped to one (router, worker) stream. Positions are indices in the full
token sequence, prompt included. A digest names a token prefix (see :mod:`speculation.digest`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

SessionId = NewType("SessionId", int)
Token = int

ANCHOR = -1
"""Parent index of a proposed token that hangs directly from the proposal's anchor."""


class FinishReason(StrEnum):
    """Why the target stopped a session."""

    STOP = "stop"
    """A stop token was committed (it is the last token of the verification)."""
    LENGTH = "length"
    """``Limits.end`` was reached."""


class Source(StrEnum):
    """Where a draft token came from."""

    DRAFT = "draft"
    """A draft model, on a draft worker."""
    LOOKUP = "lookup"
    """The session's own tokens: what followed when the same words stood there before. Made at the target."""


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


class RefusalCode(StrEnum):
    """Why a worker will not, or can no longer, run a session. Stable names; also used in metrics."""

    INVALID = "invalid"
    """The request can never succeed here (bad token, too long for the model ...). Not retryable."""
    OVERLOADED = "overloaded"
    """No room now. Retryable elsewhere or later."""
    UNKNOWN_SESSION = "unknown_session"
    """The worker does not hold this session (it restarted, or dropped it). Re-open."""
    DRAINING = "draining"
    """The worker is going away. Re-open elsewhere."""
    INTERNAL = "internal"
    """The worker failed while running this session. Retryable, a bounded number of times."""

    @property
    def retryable(self) -> bool:
        """Whether another try, here or elsewhere, can succeed."""
        return self is not RefusalCode.INVALID


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Filters apply in this order: temperature, top-k, top-p, min-p.

    ``temperature`` 0 means argmax. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < 1e4:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0: off), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

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


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a session allows to be speculated."""

    enabled: bool = True
    max_depth: int = 16
    """Longest path of draft tokens verified in one step; under the baseline schedules, how many are drafted."""
    rule: Rule = Rule.COUPLED
    schedule: Schedule = Schedule.TRIE
    sources: frozenset[Source] = frozenset(Source)
    """Draft sources that may be used."""

    @property
    def chains(self) -> bool:
        """Whether drafts must be chains: no alternatives at any place."""
        return self.rule is Rule.REJECTION or self.schedule is not Schedule.TRIE


MAX_PRIORITY = 100
"""Priorities go from minus this to this; the lower, the sooner."""


@dataclass(frozen=True, slots=True)
class Open:
    """Start (or, with a higher epoch, start again) a session from ``tokens`` = prompt + what is committed."""

    session: SessionId
    epoch: int
    tokens: tuple[Token, ...]
    sampling: Sampling
    limits: Limits
    speculation: Speculation = Speculation()
    priority: int = 0
    """Whom a target that cannot serve all at once serves first: the lower, the sooner."""
    age_ms: int = 0
    """Milliseconds since the session began: wherever it is opened again, it keeps its place in the order."""

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {self.priority}")


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a session. Harmless when it is unknown or already of a newer epoch."""

    session: SessionId
    epoch: int


SUPPORT_TOTAL = 1 << 16
"""What the weights of a :class:`Support` add up to."""


@dataclass(frozen=True, slots=True)
class Support:
    """A distribution over few tokens: the q a draft token was drawn from.

    Probabilities are ``weights / SUPPORT_TOTAL``. Whole numbers, so that both ends compute with the same q to the last
    bit: the rejection rule is exact only for the very distribution that was drawn from.
    """

    tokens: tuple[Token, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.tokens):
            raise ValueError(f"q has {len(self.weights)} weights for {len(self.tokens)} tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise ValueError("q names a token twice")
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(f"q has the weight {min(self.weights)}; every weight must be positive")
        if sum(self.weights) != SUPPORT_TOTAL:
            raise ValueError(f"the weights of q add up to {sum(self.weights)}, not to {SUPPORT_TOTAL}")

    @property
    def peak(self) -> float:
        """The largest probability: how sure the drafter was before it drew."""
        return max(self.weights) / SUPPORT_TOTAL


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens: a small tree hanging from a known prefix.

    ``anchor_position`` is the length of that prefix, so a token whose parent is :data:`ANCHOR` has exactly this
    position. ``parents[i] < i``, or :data:`ANCHOR`. ``confidence[i]`` is the drafter's probability for the token
    given its parent; advisory, empty when unknown.

    ``q[i]`` is the distribution that token i was drawn from, for the rejection rule; empty: the tokens were chosen, not
    drawn. Then ``confidence`` must be a function of q alone, never of the token drawn (see
    :mod:`speculation.acceptance`).
    """

    session: SessionId
    epoch: int
    anchor_position: int
    anchor_digest: int
    tokens: tuple[Token, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...] = ()
    source: Source = Source.DRAFT
    q: tuple[Support, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"parents has {len(self.parents)} entries for {len(self.tokens)} tokens")
        if self.confidence and len(self.confidence) != len(self.tokens):
            raise ValueError(f"confidence has {len(self.confidence)} entries for {len(self.tokens)} tokens")
        for i, parent in enumerate(self.parents):
            if not ANCHOR <= parent < i:
                raise ValueError(f"parents[{i}] is {parent}; a parent must precede its child")
        if self.q and len(self.q) != len(self.tokens):
            raise ValueError(f"q has {len(self.q)} entries for {len(self.tokens)} tokens")
        for i, support in enumerate(self.q):
            if self.tokens[i] not in support.tokens:
                raise ValueError(f"q[{i}] gives no probability to token {self.tokens[i]}, said to be drawn from it")

    @property
    def depths(self) -> list[int]:
        """How far below the anchor each token is; 1 hangs from it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return depths


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of one target step for one session.

    ``tokens`` are committed at ``position`` and after: the accepted draft tokens, then one of the target's own.
    ``digest`` names the prefix that ends with them. ``offered`` counts the draft tokens verified in the step.
    """

    session: SessionId
    epoch: int
    position: int
    tokens: tuple[Token, ...]
    digest: int
    accepted: int = 0
    offered: int = 0
    finish: FinishReason | None = None
    lead: int | None = None
    """How far ahead of ``end`` drafting is worth its while, in tokens; 0: not at all, but keep the cache warm. None:
    as far as the drafter sees fit."""
    cached: int = 0
    """In the first one of an opening: how many of the opened tokens the target had in its cache."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker gives up a session (of this epoch)."""

    session: SessionId
    epoch: int
    code: RefusalCode
    message: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. Sent a few times a second, so its absence means a hung peer."""

    sessions: int = 0
    waiting: int = 0
    free_tokens: int = 0
    """Room left in the cache."""
    capacity_tokens: int = 0
    draining: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    """Monotone totals since the worker started: steps, committed, offered, accepted, dropped proposals ..."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first message of a worker on a stream: who it is and what it runs."""

    role: str
    """``target`` or ``draft``."""
    model: str
    vocabulary: int
    """Token ids are below this. Padded embedding rows are not counted: they are never proposed nor sampled."""
    context: int
    """Longest sequence, prompt included."""
    tokenizer: int = 0
    """Digest of the tokenizer's id-to-token map; equal digests mean the same token ids."""
    instance: str = ""
    """Changes at every start of the worker."""
    dtype: str = ""
    """Number format and quantisation, for people."""
    source: str = ""
    """Folder or hub id the model was read from; a router that can read it too takes the tokenizer from there."""
    speculates: bool = True
    """Whether drafts are of use to this target. Of a drafter it says nothing."""
    revision: int = 0
    """Fingerprint of weights and number format, 64 bits: models of one name and revision say the same; 0: unknown."""
    started: float = 0.0
    """When the worker started, in seconds since 1970, by its own clock; 0: unknown."""


ToTarget = Open | Proposal | Close
FromTarget = Welcome | Verification | Refused | Load
ToDraft = Open | Verification | Close
FromDraft = Welcome | Proposal | Refused | Load
ToWorker = Open | Proposal | Verification | Close
FromWorker = Welcome | Proposal | Verification | Refused | Load
