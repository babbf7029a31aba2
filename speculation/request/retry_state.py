"""How long one session waits for a target, how often it tries and which ones not, and when it is given up.

A session that targets fail at is not retried for ever: :class:`SessionLimits`. Nor is one that ends them: whether it
does is not known here, but across sessions (see :mod:`speculation.request.poison_detector`). A committed token forgives
everything, so a long life is not cut short by what has long been overcome. Knows no clock: ``now`` is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation import noise
from speculation.events import Fail, FailureCode, PeerId


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
        """``seed``: see :class:`Pauses`."""
        self._bounds = bounds
        self._pauses = Pauses(bounds.backoff, bounds.longest_backoff, seed)
        self._fruitless = self._stalls = 0
        self._searching_since: float | None = None
        self._last_progress = 0.0
        self.crowded = False
        """Whether it was a lack of room that last ended an opening."""
        self.avoid: frozenset[PeerId] = frozenset()
        """Targets not to be asked now."""

    def progress(self, now: float) -> None:
        """A token was committed."""
        self._last_progress, self._stalls, self._fruitless, self.avoid = now, 0, 0, frozenset()
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
        if self.crowded and begun and not self.avoid:
            self.end_search()  # whoever was full is gone: that is another wait
            self.begin_search(now)
        if self._searching_since is None or now < self._searching_since + self._longest_search(begun=begun):
            return None
        if not self.crowded:
            return Fail(FailureCode.UNAVAILABLE, "no target worker is available")
        return None if begun else Fail(FailureCode.OVERLOADED, "all target workers are full; try again later")

    def ask_again_at(self, now: float) -> float:
        """When to look for a target again; then any will do."""
        self.avoid = frozenset()
        return now + self.pause()

    def pause(self) -> float:
        """How long to wait before a target is looked for again."""
        return self._pauses.next()

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
        return float(self._last_progress + self._bounds.stall_timeout * 2**self._stalls)

    @property
    def was_silent_before(self) -> bool:
        """Whether the last silence was not the first in a row."""
        return self._stalls > 1

    def silence(self) -> Fail | None:
        """Silence has lasted too long: why to give up, if that was once too often in a row."""
        self._stalls += 1
        if self._stalls >= self._bounds.silences:
            return Fail(FailureCode.FAULTY, f"given up after targets said nothing {self._stalls} times in a row")
        self.end_search()
        return None

    def _longest_search(self, *, begun: bool) -> float:
        longest = self._bounds.begun_timeout if begun else self._bounds.placement_timeout
        return longest if self.crowded else self._bounds.unavailable_timeout or longest
