"""Sessions that wait for their grammar: nothing is computed for them meanwhile, and nobody else waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.grammar import COMPILE_SECONDS, Compiled, Constraint, GrammarError, Grammars
from speculation.messages import Open

POLL_SECONDS = 0.002
"""How often a worker that has nothing else to do looks whether a grammar is ready."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _Wait:
    opened: Open
    grammar: Future[Compiled]
    until: float


class Compiling(Generic[S]):
    """The waiting sessions of one worker. For its computing thread, but for ``len``."""

    def __init__(self, grammars: Callable[[], Grammars]) -> None:
        """``grammars`` is called when the first session comes that has one."""
        self._make = grammars
        self._grammars: Grammars | None = None
        self._waits: dict[S, _Wait] = {}
        self.due: float | None = None
        """When to look again; None: nobody waits."""

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, session: S) -> bool:
        return session in self._waits

    def add(self, session: S, opened: Open, now: float) -> None:
        """Have the grammar of a session compiled; ``now`` in seconds on any clock."""
        self._grammars = self._grammars or self._make()
        self._waits[session] = _Wait(opened, self._grammars.compiled(opened.extras.grammar), now + COMPILE_SECONDS)
        self.due = now

    def remove(self, session: S) -> bool:
        """Forget a session; False if it does not wait."""
        return self._waits.pop(session, None) is not None

    def ready(self, now: float) -> list[tuple[S, Constraint | GrammarError]]:
        """The sessions that need not wait any longer: with what constrains them, or why nothing can."""
        over: list[tuple[S, Constraint | GrammarError]] = []
        for session, wait in self._waits.items():
            if wait.grammar.done():
                over.append((session, _outcome(wait)))
            elif now >= wait.until:
                assert self._grammars is not None
                self._grammars.give_up()
                over.append((session, GrammarError(f"the grammar takes more than {COMPILE_SECONDS:g} s to compile")))
        for session, _ in over:
            del self._waits[session]
        self.due = now + POLL_SECONDS if self._waits else None
        return over


def _outcome(wait: _Wait) -> Constraint | GrammarError:
    try:
        return Constraint(wait.grammar.result(), wait.opened.limits.stop_tokens)
    except GrammarError as error:
        return error
