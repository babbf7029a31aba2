"""How long one session waits for a target, and how often it tries: bounds, pauses, and what progress forgives.

A committed token forgives everything, so a long life is not cut short by what has long been overcome. Knows no clock:
``now`` is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from speculation import noise


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
        self._give_up_at: float | None = None
        self._last_progress = 0.0
        self.crowded = False
        """Whether it was a lack of room that last ended an opening."""

    def progress(self, now: float) -> None:
        """A token was committed."""
        self._last_progress, self._stalls, self._fruitless = now, 0, 0
        self._pauses.start_over()
        self.end_search()

    def end_search(self) -> None:
        """The search for a target is over, or starts for another reason: its deadline is forgotten."""
        self._give_up_at, self.crowded = None, False

    def opened(self, now: float) -> None:
        """A target was found; it may still refuse."""
        self._last_progress = now

    def begin_search(self, now: float, *, begun: bool) -> None:
        """A target is looked for, by a text that has ``begun`` or not."""
        if self._give_up_at is None:
            self.restart_search(now, begun=begun)

    def restart_search(self, now: float, *, begun: bool) -> None:
        """Wait as long as at first, from now."""
        self._give_up_at = now + (self._bounds.begun_timeout if begun else self._bounds.placement_timeout)

    def search_is_over(self, now: float) -> bool:
        """Whether a target has been looked for long enough."""
        return self._give_up_at is not None and now >= self._give_up_at

    def pause(self) -> float:
        """How long to wait before a target is looked for again."""
        return self._pauses.next()

    def count_fault(self) -> int | None:
        """An opening ended with a fault of the session's own: how many in a row, if these are too many."""
        self._fruitless += 1
        return self._fruitless if self._fruitless >= self._bounds.fruitless_openings else None

    @property
    def stalled_at(self) -> float:
        """When silence has lasted too long."""
        return float(self._last_progress + self._bounds.stall_timeout * 2**self._stalls)

    def stall(self) -> int:
        """Silence has lasted too long: how often in a row."""
        self._stalls += 1
        return self._stalls
