"""What one row of the table says, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.chaos.records import Tally


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a row must show, besides no failed request and no different text."""

    text: str
    """For the table."""
    silence: float | None = None
    """Seconds that the longest silence stays below; None: no bound."""


@dataclass(slots=True)
class Outcome:
    """What was measured under one fault."""

    name: str
    fault: str
    """What was done, for the table."""
    wanted: Wanted
    streams: int
    """At once."""
    tally: Tally
    seconds: float = 0.0
    """From the fault until all workers were back; 0 where nothing was lost."""
    complaints: list[str] = field(default_factory=list)
    """What else was not as it must be."""
    notes: list[str] = field(default_factory=list)
    """Further figures."""

    @property
    def problems(self) -> list[str]:
        """Everything that keeps the row from holding, the requests' own complaints last."""
        found = list(self.complaints)
        bound = self.wanted.silence
        silence = self.tally.silence.seconds
        if bound is not None and silence >= bound:
            found.append(f"a silence of {silence:.2f} s, wanted under {bound:g} s")
        if not self.tally.requests:
            found.append("nothing was asked for")
        return [*found, *self.tally.complaints]

    @property
    def holds(self) -> bool:
        """Whether the row shows what it must."""
        return not self.problems
