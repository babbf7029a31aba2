"""Sessions that wait for their grammar: nothing is computed for them meanwhile, and nobody else waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from engine.shaping.grammar import COMPILE_SECONDS, Compiled, GrammarConstraint, GrammarError, Grammars, PassingError
from speculation.messages import Open, Token

POLL_SECONDS = 0.002
"""How often a worker that has nothing else to do looks whether a grammar is ready."""

S = TypeVar("S")


class Compiling(Generic[S]):
    """The waiting sessions of one worker. For its computing thread, but for ``len``."""

    def __init__(self, grammars: Callable[[], Grammars]) -> None:
        """``grammars`` is called when the first session comes that has one."""
        self._make = grammars
        self._grammars: Grammars | None = None
        self._waits: dict[S, tuple[Future[Compiled], frozenset[Token]]] = {}
        """What each waits for, and its stop tokens."""
        self._at_work: tuple[Future[Compiled] | None, float] = (None, 0.0)
        """What is being compiled, and since when that is known."""
        self.due: float | None = None
        """When to look again; None: nobody waits."""

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, session: S) -> bool:
        return session in self._waits

    def add(self, session: S, opened: Open, now: float) -> None:
        """Have the grammar of a session compiled; ``now`` in seconds on any clock."""
        self._grammars = self._grammars or self._make()
        grammar = self._grammars.compiled(opened.request_options.grammar)
        self._waits[session] = grammar, opened.limits.stop_tokens
        self._note(self._grammars, now)
        self.due = now

    def remove(self, session: S) -> bool:
        """Forget a session; False if it does not wait."""
        return self._waits.pop(session, None) is not None

    def ready(self, now: float) -> list[tuple[S, GrammarConstraint | GrammarError]]:
        """The sessions that need not wait any longer: with what constrains them, or why nothing can."""
        over: list[tuple[S, GrammarConstraint | GrammarError]] = []
        left = self._given_up(now)
        for session, (grammar, stop_tokens) in self._waits.items():
            if grammar.done():
                over.append((session, _outcome(grammar, stop_tokens)))
            elif grammar in left:
                over.append((session, PassingError(f"the grammar takes more than {COMPILE_SECONDS:g} s to compile")))
        for session, _ in over:
            del self._waits[session]
        self.due = now + POLL_SECONDS if self._waits else None
        return over

    def _given_up(self, now: float) -> frozenset[Future[Compiled]]:
        """What has taken too long by now. A grammar's time begins when the thread comes to it."""
        if self._grammars is None:
            return frozenset()
        self._note(self._grammars, now)
        grammar, since = self._at_work
        if grammar is None or now < since + COMPILE_SECONDS:
            return frozenset()
        left = self._grammars.give_up()
        self._note(self._grammars, now)
        return left

    def _note(self, grammars: Grammars, now: float) -> None:
        """Look what is being compiled."""
        grammar = grammars.at_work
        if grammar is not self._at_work[0]:
            self._at_work = (grammar, now)


def _outcome(grammar: Future[Compiled], stop_tokens: frozenset[Token]) -> GrammarConstraint | GrammarError:
    try:
        return GrammarConstraint(grammar.result(), stop_tokens)
    except GrammarError as error:
        return error
