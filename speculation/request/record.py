"""What a session is: its state, its request, its text, where it is open, and what it has counted.

Whatever happens to a session is an event of some kind; a message of a worker counts as the kind of that message. For
each state one table, :data:`TRANSITIONS`, has the kinds that can happen there and, for each, the states in which the
session may be then. Anything else is a fault of this program, not of a worker, and raises :class:`IllegalTransition`.

Others read it here; only :class:`speculation.request.session.Session` changes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple

from speculation import digest as digests
from speculation import events
from speculation.events import Emit, Event, PeerId, StepMetadata
from speculation.messages import Open, Proposal, Refused, SessionId, SessionMessage, Token, Verification
from speculation.request.placement import Drafting, Opening, RetryState, SessionLimits

HISTORY = 16

Kind = type[Event] | type[SessionMessage]


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


ANSWERS: tuple[Kind, ...] = (events.Placed, events.PoisonRequest)
MESSAGES: tuple[Kind, ...] = (Verification, Proposal, Refused, events.Faulted)
NEWS: tuple[Kind, ...] = (events.Lost, events.Draining, events.Stays, events.Available, events.Tick)
KINDS: tuple[Kind, ...] = (events.Start, *ANSWERS, *MESSAGES, *NEWS, events.Stop)


def _unmoved(state: SessionState, *kinds: Iterable[Kind]) -> dict[Kind, frozenset[SessionState]]:
    return {kind: frozenset({state}) for group in kinds for kind in group}


def _to(*states: SessionState) -> frozenset[SessionState]:
    return frozenset(states)


def _table() -> Mapping[SessionState, Mapping[Kind, frozenset[SessionState]]]:
    new, placing, decoding, leaving, migrating, ended = SessionState
    return {
        new: _unmoved(new, NEWS) | {events.Start: _to(placing), events.Stop: _to(ended)},
        placing: _unmoved(placing, MESSAGES, NEWS)
        | {
            events.Placed: _to(placing, decoding, leaving, ended),
            events.PoisonRequest: _to(ended),
            events.Stop: _to(ended),
        },
        decoding: _unmoved(decoding, ANSWERS, MESSAGES, NEWS)
        | dict.fromkeys((Verification, Refused, events.Faulted, events.Tick), _to(decoding, placing, ended))
        | {events.Lost: _to(decoding, placing), events.Draining: _to(decoding, leaving), events.Stop: _to(ended)},
        leaving: _unmoved(leaving, ANSWERS, MESSAGES, NEWS)
        | dict.fromkeys((Verification, Refused, events.Faulted, events.Tick), _to(leaving, placing, ended))
        | {events.Placed: _to(leaving, migrating), events.Lost: _to(leaving, placing)}
        | {events.Stays: _to(leaving, decoding), events.Stop: _to(ended)},
        migrating: _unmoved(migrating, ANSWERS, MESSAGES, NEWS)
        | dict.fromkeys((Refused, events.Faulted), _to(migrating, leaving, placing, ended))
        | {Verification: _to(migrating, decoding, leaving, placing, ended), events.Tick: _to(migrating, placing, ended)}
        | {events.Lost: _to(migrating, decoding, leaving), events.Draining: _to(migrating, leaving)}
        | {events.Stays: _to(migrating, decoding), events.Stop: _to(ended)},
        ended: {},
    }


TRANSITIONS = _table()
"""By state and by what happens: the states that a session may be in afterwards."""


class IllegalTransition(AssertionError):
    """A session was told, or did, what the table does not have. Ends that session alone."""

    def __init__(self, session: SessionId, what: str, history: Iterable[tuple[Kind, SessionState]]) -> None:
        """``history``: the latest events, each with the state that it met, the last one included."""
        self.history = tuple((kind.__name__, state) for kind, state in history)
        before = ", ".join(f"{kind} ({state.label})" for kind, state in self.history)
        super().__init__(f"session {session} {what}; its latest events, and when they came: {before}")


class CommittedText:
    """All tokens of a session that are decided, the prompt included, and what of a verification is new to it.

    Only what connects is committed: a verification that starts beyond the end, or whose digest is not that of the text
    with its tokens, says of another text. So nothing is ever retracted or doubled.
    """

    def __init__(self, prompt: tuple[Token, ...], digest: int | None = None) -> None:
        """``digest``: of the prompt, if it is known: to compute it takes some 0.7 us a token."""
        assert prompt, "a session has at least one token"
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.digest = digests.of(prompt) if digest is None else digest
        """Of all the tokens."""

    @property
    def begun(self) -> bool:
        """Whether anything was generated."""
        return len(self.tokens) > self.prompt_length

    def has(self, verification: Verification) -> bool:
        """Whether nothing that it says is new."""
        return len(self.tokens) - verification.position >= len(verification.tokens)

    def commit(self, verification: Verification) -> Emit | None:
        """Take over what is new and return what to say of it; None, and nothing is taken, if it does not connect."""
        known = len(self.tokens) - verification.position
        fresh = verification.tokens[max(known, 0) :]
        digest = self.digest
        for token in fresh:
            digest = digests.extend(digest, token)
        if known < 0 or digest != verification.digest:
            return None
        first = not self.begun
        self.tokens.extend(fresh)
        self.digest = digest
        accepted, cached = max(verification.accepted - known, 0), verification.cached if first else 0
        offered = verification.offered - verification.accepted + accepted
        metadata = StepMetadata(
            sources=verification.sources[known:],
            refused=verification.refused,
            recovered=verification.recovered,
            logprobs=verification.logprobs[known:],
            prompt_logprobs=verification.prompt_logprobs if first else (),
            took_us=verification.took_us,
            waited_us=verification.waited_us,
        )
        return Emit(fresh, accepted, offered, cached, metadata)

    def validate(self) -> None:
        """Assert that the digest is that of the tokens."""
        assert len(self.tokens) >= self.prompt_length, "a part of the prompt is missing"
        assert self.digest == digests.of(self.tokens), f"the digest is not that of the {len(self.tokens)} tokens"


MAX_AGE_MS = (1 << 32) - 1


class Workers(NamedTuple):
    """Where a session is open."""

    target: PeerId | None
    """The one whose word counts, not one that it will move to."""
    draft: PeerId | None


class SessionRecord:
    """What is known of one choice of one request, and nothing of what becomes of it."""

    def __init__(
        self, request: Open, session_limits: SessionLimits = SessionLimits(), digest: int | None = None
    ) -> None:
        """``request``: as it would be opened first; each opening has its own epoch and age, and the text so far.

        ``digest``: as of a :class:`CommittedText`.
        """
        self.session, self.prompt_length = request.session, len(request.tokens)
        self.reopened = 0
        """How often the target side was opened again after a fault: the number of failovers."""
        self.moved = 0
        """How often it left a target that drains, or went as it was expected to."""
        self.stale = 0
        """Messages dropped because they came too late to matter."""
        self._text = CommittedText(request.tokens, digest)
        self._tokens = self._text.tokens
        self._request, self._bounds = request, session_limits
        self._state = SessionState.NEW
        self._history: deque[tuple[Kind, SessionState]] = deque(maxlen=HISTORY)
        self._epoch = 0
        self._target: Opening | None = None
        self._migration_target: Opening | None = None
        """Opened where the session will move, and not yet prefilled. What it says is not used."""
        self._prefills = 0
        self.drafting = Drafting(request.session, request.speculation, session_limits)
        self._lead: int | None = None
        self._draining: frozenset[PeerId] = frozenset()
        self._retries = RetryState(session_limits, request.session)
        self._wake_at: float | None = None
        self._began = self._now = 0.0

    @property
    def phase(self) -> Phase:
        """Where the session is in its life."""
        return self._state.phase

    @property
    def output(self) -> tuple[Token, ...]:
        """Committed tokens after the prompt."""
        return tuple(self._tokens[self.prompt_length :])

    @property
    def position(self) -> int:
        """How many tokens it has, the prompt included."""
        return len(self._tokens)

    @property
    def end(self) -> int:
        """How many tokens it may have at last, the prompt included."""
        return self._request.limits.end

    @property
    def openings(self) -> tuple[Opening | None, Opening | None]:
        """As what it is open at its target and its drafter."""
        return self._target, self.drafting.opening

    @property
    def workers(self) -> Workers:
        """Where it is open."""
        target, draft = self.openings
        return Workers(target.peer if target else None, draft.peer if draft else None)

    @property
    def undrafted(self) -> bool:
        """Whether it is decoded without a drafter although it allows one."""
        return self.phase is Phase.RUNNING and self.drafting.opening is None and self.drafting.wanted

    @property
    def resting(self) -> bool:
        """Whether its target has no use for its drafter at present."""
        return self.drafting.opening is not None and self._lead == 0

    def validate(self) -> None:
        """Raise AssertionError where this contradicts itself."""
        state, target, draft = self._state, self._target, self.drafting.opening
        running = self.phase is Phase.RUNNING
        assert running is (target is not None), f"{state.label}, with the target {target}"
        leaving = target is not None and target.peer in self._draining
        moving = state in (SessionState.LEAVING, SessionState.MIGRATING)
        assert leaving is moving, f"{state.label}, while the target {'drains' if leaving else 'stays'}"
        migrating = self._migration_target
        assert (state is SessionState.MIGRATING) is (migrating is not None), (
            f"{state.label}, with {migrating} to move to"
        )
        assert migrating is None or migrating.peer not in self._draining, f"it is to move to {migrating}, which drains"
        assert running or draft is None, f"{state.label}, with the drafter {draft}"
        assert draft is None or draft.peer not in self.drafting.quarantined, f"it is done with its drafter {draft}"
        epochs = [opening.epoch for opening in (target, migrating, draft) if opening is not None]
        assert len(set(epochs)) == len(epochs), f"two openings have one epoch: {epochs}"
        assert max(epochs, default=0) <= self._epoch, f"epochs {epochs}, of {self._epoch} that were given out"
        self._text.validate()

    def _at_target(self, peer: PeerId) -> bool:
        return self._target is not None and self._target.peer == peer

    def _opening(self, epoch: int) -> Open:
        age_ms = min(int(1000 * (self._now - self._began)), MAX_AGE_MS)
        text, prompt = self._text, self.prompt_length
        tokens, digest = tuple(text.tokens), text.digest
        return replace(self._request, epoch=epoch, tokens=tokens, age_ms=age_ms, prompt=prompt, digest=digest)

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch
