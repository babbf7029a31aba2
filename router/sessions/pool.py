"""The workers a router knows: which are up, what they run, how busy and how far they are.

Gathers what :mod:`router.sessions.choice` decides by. Targets of one name serve one model; drafters serve every model
with their tokenizer. Knows of sessions only how many it has where, and how long they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from router.generation import ServedModel
from router.sessions import choice
from router.sessions.run import EventKind, EventLog, JoinedEnd, OpenSession
from router.sessions.tally import AcceptanceRecord, Recent
from speculation import messages
from speculation.events import Available, Draining, PeerId, Role, Stays
from speculation.request.placement import Opening
from transport.client import Traffic, WorkerConnection
from transport.codec import MalformedMessage
from transport.codec_parts import AskedLogprobs
from transport.incoming import Listener, Route
from transport.tls import Identity

log = logging.getLogger(__name__)

WORK = {Role.TARGET: ("steps", "committed"), Role.DRAFT: ("steps", "proposed")}
"""What workers count of their steps and of the tokens they bring."""


@dataclass(slots=True)
class PoolEvents:
    """What the pool tells its owner. Called from the event loop; must not block."""

    changed: Callable[[Available | Draining | Stays], None]
    lost: Callable[[Role, PeerId, bool], None]
    """A worker is gone; whether it was expected to go."""
    received: Callable[[PeerId, messages.SessionMessage], None]
    malformed: Callable[[PeerId, MalformedMessage], None]


@dataclass(eq=False, slots=True)
class Peer(Listener):
    """One worker as the router sees it."""

    peer: PeerId
    role: Role
    pool: WorkerPool
    welcome: messages.Welcome | None = None
    """None while it is down."""
    described: messages.Welcome | None = None
    """As it last introduced itself, also while it is down."""
    doing: messages.Loading | None = None
    """What it does before it can come up, as far as it says so."""
    load: messages.Load = messages.Load()
    opened: dict[messages.SessionId, OpenSession] = field(default_factory=dict)
    prefixes: choice.Prefixes = field(default_factory=choice.Prefixes)
    connection: WorkerConnection = field(init=False)
    task: asyncio.Task[None] | None = None
    since: float = 0.0
    """When it was last seen to come, to go or to begin to drain, by the clock of the pool."""
    work: Recent | None = None
    """Its counters named in :data:`WORK`; None before its first report."""
    listed: bool = True
    """Whether it is meant to be there. One that is not is used until its sessions have left, or its stream ends."""

    def __post_init__(self) -> None:
        address = self.peer.partition("@")[2]
        self.connection = WorkerConnection(address, self.role.value, self, self.pool.identity)

    @property
    def leaving(self) -> bool:
        """Whether nothing new is to be opened there."""
        return self.load.draining or not self.listed

    @property
    def stays(self) -> bool:
        """Whether it is up, and something new may be opened there."""
        return self.welcome is not None and not self.leaving

    def up(self, welcome: messages.Welcome) -> None:
        """The worker introduced itself; one of another role is not used."""
        self.doing = None
        if welcome.role != self.role.value:
            log.error("worker %s is not used: it says it is a %s worker", self.peer, welcome.role)
            return
        what = f"is up: {welcome.model} in {welcome.dtype}"
        log.info("worker %s %s%s", self.peer, what, welcome.exactness and ", " + welcome.exactness)
        self.note(EventKind.WORKER_UP, what)
        if self.described is None or self.described.instance != welcome.instance:
            self.prefixes = choice.Prefixes()
        self.welcome = self.described = welcome
        self.pool.first.seen(welcome)
        self.opened, self.load, self.work = {}, messages.Load(), None
        self.pool.warn_of(self, welcome)
        self.pool.events.changed(Available(self.role))

    def loading(self, loading: messages.Loading | None) -> None:
        """The worker is there, and will be up."""
        if loading is not None and self.doing is None:
            log.info("worker %s is there and loads %s", self.peer, loading.model)
        self.doing = loading

    def received(self, message: messages.SessionMessage | messages.Load) -> None:
        """The worker sent a message. With its load it says how busy it is, and what it has counted."""
        if isinstance(message, messages.Load):
            leaving, self.load = self.leaving, message
            now, totals = self.pool.clock(), [message.counters.get(name, 0) for name in WORK[self.role]]
            self.work = self.work or Recent(now, *totals)
            self.work.set(now, *totals)
            if self.leaving and not leaving:
                log.info("worker %s drains", self.peer)
                self.note(EventKind.WORKER_DRAINING, "drains")
                self.pool.events.changed(Draining(self.peer))
            return
        opened = self.opened.get(message.session)
        if isinstance(message, messages.Refused):
            if opened is not None and opened.epoch == message.epoch:  # and not an older one
                self.pool.closed(self.peer, message.session)
        elif opened is not None:
            opened.unanswered = 0
            if isinstance(message, messages.Verification) and message.prompt_logprobs:
                opened.asked = replace(opened.asked, prompt=None)
        self.pool.events.received(self.peer, message)

    def asked(self, session: messages.SessionId, epoch: int) -> AskedLogprobs | None:
        """What it may tell of a session's tokens; None: it is not open there under this epoch."""
        opened = self.opened.get(session)
        return opened.asked if opened is not None and opened.epoch == epoch else None

    def unrouted(self) -> None:
        """Features of it came too late for anybody, or under an epoch that does not count."""
        self.pool.unrouted += 1

    def malformed(self, error: MalformedMessage) -> None:
        """The worker sent a message that breaks the protocol, or of a kind not known here."""
        self.pool.events.malformed(self.peer, error)

    def down(self, why: str) -> None:
        """The worker is lost."""
        if self.welcome is not None:
            expected = self.leaving
            log.log(logging.INFO if expected else logging.WARNING, "worker %s is gone: %s", self.peer, why)
            self.note(EventKind.WORKER_GONE if expected else EventKind.WORKER_LOST, f"is gone: {why}")
            self.welcome, self.opened, self.load = None, {}, messages.Load()
            self.pool.events.lost(self.role, self.peer, expected)
        self.pool.let_go(self)

    def note(self, kind: EventKind, what: str) -> None:
        """Something happened to it."""
        self.since = self.pool.clock()
        self.pool.event_log.note(kind, f"worker {self.peer} {what}", self.peer)


@dataclass(slots=True)
class WorkerPool:
    """All workers of one router."""

    events: PoolEvents
    rng: Random = field(default_factory=Random)
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    record: AcceptanceRecord = field(default_factory=AcceptanceRecord)
    event_log: EventLog = field(default_factory=EventLog)
    identity: Identity | None = None
    """Who the router is to the workers; None: connections are in plain text."""
    standby: Mapping[str, choice.StandbyTargets] = field(default_factory=dict)
    """By the name of a model, or under no name for any: those of which targets are to stand by."""
    expected: Sequence[str] = ()
    """Names of all models there are to be, where these are several and known beforehand."""
    unrouted: int = 0
    """Features that nobody waited for."""
    _joined: dict[messages.SessionId, tuple[JoinedEnd | None, JoinedEnd | None]] = field(default_factory=dict)
    """The target and the drafter of each session that say something to each other."""
    _departed: dict[Role, Traffic] = field(default_factory=lambda: {role: Traffic() for role in Role})
    _models: choice.ServedModels = field(default_factory=choice.ServedModels)
    first: choice.FirstTargets = field(init=False)

    def __post_init__(self) -> None:
        self.first = choice.FirstTargets(self.expected, self.clock(), time.time())

    def models(self) -> dict[str, ServedModel]:
        """All models that have, or lately had, a target. New requests are for what the newest target of each says."""
        targets = self._of(Role.TARGET)
        known = [peer.described for peer in targets if peer.described]
        return self._models.served(known, [peer.welcome for peer in targets if peer.welcome], self.clock())

    def loading(self) -> set[str]:
        """Names of the models that targets load, as these say."""
        return {peer.doing.model for peer in self._of(Role.TARGET) if peer.doing and peer.doing.model}

    def _of(self, role: Role) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.role is role]

    def traffic(self, role: Role) -> Traffic:
        """Everything that went to workers of a role and came from them since the start."""
        return sum((peer.connection.traffic for peer in self._of(role)), self._departed[role])

    def set_workers(self, role: Role, addresses: Iterable[str]) -> None:
        """Connect to new workers of a role and let go of those no longer listed, as soon as sessions have left them."""
        wanted = [PeerId(f"{role}@{address}") for address in addresses]
        for peer in self._of(role):
            if peer.peer not in wanted:
                self._list(peer, listed=False)
        for name in wanted:
            if name in self.peers:
                self._list(self.peers[name], listed=True)
            else:
                peer = self.peers[name] = Peer(name, role, self, since=self.clock())
                peer.task = asyncio.create_task(peer.connection.run(), name=f"connection {name}")

    async def close(self) -> None:
        """Let go of all workers."""
        tasks = [peer.task for peer in self.peers.values() if peer.task]
        for peer in list(self.peers.values()):
            peer.listed = False
            self._remove(peer, "this router stops")
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def send(self, peer: PeerId, message: messages.ToWorker) -> None:
        """Pass a message on; dropped if the worker is not connected."""
        known = self.peers.get(peer)
        if known is not None:
            known.connection.send(message)

    def join(self, session: messages.SessionId, target: Opening | None, draft: Opening | None) -> None:
        """From now on, have what these two say of a session passed on to each other at once, and nobody else's word.

        And the target is told whether the drafter it is joined to has an EAGLE head, for which it then sends features.
        No drafter can ask for features of a session that is not open at it.
        """
        before = self._joined.pop(session, (None, None))
        for end in before:
            if end is not None:
                end.connection.routes.pop(session, None)
        there, drafting = now = self._end(target), self._end(draft)
        if there is not None or drafting is not None:
            self._joined[session] = now
        if there is not None and drafting is not None:
            there.connection.routes[session] = Route(there.epoch, drafting.connection, drafting.epoch)
            drafting.connection.routes[session] = Route(drafting.epoch, there.connection, there.epoch)
        if before == now or there is None:
            return
        if drafting is not None and (drafter := drafting.head):
            # For another drafter too: what the target has kept of the text is sent again.
            there.connection.send(messages.Subscribe(session, there.epoch, drafter.head, drafter.features))
        elif before[0] == there and before[1] is not None and before[1].head:
            there.connection.send(messages.Subscribe(session, there.epoch, 0))

    def _end(self, opening: Opening | None) -> JoinedEnd | None:
        peer = self.peers.get(opening.peer) if opening is not None else None
        if opening is None or peer is None:
            return None
        return JoinedEnd(peer.connection, opening.epoch, peer.welcome if peer.welcome and peer.welcome.head else None)

    def choose(
        self, role: Role, avoid: frozenset[PeerId], wanted: choice.WantedWorker, target: PeerId | None
    ) -> PeerId | None:
        """Where a session goes. ``target``: where it already is, when a drafter is to be found for it.

        None when no worker fits, or its model has no use for drafts.
        """
        usable = [peer for peer in self._of(role) if peer.stays and peer.peer not in avoid]
        if role is Role.TARGET:
            idle = self.idle()
            known = [self._candidate(peer, wanted, idle=peer.peer in idle) for peer in usable]
            others = (peer for peer in self._of(role) if peer.listed and peer not in usable)  # seldom looked at
            return choice.choose_target(known, wanted, self.rng, (peer.described for peer in others if peer.described))
        if not self.speculates(target):
            return None
        verifier = self.welcome_of(target)
        wanted = replace(wanted, head=verifier.head if verifier else 0)
        return choice.choose_drafter([self._candidate(peer, wanted) for peer in usable], wanted, self.rng)

    def idle(self) -> set[PeerId]:
        """The targets that stand by: they take sessions only where no other one can."""
        targets = self._of(Role.TARGET)
        known = [choice.KnownTarget(peer.peer, peer.described, peer.stays, peer.listed) for peer in targets]
        return choice.idle_targets(known, self.standby)

    def speculates(self, target: PeerId | None) -> bool:
        """Whether drafts are of use to what runs there; assumed where that is not known."""
        welcome = self.welcome_of(target)
        return welcome is None or welcome.speculates

    def welcome_of(self, worker: PeerId | None) -> messages.Welcome | None:
        """How a worker introduced itself; None while it is down."""
        known = self.peers.get(worker) if worker is not None else None
        return known.welcome if known is not None else None

    def _candidate(self, peer: Peer, wanted: choice.WantedWorker, *, idle: bool = False) -> choice.WorkerCandidate:
        assert peer.welcome is not None
        return choice.WorkerCandidate(
            peer.peer,
            peer.welcome,
            peer.load,
            sessions=len(peer.opened),
            opening_tokens=sum(opened.unanswered for opened in peer.opened.values()),
            known_tokens=peer.prefixes.known_tokens(wanted.blocks),
            round_trip=peer.connection.round_trip,
            acceptance=self.record.expected(wanted.model, peer.welcome.model, peer.peer),
            idle=idle,
        )

    def revisions(self, model: str) -> set[int]:
        """Revisions of a model that have a target now."""
        return {welcome.revision for welcome in self._targets_of(model)}

    def longest(self, model: str) -> int:
        """Tokens of the longest text that a target of a model takes now; 0: it has none."""
        return max((welcome.context for welcome in self._targets_of(model)), default=0)

    def _targets_of(self, model: str) -> list[messages.Welcome]:
        welcomes = [peer.welcome for peer in self._of(Role.TARGET)]
        return [welcome for welcome in welcomes if welcome and welcome.model == model]

    def opened(self, peer: PeerId, opening: messages.Open, blocks: Sequence[int]) -> None:
        """A session is sent there, of a prompt of these blocks."""
        known = self.peers.get(peer)
        if known is not None:
            unanswered = max(len(opening.tokens) - known.prefixes.known_tokens(blocks), 0)
            wanted = opening.request_options
            asked = AskedLogprobs(wanted.logprobs, wanted.prompt_logprobs, len(opening.tokens))
            known.opened[opening.session] = OpenSession(opening.epoch, unanswered, asked)
            if known.role is Role.TARGET:
                known.prefixes.note(blocks)

    def closed(self, peer: PeerId, session: messages.SessionId) -> None:
        """A session has left; harmless if it was not there."""
        known = self.peers.get(peer)
        if known is not None:
            known.opened.pop(session, None)
            self.let_go(known)

    def end_session(self, session: messages.SessionId) -> None:
        """Pass nothing on any more, and tell whoever still holds it, as where it did not end as it should."""
        self.join(session, None, None)
        for peer in list(self.peers.values()):
            if (opened := peer.opened.get(session)) is not None:
                self.send(peer.peer, messages.Close(session, opened.epoch))
                self.closed(peer.peer, session)

    def drafted(self, target: PeerId, drafter: PeerId, kept: int, offered: int) -> None:
        """So many drafts were offered in a step of a session at these two, and so many of them kept."""
        verifier, proposer = self.peers.get(target), self.peers.get(drafter)
        if verifier and proposer and verifier.welcome and proposer.welcome:
            self.record.add(target, verifier.welcome.model, drafter, proposer.welcome.model, kept, offered)

    def _list(self, peer: Peer, *, listed: bool) -> None:
        """Let go of a worker that is no longer listed, but not of its sessions; or have it back."""
        leaving, peer.listed = peer.leaving, listed
        if not listed and peer.opened and not leaving:
            peer.note(EventKind.WORKER_DRAINING, "left the list of workers; its sessions leave it")
            self.events.changed(Draining(peer.peer))
        elif listed and leaving and not peer.leaving:
            peer.note(EventKind.WORKER_UP, "is on the list of workers again")
            self.events.changed(Stays(peer.peer))
        self.let_go(peer)

    def warn_of(self, peer: Peer, welcome: messages.Welcome) -> None:
        """Log what is odd about a worker that has come up: a drafter may have nothing to do beside all targets."""
        if peer.role is Role.TARGET:
            if self.revisions(welcome.model) != {welcome.revision}:
                text = "targets of %s are of different revisions: no text moves from one to another"
                log.warning(text, welcome.model)
            return
        heads = {other.welcome.head for other in self._of(Role.TARGET) if other.welcome}
        why = choice.why_useless(welcome, [model.tokenizer for model in self.models().values()], heads)
        if why:
            log.warning("drafter %s has nothing to do: %s", peer.peer, why)

    def let_go(self, peer: Peer) -> None:
        """Remove a worker that has left the list, if nothing is left there."""
        if not peer.listed and not peer.opened and self.peers.get(peer.peer) is peer:
            self._remove(peer, "it left the list of workers")

    def _remove(self, peer: Peer, why: str) -> None:
        self.models()  # so that its model is remembered
        del self.peers[peer.peer]
        self.record.forget(peer.peer)
        self._departed[peer.role] += peer.connection.traffic
        if peer.task:
            peer.task.cancel()
        peer.down(why)
