"""The shape of ``GET /cluster``: what a router knows of itself, its workers and what lately happened.

For people, through the page and ``paceline top``. Several routers have each their own view: what a worker says of
itself (:class:`WorkerPart`, but for ``router_sessions`` and ``round_trip_ms``) all of them repeat, everything else is
this one's. Times are in seconds since 1970; None stands where nothing is known yet. Fields may be added.
"""

from __future__ import annotations

from typing import TypedDict


class SessionsPart(TypedDict):
    """Sessions under way."""

    running: int
    """Open at a target worker."""
    placing: int
    """Without one at present."""
    queued: int
    """Waiting for room at a target worker, of all routers together; those of this one also count as running."""


class NowPart(TypedDict):
    """The last seconds."""

    window_seconds: float
    requests_per_second: float
    tokens_per_second: float
    """Committed."""
    acceptance: float | None
    """Accepted of offered draft tokens; None if none were offered."""


class RouterPart(TypedDict):
    """The router that answers."""

    version: str
    instance: str
    """Differs between routers, and changes at every start."""
    started: float
    uptime_seconds: float
    ready: bool
    unready: str | None
    """Why not."""
    draining: bool
    sessions: SessionsPart
    now: NowPart


class TotalsPart(TypedDict):
    """Since the router started."""

    requests: int
    sessions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    verifications: int
    """With at least one draft token."""
    draft_tokens: int
    accepted_tokens: int
    acceptance: float | None
    mean_acceptance_length: float | None
    """Tokens committed by a verification with drafts: 1 + accepted / verifications."""
    reopened: int
    """Failovers."""
    moved: int
    condemned: int
    quarantined: int
    failed: int
    """Sessions without a whole text."""
    refused: int
    """Requests that were told an error of theirs, or to come again later."""
    malformed_messages: int
    stale_messages: int
    acceptance_collapses: int


class LatencyPart(TypedDict):
    """Of the requests since the start, estimated from a histogram; None before the first."""

    median_ms: float | None
    p90_ms: float | None


class ModelPart(TypedDict):
    """A served model."""

    name: str
    context: int
    vocabulary: int
    targets_up: int
    prompt_tokens: int
    generated_tokens: int
    acceptance: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: list[float]
    """Share of verifications with drafts that kept the first, the second, ... draft token."""
    first_token: LatencyPart
    inter_token: LatencyPart


class CachePart(TypedDict):
    """A worker's cache, in tokens."""

    free: int
    capacity: int


class SourcePart(TypedDict):
    """Draft tokens of one source at a target."""

    offered: int
    accepted: int


class WorkerPart(TypedDict):
    """A worker on the list."""

    id: str
    address: str
    role: str
    """``target`` or ``draft``."""
    model: str
    """Empty if it never was up, nor says what it loads; so are the texts below."""
    state: str
    """``connecting`` (it never was up), ``loading``, ``up``, ``draining`` or ``lost``."""
    doing: str
    """What it does while it is loading; else empty."""
    fraction: float | None
    """How much of that is done."""
    standby: bool
    """Whether it is a target that takes sessions only where no other one can."""
    since: float
    """When it came into this state."""
    sessions: int
    """That it computes, of all routers."""
    waiting: int
    """Queued there, of all routers."""
    router_sessions: int
    """That this router has open there."""
    cache: CachePart
    round_trip_ms: float | None
    acceptance: float | None
    """Of the last few thousand drafts of this drafter, or of drafters at this target, as far as this router saw them: a
    pair has one number. Of a target without drafters: of all drafts it verified since it started."""
    steps_per_second: float | None
    tokens_per_second: float | None
    """Over the last seconds: committed by a target, proposed by a drafter."""
    efficiency: float | None
    """Part of a target's working time that it computed rather than waited for drafts."""
    sources: dict[str, SourcePart]
    """Of a target: by draft source, those only that offered something."""
    dtype: str
    exactness: str
    revision: str
    """16 hexadecimal digits; all 0 if unknown."""
    instance: str
    started: float | None


class EventPart(TypedDict):
    """Something that happened; see :class:`router.sessions.event_log.LoggedEvent`."""

    number: int
    """Rises with every event, by this router's count."""
    time: float
    kind: str
    text: str
    worker: str
    session: int | None
    request: str
    times: int


class Cluster(TypedDict):
    """The answer."""

    object: str
    """``cluster``."""
    time: float
    router: RouterPart
    totals: TotalsPart
    models: list[ModelPart]
    workers: list[WorkerPart]
    """Targets first, then by address."""
    events: list[EventPart]
    """The latest 100, oldest first."""
