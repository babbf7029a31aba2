"""What one router carries: how large the benchmark is, and what its figures are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness.options import Options, flag
from benchmarks.harness.report import Goal, Result, Table, against, table_of
from cluster.config.flags import count

ROUTER, FEATURES, BARE = "router", "with features", "bare"
"""What is measured: a whole router between workers and clients; the same where features of every committed token go to
drafters, if asked for; and a bare uvicorn and Starlette that streams as many events of the same size, made in its own
process."""
CONTENDERS = (ROUTER, FEATURES, BARE)
WANTED_DELAY_MS = 50.0
"""The 99th percentile of what the way adds, at most."""
KEPT_UP = 0.97
"""Of the pace that was asked for: below, a point is beyond what the contender carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions(Options):
    """How many streams, at which paces."""

    BENCH = "scale"
    ABOUT = (
        "what one router carries (streams, tokens a second, processor and memory), beside a bare server that streams"
    )
    DETAILS = "No model is computed; the router has a core of its own where there are two. Takes two to four minutes."
    MODULE = "benchmarks.http.load"
    streams: tuple[int, ...] = flag(
        (64, 512, 2048), "streams at once, one number or more", parse=partial(count, maximum=16384)
    )
    tokens: tuple[int, ...] = flag(
        (5000, 10000, 20000, 40000),
        "tokens a second of all streams together, one number or more",
        parse=partial(count, maximum=1_000_000),
    )
    sessions: int = flag(64, "sessions of one target, which commits for all of them at once", least=1, most=1024)
    """By default as many as one computes in a step by default."""
    commit: int = flag(3, "tokens of a commit, all but one of them drafted", least=1, most=64)
    seconds: float = flag(4.0, "how long each pace is measured", least=0.5, most=600, metavar="S")
    drafters: bool = flag(False, "drafters as well, whose proposals the router relays: one for every commit")
    features: int = flag(0, "also with drafters that read so many numbers of each committed token", least=0, most=65536)
    """In bfloat16, as an EAGLE head away from its target reads them."""
    only: str = flag("", "measure only this", choices=CONTENDERS)

    @property
    def contenders(self) -> list[str]:
        """What is measured."""
        return [one for one in CONTENDERS if self.only in ("", one) and (one != FEATURES or self.features)]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One contender with so many streams at one pace."""

    contender: str
    streams: int
    asked: float
    """Tokens a second."""
    delivered: float
    delays_ms: tuple[float, float, float]
    """From a commit's making to its event at the client: median, 99th percentile, most."""
    cpu_us_per_token: float
    busy: float
    """Share of a core that the server used."""
    load_busy: float
    """And the process of workers and clients."""
    request_ms: float
    """Processor time of the server for a request until its stream runs."""
    first_ms: float
    """From a request's first byte to its first event at the client, in the median; workers commit at once."""
    kb_per_stream: float
    """Memory of the server with these streams, less that with one, by stream."""
    verified_ms: float | None = None
    """A commit's way from its target to its drafter, in the median; None: there are no drafters."""
    proposed_ms: float | None = None
    relayed_bytes: float = 0.0
    """Of what workers say to each other through the server, by committed token."""

    @property
    def kept_up(self) -> bool:
        """Whether what was asked for was delivered."""
        return self.delivered >= KEPT_UP * self.asked

    @property
    def tokens_per_core(self) -> float:
        """A second, if it had all of a core at this cost."""
        return 1e6 / self.cpu_us_per_token


def carried(points: Iterable[LoadPoint], contender: str, streams: int) -> float:
    """The highest pace delivered within the wanted delay; 0: none was."""
    own = (one for one in points if (one.contender, one.streams) == (contender, streams))
    in_time = (one.delivered for one in own if one.kept_up and one.delays_ms[1] <= WANTED_DELAY_MS)
    return max(in_time, default=0.0)


def features_over_router(points: Sequence[LoadPoint]) -> float | None:
    """Processor time a token with features over that without, in the median of what both kept up with; None: none."""

    def spent(contender: str) -> dict[tuple[int, float], float]:
        own = (point for point in points if point.contender == contender and point.kept_up)
        return {(point.streams, point.asked): point.cpu_us_per_token for point in own}

    features, alone = spent(FEATURES), spent(ROUTER)
    return median(features[at] / alone[at] for at in both) if (both := features.keys() & alone.keys()) else None


def summary(points: Sequence[LoadPoint]) -> dict[str, float]:
    """The figures that matter, of the router with the most streams."""
    most = max(point.streams for point in points if point.contender == ROUTER)
    own = [point for point in points if (point.contender, point.streams) == (ROUTER, most)]
    best = max((point for point in own if point.kept_up), key=lambda point: point.asked, default=own[0])
    return {
        "streams": most,
        "tokens_per_core": max(point.tokens_per_core for point in own),
        "carried_tokens": carried(points, ROUTER, most),
        "p99_added_ms": best.delays_ms[1],
        "first_ms": own[0].first_ms,
        "kb_per_stream": own[0].kb_per_stream,
    }


def table(points: Sequence[LoadPoint]) -> Table:
    """All points."""
    return table_of(
        "What one carries",
        points,
        {
            "server": lambda one: one.contender,
            "streams": lambda one: one.streams,
            "asked tokens/s": lambda one: f"{one.asked:.0f}",
            "delivered": lambda one: f"{one.delivered:.0f}",
            "added ms p50": lambda one: f"{one.delays_ms[0]:.1f}",
            "p99": lambda one: f"{one.delays_ms[1]:.1f}",
            "most": lambda one: f"{one.delays_ms[2]:.1f}",
            "CPU us/token": lambda one: f"{one.cpu_us_per_token:.1f}",
            "tokens/s a core": lambda one: f"{one.tokens_per_core:.0f}",
            "busy % server/load": lambda one: f"{100 * one.busy:.0f} / {100 * one.load_busy:.0f}",
            "CPU ms/request": lambda one: one.request_ms,
            "first ms": lambda one: f"{one.first_ms:.1f}",
            "KB/stream": lambda one: f"{one.kb_per_stream:.0f}",
            "relayed ms, there / back": lambda one: (
                f"{one.verified_ms:.2f} / {one.proposed_ms:.2f}" if one.verified_ms and one.proposed_ms else ""
            ),
            "relayed bytes/token": lambda one: f"{one.relayed_bytes:.0f}",
        },
    )


def _of_router(name: str) -> Callable[[Sequence[LoadPoint]], float]:
    return lambda points: summary(points)[name]


GOALS: tuple[Goal[Sequence[LoadPoint]], ...] = (
    Goal("tokens_per_core", "tokens/s a core", 20_000, False, _of_router("tokens_per_core")),
    Goal("p99_added_ms", "added, 99th percentile, ms", WANTED_DELAY_MS, True, _of_router("p99_added_ms")),
    Goal("kb_per_stream", "memory of a stream, KB", 64, True, _of_router("kb_per_stream")),
    Goal("features_cpu", "CPU a token with features, over that without", 1.3, True, features_over_router),
)
"""Of the router with the most streams, but for the last one."""


def notes(options: ScaleOptions) -> list[str]:
    """What a reader of the figures must know."""
    drafts = "Drafters send a proposal for every commit, which the router relays. "
    drafts = drafts if options.drafters or options.features else ""
    return [
        f"A commit has {options.commit} tokens and is one event of its stream. Targets of {options.sessions} sessions "
        f"commit for all of theirs at once. {drafts}The server has one core; workers and clients are one process on "
        "the others.",
        "Added: from the making of a commit at its target to its event at the client. A target makes no new step while "
        "the router has not taken the last one, so beyond what is carried less is delivered than was asked for.",
        "First: from a request's first byte to its first event; all streams are opened at once, 256 at a time. "
        "Relayed: from the making of a commit at its target to its drafter, and of a proposal back, in the median.",
    ]


def result(options: ScaleOptions, points: Sequence[LoadPoint]) -> Result:
    """All that is shown."""
    goals, document = None, dict[str, Any](points=[asdict(point) for point in points])
    if any(point.contender == ROUTER for point in points):
        goals = [goal for goal in GOALS if goal.ours(points) is not None]
        document["summary"] = against(goals, points)["summary"] | summary(points)
    return Result("What one router carries", options, [table(points)], notes(options), document, goals, points)
