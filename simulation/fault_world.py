"""The world of the fault simulation: clock, network, workers and the shell of a router.

One heap, one seeded generator, virtual time. The machines are the ones that serve:
:class:`speculation.request.session.Session`, :class:`speculation.request.poison_detector.PoisonDetector`,
:class:`speculation.verifying.target_session.TargetSession` and
:class:`speculation.drafting.draft_session.DraftSession`. Only the models are toys (a hash of the context) and the
network is a list. The cut is at the stream between router and worker.

What can happen to a worker are methods here; when it happens, :mod:`simulation.faults` decides.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from simulation.toy_workers import VOCABULARY, LyingDraftWorker, ToyDraftWorker, ToyTargetWorker, target_only
from speculation.events import (
    Available,
    Draining,
    Effect,
    Emit,
    Event,
    Fail,
    FailureCode,
    Finish,
    Lost,
    PeerId,
    Place,
    Placed,
    PoisonRequest,
    Received,
    Relay,
    Role,
    Send,
    Start,
    Stop,
    Tick,
    Wake,
)
from speculation.messages import (
    Close,
    FromWorker,
    Limits,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Sampling,
    SessionId,
    Token,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.request.drafting import Opening
from speculation.request.poison_detector import PoisonDetector, PoisonLimits
from speculation.request.session import Phase, Session, SessionLimits

OUTPUT = 32
HORIZON = 400.0
"""Virtual seconds after which a session that has not ended counts as stuck."""
HEALED = 30.0
"""Faults stop here, so that progress can be demanded."""
SILENCE = 2.0
"""After which a router gives up a worker it does not hear, as in :mod:`transport.client`."""
ROUTER_SILENCE = 3.0
"""After which a worker gives up a router it does not hear."""
READING = 0.0005
"""Until a router reads what it has passed on already."""
WATCHDOG = 1.0
DRAIN = 1.5
"""How long a worker that drains waits for its sessions to leave."""
MAX_UNDER_WAY = 50_000
"""Messages and timers at once; more would mean that something is not bounded."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A request that harms the target that computes it, from a position on."""

    position: int
    harm: str
    """``dies``, ``hangs`` (and is ended by its watchdog) or ``refuses`` (the worker catches the error)."""


@dataclass(slots=True)
class SimulatedPeer:
    """A worker as the world sees it, and what the router believes of it."""

    name: PeerId
    role: Role
    links: dict[int, ToyTargetWorker | ToyDraftWorker] = field(default_factory=dict)
    """Its sessions, by the stream they were opened on. It may keep an old one that the router has given up."""
    link: int = 0
    """The stream that the router uses; what comes on an earlier one is not heard."""
    up: bool = True
    revision: int = 0
    """Of its model; another says something else."""
    becomes: int = 0
    """The revision that the next process in its place has."""
    stopped_until: float = 0.0
    unread: list[tuple[int, ToWorker]] = field(default_factory=list)
    """What has arrived, by stream, since the process was stopped."""
    heard: deque[tuple[int, Verification | Proposal | Refused]] = field(default_factory=deque)
    """What the router has heard of it and not read yet, by stream."""
    stuck: bool = False
    draining: bool = False
    stepping: bool = False
    known: bool = True
    """Whether the router believes its stream to be up."""
    leaving: bool = False
    """Whether the router has heard that it drains."""
    lies: bool = False
    """A drafter that says what only targets say."""
    arrivals: dict[str, float] = field(default_factory=dict)


class FaultWorld:
    """Clock, network, workers and router shell of one run."""

    def __init__(
        self,
        rng: Random,
        *,
        delay: float,
        loss: float,
        doubling: float,
        agreement: float,
        capacity: int,
        tries: int,
        upgrades: bool = False,
    ) -> None:
        """Two targets and three drafters, all up, and no sessions.

        ``delay``: mean seconds one way; ``tries``: see :class:`speculation.request.poison_detector.PoisonLimits`;
        ``upgrades``: whether targets of another revision may come.
        """
        self.rng = rng
        self.now = 0.0
        self.events = 0
        self.accepted = 0
        self.longest_silence = 0.0
        """Between two emissions of a session."""
        self._delay, self._loss, self._doubling = delay, loss, doubling
        self._agreement, self._capacity = agreement, capacity
        self._serial = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        names = [(Role.TARGET, "t0"), (Role.TARGET, "t1"), (Role.DRAFT, "d0"), (Role.DRAFT, "d1"), (Role.DRAFT, "d2")]
        self.peers = {PeerId(name): SimulatedPeer(PeerId(name), role) for role, name in names}
        self.limits = SessionLimits(
            fruitless_openings=30 if loss else 3,
            draft_openings=50,
            placement_timeout=20.0 if capacity < len(names) or upgrades else HORIZON,
            begun_timeout=20.0 if upgrades else HORIZON,
            stall_timeout=2.0,
            silences=30 if loss else 5,
        )
        self._poison_limits = PoisonLimits(tries=tries)
        self.poison_detector = PoisonDetector(self._poison_limits)
        self.sessions: dict[SessionId, Session] = {}
        self.truth: dict[SessionId, tuple[Token, ...]] = {}
        """What each must say: with the first token that it says, of the revision that said it."""
        self.revisions: dict[SessionId, int] = {}
        """Which one that was."""
        self.upgraded = False
        self.emitted: dict[SessionId, list[Token]] = {}
        self.failed: dict[SessionId, FailureCode] = {}
        self.stopped: set[SessionId] = set()
        self.poison: dict[SessionId, Poison] = {}
        self.harmed: dict[SessionId, int] = {}
        """Targets that a poison request has harmed."""
        self.unexpected = 0
        """Losses of workers that the router had not been told of."""
        self._spoke: dict[SessionId, float] = {}
        self._wakes: dict[SessionId, float] = {}
        """When each is to be woken; what was asked for before does not count."""

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run ``action`` at virtual time ``when``."""
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, action))
        assert len(self._heap) < MAX_UNDER_WAY, "messages pile up"

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` so many seconds from now."""
        self.at(self.now + seconds, action)

    @property
    def running(self) -> bool:
        """Whether a session has not ended."""
        return any(session.phase is not Phase.ENDED for session in self.sessions.values())

    @property
    def faulty(self) -> bool:
        """Whether faults still happen."""
        return self.now < HEALED

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
        self.at(when, lambda: self.deliver(number, Start()))
        return number

    def _admit(self, number: SessionId, prompt: tuple[Token, ...], seed: int) -> None:
        end = len(prompt) + OUTPUT
        self.sessions[number] = Session(number, prompt, Sampling(seed=seed), Limits(end), session_limits=self.limits)
        self.truth[number] = target_only(prompt, seed, end)
        self.revisions.pop(number, None)
        self.emitted[number] = []

    def client_stops(self, number: SessionId) -> None:
        """A client goes away."""
        self.stopped.add(number)
        self.deliver(number, Stop())

    def deliver(self, number: SessionId, event: Event) -> None:
        """Let a session handle an event."""
        session = self.sessions[number]
        for effect in session.handle(self.now, event):
            if isinstance(effect, Emit) and isinstance(event, Received):
                self._learn(number, event.peer)
            self._perform(number, effect)
        session.validate()
        if session.phase is Phase.ENDED:
            self.poison_detector.ended(number, finished=number not in self.stopped and number not in self.failed)
        if self.poison_detector.changed:
            self.later(0.0, self._ask_again)

    def broadcast(self, event: Event) -> None:
        """Let all sessions handle an event."""
        for number in list(self.sessions):
            self.deliver(number, event)

    def _ask_again(self) -> None:
        for number in self.poison_detector.due():
            self.deliver(number, Available(Role.TARGET))

    def _perform(self, number: SessionId, effect: Effect) -> None:
        match effect:
            case Place(role=role, avoid=avoid):
                self.deliver(number, self._placed(number, role, avoid))
            case Send(peer=peer, message=message):
                self._note(self.peers[peer], message)
                self._to_worker(self.peers[peer], message)
            case Relay(peer=peer, message=message, epoch=epoch):
                if message.passed != epoch:
                    self._to_worker(self.peers[peer], replace(message, epoch=epoch))
            case Emit(tokens=tokens, accepted=accepted):
                self._emit(number, tokens)
                self.accepted += accepted
            case Wake(at=when):
                self._wakes[number] = when
                session = self.sessions[number]
                self.at(when, lambda: self._wake(number, session, when))
            case Fail(code=code):
                self.failed[number] = code
            case Finish():
                pass

    def _wake(self, number: SessionId, session: Session, when: float) -> None:
        if self.sessions[number] is session and self._wakes[number] == when:
            self.deliver(number, Tick())

    def _placed(self, number: SessionId, role: Role, avoid: frozenset[PeerId]) -> Placed | PoisonRequest:
        def choose(avoid: frozenset[PeerId]) -> PeerId | None:
            usable = [p for p in self.peers.values() if p.known and not p.leaving and p.role is role]
            usable = [peer for peer in usable if peer.name not in avoid]
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
            prompt, end = session._tokens[: session.prompt_length], session.end
            self.revisions[number] = revision
            self.truth[number] = target_only(prompt, session._sampling.seed, end, revision)

    def _note(self, peer: SimulatedPeer, message: ToWorker) -> None:
        if peer.role is Role.TARGET and isinstance(message, Open):
            self.poison_detector.opened(message.session, peer.name, message.epoch)
        elif peer.role is Role.TARGET and isinstance(message, Close):
            self.poison_detector.closed(message.session, peer.name)

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
        self.poison_detector = PoisonDetector(self._poison_limits)
        for number, session in self.sessions.items():
            if session.phase is not Phase.ENDED:
                self._admit(number, tuple(session._tokens[: session.prompt_length]), session._sampling.seed)
                if session.phase is not Phase.NEW:  # whose request is still to come
                    self.later(0.01, lambda number=number: self.deliver(number, Start()))  # type: ignore[misc]

    # -- network -------------------------------------------------------------------------------------------------------

    def _transmit(self, peer: SimulatedPeer, direction: str, action: Callable[[], None]) -> None:
        """Deliver in order after a delay, unless the stream breaks first; lose or double as the weather has it."""
        if self.faulty and self.rng.random() < self._loss:
            return
        for _ in range(2 if self.faulty and self.rng.random() < self._doubling else 1):
            self._carry(peer, direction, action)

    def _carry(self, peer: SimulatedPeer, direction: str, action: Callable[[], None]) -> None:
        arrival = max(self.now + self.rng.expovariate(1 / self._delay), peer.arrivals.get(direction, 0.0))
        peer.arrivals[direction] = arrival
        self.at(arrival, action)

    def _to_worker(self, peer: SimulatedPeer, message: ToWorker) -> None:
        link = peer.link

        def arrive() -> None:
            if not peer.up:
                return
            peer.unread.append((link, message))
            self._read(peer)

        self._transmit(peer, "to", arrive)

    def _read(self, peer: SimulatedPeer) -> None:
        """Take what has arrived, unless the process is stopped: then as soon as it goes on."""
        if self.now < peer.stopped_until:
            self.at(peer.stopped_until, lambda: self._read(peer))
            return
        unread, peer.unread = peer.unread, []
        for link, message in unread:
            if link == peer.link or link in peer.links:
                self._receive(peer, link, message)

    def _receive(self, peer: SimulatedPeer, link: int, message: ToWorker) -> None:
        if peer.draining and isinstance(message, Open):
            self._to_router(peer, link, Refused(message.session, message.epoch, RefusalCode.DRAINING))
            message = Close(message.session, message.epoch)
        if link not in peer.links:
            target = peer.role is Role.TARGET
            drafter = LyingDraftWorker if peer.lies else ToyDraftWorker
            peer.links[link] = ToyTargetWorker(self._capacity, peer.revision) if target else drafter(self._agreement)
        for reply in peer.links[link].receive(message):
            self._to_router(peer, link, reply)
        self._schedule_step(peer)

    def _to_router(self, peer: SimulatedPeer, link: int, message: FromWorker) -> None:
        self._transmit(peer, "from", lambda: self._hear(peer, link, message))

    def _hear(self, peer: SimulatedPeer, link: int, message: FromWorker) -> None:
        """Pass it on, and read it a little later, in its turn: as in :class:`transport.client.Incoming`."""
        if not peer.known or link != peer.link:
            return
        assert not isinstance(message, Load | Welcome)
        if isinstance(message, Verification | Proposal):
            self._pass_on(peer, message)
        peer.heard.append((link, message))
        self.later(READING, lambda: self._read_heard(peer))

    def _pass_on(self, peer: SimulatedPeer, message: Verification | Proposal) -> None:
        target, draft = self.sessions[message.session].openings
        here, there = (target, draft) if isinstance(message, Verification) else (draft, target)
        if here != Opening(peer.name, message.epoch) or there is None:
            return
        if not any(said.session == message.session and not _passed(said) for _, said in peer.heard):
            self._to_worker(self.peers[there.peer], replace(message, epoch=there.epoch))
            object.__setattr__(message, "passed", there.epoch)

    def _read_heard(self, peer: SimulatedPeer) -> None:
        link, message = peer.heard.popleft()
        if not peer.known or link != peer.link:
            return
        if isinstance(message, Verification) and peer.role is Role.TARGET:
            self.poison_detector.heard(peer.name, message)
        self.deliver(message.session, Received(peer.name, message))

    # -- workers -------------------------------------------------------------------------------------------------------

    def _schedule_step(self, peer: SimulatedPeer) -> None:
        if not peer.stepping:
            peer.stepping = True
            seconds = ToyTargetWorker.step_seconds if peer.role is Role.TARGET else ToyDraftWorker.step_seconds
            self.later(seconds * self.rng.uniform(0.8, 1.5), lambda: self._step(peer))

    def _step(self, peer: SimulatedPeer) -> None:
        peer.stepping = False
        if not peer.up or peer.stuck:
            return
        if self.now < peer.stopped_until:
            peer.stepping = True
            self.at(peer.stopped_until, lambda: self._step(peer))
            return
        busy = False
        for link, worker in list(peer.links.items()):
            if isinstance(worker, ToyTargetWorker) and self._harmed(peer, link, worker):
                return
            sent = worker.step()
            busy = busy or sent is not None
            for message in sent or []:
                self._to_router(peer, link, message)
        if busy:
            self._schedule_step(peer)

    def _harmed(self, peer: SimulatedPeer, link: int, worker: ToyTargetWorker) -> bool:
        """Whether a poison request ends or hangs the worker in this step."""
        for number, poison in self.poison.items():
            held = worker.sessions.get(number)
            if held is None or len(held.tokens) < poison.position:
                continue
            self.harmed[number] = self.harmed.get(number, 0) + 1
            if poison.harm != "refuses":
                self.crash(peer) if poison.harm == "dies" else self.get_stuck(peer)
                return True
            self._to_router(peer, link, worker.give_up(number))
        return False

    def crash(self, peer: SimulatedPeer, back_in: float | None = None) -> None:
        """Kill a worker; its replacement is empty. Half the time the router learns late, as after a lost FIN."""
        if not peer.up:
            return
        self._end_process(peer)
        link = peer.link
        self.later(self.rng.choice([0.003, 1.0]), lambda: self.notice(peer) if peer.link == link else None)
        self.later(self.rng.uniform(0.01, 3.0) if back_in is None else back_in, lambda: self.come_back(peer))

    def get_stuck(self, peer: SimulatedPeer) -> None:
        """The computing thread hangs. All looks well from outside, until the watchdog ends the process."""
        if peer.up:
            peer.stuck = True
            self.later(WATCHDOG, lambda: self.crash(peer) if peer.stuck else None)

    def stop_process(self, peer: SimulatedPeer, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        peer.stopped_until = max(peer.stopped_until, self.now + seconds)
        link = peer.link
        if seconds > SILENCE:
            self.later(SILENCE, lambda: self._cut(peer, link))

    def cut_for_worker(self, peer: SimulatedPeer) -> None:
        """The worker sees its stream end; the router hears nothing more, and gives up after a while."""
        link = peer.link
        peer.links.pop(link, None)
        self.later(SILENCE, lambda: self._cut(peer, link))
        peer.arrivals.clear()

    def cut_for_router(self, peer: SimulatedPeer) -> None:
        """The router sees the stream end and connects again; the worker holds on to the old one for a while."""
        self._cut(peer, peer.link)

    def _cut(self, peer: SimulatedPeer, link: int) -> None:
        if peer.link == link and peer.up and peer.known:
            self._leave_link(peer, ROUTER_SILENCE)
            self.notice(peer)
            self.later(0.1, lambda: self._connect(peer))

    def _leave_link(self, peer: SimulatedPeer, silence: float) -> None:
        """From here on there is another stream; the worker forgets what was on the last one when it notices."""
        last = peer.link
        peer.link += 1
        peer.arrivals.clear()
        self.later(silence, lambda: self._forget_link(peer, last))

    @staticmethod
    def _forget_link(peer: SimulatedPeer, link: int) -> None:
        peer.links.pop(link, None)

    def drain(self, peer: SimulatedPeer, back_in: float | None) -> None:
        """Tell a worker to end; ``back_in``: when its replacement is there, if there is to be one."""
        if not peer.up or peer.draining:
            return
        peer.draining = True
        link = peer.link
        self._carry(peer, "from", lambda: self._hear_draining(peer, link))
        self._await_drained(peer, self.now + DRAIN, back_in)

    def upgrade(self, peer: SimulatedPeer, back_in: float) -> None:
        """Replace a target by one of the next revision."""
        self.upgraded = True
        peer.becomes = 1
        if peer.up:
            self.drain(peer, back_in)
        else:
            self.come_back(peer)

    def _hear_draining(self, peer: SimulatedPeer, link: int) -> None:
        if peer.known and peer.link == link and not peer.leaving:
            peer.leaving = True
            self.poison_detector.draining(peer.name)
            self.broadcast(Draining(peer.name))

    def _await_drained(self, peer: SimulatedPeer, until: float, back_in: float | None) -> None:
        if not peer.draining or not peer.up:
            return
        unheard = peer.known and not peer.leaving
        if self.now < until and (unheard or any(worker.sessions for worker in peer.links.values())):
            self.later(0.02, lambda: self._await_drained(peer, until, back_in))
            return
        self._end_process(peer)
        link = peer.link
        self.later(self._delay, lambda: self.notice(peer) if peer.link == link else None)
        if back_in is not None:
            self.later(back_in, lambda: self.come_back(peer))

    def _end_process(self, peer: SimulatedPeer) -> None:
        peer.up = peer.stuck = peer.draining = False
        peer.stopped_until = 0.0
        peer.links.clear()
        peer.unread.clear()
        peer.link += 1
        peer.arrivals.clear()

    def notice(self, peer: SimulatedPeer) -> None:
        """The router learns that its stream is gone."""
        if not peer.known:
            return
        self.unexpected += not peer.leaving
        peer.known, expected, peer.leaving = False, peer.leaving, False
        peer.link += 1
        if peer.role is Role.TARGET:
            self.poison_detector.lost(self.now, peer.name, expected=expected)
        self.broadcast(Lost(peer.name))

    def come_back(self, peer: SimulatedPeer) -> None:
        """A process takes the worker's place."""
        if peer.up:
            return
        self.notice(peer)
        peer.up, peer.revision = True, peer.becomes
        self._connect(peer)

    def _connect(self, peer: SimulatedPeer) -> None:
        if peer.up and not peer.known:
            peer.known = True
            if peer.draining:
                self._hear_draining(peer, peer.link)
            self.broadcast(Available(peer.role))


def _passed(message: Verification | Proposal | Refused) -> bool:
    """Whether nobody has to pass it on any more."""
    return isinstance(message, Refused) or bool(message.passed)
