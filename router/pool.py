"""The workers a router knows, and the choice among them.

Knows which are up, what they run and how busy they are; decides where a session goes: filter (up, right model, not to
be avoided), score (fewest sessions), pick (at random among equals). Knows nothing about sessions but their number.

Messages that no worker of the served model should send are reported as malformed, like those that cannot be read. What
follows from that for a session is the session's business; a worker is used on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from speculation.events import PeerId, Role
from speculation.messages import FromWorker, Load, Proposal, ToWorker, Welcome
from transport.client import WorkerConnection
from transport.codec import MalformedMessage
from transport.tls import Identity

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PoolEvents:
    """What the pool tells its owner. Called from the event loop; must not block."""

    available: Callable[[Role], None]
    lost: Callable[[PeerId, str], None]
    received: Callable[[PeerId, FromWorker], None]
    malformed: Callable[[PeerId, MalformedMessage], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of frames to and from workers, as serialised."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent - other.sent, self.received - other.received)


@dataclass(eq=False, slots=True)
class Peer:
    """One worker as the router sees it. Implements :class:`transport.client.Listener`."""

    peer: PeerId
    role: Role
    pool: WorkerPool
    welcome: Welcome | None = None
    """None while it is down."""
    load: Load = Load()
    sessions: int = 0
    """Sessions this router has open there."""
    connection: WorkerConnection | None = None
    task: asyncio.Task[None] | None = None
    removed: bool = False

    def up(self, welcome: Welcome) -> None:
        """The worker introduced itself."""
        self.pool.worker_up(self, welcome)

    @property
    def traffic(self) -> Traffic:
        """All that went to it and came from it."""
        connection = self.connection
        return Traffic(connection.sent_bytes, connection.received_bytes) if connection else Traffic()

    def received(self, message: FromWorker) -> None:
        """The worker sent a message."""
        match message:
            case Load():
                self.load = message
            case Proposal() if (worst := highest_token(message)) >= self.pool.vocabulary:
                why = f"token {worst} is outside the vocabulary of {self.pool.vocabulary}"
                self.malformed(MalformedMessage(why, message.session, message.epoch))
            case _:
                self.pool.events.received(self.peer, message)

    def malformed(self, error: MalformedMessage) -> None:
        """The worker sent a message that breaks the protocol."""
        self.pool.events.malformed(self.peer, error)

    def down(self, why: str) -> None:
        """The worker is lost."""
        self.pool.worker_down(self, why)


def highest_token(proposal: Proposal) -> int:
    """The highest token id in a proposal, -1 if it is empty."""
    supports = (support.tokens for support in proposal.q)
    return max(itertools.chain(proposal.tokens, *supports), default=-1)


@dataclass(slots=True)
class WorkerPool:
    """All workers of one router."""

    events: PoolEvents
    rng: Random = field(default_factory=Random)
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    model: Welcome | None = None
    """The served model, as its first target described it."""
    delays: dict[Role, float] = field(default_factory=dict)
    """For experiments: seconds by which all messages to and from workers of a role are late, each way. May be changed
    at any time."""
    identity: Identity | None = None
    """Who the router is to the workers; None: connections are in plain text."""
    _departed: dict[Role, Traffic] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Token ids of the served model are below this; 0 while the model is unknown."""
        return self.model.vocabulary if self.model else 0

    def traffic(self, role: Role) -> Traffic:
        """Everything that went to workers of a role and came from them since the start."""
        present = (peer.traffic for peer in self.peers.values() if peer.role is role)
        return sum(present, self._departed.get(role, Traffic()))

    def set_workers(self, role: Role, addresses: Iterable[str]) -> None:
        """Connect to new workers of a role and let go of those no longer listed."""
        wanted = {PeerId(f"{role}@{address}"): address for address in addresses}
        for peer in [peer for peer in self.peers.values() if peer.role is role and peer.peer not in wanted]:
            self._remove(peer)
        for name, address in wanted.items():
            if name not in self.peers:
                peer = self.peers[name] = Peer(name, role, self)
                peer.connection = WorkerConnection(
                    address, role.value, peer, lambda: self.delays.get(role, 0.0), self.identity
                )
                peer.task = asyncio.create_task(peer.connection.run(), name=f"connection {name}")

    async def close(self) -> None:
        """Let go of all workers."""
        tasks = [peer.task for peer in self.peers.values() if peer.task]
        for peer in list(self.peers.values()):
            self._remove(peer)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def send(self, peer: PeerId, message: ToWorker) -> None:
        """Pass a message on; dropped if the worker is not connected."""
        known = self.peers.get(peer)
        if known is not None and known.connection is not None:
            known.connection.send(message)

    def choose(self, role: Role, avoid: frozenset[PeerId]) -> PeerId | None:
        """Where the next session goes; nowhere, if it is drafts for targets that have no use for them."""
        if role is Role.DRAFT and self.model is not None and not self.model.speculates:
            return None
        usable = [
            peer
            for peer in self.peers.values()
            if peer.role is role and peer.welcome and not peer.load.draining and peer.peer not in avoid
        ]
        if not usable:
            return None
        least = min(self._score(peer) for peer in usable)
        return self.rng.choice([peer for peer in usable if self._score(peer) == least]).peer

    @staticmethod
    def _score(peer: Peer) -> int:
        """Sessions there: our own, of which the worker may not know yet, or all it reports."""
        return max(peer.sessions, peer.load.sessions + peer.load.waiting)

    def count(self, peer: PeerId, change: int) -> None:
        """A session was opened (+1) or left (-1)."""
        known = self.peers.get(peer)
        if known is not None:
            known.sessions = max(known.sessions + change, 0)

    def worker_up(self, peer: Peer, welcome: Welcome) -> None:
        """A worker introduced itself; one that does not fit the served model is not used."""
        objection = self._objection(peer.role, welcome)
        if objection:
            log.error("worker %s is not used: %s", peer.peer, objection)
            return
        log.info("worker %s is up: %s in %s", peer.peer, welcome.model, welcome.dtype)
        peer.welcome, peer.sessions, peer.load = welcome, 0, Load()
        if peer.role is Role.TARGET and self.model is None:
            self.model = welcome
        self.events.available(peer.role)

    def worker_down(self, peer: Peer, why: str) -> None:
        """A worker was lost."""
        if peer.welcome is not None:
            log.warning("worker %s is lost: %s", peer.peer, why)
            peer.welcome, peer.sessions = None, 0
            self.events.lost(peer.peer, why)

    def _objection(self, role: Role, welcome: Welcome) -> str | None:
        if welcome.role != role.value:
            return f"it says it is a {welcome.role} worker, not a {role.value} worker"
        if self.model is None:
            return None
        same_tokenizer = 0 in (welcome.tokenizer, self.model.tokenizer) or welcome.tokenizer == self.model.tokenizer
        if not same_tokenizer:
            return f"its tokenizer differs from that of the target {self.model.model}"
        if role is Role.TARGET and (welcome.model, welcome.vocabulary) != (self.model.model, self.model.vocabulary):
            return f"it runs {welcome.model}, the others run {self.model.model}"
        return None

    def _remove(self, peer: Peer) -> None:
        del self.peers[peer.peer]
        self._departed[peer.role] = self._departed.get(peer.role, Traffic()) + peer.traffic
        if peer.task:
            peer.task.cancel()
        self.worker_down(peer, "it left the list of workers")
