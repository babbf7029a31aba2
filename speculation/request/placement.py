"""How a session comes to workers: how long it waits for a target and how often it tries, and which drafter it has.

A session that targets fail at is not retried for ever: :class:`SessionLimits`. Nor is one that ends them: whether it
does is not known here, but across sessions (see :mod:`speculation.request.poison_detector`). A committed token forgives
everything, so a long life is not cut short by what has long been overcome; but what a target commits while it drains
forgives none of those that the session could not move to.

Drafters are optional at every moment, so nothing here ever delays a target for one. A drafter whose messages break the
protocol is struck; struck often enough, it is never asked again. One that was full is asked again after a while, and
one that keeps losing the thread is given up until another comes.

Knows no clock: ``now`` is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from speculation import noise
from speculation.events import Effect, Fail, FailureCode, PeerId, Place, Relay, Role, Send
from speculation.messages import Close, Proposal, RefusalCode, Rule, SessionId, Source, Speculation, Verification


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds on waiting and retrying, in seconds and counts."""

    fruitless_openings: int = 3
    """Openings in a row that a target ended, without a token, with a fault in this session alone."""
    draft_openings: int = 3
    """Openings at drafters in a row without a proposal, before this session goes on without."""
    draft_strikes: int = 3
    """Messages of one drafter that break the protocol, before this session is done with it."""
    placement_timeout: float = 30.0
    """How long a target is looked for ..."""
    begun_timeout: float = 120.0
    """... and how long by a text that has begun: a worker that is started again may have to load its model first."""
    unavailable_timeout: float = 0.0
    """How long by either while there is none, full ones apart; 0: as long as that."""
    backoff: float = 0.2
    """First pause before a target is looked for again. It doubles each time, and is cut by up to half, by chance."""
    longest_backoff: float = 2.0
    draft_backoff: float = 1.0
    """First pause before drafters that were all full are asked again."""
    longest_draft_backoff: float = 10.0
    max_migration_lag: int = 8
    """Tokens that a target may have to compute when a session moves to it from one that drains ..."""
    max_prefills: int = 5
    """... unless it has been asked to compute more this often."""
    stall_timeout: float = 90.0
    """Silence after which a running session is opened again (doubles each time in a row) ..."""
    silences: int = 5
    """... and how many in a row end it."""


class Pauses:
    """Pauses that double; each is cut by up to half, by chance, so that no two sessions keep step."""

    def __init__(self, first: float, longest: float, seed: int) -> None:
        """``first``, ``longest`` in seconds; ``seed`` tells two sessions apart."""
        self._first, self._longest, self._seed = first, longest, seed
        self._pauses = self._draws = 0

    def next(self) -> float:
        """How long to wait this time."""
        longest = min(self._first * 2 ** min(self._pauses, 30), self._longest)
        self._pauses += 1
        self._draws += 1
        chance = noise.uniform(noise.bits(noise.key(self._seed, self._draws), 0))
        return float(longest * (1.0 - chance / 2))

    def start_over(self) -> None:
        """The next one is the first again."""
        self._pauses = 0


class RetryState:
    """What a session has waited for and tried since it last committed a token."""

    def __init__(self, bounds: SessionLimits, seed: int) -> None:
        self._bounds = bounds
        self._pauses = Pauses(bounds.backoff, bounds.longest_backoff, seed)
        self._moving = Pauses(bounds.backoff, bounds.longest_backoff, seed)  # the same, where it is to leave a target
        self._fruitless = self.stalls = 0  # openings in a row that came to nothing, and silences
        self._searching_since: float | None = None
        self._last_progress = 0.0
        self.crowded = False
        """Whether it was a lack of room that last ended an opening."""
        self.avoid: frozenset[PeerId] = frozenset()
        """Targets not to be asked now."""
        self.avoid_moving: frozenset[PeerId] = frozenset()
        """Those not to be asked now to take over from one that drains."""

    def progress(self, now: float) -> None:
        """A token was committed."""
        self._last_progress, self.stalls, self._fruitless, self.avoid = now, 0, 0, frozenset()
        self._pauses.start_over()
        self.end_search()

    def end_search(self) -> None:
        """The search for a target is over, or starts for another reason: its deadline is forgotten."""
        self._searching_since, self.crowded = None, False

    def refused(self, *, full: bool) -> None:
        """The target that was found takes no more, as it is full or about to go."""
        if full and not self.crowded:
            self.end_search()  # for there are targets: from now on it waits for room
        self.crowded = full

    def opened(self, now: float) -> None:
        """A target was found; it may still refuse."""
        self._last_progress = now
        self.end_move()

    def end_move(self) -> None:
        """It has left a target that drains, or is to stay there."""
        self.avoid_moving = frozenset()
        self._moving.start_over()

    def move_failed(self, peer: PeerId) -> float:
        """It could not move there: how long to wait before another is looked for."""
        self.avoid |= {peer}
        self.avoid_moving |= {peer}
        return self._moving.next()

    def begin_search(self, now: float) -> None:
        """A target is looked for."""
        if self._searching_since is None:
            self._searching_since = now

    def none_found(self, now: float, *, queued: bool, begun: bool) -> Fail | None:
        """There is no target now: why to give up, if so. What was begun waits while targets are full.

        ``queued``: there are some, and the session's turn will come.
        """
        if queued:
            self._searching_since = now
            return None
        if self.crowded and begun:
            self.end_search()  # whoever was full is gone: that is another wait
            self.begin_search(now)
        longest = self._bounds.begun_timeout if begun else self._bounds.placement_timeout
        if not self.crowded and self._bounds.unavailable_timeout:
            longest = self._bounds.unavailable_timeout
        if self._searching_since is None or now < self._searching_since + longest:
            return None
        if not self.crowded:
            return Fail(FailureCode.UNAVAILABLE, "no target worker is available")
        return None if begun else Fail(FailureCode.OVERLOADED, "all target workers are full; try again later")

    def pause(self, *, moving: bool) -> float:
        """How long to wait before a target is looked for again, be it to move to; then any will do."""
        self.avoid = self.avoid_moving = frozenset()
        return (self._moving if moving else self._pauses).next()

    def fault(self, why: str) -> Fail | None:
        """An opening ended with a fault of the session's own: why to give up, if these were too many in a row."""
        self._fruitless += 1
        if self._fruitless >= self._bounds.fruitless_openings:
            text = f"given up after {self._fruitless} openings in a row that ended without a token; the last: {why}"
            return Fail(FailureCode.FAULTY, text)
        self.end_search()
        return None

    @property
    def stalled_at(self) -> float:
        """When silence has lasted too long."""
        return float(self._last_progress + self._bounds.stall_timeout * 2**self.stalls)

    def silence(self) -> Fail | None:
        """Silence has lasted too long: why to give up, if that was once too often in a row."""
        self.stalls += 1
        if self.stalls >= self._bounds.silences:
            return Fail(FailureCode.FAULTY, f"given up after targets said nothing {self.stalls} times in a row")
        self.end_search()
        return None


NOBODY: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Opening:
    """A session as opened at one worker."""

    peer: PeerId
    epoch: int


def closed(session: SessionId, opening: Opening | None) -> list[Effect]:
    """Have the worker forget it, if it is open at one."""
    return [] if opening is None else [Send(opening.peer, Close(session, opening.epoch))]


class Drafting:
    """The drafter of one session, if it has one, and what it knows of others."""

    def __init__(self, session: SessionId, speculation: Speculation, bounds: SessionLimits) -> None:
        self.opening: Opening | None = None
        self.strikes: dict[PeerId, list[str]] = {}
        """What drafters did against the protocol."""
        self.again_at: float | None = None
        """When drafters that were full are to be asked again."""
        self._session, self._speculation, self._bounds = session, speculation, bounds
        self._avoid = NOBODY
        self._openings = 0  # in a row without a proposal
        self._pauses = Pauses(bounds.draft_backoff, bounds.longest_draft_backoff, session)

    @property
    def wanted(self) -> bool:
        """Whether the session allows one, and has not opened too many in vain."""
        allowed = self._speculation.takes(Source.DRAFT)
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
        return closed(self._session, opening)

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
