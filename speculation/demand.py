"""What workers and routers tell whoever decides how many of them there should be.

Plain numbers, so that they can be summed, averaged and sent by name. :data:`TOTALS` only ever grow while a worker
lives; whoever decides wants their growth a second. The rest are figures of the moment.
"""

from __future__ import annotations

from dataclasses import dataclass

TOTALS = frozenset({"computed", "asked", "delivered", "busy"})
"""Names of what is counted since the start."""
PRESENT = frozenset({"undrafted"})
"""Names of figures that count, once there are drafters, as no more than was last told.

Their averages go on asking for drafters that have come meanwhile.
"""


@dataclass(frozen=True, slots=True)
class TargetDemand:
    """One target worker: work that waits or is being decoded, and what it can do."""

    queued_tokens: float = 0.0
    """Tokens of prompts that are not computed yet, of sessions that wait or have just begun."""
    running_tokens: float = 0.0
    capacity_tokens: float = 0.0
    sessions: float = 0.0
    """Running and waiting."""
    places: float = 0.0
    """Sessions it computes at once."""
    speed: float = 0.0
    """Prompt tokens that it can compute a second, measured; 0 before the first step."""
    computed: float = 0.0
    """Prompt tokens computed and tokens committed: total."""


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """One draft worker: how much it was asked for and what it delivered."""

    asked: float = 0.0
    """Lead that targets asked for, in tokens, added up at every verification: total."""
    delivered: float = 0.0
    """Lead that there was by then, up to what was asked for: total."""
    busy: float = 0.0
    """Seconds spent computing: total."""


WorkerDemand = TargetDemand | DraftDemand


@dataclass(frozen=True, slots=True)
class RouterDemand:
    """One router, of one model."""

    streams: float = 0.0
    undrafted: float = 0.0
    """Those that want drafts and have no drafter."""
    resting: float = 0.0
    """Those that have a drafter which their target told to rest."""
