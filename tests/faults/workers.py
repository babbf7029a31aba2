"""The workers of the fault simulation: clock, network, processes, and all that can happen to them.

One heap, one seeded generator, virtual time. A router is who hears of it: see :mod:`tests.faults.world`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from speculation.events import PeerId, Role
from speculation.messages import (
    Close,
    FromWorker,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    SessionId,
    ToWorker,
    Verification,
)
from tests.faults.toy_workers import LyingDraftWorker, ToyDraftWorker, ToyTargetWorker
from tests.faults.weather import Weather

HEALED = 30.0
"""Faults stop here, so that progress can be demanded."""
SILENCE = 2.0
"""After which a router gives up a worker it does not hear, as in :mod:`transport.client`."""
ROUTER_SILENCE = 3.0
"""After which a worker gives up a router it does not hear."""
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


class SimulatedWorkers(ABC):
    """Two targets and three drafters, all up, and the time and the network that they share with a router."""

    def __init__(self, rng: Random, weather: Weather) -> None:
        self.rng, self.weather = rng, weather
        self.now = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        names = [(Role.TARGET, "t0"), (Role.TARGET, "t1"), (Role.DRAFT, "d0"), (Role.DRAFT, "d1"), (Role.DRAFT, "d2")]
        self.peers = {PeerId(name): SimulatedPeer(PeerId(name), role) for role, name in names}
        self.upgraded = False
        self.poison: dict[SessionId, Poison] = {}
        self.harmed: dict[SessionId, int] = {}

    # -- what a router learns ------------------------------------------------------------------------------------------

    @abstractmethod
    def _hear(self, peer: SimulatedPeer, link: int, message: FromWorker) -> None:
        """A message of a worker arrives."""

    @abstractmethod
    def _hear_draining(self, peer: SimulatedPeer, link: int) -> None:
        """It arrives that a worker drains."""

    @abstractmethod
    def notice(self, peer: SimulatedPeer) -> None:
        """The router learns that its stream is gone."""

    @abstractmethod
    def _connect(self, peer: SimulatedPeer) -> None:
        """There may be a stream to this worker again."""

    # -- time ----------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Run ``action`` at virtual time ``when``."""
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, action))
        assert len(self._heap) < MAX_UNDER_WAY, "messages pile up"

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Run ``action`` so many seconds from now."""
        self.at(self.now + seconds, action)

    # -- network -------------------------------------------------------------------------------------------------------

    def _transmit(self, peer: SimulatedPeer, direction: str, action: Callable[[], object]) -> None:
        """Deliver in order after a delay, unless the stream breaks first; lose or double as the weather has it."""
        faulty = self.now < HEALED
        if faulty and self.rng.random() < self.weather.loss:
            return
        for _ in range(2 if faulty and self.rng.random() < self.weather.doubling else 1):
            self._carry(peer, direction, action)

    def _carry(self, peer: SimulatedPeer, direction: str, action: Callable[[], object]) -> None:
        arrival = max(self.now + self.rng.expovariate(1 / self.weather.delay), peer.arrivals.get(direction, 0.0))
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
            if peer.role is Role.TARGET:
                peer.links[link] = ToyTargetWorker(self.weather.capacity, peer.revision)
            else:
                peer.links[link] = (LyingDraftWorker if peer.lies else ToyDraftWorker)(self.weather.agreement)
        for reply in peer.links[link].receive(message):
            self._to_router(peer, link, reply)
        self._schedule_step(peer)

    def _to_router(self, peer: SimulatedPeer, link: int, message: FromWorker) -> None:
        self._transmit(peer, "from", lambda: self._hear(peer, link, message))

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
        self.later(silence, lambda: peer.links.pop(last, None))

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

    def _await_drained(self, peer: SimulatedPeer, until: float, back_in: float | None) -> None:
        if not peer.draining or not peer.up:
            return
        unheard = peer.known and not peer.leaving
        if self.now < until and (unheard or any(worker.sessions for worker in peer.links.values())):
            self.later(0.02, lambda: self._await_drained(peer, until, back_in))
            return
        self._end_process(peer)
        link = peer.link
        self.later(self.weather.delay, lambda: self.notice(peer) if peer.link == link else None)
        if back_in is not None:
            self.later(back_in, lambda: self.come_back(peer))

    def _end_process(self, peer: SimulatedPeer) -> None:
        peer.up = peer.stuck = peer.draining = False
        peer.stopped_until = 0.0
        peer.links.clear()
        peer.unread.clear()
        peer.link += 1
        peer.arrivals.clear()

    def come_back(self, peer: SimulatedPeer) -> None:
        """A process takes the worker's place."""
        if peer.up:
            return
        self.notice(peer)
        peer.up, peer.revision = True, peer.becomes
        self._connect(peer)
