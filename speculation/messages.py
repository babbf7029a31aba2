"""The words that cross the wire, as plain values.

Immutable, without protobuf, sockets or clocks: ``transport.codec`` turns these into protobuf and back. A session id is
chosen by the router and is scoped to one (router, worker) stream. What the words mean here and everywhere:

    committed   decided by the target; never taken back
    position    index in the full token sequence, prompt included
    epoch       number of an opening of a session; what comes under an older one is not heard
    digest      64 bits that name a token prefix (:mod:`speculation.digest`)
    anchor      the prefix that a proposal hangs from
    offer       the drafts that are verified in one step
    lead        how far ahead of the committed text drafting should be, or is, in tokens
    accepted, recovered, bonus   see :mod:`speculation.acceptance`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from speculation.frozen import frozen
from speculation.settings import MAX_PRIORITY as MAX_PRIORITY
from speculation.settings import AllBut as AllBut
from speculation.settings import Limits as Limits
from speculation.settings import RequestOptions as RequestOptions
from speculation.settings import Rule as Rule
from speculation.settings import Sampling as Sampling
from speculation.settings import Schedule as Schedule
from speculation.settings import Source as Source
from speculation.settings import SourceName as SourceName
from speculation.settings import Sources as Sources
from speculation.settings import Speculation as Speculation
from speculation.settings import Token as Token

SessionId = NewType("SessionId", int)

ANCHOR = -1
"""Parent index of a proposed token that hangs directly from the proposal's anchor."""


class FinishReason(StrEnum):
    """Why the target stopped a session."""

    STOP = "stop"
    """A stop token was committed (it is the last token of the verification), or the grammar lets nothing follow."""
    LENGTH = "length"
    """``Limits.end`` was reached."""


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
    prompt: int = 0
    """How many of ``tokens`` are the prompt; 0: all. The others were generated before the session came here."""
    request_options: RequestOptions = RequestOptions()
    digest: int = 0
    """Of ``tokens``, so that no worker holds all its sessions up to compute it; 0: unknown."""

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {self.priority}")
        if not 0 <= self.prompt <= len(self.tokens):
            raise ValueError(f"prompt is {self.prompt}; it must be at most the {len(self.tokens)} tokens sent")

    @property
    def prompt_length(self) -> int:
        """How many of the tokens are the prompt."""
        return self.prompt or len(self.tokens)


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


def depths_of(parents: Iterable[int]) -> list[int]:
    """How far below the anchor each token of a tree is; 1 hangs from it. ``parents``: as in :class:`Proposal`."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ANCHOR else depths[parent] + 1)
    return depths


@frozen
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
    took_us: int = 0
    """How long the draft steps that made it took, in microseconds: it was begun that long before it was sent."""
    passed: int = field(default=0, init=False, repr=False, compare=False)
    """The epoch under which a router has passed it on before it looked at it; 0: it has not."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"parents has {len(self.parents)} entries for {len(self.tokens)} tokens")
        for name, given in ("confidence", self.confidence), ("q", self.q):
            if given and len(given) != len(self.tokens):
                raise ValueError(f"{name} has {len(given)} entries for {len(self.tokens)} tokens")
        for i, parent in enumerate(self.parents):
            if not ANCHOR <= parent < i:
                raise ValueError(f"parents[{i}] is {parent}; a parent must precede its child")
        for i, support in enumerate(self.q):
            if self.tokens[i] not in support.tokens:
                raise ValueError(f"q[{i}] gives no probability to token {self.tokens[i]}, said to be drawn from it")


@frozen
class TokenLogprobs:
    """What the model thought of a token: natural logarithms of probabilities."""

    logprob: float
    tokens: tuple[Token, ...] = ()
    """The likeliest ones, best first ..."""
    logprobs: tuple[float, ...] = ()
    """... and theirs."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"logprobs has {len(self.logprobs)} entries for {len(self.tokens)} tokens")


@frozen
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
    """How far ahead of ``end`` drafting is worth it, in tokens; 0: not at all, but keep the cache warm; None: any."""
    cached: int = 0
    """In the first one of an opening: how many of the opened tokens the target had in its cache."""
    sources: tuple[SourceName, ...] = ()
    """Where each accepted token came from; empty: all from draft models."""
    refused: tuple[SourceName, ...] = ()
    """Where each token came from that was offered and not accepted; empty: all from draft models."""
    recovered: bool = False
    """Whether the last token is the target's own at a place where a draft was offered and refused."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each token, if asked for."""
    prompt_logprobs: Collection[TokenLogprobs] = ()
    """Of each prompt token but the first, if asked for; in the first one of a session. Checked as they are read."""
    took_us: int = 0
    """How long the step took, in microseconds."""
    waited_us: int = 0
    """How long the session had waited for drafts before it."""
    passed: int = field(default=0, init=False, repr=False, compare=False)
    """The epoch under which a router has passed it on before it looked at it; 0: it has not."""

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
    capacity_tokens: int = 0
    draining: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    """Monotone totals since the worker started: steps, committed, offered, accepted, dropped proposals ..."""


class FeatureFormat(StrEnum):
    """How the numbers of :class:`Features` are written."""

    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3, with a scale a token."""

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return 2 if self is FeatureFormat.BF16 else 1


EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Loading:
    """What a worker does before it can introduce itself."""

    doing: str
    """For people."""
    fraction: float | None = None
    """How much of that is done, from 0 to 1; None: unknown."""
    model: str = ""
    """As it will introduce itself."""


Progress = Callable[[Loading], None]  # of every slow part of a start, before it and on the way


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
    """Number format, quantisation and ranks, for people."""
    source: str = ""
    """Folder or hub id the model was read from; a router that can read it too takes the tokenizer from there."""
    speculates: bool = True
    """Whether drafts are of use to this target. Of a drafter it says nothing."""
    revision: int = 0
    """Fingerprint of weights, number format and arithmetic, 64 bits: models of one name and revision say the same; 0:
    unknown."""
    started: float = 0.0
    """When the worker started, in seconds since 1970, by its own clock; 0: unknown."""
    sources: tuple[SourceName, ...] = ()
    """Of a target: draft sources that were registered there."""
    exactness: str = ""
    """``exact``: a token has the same bits however it is computed, as measured at the start; or why not; empty:
    unknown."""
    head: int = 0
    """Fingerprint of the EAGLE head that a target makes features for, or that a drafter drafts with; 0: none."""
    features: FeatureFormat = FeatureFormat.BF16
    """How a drafter with a head wants them."""

    @property
    def exact(self) -> bool | None:
        """Whether a token has the same bits however it is computed; None: unknown."""
        return self.exactness == EXACT if self.exactness else None


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Have a target send :class:`Features` of a session from now on, because its drafter has an EAGLE head."""

    session: SessionId
    epoch: int
    head: int
    """Fingerprint of the head; 0: send none any more."""
    format: FeatureFormat = FeatureFormat.BF16


@frozen
class Features:
    """What an EAGLE head reads of a target's hidden states, for some tokens that follow each other.

    Of each token the fused hidden states that it was drawn from: those of the token before it. Hints, as proposals are:
    any may be lost, late or doubled.
    """

    session: SessionId
    epoch: int
    position: int
    """Of the first token."""
    head: int
    """Fingerprint of the head they were made for."""
    width: int
    """Numbers a token."""
    values: bytes
    """Token by token, little-endian."""
    format: FeatureFormat = FeatureFormat.BF16
    scales: bytes = b""
    """Under :attr:`FeatureFormat.FP8`, a float32 a token that its values are multiplied with."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width is {self.width}; a token has at least one number")
        if not self.values or len(self.values) % (self.width * self.format.size):
            whole = f"whole tokens of {self.width} numbers in {self.format}"
            raise ValueError(f"values has {len(self.values)} bytes; they must be {whole}, one at least")
        scaled = 4 * len(self) if self.format is FeatureFormat.FP8 else 0
        if len(self.scales) != scaled:
            raise ValueError(f"scales has {len(self.scales)} bytes for {len(self)} tokens in {self.format}")

    def __len__(self) -> int:
        return len(self.values) // (self.width * self.format.size)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + len(self)


ToWorker = Open | Proposal | Verification | Close | Subscribe | Features
SessionMessage = Proposal | Verification | Refused  # all that workers say of a session
FromWorker = Welcome | SessionMessage | Load
