"""Where a request's session is in its life, and the one table of how it may get from there to where.

Whatever happens to a session is an event of some kind; a message of a worker counts as the kind of that message. For
each state the table has the kinds that can happen there and, for each, the states in which the session may be then.
Anything else is a fault of this program, not of a worker, and raises :class:`IllegalTransition`.

``python -m speculation.request.states`` writes what docs/protocol.md shows of the table.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from speculation.events import (
    Available,
    Draining,
    Event,
    Faulted,
    Lost,
    Placed,
    PoisonRequest,
    Received,
    Start,
    Stays,
    Stop,
    Tick,
)
from speculation.messages import FromWorker, Load, Proposal, Refused, SessionId, Verification, Welcome

HISTORY = 16
"""Events that a session remembers for the error."""

Kind = type[Event] | type[FromWorker]
"""What sort of thing happened."""


class Phase(Enum):
    """What of a session's state others need to know."""

    NEW = auto()
    PLACING = auto()
    RUNNING = auto()
    ENDED = auto()


class SessionState(Enum):
    """Where a session is in its life."""

    NEW = ("new", Phase.NEW, "it has not begun")
    PLACING = ("placing", Phase.PLACING, "it is open nowhere and waits for a target")
    DECODING = ("decoding", Phase.RUNNING, "it is open at a target, and perhaps at a drafter")
    LEAVING = ("leaving", Phase.RUNNING, "its target drains, and it looks for another one to move to")
    MIGRATING = ("migrating", Phase.RUNNING, "it is open there as well, which computes what is committed")
    ENDED = ("ended", Phase.ENDED, "it is open nowhere, and what comes is not heard")

    __hash__ = object.__hash__  # Enum's own is slow, and the table is asked at every message

    def __init__(self, label: str, phase: Phase, meaning: str) -> None:
        self.label, self.phase, self.meaning = label, phase, meaning


ANSWERS: tuple[Kind, ...] = (Placed, PoisonRequest)
MESSAGES: tuple[Kind, ...] = (Verification, Proposal, Refused, Faulted, Load, Welcome)
NEWS: tuple[Kind, ...] = (Lost, Draining, Stays, Available, Tick)
KINDS: tuple[Kind, ...] = (Start, *ANSWERS, *MESSAGES, *NEWS, Stop)


def _unmoved(state: SessionState, *kinds: Iterable[Kind]) -> dict[Kind, frozenset[SessionState]]:
    return {kind: frozenset({state}) for group in kinds for kind in group}


def _to(*states: SessionState) -> frozenset[SessionState]:
    return frozenset(states)


def _table() -> Mapping[SessionState, Mapping[Kind, frozenset[SessionState]]]:
    new, placing, decoding, leaving, migrating, ended = SessionState
    return {
        new: _unmoved(new, NEWS) | {Start: _to(placing), Stop: _to(ended)},
        placing: _unmoved(placing, MESSAGES, NEWS)
        | {Placed: _to(placing, decoding, leaving, ended), PoisonRequest: _to(ended), Stop: _to(ended)},
        decoding: _unmoved(decoding, ANSWERS, MESSAGES, NEWS)
        | dict.fromkeys((Verification, Refused, Faulted, Tick), _to(decoding, placing, ended))
        | {Lost: _to(decoding, placing), Draining: _to(decoding, leaving), Stop: _to(ended)},
        leaving: _unmoved(leaving, ANSWERS, MESSAGES, NEWS)
        | dict.fromkeys((Verification, Refused, Faulted, Tick), _to(leaving, placing, ended))
        | {Placed: _to(leaving, migrating), Lost: _to(leaving, placing)}
        | {Stays: _to(leaving, decoding), Stop: _to(ended)},
        migrating: _unmoved(migrating, ANSWERS, MESSAGES, NEWS)
        | dict.fromkeys((Refused, Faulted), _to(migrating, leaving, placing, ended))
        | {Verification: _to(migrating, decoding, leaving, placing, ended), Tick: _to(migrating, placing, ended)}
        | {Lost: _to(migrating, decoding, leaving), Draining: _to(migrating, leaving)}
        | {Stays: _to(migrating, decoding), Stop: _to(ended)},
        ended: {},
    }


TRANSITIONS = _table()
"""By state and by what happens: the states that a session may be in afterwards."""


class IllegalTransition(AssertionError):
    """A session was told, or did, what the table does not have. Ends that session alone."""

    def __init__(self, session: SessionId, what: str, history: Iterable[tuple[str, SessionState]]) -> None:
        """``history``: kinds of the latest events, each with the state that it met, the last one included."""
        self.history = tuple(history)
        before = ", ".join(f"{kind} ({state.label})" for kind, state in self.history)
        super().__init__(f"session {session} {what}; its latest events, and when they came: {before}")


class Lifecycle:
    """The state of one session, and what it lately was through."""

    def __init__(self, session: SessionId) -> None:
        """``session`` is for messages."""
        self.state = SessionState.NEW
        self._session = session
        self._history: deque[tuple[Kind, SessionState]] = deque(maxlen=HISTORY)

    def begin(self, event: Event) -> frozenset[SessionState]:
        """An event comes: the states that may follow. Raises :class:`IllegalTransition` if it cannot come now."""
        kind: Kind = type(event.message) if type(event) is Received else type(event)
        state = self.state
        self._history.append((kind, state))
        allowed = TRANSITIONS[state].get(kind)
        if allowed is None:
            raise self._illegal(f"was told {kind.__name__} while {state.label}")
        return allowed

    def end(self, allowed: frozenset[SessionState]) -> None:
        """The event has been dealt with. Raises :class:`IllegalTransition` where that led to none of ``allowed``."""
        if self.state not in allowed:
            kind, state = self._history[-1]
            raise self._illegal(f"went from {state.label} to {self.state.label} on {kind.__name__}")

    def _illegal(self, what: str) -> IllegalTransition:
        return IllegalTransition(self._session, what, ((kind.__name__, state) for kind, state in self._history))


def page_section() -> str:
    """The table as docs/protocol.md shows it: what each state means, and a diagram of the ways between them."""
    meanings = [f"| {state.label} | {state.meaning} | {_unmoved_by(state)} |" for state in SessionState]
    arrows = [
        f"    {state.label} --> {after.label}: {', '.join(kinds)}"
        for state, row in TRANSITIONS.items()
        for after in SessionState
        if after is not state and (kinds := [kind.__name__ for kind in KINDS if after in row.get(kind, ())])
    ]
    head = ["| state | what it means | what may leave it as it is |", "|---|---|---|"]
    ends = f"    [*] --> {SessionState.NEW.label}", f"    {SessionState.ENDED.label} --> [*]"
    diagram = ["```mermaid", "stateDiagram-v2", ends[0], *arrows, ends[1], "```"]
    return "\n".join([*head, *meanings, "", *diagram])


def _unmoved_by(state: SessionState) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind in KINDS if state in TRANSITIONS[state].get(kind, ()))


if __name__ == "__main__":
    sys.stdout.write(page_section() + "\n")
