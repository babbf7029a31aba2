"""A router at one moment, as plain values: what metrics, readiness and views of the cluster are made from.

What it has counted since its start is part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from router.generation import ServedModel
from router.sessions.pool import Peer, WorkerPool
from router.sessions.run import LoggedEvent
from router.sessions.tally import AcceptanceRecord
from speculation.events import PeerId, Role
from speculation.messages import Load, Loading, Welcome
from speculation.request.session import Phase, Session
from transport.client import Traffic


class WorkerState(StrEnum):
    """What a router can do with a worker."""

    UP = "up"
    DRAINING = "draining"
    """Its sessions go on; it gets no new ones."""
    DOWN = "down"
    """It is listed, but not connected, or does not fit the served model."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as a router sees it."""

    worker: PeerId
    role: Role
    state: WorkerState
    model: str = ""
    load: Load = Load()
    """What it last said of itself, all its routers together."""
    round_trip: float | None = None
    described: Welcome | None = None
    sessions: int = 0
    since: float = 0.0
    """When it came into this state, by the clock of the pool."""
    acceptance: float | None = None
    """Share of drafters' drafts that were kept, of this drafter or at this target, the recent counting most; None: no
    drafter offered any."""
    rates: tuple[float, ...] | None = None
    """See :attr:`router.sessions.pool.Peer.work`; None while unknown."""
    standby: bool = False
    loading: Loading | None = None

    @classmethod
    def of(cls, peer: Peer, acceptance: float | None, *, standby: bool = False) -> WorkerView:
        """What is known of it now."""
        known = cls(peer.peer, peer.role, WorkerState.DOWN, described=peer.described, since=peer.since)
        if peer.welcome is None:
            return replace(known, loading=peer.doing)
        return replace(
            known,
            state=WorkerState.DRAINING if peer.leaving else WorkerState.UP,
            model=peer.welcome.model,
            load=peer.load,
            round_trip=peer.connection.round_trip,
            sessions=len(peer.opened),
            acceptance=acceptance,
            rates=peer.work.rates(peer.pool.clock()) if peer.work else None,
            standby=standby,
        )

    @property
    def starting(self) -> dict[str, object]:
        """Of one that is down: what it does, as far as it says so, and how much of that is done."""
        known = self.loading or Loading("waiting for this worker", model=self.described.model if self.described else "")
        return {"role": self.role.value, "model": known.model, "doing": known.doing, "fraction": known.fraction}


@dataclass(slots=True)
class Totals:
    """Monotone totals since the start. What sessions count themselves is added when they end."""

    sessions: int = 0
    reopened: int = 0
    moved: int = 0
    """Sessions that went to another target without a fault, each time."""
    condemned: int = 0
    """Sessions failed because targets died of them."""
    failed: int = 0
    """Sessions without a whole text."""
    malformed: int = 0
    stale: int = 0
    """Messages of workers that came too late to matter, or about no session known here."""
    strikes: int = 0
    quarantined: int = 0
    """Drafters that a session was done with; each counts once for every such session."""

    def take(self, session: Session) -> None:
        """Add what a session counts itself."""
        self.reopened += session.reopened
        self.moved += session.moved
        self.stale += session.stale
        self.strikes += sum(map(len, session.drafting.strikes.values()))
        self.quarantined += len(session.drafting.quarantined)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Workers, sessions and totals of one router."""

    workers: tuple[WorkerView, ...] = ()
    models: tuple[ServedModel, ...] = ()
    logged_events: tuple[LoggedEvent, ...] = ()
    totals: Totals = field(default_factory=Totals)
    record: AcceptanceRecord = field(default_factory=AcceptanceRecord)
    placing: int = 0
    """Sessions that wait for a target worker."""
    running: int = 0
    traffic: dict[Role, Traffic] = field(default_factory=dict)
    draining: bool = False
    awaited: tuple[str, ...] = ()
    """See :class:`router.sessions.choice.FirstTargets`."""
    unreadable: frozenset[str] = frozenset()
    """Names of models whose tokenizer cannot be read."""

    @classmethod
    def of(
        cls,
        pool: WorkerPool,
        sessions: Collection[Session],
        ended: Totals,
        *,
        draining: bool,
        unreadable: Iterable[str] = (),
    ) -> Snapshot:
        """A router as of now. ``sessions`` are under way; ``ended``: what those before them have counted."""
        totals = replace(ended)
        for session in sessions:
            totals.take(session)
        kept, idle = pool.record.measured(), pool.idle()
        totals.stale += pool.unrouted
        return cls(
            workers=tuple(
                WorkerView.of(peer, kept.get(name), standby=name in idle) for name, peer in pool.peers.items()
            ),
            models=tuple(pool.models().values()),
            logged_events=pool.event_log.lines,
            totals=totals,
            record=pool.record,
            placing=sum(session.phase is Phase.PLACING for session in sessions),
            running=sum(session.phase is Phase.RUNNING for session in sessions),
            traffic={role: pool.traffic(role) for role in Role},
            draining=draining,
            awaited=pool.first.awaited(pool.clock()),
            unreadable=frozenset(unreadable),
        )

    @property
    def targets(self) -> list[WorkerView]:
        """Those of the workers that verify."""
        return [worker for worker in self.workers if worker.role is Role.TARGET]

    @property
    def exact(self) -> bool | None:
        """Whether every target that is up gives a token the same bits however it is computed; None: unknown."""
        up = [target.described for target in self.targets if target.state is WorkerState.UP]
        known = [welcome.exact if welcome else None for welcome in up]
        return None if None in known or not known else all(known)

    @property
    def readiness(self) -> dict[str, object]:
        """Whether requests can be served, and what is being done about workers that are not up: names no addresses."""
        reason = self.unready
        down = [each for each in self.workers if each.state is WorkerState.DOWN]
        starting = [each.starting for each in down if each.loading or (reason and each.role is Role.TARGET)]
        status: dict[str, object] = {"status": "ready", "exact": self.exact}
        if reason is not None:
            status = {"status": "unready", "reason": reason}
        return status | {"starting": starting} if starting else status

    @property
    def loading(self) -> str:
        """What targets do before they are up; nothing where none says so."""
        known = [target.loading for target in self.targets if target.loading]
        return f"{len(known)} of {len(self.targets)} target workers load: {known[0].doing}" if known else ""

    @property
    def unready(self) -> str | None:
        """Why no request, or none for one of the models yet, can be served now; None: one can."""
        if self.draining:
            return "this router is draining"
        targets = self.targets
        if not targets:
            return "no target worker is known"
        if up := {target.model for target in targets if target.state is WorkerState.UP}:
            if up <= self.unreadable:
                return f"the tokenizer of {', '.join(sorted(up))} cannot be read; this router's log says why"
            awaited = ", ".join(self.awaited)
            return f"no target worker of these models has been up yet: {awaited}" if awaited else None
        if loading := self.loading:
            return loading
        if all(target.state is WorkerState.DOWN for target in targets):
            return f"no target worker is connected, of {len(targets)} known"
        return "every target worker that is connected is draining"
