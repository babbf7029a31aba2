"""Which texts a target keeps to draft from, and who may draft from them; how is :mod:`.sources.suffix`'s matter.

A text is kept once its session has ended here: finished, or closed by the router, which is how it ends at a stop string
and when the client leaves. What there is by then is the target's own either way. Not kept is what was given up, and
what its router lost or opens again: it is kept, once and whole, where it ends. A text that moves to another target is
closed here too, and kept as far as it came, for as long as this worker still lives. Nothing of it is ever logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from speculation.messages import Open, Rule
from speculation.sources.registry import LocalSource
from speculation.sources.suffix import SuffixLookup, SuffixStore
from speculation.verifying.target_session import TargetSession

IN_STEP = 32
"""Tokens indexed or forgotten in a step, and twice as many as it commits: some 2 us each."""
IN_PAUSE = 256
"""The same while there is nothing to compute, before messages are looked at again."""


class SuffixScope(StrEnum):
    """Whose earlier outputs a session drafts from."""

    KEY = "key"
    """Those of the same API key and ``cache_salt``; requests with neither share theirs."""
    ALL = "all"
    """Everybody's."""
    OFF = "off"
    """Nobody's: none are kept."""


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """How much is kept, and for whom."""

    tokens: int = 0
    """Most tokens kept; 0: none."""
    scope: SuffixScope = SuffixScope.KEY


class SuffixCache:
    """Earlier outputs of a target."""

    def __init__(self, settings: SuffixSettings) -> None:
        """None yet."""
        self._scope = settings.scope
        on = settings.tokens > 0 and settings.scope is not SuffixScope.OFF
        self.store = SuffixStore(settings.tokens) if on else None

    @property
    def busy(self) -> bool:
        """Whether there is something to :meth:`work` at."""
        return self.store is not None and not self.store.idle

    def sources(self, opened: Open) -> list[LocalSource]:
        """What a session can draft with; nothing under the rejection rule (:mod:`speculation.sources.suffix`)."""
        if self.store is None or opened.speculation.rule is Rule.REJECTION:
            return []
        return [SuffixLookup(self.store, self._scope_of(opened))]

    def keep(self, session: TargetSession) -> None:
        """Take in the text of a session that has ended, unless it is not to be remembered."""
        opened = session.opened
        if self.store is not None and opened.speculation.remember:
            self.store.record(self._scope_of(opened), session.tokens, opened.prompt or len(opened.tokens))

    def work(self, max_tokens: int) -> None:
        """Index what was taken in, and forget what there is no room for: up to so many tokens."""
        if self.store is not None:
            self.store.work(max_tokens)

    def validate(self) -> None:
        """See :meth:`transport.worker.Machine.validate`."""
        if self.store is not None:
            self.store.validate()

    def _scope_of(self, opened: Open) -> str:
        return opened.request_options.cache_scope if self._scope is SuffixScope.KEY else ""
