"""The design of the benchmark, and what a path adds to the first token and to every other: figures and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, ClassVar

from benchmarks.harness.command import Bench, BenchError
from benchmarks.harness.options import FIGURES, Options, flag
from benchmarks.harness.report import Result, Table

ADDED_MS = 20.0
"""Most that the HTTP path may add to the first token, in the median."""
PACELINE, ECHO = "paceline", "echo"
"""What is measured: the router's whole HTTP side, and a bare uvicorn and Starlette that does nothing but stream."""
CONTENDERS = (PACELINE, ECHO)
STEADY, BURST = "steady", "burst"
"""Requests that come while all other streams run, evenly spread over time; and all at the same moment."""
PATTERNS = (STEADY, BURST)
MAX_STREAMS = 256
"""Each is a connection, and tokens of all come at a pace that one process must keep up with."""
COMMIT_TOKENS = 3
FIRST_SECONDS = 0.2
"""From a request's start to its first commit: a prefill, as it were."""
COMMIT_SECONDS = 0.1
"""From one commit to the next: 30 tokens a second a stream, and 1900 tokens a second at 64 streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions(Options):
    """How many streams, and how long they are measured."""

    BENCH: ClassVar[str] = "http"
    FOLDER: ClassVar[str | None] = "-http"
    quick: bool = flag(False, "fewer and shorter rounds; writes no folder")
    json: Path | None = flag(None, FIGURES)
    out: Path | None = flag(None, "folder of a full run (default: benchmarks/results/DATE-http)", metavar="DIR")
    streams: int = flag(64, "streams at once", least=1, most=MAX_STREAMS)
    rounds: int = flag(7, "turns of each server", least=1, quick=2)
    """Besides a first that only warms up; in each, every contender has every pattern."""

    @property
    def commits(self) -> int:
        """Of a request."""
        return 20 if self.quick else 50

    @property
    def requests(self) -> int:
        """One after the other of a stream in the steady pattern."""
        return 2 if self.quick else 3


BENCH = Bench(
    "what the HTTP path adds to the first token and to the others, beside a bare server that streams",
    "No model is computed. The quick run takes about half a minute, the full one about five.",
    HttpOptions,
    "benchmarks.http.run",
)


class BadAnswer(BenchError):
    """The server did not stream. One line."""


@dataclass(slots=True)
class StreamedReply:
    """One request as its client saw it. Times of the clock that all processes of a machine share."""

    request_id: str
    sent: float
    events: list[float] = field(default_factory=list)
    """When each event came, the last (which only says that it is the last) left out."""


@dataclass(frozen=True, slots=True)
class Round:
    """One contender under one pattern of requests, once."""

    contender: str
    pattern: str
    first: tuple[float, ...]
    """By request: seconds added to its first token."""
    before: tuple[float, ...]
    """By request: how much of that was spent before the generator was asked."""
    later: tuple[float, ...]
    """By commit but for the first ones: seconds from the commit to the client."""
    cpu: float
    """Processor seconds of the server."""
    client_cpu: float
    seconds: float
    tokens: int
    """That went through meanwhile."""

    @classmethod
    def of(
        cls,
        contender: str,
        pattern: str,
        heard: Sequence[StreamedReply],
        times: Mapping[str, Sequence[float]],
        *,
        cpu: float,
        client_cpu: float,
        seconds: float,
    ) -> Round:
        """``times``: the server's account, by request: when it was begun, then each commit. Raises BadAnswer."""
        first, before, later = [], [], []
        tokens = COMMIT_TOKENS * sum(len(of_one) - 1 for of_one in times.values())
        for one in heard:
            begun, *commits = times[one.request_id]
            # An event more than commits there are says why the text ended.
            if not 0 <= len(one.events) - len(commits) <= 1:
                raise BadAnswer(f"{contender}: {len(one.events)} events for {len(commits)} commits")
            first.append((one.events[0] - one.sent) - (commits[0] - begun))
            before.append(begun - one.sent)
            later += [came - made for came, made in zip(one.events[1:], commits[1:], strict=False)]
        return cls(contender, pattern, tuple(first), tuple(before), tuple(later), cpu, client_cpu, seconds, tokens)


@dataclass(frozen=True, slots=True)
class HttpFigures:
    """Of one contender under one pattern, all rounds together. Milliseconds, but for microseconds a token."""

    first_median: float
    first_p90: float
    before_median: float
    later_median: float
    later_p90: float
    cpu_us_per_token: float
    client_cpu_us_per_token: float


def figures(rounds: Iterable[Round], contender: str, pattern: str) -> HttpFigures:
    """All rounds of one kind."""
    chosen = [one for one in rounds if (one.contender, one.pattern) == (contender, pattern)]
    first = [1e3 * value for one in chosen for value in one.first]
    later = [1e3 * value for one in chosen for value in one.later]
    tokens = sum(one.tokens for one in chosen)
    return HttpFigures(
        first_median=median(first),
        first_p90=p90(first),
        before_median=median(1e3 * value for one in chosen for value in one.before),
        later_median=median(later),
        later_p90=p90(later),
        cpu_us_per_token=1e6 * sum(one.cpu for one in chosen) / tokens,
        client_cpu_us_per_token=1e6 * sum(one.client_cpu for one in chosen) / tokens,
    )


def p90(values: Sequence[float]) -> float:
    """Nine of ten are below."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """What must be reached, and the ratios to the bare server."""
    ours, bare = figures(rounds, PACELINE, STEADY), figures(rounds, ECHO, STEADY)
    return {
        "first_token_added_ms": ours.first_median,
        "first_token_added_in_a_burst_ms": figures(rounds, PACELINE, BURST).first_median,
        "first_token_added_over_echo": ours.first_median / bare.first_median,
        "cpu_per_token_over_echo": ours.cpu_us_per_token / bare.cpu_us_per_token,
    }


WANTED = {"first_token_added_ms": ADDED_MS}
"""At most."""


def result(options: HttpOptions, rounds: Sequence[Round], **about: Any) -> Result:
    """All that is shown."""
    found = Result(
        "http",
        "The HTTP path",
        options,
        (paths(rounds), goals(rounds)),
        [],
        {
            "summary": summary(rounds),
            "wanted": {name: {"at_most": bound} for name, bound in WANTED.items()},
            "figures": {
                pattern: {name: asdict(figures(rounds, name, pattern)) for name in CONTENDERS} for pattern in PATTERNS
            },
            "first_seconds": [
                {"contender": one.contender, "pattern": one.pattern, "added": one.first} for one in rounds
            ],
        },
        **about,
    )
    return replace(found, notes=notes(options, found.machine))


def goals(rounds: Sequence[Round]) -> Table:
    """What must be reached, beside what was."""
    measured = summary(rounds)
    lines = [
        (name, f"at most {bound:g}", f"{measured[name]:.2f}", "yes" if measured[name] <= bound else "NO")
        for name, bound in WANTED.items()
    ]
    lines += [(name, "", f"{value:.2f}", "") for name, value in measured.items() if name not in WANTED]
    return Table("Must reach", ("figure", "wanted", "measured", "reached"), lines)


def paths(rounds: Sequence[Round]) -> Table:
    """Each contender under each pattern, and the ratios."""
    lines = []
    for pattern in PATTERNS:
        both = {name: asdict(figures(rounds, name, pattern)) for name in CONTENDERS}
        lines += [(pattern, name, *(f"{value:.2f}" for value in found.values())) for name, found in both.items()]
        ratios = (f"{both[PACELINE][key] / both[ECHO][key]:.2f}" for key in both[ECHO])
        lines.append((pattern, "ratio", *ratios))
    columns = ("requests", "server", "first ms", "p90", "before ms", "later ms", "p90", "CPU us/token", "client's")
    return Table("What the path adds", columns, lines)


def notes(options: HttpOptions, machine: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    return [
        f"{machine['processor']}, {machine['cores']} cores. {options.streams} streams, a commit of "
        f"{COMMIT_TOKENS} tokens every {1e3 * COMMIT_SECONDS:g} ms each, {options.commits} to a request; no model is "
        "computed. Server and client are processes on the same machine; both servers ran in the same rounds, in turn.",
        "First: from the request's first byte to its first event at the client, less the time from the generator's "
        "start to its first commit. Before: how much of it was spent before the generator was asked. Later: from a "
        "commit to its event at the client.",
        "Steady: a request comes while all other streams run, evenly spread. Burst: all requests at one moment.",
    ]
