"""The world of the fault simulation: its workers (:mod:`tests.faults.workers`) and the shell of a router.

The machines are the ones that serve:
:class:`speculation.request.session.Session`, :class:`speculation.request.poison_detector.PoisonDetector`,
:class:`speculation.verifying.target_session.TargetSession` and
:class:`speculation.drafting.draft_session.DraftSession`. Only the models are toys (a hash of the context) and the
network is a list. The cut is at the stream between router and worker. What happens to workers and routers is decided in
:mod:`tests.faults.run`.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from random import Random

from speculation import events
from speculation.events import Effect, Event, FailureCode, PeerId, Placed, PoisonRequest, Role
from speculation.messages import (
    Close,
    FromWorker,
    Limits,
    Open,
    Proposal,
    Refused,
    Sampling,
    SessionId,
    SessionMessage,
    Token,
    ToWorker,
    Verification,
)
from speculation.request.placement import Opening
from speculation.request.poison_detector import PoisonDetector, PoisonLimits
from speculation.request.record import SessionState
from speculation.request.session import Phase, Session, SessionLimits
from tests.faults.toy_workers import VOCABULARY, target_only
from tests.faults.weather import Weather
from tests.faults.workers import ROUTER_SILENCE, SimulatedPeer, SimulatedWorkers

OUTPUT = 32
HORIZON = 400.0
"""Virtual seconds after which a session that has not ended counts as stuck."""
READING = 0.0005
"""Until a router reads what it has passed on already."""


class FaultWorld(SimulatedWorkers):
    """Clock, network, workers and router shell of one run."""

    def __init__(self, rng: Random, weather: Weather) -> None:
        """Two targets and three drafters, all up, and no sessions."""
        super().__init__(rng, weather)
        self.events = 0
        self.accepted = 0
        self.longest_silence = 0.0
        crowded = weather.capacity < len(self.peers)
        self.limits = SessionLimits(
            fruitless_openings=30 if weather.loss else 3,
            draft_openings=50,
            placement_timeout=20.0 if crowded or weather.upgrade_after else HORIZON,
            begun_timeout=20.0 if weather.upgrade_after else HORIZON,
            stall_timeout=2.0,
            silences=30 if weather.loss else 5,
        )
        self.poison_detector = PoisonDetector(PoisonLimits(tries=weather.tries))
        self.sessions: dict[SessionId, Session] = {}
        self.truth: dict[SessionId, tuple[Token, ...]] = {}
        """What each must say: with the first token that it says, of the revision that said it."""
        self.revisions: dict[SessionId, int] = {}
        self.emitted: dict[SessionId, list[Token]] = {}
        self.failed: dict[SessionId, FailureCode] = {}
        self.stopped: set[SessionId] = set()
        self.unexpected = 0
        """Losses of workers that the router had not been told of."""
        self._spoke: dict[SessionId, float] = {}
        self._wakes: dict[SessionId, float] = {}
        """When each is to be woken; what was asked for before does not count."""

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a session has not ended."""
        return any(session.phase is not Phase.ENDED for session in self.sessions.values())

    def run(self) -> None:
        """Until every session has ended, and then until nothing is under way any more."""
        while self._heap and (self.running or self.now < 1.0):
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            assert self.now < HORIZON, f"stuck: {[(s.phase, len(s.output)) for s in self.sessions.values()]}"
            action()
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    # -- router shell --------------------------------------------------------------------------------------------------

    def begin(self, when: float) -> SessionId:
        """A request comes at this time."""
        number = SessionId(len(self.sessions))
        prompt = tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 6)))
        self._admit(number, prompt, self.rng.getrandbits(64))
        self.at(when, lambda: self.deliver(number, events.Start()))
        return number

    def _admit(self, number: SessionId, prompt: tuple[Token, ...], seed: int) -> None:
        end = len(prompt) + OUTPUT
        self.sessions[number] = Session(Open(number, 0, prompt, Sampling(seed=seed), Limits(end)), self.limits)
        self.truth[number] = target_only(prompt, seed, end)
        self.revisions.pop(number, None)
        self.emitted[number] = []

    def client_stops(self, number: SessionId) -> None:
        """A client goes away."""
        self.stopped.add(number)
        self.deliver(number, events.Stop())

    def deliver(self, number: SessionId, event: Event) -> None:
        """Let a session handle an event."""
        session = self.sessions[number]
        for effect in session.handle(self.now, event):
            if isinstance(effect, events.Emit) and isinstance(event, events.Received):
                self._learn(number, event.peer)
            self._perform(number, effect)
        session.validate()
        if session.phase is Phase.ENDED:
            self.poison_detector.ended(number, finished=number not in self.stopped and number not in self.failed)
        for owner in self.poison_detector._reserved.values():
            seeks = self.sessions[owner]._state in (SessionState.PLACING, SessionState.LEAVING)
            assert seeks, f"a target is kept free for session {owner}, which looks for none"
        if self.poison_detector.changed:
            self.later(0.0, self._ask_again)

    def broadcast(self, event: Event) -> None:
        """Let all sessions handle an event."""
        for number in list(self.sessions):
            self.deliver(number, event)

    def _ask_again(self) -> None:
        for number in self.poison_detector.due():
            self.deliver(number, events.Available(Role.TARGET))

    def _perform(self, number: SessionId, effect: Effect) -> None:
        match effect:
            case events.Place(role=role, avoid=avoid):
                self.deliver(number, self._placed(number, role, avoid))
            case events.Send(peer=peer, message=message):
                if self.peers[peer].role is Role.TARGET:
                    self._note(peer, message)
                self._to_worker(self.peers[peer], message)
            case events.Relay(peer=peer, message=message, epoch=epoch):
                if message.passed != epoch:
                    self._to_worker(self.peers[peer], replace(message, epoch=epoch))
            case events.Emit(tokens=tokens, accepted=accepted):
                self._emit(number, tokens)
                self.accepted += accepted
            case events.Wake(at=when):
                self._wakes[number] = when
                session = self.sessions[number]
                self.at(when, lambda: self._wake(number, session, when))
            case events.Fail(code=code):
                self.failed[number] = code
            case events.Finish():
                pass

    def _wake(self, number: SessionId, session: Session, when: float) -> None:
        if self.sessions[number] is session and self._wakes[number] == when:
            self.deliver(number, events.Tick())

    def _placed(self, number: SessionId, role: Role, avoid: frozenset[PeerId]) -> Placed | PoisonRequest:
        def choose(avoid: frozenset[PeerId]) -> PeerId | None:
            peers = self.peers.values()
            usable = [p for p in peers if p.known and not p.leaving and p.role is role and p.name not in avoid]
            if role is Role.TARGET and usable:
                newest = max(peer.revision for peer in usable)
                usable = [peer for peer in usable if peer.revision == self.revisions.get(number, newest)]
            return self.rng.choice(usable).name if usable else None

        if role is Role.TARGET:
            return self.poison_detector.place(self.now, number, avoid, choose)
        return Placed(role, choose(avoid))

    def _learn(self, number: SessionId, peer: PeerId) -> None:
        """A text belongs to the revision that began it."""
        if number not in self.revisions:
            session, revision = self.sessions[number], self.peers[peer].revision
            prompt, end = session._request.tokens, session.end
            self.revisions[number] = revision
            self.truth[number] = target_only(prompt, session._request.sampling.seed, end, revision)

    def _note(self, target: PeerId, message: ToWorker) -> None:
        if isinstance(message, Open):
            self.poison_detector.opened(message.session, target, message.epoch)
        elif isinstance(message, Close):
            self.poison_detector.closed(message.session, target)

    def _emit(self, number: SessionId, tokens: tuple[Token, ...]) -> None:
        emitted = self.emitted[number]
        emitted += tokens
        known = self.truth[number][: len(emitted)]
        assert tuple(emitted) == known, f"session {number} differs from the target alone, or says something twice"
        if len(emitted) > len(tokens):
            self.longest_silence = max(self.longest_silence, self.now - self._spoke[number])
        self._spoke[number] = self.now

    def replace_router(self) -> None:
        """The router is lost; clients send what was not finished to another one, which knows nothing."""
        for peer in self.peers.values():
            self._leave_link(peer, ROUTER_SILENCE)
        self.poison_detector = PoisonDetector(PoisonLimits(tries=self.weather.tries))
        for number, session in self.sessions.items():
            if session.phase is not Phase.ENDED:
                self._admit(number, session._request.tokens, session._request.sampling.seed)
                if session.phase is not Phase.NEW:  # whose request is still to come
                    self.later(0.01, lambda number=number: self.deliver(number, events.Start()))  # type: ignore[misc]

    # -- what the router hears -----------------------------------------------------------------------------------------

    def _hear(self, peer: SimulatedPeer, link: int, message: FromWorker) -> None:
        """Pass it on, and read it a little later, in its turn: as in :class:`transport.incoming.Incoming`."""
        if not peer.known or link != peer.link:
            return
        assert isinstance(message, SessionMessage)
        if not isinstance(message, Refused):
            self._pass_on(peer, message)
        peer.heard.append((link, message))
        self.later(READING, lambda: self._read_heard(peer))

    def _pass_on(self, peer: SimulatedPeer, message: Verification | Proposal) -> None:
        target, draft = self.sessions[message.session].openings
        here, there = (target, draft) if isinstance(message, Verification) else (draft, target)
        if here != Opening(peer.name, message.epoch) or there is None:
            return
        unread = (said for _, said in peer.heard if said.session == message.session)
        if all(isinstance(said, Refused) or said.passed for said in unread):  # nobody has to pass those on any more
            self._to_worker(self.peers[there.peer], replace(message, epoch=there.epoch))
            object.__setattr__(message, "passed", there.epoch)

    def _read_heard(self, peer: SimulatedPeer) -> None:
        link, message = peer.heard.popleft()
        if not peer.known or link != peer.link:
            return
        if isinstance(message, Verification) and peer.role is Role.TARGET:
            self.poison_detector.heard(peer.name, message)
        self.deliver(message.session, events.Received(peer.name, message))

    def _hear_draining(self, peer: SimulatedPeer, link: int) -> None:
        if peer.known and peer.link == link and not peer.leaving:
            peer.leaving = True
            self.poison_detector.draining(peer.name)
            self.broadcast(events.Draining(peer.name))

    def unlist(self, peer: SimulatedPeer, back_in: float) -> None:
        """A worker leaves the list of workers; ``back_in``: when it is on it again."""
        if peer.known and not peer.leaving:
            link = peer.link
            self._hear_draining(peer, link)
            self.later(back_in, lambda: self._list_again(peer, link))

    def _list_again(self, peer: SimulatedPeer, link: int) -> None:
        if peer.known and peer.link == link and not peer.draining:
            peer.leaving = False
            self.poison_detector.stays(peer.name)
            self.broadcast(events.Stays(peer.name))

    def notice(self, peer: SimulatedPeer) -> None:
        """The router learns that its stream is gone."""
        if not peer.known:
            return
        self.unexpected += not peer.leaving
        peer.known, expected, peer.leaving = False, peer.leaving, False
        peer.link += 1
        if peer.role is Role.TARGET:
            self.poison_detector.lost(self.now, peer.name, expected=expected)
        self.broadcast(events.Lost(peer.name))

    def _connect(self, peer: SimulatedPeer) -> None:
        if peer.up and not peer.known:
            peer.known = True
            if peer.draining:
                self._hear_draining(peer, peer.link)
            self.broadcast(events.Available(peer.role))
