"""What a draft worker counts, and tells with every heartbeat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftCounters:
    """Monotone totals since the start."""

    steps: int = 0
    step_microseconds: int = 0
    computed: int = 0
    reused: int = 0
    """Tokens taken over from the cache instead of being computed."""
    guessed: int = 0
    """Guesses computed by staged drafting ..."""
    followed: int = 0
    """... and those that the draft model drew itself, so that they count as drafts that were expanded."""
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    lost: int = 0
    asked: int = 0
    """Lead that targets asked for, added up at every verification ..."""
    delivered: int = 0
    """... and what there was of it by then."""
    features: int = 0
    """Tokens of which features came, for an EAGLE head."""
    features_late: int = 0
    """Messages with features of a session that is not open here, or was open under that epoch."""
    features_refused: int = 0
    """Messages with features that are none for this head: of another one, of another size, no numbers."""
