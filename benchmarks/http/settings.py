"""The design of the benchmark of the HTTP path: how many streams, how fast tokens come, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.harness.command import Bench
from benchmarks.harness.options import FIGURES, Options, flag

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
