"""The design of the benchmark of the HTTP path: how many streams, how fast tokens come, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ADDED_MS = 20.0
"""Most that the HTTP path may add to the first token, in the median."""
PACELINE, ECHO = "paceline", "echo"
"""What is measured: the router's whole HTTP side, and a bare uvicorn and Starlette that does nothing but stream."""
CONTENDERS = (PACELINE, ECHO)
STEADY, BURST = "steady", "burst"
"""Requests that come while all other streams run, evenly spread over time; and all at the same moment."""
PATTERNS = (STEADY, BURST)
COMMIT_TOKENS = 3
FIRST_SECONDS = 0.2
"""From a request's start to its first commit: a prefill, as it were."""
COMMIT_SECONDS = 0.1
"""From one commit to the next: 30 tokens a second a stream, and 1900 tokens a second at 64 streams."""


@dataclass(frozen=True, slots=True)
class Options:
    """How large the benchmark is, and where its results go."""

    quick: bool
    json: Path | None
    out: Path
    streams: int = 64
    rounds: int | None = None
    """In each of which every contender has every pattern; None: as many as usual."""

    @property
    def turns(self) -> int:
        """Rounds, besides a first that only warms up."""
        return self.rounds or (2 if self.quick else 7)

    @property
    def commits(self) -> int:
        """Of a request."""
        return 20 if self.quick else 50

    @property
    def requests(self) -> int:
        """One after the other of a stream in the steady pattern."""
        return 2 if self.quick else 3

    @property
    def command(self) -> str:
        """What measures the same again."""
        return f"paceline bench http{' --quick' if self.quick else ''} --streams {self.streams} --rounds {self.turns}"
