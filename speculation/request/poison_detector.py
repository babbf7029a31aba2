"""Who may be opened where after targets were lost: what a router remembers across its sessions.

A target that dies takes down every session on it, and nearly always none of them is to blame. Now and then one is:
computing it ends the worker, and opened on the next it would end that too. That one must be found and failed, and
nobody else. docs/adr/0014 says why so, and what it costs.

* *Suspects* of a death are the sessions that were open there and had not committed a token there, or were still near
  the place where a target had died under them before, or had left a target that has said nothing since. Whoever has
  gone on was computed and did no harm, unless it went on where it had been open before: at a target that drains, for
  one. Suspects are on *probation*: a target tries one of them at a time (of many, an eighth at a time), and meanwhile
  nothing else is opened there.
* Two deaths in a row may still be chance. A death is *blameless* once all who are *implicated*, having been open there,
  have gone well past the place where they were, or have finished. As many blameless deaths as there were lately, so
  many more tries it takes to prove anything, and some for deaths that others are suspected of. And a session that was
  alone with the last of enough deaths is kept out for a while first.

    a, b and c run on t1, a unproven; t1 dies          implicated a, b, c; suspect a
    b and c go 16 tokens past where they were          implicated a
    a is tried alone on t2; t2 dies                    two deaths in a row, a the only suspect
    ten seconds pass, and no worker died of nothing    a is poison

A worker that said it would go is not a death. The same bookkeeping bounds how many sessions are opened again on one
target at once, so that a crowd that lost its target does not bury the next. ``now`` is seconds on any one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from speculation.events import PeerId, Placed, PoisonRequest, Role
from speculation.messages import SessionId, Verification

REMEMBERED_DEATHS = 1024
WELL_PAST = 16
"""Tokens beyond what the router knew of a session when a target died. The target may have been a few further."""
WOKEN_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class PoisonLimits:
    """Bounds, in counts and seconds."""

    tries: int = 2
    """Deaths in a row under a session before it can count as poison."""
    max_tries: int = 30
    """The same, however often workers die without anybody's fault."""
    watch: float = 10.0
    """How long targets must live without a suspect that is kept out before it counts as poison."""
    memory: float = 300.0
    """For how long a death that nobody was guilty of speaks for the suspects."""
    per_target: int = 64
    """Sessions opened again on one target at once, until they commit a token there."""
    others: int = 4
    """For so many deaths in that time that only others may be guilty of, one more try."""
    share: int = 8
    """One in so many on probation is tried at the same time on one target."""


@dataclass(eq=False, slots=True)
class _Death:
    """Of a target."""

    at: float
    implicated: set[SessionId]
    explained: bool = False
    """Whether one of them was found to be poison."""


@dataclass(slots=True)
class _Implication:
    """Deaths that a session may be guilty of, until it is past a position."""

    position: int = 0
    deaths: list[_Death] = field(default_factory=list)


@dataclass(slots=True)
class _Suspicion:
    """Deaths in a row of which a session was a suspect."""

    deaths: int = 0
    alone: bool = False
    """Whether it was the only suspect of the last one."""
    last: _Death | None = None


class PoisonDetector:
    """The sessions of one router that have something to prove. Forgets those that are over."""

    def __init__(self, limits: PoisonLimits = PoisonLimits()) -> None:
        self._limits = limits
        self._open: dict[PeerId, dict[SessionId, int]] = {}  # with the epoch of the opening
        self._unproven: dict[PeerId, set[SessionId]] = {}
        """Those of them that have not committed a token there, or not gone well past where a target last died under
        them. No empty sets."""
        self._left: dict[PeerId, set[SessionId]] = {}
        """Sessions that left a target, until it says something: it may hang, and die, of one of them."""
        self._suspicions: dict[SessionId, _Suspicion] = {}
        self._deaths: deque[_Death] = deque(maxlen=REMEMBERED_DEATHS)
        self._implicated: dict[SessionId, _Implication] = {}
        self._reached: dict[SessionId, int] = {}  # up to which position each session is verified
        self._died_under: dict[SessionId, int] = {}  # the epoch of the newest opening whose target died
        self._opened: set[SessionId] = set()
        self._reserved: dict[PeerId, SessionId] = {}
        """Targets kept free of others until a session on probation can be tried there."""
        self._waiting: dict[SessionId, None] = {}
        self.changed = False
        """Whether ``due`` may have something new to say."""

    # -- what happens --------------------------------------------------------------------------------------------------

    def opened(self, session: SessionId, peer: PeerId, epoch: int) -> None:
        """A session was opened at a target."""
        self._leave_queue(session)
        self._opened.add(session)
        self._open.setdefault(peer, {})[session] = epoch
        self._unproven.setdefault(peer, set()).add(session)

    def heard(self, peer: PeerId, verification: Verification) -> None:
        """A target verified something."""
        session = verification.session
        self._left.pop(peer, None)
        self._reached[session] = max(verification.end, self._reached.get(session, 0))
        implication = self._implicated.get(session)
        past = implication is None or verification.end >= implication.position
        # A target that it is to leave for the one that died goes on all the while: that proves nothing.
        newer = verification.epoch > self._died_under.get(session, 0)
        if past and newer:
            self._exonerate(session)
        if self._open.get(peer, {}).get(session) != verification.epoch:
            return
        if newer and self._suspicions.pop(session, None) is not None:
            self.changed = True
        self._forget_leaving(session)
        if past:
            self._settle(session, peer)

    def closed(self, session: SessionId, peer: PeerId) -> None:
        """A session left a target that lives."""
        if self._open.get(peer, {}).pop(session, None) is not None:
            self._left.setdefault(peer, set()).add(session)
            self._settle(session, peer)

    def ended(self, session: SessionId, *, finished: bool) -> None:
        """A session is over. Unless it has finished as it should, what it may be guilty of stays unexplained."""
        for peer in self._open:
            self.closed(session, peer)
        if finished:
            self._exonerate(session)
            self._forget_leaving(session)
        self._leave_queue(session)
        self._opened.discard(session)
        self._implicated.pop(session, None)
        self._reached.pop(session, None)
        self._died_under.pop(session, None)
        if self._suspicions.pop(session, None):
            self.changed = True

    def draining(self, peer: PeerId) -> None:
        """A target will go: nobody is tried there any more, so whoever it was kept free for looks for another."""
        if self._reserved.pop(peer, None) is not None:
            self.changed = True

    def stays(self, peer: PeerId) -> None:
        """A target does not go after all: whoever is open there looks for no other."""
        for session in self._open.get(peer, ()):
            self._leave_queue(session)

    def lost(self, now: float, peer: PeerId, *, expected: bool) -> None:
        """The stream to a target is gone; ``expected``: it had said that it would go."""
        left, opened = self._left.pop(peer, set()), self._open.pop(peer, {})
        there, suspects = opened.keys() | left, self._unproven.pop(peer, set()) | left
        self._reserved.pop(peer, None)
        self.changed = True
        if expected:
            return
        death = _Death(now, set(there))
        self._deaths.append(death)
        for session, epoch in opened.items():
            self._died_under[session] = max(epoch, self._died_under.get(session, 0))
        for session in there & self._opened:
            implication = self._implicated.setdefault(session, _Implication())
            implication.position = self._reached[session] + WELL_PAST if session in self._reached else 0
            implication.deaths.append(death)
        for session in suspects & self._opened:
            suspicion = self._suspicions.setdefault(session, _Suspicion())
            suspicion.deaths += 1
            suspicion.alone = len(suspects) == 1
            suspicion.last = death

    # -- what follows --------------------------------------------------------------------------------------------------

    def place(
        self,
        now: float,
        session: SessionId,
        avoid: frozenset[PeerId],
        choose: Callable[[frozenset[PeerId]], PeerId | None],
    ) -> Placed | PoisonRequest:
        """The answer to a session that asks for a target. ``choose``: the best target but for these, if any is left."""
        suspicion = self._suspicions.get(session)
        if suspicion is not None and suspicion.alone and suspicion.deaths >= self._tries(now, session):
            assert suspicion.last is not None
            if now < suspicion.last.at + self._limits.watch:
                return Placed(Role.TARGET, None, queued=True)
            if suspicion.last.implicated == {session}:
                for death in self._implicated[session].deaths:
                    death.explained = True
                return PoisonRequest(suspicion.deaths)
        chosen = choose(avoid | self._blocked(session))
        otherwise = choose(avoid) if chosen is None else None
        if otherwise is not None:
            self._wait(session, otherwise)
        return Placed(Role.TARGET, chosen, queued=otherwise is not None)

    def due(self) -> list[SessionId]:
        """Sessions that wait and should ask again, because something has changed since the last call."""
        if not self.changed:
            return []
        self.changed = False
        ready = [owner for peer, owner in self._reserved.items() if peer not in self._unproven]
        first = [session for session, _ in zip(self._waiting, range(WOKEN_AT_ONCE), strict=False)]
        return list(dict.fromkeys([*ready, *first]))

    # -- within --------------------------------------------------------------------------------------------------------

    def _blocked(self, session: SessionId) -> frozenset[PeerId]:
        """Targets where a session must not be opened at the moment."""
        reserved = {peer for peer, owner in self._reserved.items() if owner != session}
        suspects = self._suspicions.keys()
        if session in suspects:
            most = len(suspects) // self._limits.share  # tried at once on one target, and nobody else is there
            trying = {peer for peer, there in self._unproven.items() if len(there) < most and there <= suspects}
            return frozenset(reserved | (self._unproven.keys() - trying))
        trials = {peer for peer, there in self._unproven.items() if suspects and not there.isdisjoint(suspects)}
        again, max_there = session in self._opened, self._limits.per_target
        full = {peer for peer, there in self._unproven.items() if again and len(there) >= max_there}
        return frozenset(reserved | trials | full)

    def _wait(self, session: SessionId, at: PeerId) -> None:
        """A session found no target that is not blocked. ``at``: where it would go otherwise."""
        self._waiting[session] = None
        if session in self._suspicions and session not in self._reserved.values():
            self._reserved.setdefault(at, session)

    def _tries(self, now: float, session: SessionId) -> int:
        """Deaths in a row that would prove something against a session, as things are."""
        while self._deaths and self._deaths[0].at < now - self._limits.memory:
            self._deaths.popleft()
        unexplained = [death.implicated for death in self._deaths if not death.explained]
        blameless = sum(not implicated for implicated in unexplained)
        others = sum(session not in implicated for implicated in unexplained) - blameless
        return min(self._limits.tries + blameless + others // self._limits.others, self._limits.max_tries)

    def _exonerate(self, session: SessionId) -> None:
        implication = self._implicated.pop(session, None)
        for death in implication.deaths if implication else ():
            death.implicated.discard(session)

    def _forget_leaving(self, session: SessionId) -> None:
        for left in self._left.values():
            left.discard(session)

    def _settle(self, session: SessionId, peer: PeerId) -> None:
        """A session has nothing to prove any more at a target."""
        unproven = self._unproven.get(peer)
        if unproven is not None and session in unproven:
            unproven.remove(session)
            if not unproven:
                del self._unproven[peer]
            self.changed = self.changed or bool(self._waiting)

    def _leave_queue(self, session: SessionId) -> None:
        self._waiting.pop(session, None)
        for peer in [peer for peer, owner in self._reserved.items() if owner == session]:
            del self._reserved[peer]
            self.changed = True
