"""The design of the benchmark of the relay: how many sessions, how fast steps come, and what must be reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.harness.command import Bench
from benchmarks.harness.options import FIGURES, Options, between, flag

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions(Options):
    """How large the benchmark is."""

    BENCH: ClassVar[str] = "relay"
    json: Path | None = flag(None, FIGURES)
    sessions: int = flag(16, "sessions at once", least=1, most=256)
    """At most as many as a target runs in one step."""
    steps: float = flag(125.0, "steps of the target a second", least=1, most=1000)
    """Every session is in each."""
    host_ms: float = flag(1.0, "Python in each step of the target", metavar="MS")
    """How long either worker is busy in Python in each step: meanwhile its event loop has to get hold of the GIL."""
    rounds: int = flag(3, "turns of the router and of the bare relay", least=1, most=100)
    """In each of which every contender has its turn."""
    seconds: float = flag(4.0, "how long a turn is measured", least=0.1, most=600, metavar="S")

    def check(self) -> None:
        """See :class:`benchmarks.harness.options.Options`."""
        between("--host-ms", self.host_ms, 0, 1000 / self.steps, ", a step")


BENCH = Bench(
    "what the router's relay takes from target to drafter and back, beside bare gRPC streams",
    "No model is computed. Takes less than a minute.",
    RelayOptions,
    "benchmarks.relay.run",
)
