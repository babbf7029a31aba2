"""The design of the benchmark of the relay: how many sessions, how fast steps come, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACELINE, BARE, DIRECT = "paceline", "bare", "bare, no router"
"""What is measured: a router between two workers; three processes that pass the same bytes on through gRPC; and two
that send them to each other, which is the least that a stream between target and drafter would take."""
CONTENDERS = (PACELINE, BARE, DIRECT)
VERIFIED, PROPOSED = "target to drafter", "drafter to target"
"""The two ways."""
WAYS = (VERIFIED, PROPOSED)
WANTED_MS = 0.5
"""Most that each way may take, in the median."""
COMMIT_TOKENS = 3
"""Of a verification, the last of which is when it was sent."""
PROPOSED_TOKENS = 4
"""Of a proposal, the first of which is when it was sent."""
CLOCK_US = 1 << 31
"""Times are sent as token ids: microseconds of the clock that all processes of a machine share, from 0 to this."""


@dataclass(frozen=True, slots=True)
class Options:
    """How large the benchmark is, and where its results go."""

    json: Path | None
    sessions: int = 16
    steps: float = 125.0
    """Of the target, each second; every session is in each."""
    host_ms: float = 1.0
    """How long either worker is busy in Python in each step: meanwhile its event loop has to get hold of the GIL."""
    rounds: int = 3
    """In each of which every contender has its turn."""
    seconds: float = 4.0
    """Of one turn."""

    @property
    def command(self) -> str:
        """What measures the same again."""
        size = f"--sessions {self.sessions} --steps {self.steps:g} --host-ms {self.host_ms:g}"
        return f"paceline bench relay {size} --rounds {self.rounds} --seconds {self.seconds:g}"
