"""What a router has counted, its sessions included."""

from __future__ import annotations

from dataclasses import dataclass

from speculation.request.session import Session


@dataclass(slots=True)
class Totals:
    """Monotone totals since the start. What sessions count themselves is added when they end."""

    sessions: int = 0
    committed: int = 0
    accepted: int = 0
    offered: int = 0
    reopened: int = 0
    moved: int = 0
    """Sessions that went to another target without a fault, each time."""
    condemned: int = 0
    """Sessions failed because targets died of them."""
    failed: int = 0
    malformed: int = 0
    """Messages of workers that break the protocol; all were dropped."""
    stale: int = 0
    """Messages of workers that came too late to matter, or about no session known here."""
    strikes: int = 0
    """Malformed messages held against a drafter by its session."""
    quarantined: int = 0
    """Drafters that a session was done with; each counts once for every such session."""

    def take(self, session: Session) -> None:
        """Add what a session counts itself."""
        self.reopened += session.reopened
        self.moved += session.moved
        self.stale += session.stale
        self.strikes += sum(map(len, session.strikes.values()))
        self.quarantined += len(session.quarantined)
