"""Which drafter a session has: which it is done with, when it asks for another, and what drafters must not say.

Drafters are optional at every moment, so nothing here ever delays a target. A drafter whose messages break the protocol
is struck; struck often enough, it is never asked again. One that was full is asked again after a while, and one that
keeps losing the thread is given up until another comes. Knows no clock: ``now`` is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from speculation.events import Effect, PeerId, Place, Relay, Role, Send
from speculation.messages import Close, Proposal, RefusalCode, Rule, SessionId, Source, Speculation, Verification
from speculation.request.retry_state import Pauses, SessionLimits

NOBODY: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Opening:
    """A session as opened at one worker."""

    peer: PeerId
    epoch: int

    def close(self, session: SessionId) -> Send:
        """Have the worker forget it."""
        return Send(self.peer, Close(session, self.epoch))


class Drafting:
    """The drafter of one session, if it has one, and what it knows of others."""

    def __init__(self, session: SessionId, speculation: Speculation, bounds: SessionLimits) -> None:
        """No drafter is known."""
        self.opening: Opening | None = None
        """Where it is open."""
        self.strikes: dict[PeerId, list[str]] = {}
        """What drafters did against the protocol."""
        self.again_at: float | None = None
        """When drafters that were full are to be asked again."""
        self._session, self._speculation, self._bounds = session, speculation, bounds
        self._avoid = NOBODY
        self._openings = 0
        """In a row without a proposal."""
        self._pauses = Pauses(bounds.draft_backoff, bounds.longest_draft_backoff, session)

    @property
    def wanted(self) -> bool:
        """Whether the session allows one, and has not opened too many in vain."""
        allowed = self._speculation.enabled and Source.DRAFT in self._speculation.sources
        return allowed and self._openings < self._bounds.draft_openings

    @property
    def quarantined(self) -> frozenset[PeerId]:
        """Drafters this session is done with."""
        limit = self._bounds.draft_strikes
        return frozenset(peer for peer, whys in self.strikes.items() if len(whys) >= limit)

    @property
    def unwanted(self) -> frozenset[PeerId]:
        """Drafters not to be asked now."""
        return self._avoid | self.quarantined

    def at(self, peer: PeerId) -> bool:
        """Whether it is open there."""
        return self.opening is not None and self.opening.peer == peer

    def stays(self, draining: frozenset[PeerId]) -> bool:
        """Whether it has one that is not about to go."""
        return self.opening is not None and self.opening.peer not in draining

    def place(self, draining: frozenset[PeerId]) -> list[Effect]:
        """Ask for one where none stays and one is wanted."""
        if self.stays(draining) or not self.wanted:
            return []
        return [Place(Role.DRAFT, self.unwanted | draining)]

    def takes(self, peer: PeerId, draining: frozenset[PeerId]) -> bool:
        """Whether the one that was found is of use by now."""
        return not self.stays(draining) and peer not in self.unwanted | draining

    def opened(self, opening: Opening) -> None:
        """It is open at a drafter, and at no other."""
        self._openings += 1
        self.opening = opening

    def close(self) -> list[Effect]:
        """It is open at none any more."""
        opening, self.opening = self.opening, None
        return [] if opening is None else [opening.close(self._session)]

    def relay(self, verification: Verification) -> list[Effect]:
        """Tell the drafter, if there is one, what the target decided.

        Without logprobs, which are long and for clients only; unless it was passed on already as it came.
        """
        drafter = self.opening
        if drafter is None:
            return []
        if verification.passed == drafter.epoch or not (verification.logprobs or verification.prompt_logprobs):
            return [Relay(drafter.peer, verification, drafter.epoch)]
        return [Send(drafter.peer, replace(verification, epoch=drafter.epoch, logprobs=(), prompt_logprobs=()))]

    def proposed(self) -> None:
        """The drafter has kept the thread."""
        self._openings = 0
        self._pauses.start_over()

    def objection(self, proposal: Proposal) -> str | None:
        """What a drafter that was told this session's speculation should not have sent, if so."""
        if bool(proposal.q) is not (self._speculation.rule is Rule.REJECTION):
            return f"a proposal {'with' if proposal.q else 'without'} q under the rule {self._speculation.rule}"
        if self._speculation.chains and len(set(proposal.parents)) < len(proposal.parents):
            return "a proposal that branches where only chains are allowed"
        return None

    def struck(self, why: str) -> bool:
        """The drafter broke the protocol: whether this was once too often."""
        assert self.opening is not None
        self.strikes.setdefault(self.opening.peer, []).append(why)
        return self.opening.peer in self.quarantined

    def refused(self, now: float, code: RefusalCode) -> None:
        """The drafter does not hold the session."""
        assert self.opening is not None
        peer, self.opening = self.opening.peer, None
        if code is not RefusalCode.UNKNOWN_SESSION:  # which it has only forgotten
            self._avoid |= {peer}
        if code is RefusalCode.OVERLOADED:
            self._openings = max(self._openings - 1, 0)
            self.again_at = now + self._pauses.next()

    def came(self) -> None:
        """There is a new one, or one that may take the session again."""
        self._avoid = NOBODY
        self._openings = min(self._openings, self._bounds.draft_openings - 1)

    def due(self, now: float) -> bool:
        """Whether those that were full are to be asked; then they no longer count as full."""
        if self.again_at is None or now < self.again_at:
            return False
        self.again_at, self._avoid = None, NOBODY
        return True
