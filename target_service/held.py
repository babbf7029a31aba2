"""A session that a target worker holds: what is decided of it, what of it is cached, and where it stands."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from engine.kv_cache import CachedSequence, KVCache
from speculation.messages import RefusalCode, Refused, Verification
from speculation.target_session import TargetSession
from target_service.counters import Counters
from target_service.scheduler import Rank, rank


@dataclass(eq=False, slots=True)
class Held:
    """Implements :class:`target_service.scheduler.Job`. Nothing of it is cached while it waits."""

    link: Hashable
    """Where it was opened."""
    session: TargetSession
    cache: KVCache
    arrived: tuple[float, int]
    """When it came, in seconds, and how many had come before."""
    counters: Counters
    cached: CachedSequence = field(init=False)
    computed: int = 0
    """Committed tokens that were fed for it since it was opened."""

    def __post_init__(self) -> None:
        self.cached = self.cache.sequence(self.session.tokens)

    @property
    def rank(self) -> Rank:
        """Its place in the order of all sessions."""
        return rank(*self.arrived, self.priority)

    @property
    def priority(self) -> int:
        """As the request has it."""
        return self.session.opened.priority

    @property
    def uncached(self) -> int:
        """Committed tokens that the cache does not hold: always at least the last one."""
        return len(self.session.tokens) - self.cached.length

    def blocks_needed(self, count: int) -> int:
        """Blocks to be taken from the cache before ``count`` more tokens fit."""
        return self.cached.blocks_needed(count)

    def reuse(self) -> None:
        """Take over from the cache what others have computed of it, as long as it does not decode."""
        if self.uncached > 1:
            self.counters.reused += self.cached.reuse()

    def give_way(self) -> None:
        """Give all blocks back; what was cached is computed again later."""
        self.cached.free()
        self.cached = self.cache.sequence(self.session.tokens)

    def said(self, verification: Verification) -> Verification:
        """What is sent of it: the first one also says how much was found in the cache."""
        opened = len(self.session.opened.tokens)
        if verification.position > opened:
            return verification
        return replace(verification, cached=max(opened - self.computed, 0))

    def refused(self, code: RefusalCode, message: str) -> tuple[Hashable, Refused]:
        """What tells the router that this session is given up."""
        opened = self.session.opened
        return self.link, Refused(opened.session, opened.epoch, code, message)
