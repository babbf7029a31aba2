"""A session that a target worker holds: what is decided of it, what of it is cached, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.sampling.sampling import token_logprobs
from engine.shaping.grammar import GrammarConstraint, MaskBudget
from engine.shaping.shaping import Shaping
from speculation.drafting.state_drafts import StateDrafts
from speculation.messages import RefusalCode, Refused, TokenLogprobs, Verification
from speculation.verifying.target_session import TargetSession
from target_service.counters import TargetCounters
from target_service.scheduler import Rank, rank
from transport.session_log import SessionLog
from transport.tracing import SequenceTimings


@dataclass(eq=False, slots=True)
class TargetSequence:
    """Implements :class:`target_service.scheduler.Job`. Nothing of it is cached while it waits."""

    link: Hashable
    """Where it was opened."""
    session: TargetSession
    cache: KVCache
    arrived: tuple[float, int]
    """When it came, in seconds, and how many had come before."""
    counters: TargetCounters
    log: SessionLog
    timings: SequenceTimings
    shaping: Shaping | None = None
    """What it does to its logits, if anything."""
    constraint: GrammarConstraint | None = None
    """Its grammar, if it has one: known from when it is compiled."""
    cached: CachedSequence = field(init=False)
    medusa: StateDrafts | None = None
    """What Medusa heads draft for it, if they do."""
    hidden_D: Tensor | None = None
    """What they read next: the target's hidden state where its last token was drawn, until they have read it."""
    reusable: Callable[[int], int] | None = None
    """How much of a cached prefix of so many tokens may be taken over, if what drafts here has a say in it."""
    computed: int = 0
    """Committed tokens that were computed for it since it was opened."""
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    waits_since: float | None = None
    """When it began to wait for drafts, in seconds, if it does."""

    def __post_init__(self) -> None:
        self.cached = self._empty()

    def _empty(self) -> CachedSequence:
        return self.cache.sequence(self.session.tokens, self.session.opened.request_options.cache_scope)

    @property
    def rank(self) -> Rank:
        """Its place in the order of all sessions."""
        return rank(*self.arrived, self.priority)

    @property
    def priority(self) -> int:
        """As the request has it."""
        return self.session.opened.priority

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the cache does not hold: always at least the last one."""
        return len(self.session.tokens) - self.cached.length

    @property
    def caller(self) -> Hashable:
        """Who pays for what its grammar takes: the API key it came with; without one it is by itself."""
        return self.session.opened.request_options.scope or self

    def blocks_needed(self, count: int) -> int:
        """Blocks to be taken from the cache before ``count`` more tokens fit."""
        return self.cached.blocks_needed(count)

    def constrain(self, constraint: GrammarConstraint, vocabulary: int) -> str:
        """Hold the text, as far as it has come too, to a grammar; returns why that cannot be, if so."""
        self.constraint = self.session.constraint = constraint
        self.shaping = Shaping(self.session.opened, self.session.tokens, vocabulary, constraint)
        return self.follow()

    def follow(self) -> str:
        """Take in what was committed; returns why the grammar lets the text not go on, if so."""
        if self.constraint is None or self.shaping is None:
            return ""
        self.shaping.follow()
        return self.constraint.error

    def charge(self, budget: MaskBudget, now: float) -> bool:
        """Have its caller pay for what its grammar took since it last did; whether it has a grammar."""
        if self.constraint is None:
            return False
        budget.charge(self.caller, self.constraint.excess_seconds, now)
        self.constraint.excess_seconds = 0.0
        return True

    def reuse(self) -> None:
        """Take over from the cache what others have computed of it, as long as it does not decode.

        A prompt that is to be told about is computed wholly.
        """
        if self.num_uncomputed_tokens > 1 and not self.missing_prompt_logprobs:
            before = self.cached.length
            if self.cached.reuse() and self.reusable is not None:
                self.cached.truncate(max(before, self.reusable(self.cached.length)))
            self.counters.reused += self.cached.length - before

    def preempt(self) -> None:
        """Give all blocks back; what was cached is computed again later."""
        self.cached.free()
        self.cached = self._empty()

    @property
    def missing_prompt_logprobs(self) -> range:
        """Positions of the prompt's tokens whose log-probabilities are asked for and not known yet.

        With a text that was begun elsewhere they were told there.
        """
        opened = self.session.opened
        if (
            opened.request_options.prompt_logprobs is None
            or opened.generated
            or len(self.session.tokens) > len(opened.tokens)
        ):
            return range(0)
        return range(1 + len(self._prompt_logprobs), len(opened.tokens))

    def note_prompt(self, logits_PV: Tensor) -> None:
        """Take in the rows that say how likely the next untold tokens were; P of them, V the vocabulary."""
        opened, first, count = self.session.opened, self.missing_prompt_logprobs.start, len(logits_PV)
        if not count:
            return
        top_logprobs = [opened.request_options.prompt_logprobs or 0] * count
        self._prompt_logprobs += token_logprobs(logits_PV, opened.tokens[first : first + count], top_logprobs)

    def said(self, verification: Verification, started: float, ended: float) -> Verification:
        """What is sent of it, with the times of its step; the first one also speaks of the cache and of the prompt."""
        opened = len(self.session.opened.tokens)
        waited = 0.0 if self.waits_since is None else started - self.waits_since
        self.waits_since = None
        timed = replace(verification, took_us=_microseconds(ended - started), waited_us=_microseconds(waited))
        if verification.position > opened:
            return timed
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return replace(timed, cached=max(opened - self.computed, 0), prompt_logprobs=prompt_logprobs)

    def refused(self, code: RefusalCode, message: str) -> tuple[Hashable, Refused]:
        """What tells the router that this session is given up."""
        opened = self.session.opened
        return self.link, Refused(opened.session, opened.epoch, code, message)


def _microseconds(seconds: float) -> int:
    return max(round(seconds * 1e6), 0)
