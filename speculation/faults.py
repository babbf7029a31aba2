"""A deterministic simulation of router, drafters and targets under faults.

One heap, one seeded generator, virtual time. The machines are the ones that serve:
:class:`speculation.session.Session`, :class:`speculation.target_session.TargetSession` and
:class:`speculation.draft_session.DraftSession`. Only the models are toys (a hash of the context) and the network is a
list. The cut is at the stream between router and worker; on it, messages are delayed, lost and doubled, streams break
with or without the worker noticing, workers restart empty or hang.

Checked after every run: the output of each session equals decoding with the target alone, nothing was retracted or
emitted twice, every session ends, and (unless messages were lost) no worker keeps a session after that.

    python -m speculation.faults --seeds 2000
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter

from speculation.events import (
    Available,
    Effect,
    Emit,
    Event,
    Fail,
    Finish,
    Lost,
    PeerId,
    Place,
    Placed,
    Received,
    Role,
    Send,
    Start,
    Stop,
    Tick,
    Wake,
)
from speculation.messages import (
    FromWorker,
    Limits,
    Proposal,
    Refused,
    Sampling,
    SessionId,
    Token,
    ToWorker,
    Verification,
)
from speculation.session import Phase, Session, SessionLimits
from speculation.toy_workers import VOCABULARY, DraftWorker, TargetWorker, target_only

OUTPUT = 40
SESSIONS = 6
HORIZON = 600.0
"""Virtual seconds after which a session that has not ended counts as stuck."""
HEALED = 120.0
"""Faults stop here, so that progress can be demanded."""


@dataclass(frozen=True, slots=True)
class Weather:
    """The faults of one run."""

    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.002
    """Mean one-way delay in seconds, exponentially distributed; order within a stream is kept."""
    crash_every: float = 0.0
    """Mean seconds between worker crashes (0: never)."""
    hang_every: float = 0.0
    agreement: float = 0.8

    @classmethod
    def random(cls, rng: Random) -> Weather:
        """One of many kinds of weather, calm ones included."""
        return cls(
            loss=rng.choice([0.0, 0.0, 0.01, 0.1]),
            doubling=rng.choice([0.0, 0.05]),
            delay=rng.choice([0.0005, 0.005, 0.05]),
            crash_every=rng.choice([0.0, 0.3, 2.0]),
            hang_every=rng.choice([0.0, 1.0, 5.0]),
            agreement=rng.choice([0.0, 0.5, 0.8, 1.0]),
        )


@dataclass(slots=True)
class Peer:
    """A worker as the world sees it. ``life`` counts restarts; messages of an earlier life vanish."""

    name: PeerId
    role: Role
    worker: TargetWorker | DraftWorker
    life: int = 0
    up: bool = True
    hung_until: float = 0.0
    known: bool = True
    """Whether the router believes its stream to be up."""
    arrivals: dict[str, float] = field(default_factory=dict)


class World:
    """Clock, network and router shell of one run."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.rng = Random(seed)
        self.weather = weather or Weather.random(self.rng)
        self.now = 0.0
        self.events = 0
        self._serial = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        names = [(Role.TARGET, "t0"), (Role.TARGET, "t1"), (Role.DRAFT, "d0"), (Role.DRAFT, "d1"), (Role.DRAFT, "d2")]
        self.peers = {PeerId(name): Peer(PeerId(name), role, self._worker(role)) for role, name in names}
        self.sessions: list[Session] = []
        self.emitted: list[list[Token]] = []
        self.failures: list[str] = []
        self.stopped: set[int] = set()
        self.accepted = 0

    def _worker(self, role: Role) -> TargetWorker | DraftWorker:
        return TargetWorker() if role is Role.TARGET else DraftWorker(self.weather.agreement)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run ``action`` at virtual time ``when``."""
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, action))

    def run(self) -> None:
        """Serve all sessions to their end, then check the promises."""
        bounds = SessionLimits(
            fruitless_openings=1_000, draft_openings=50, placement_timeout=HORIZON, stall_timeout=2.0
        )
        for i in range(SESSIONS):
            prompt = tuple(self.rng.randrange(VOCABULARY) for _ in range(self.rng.randint(1, 6)))
            sampling = Sampling(seed=self.rng.getrandbits(64))
            session = Session(SessionId(i), prompt, sampling, Limits(len(prompt) + OUTPUT), session_limits=bounds)
            self.sessions.append(session)
            self.emitted.append([])
            self.at(self.rng.random(), lambda i=i: self._deliver(i, Start()))  # type: ignore[misc]
        if self.rng.random() < 0.5:
            self.at(self.rng.uniform(0.1, 1.5), lambda: self._client_stops(0))
        for peer in self.peers.values():
            self._schedule_step(peer)
            self._schedule_faults(peer)
        while self._heap and (self._running() or self.now < 1.0):
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            assert self.now < HORIZON, f"stuck: {[(s.phase, len(s.output)) for s in self.sessions]}"
            action()
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self._check()

    def _running(self) -> bool:
        return any(session.phase is not Phase.ENDED for session in self.sessions)

    def _client_stops(self, i: int) -> None:
        self.stopped.add(i)
        self._deliver(i, Stop())

    def _check(self) -> None:
        for i, session in enumerate(self.sessions):
            prompt = session._tokens[: session.prompt_length]
            truth = target_only(prompt, session._sampling.seed, session._limits.end)
            assert tuple(self.emitted[i]) == session.output, "what was emitted is not what is committed"
            if i in self.stopped:
                truth = truth[: len(session.output)]
            assert session.output == truth, f"session {i} differs from the target alone"
        assert not self.failures, self.failures
        if not self.weather.loss:
            held = {peer.name: list(peer.worker.sessions) for peer in self.peers.values() if peer.worker.sessions}
            assert not held, f"sessions left behind: {held}"

    # -- router shell --------------------------------------------------------------------------------------------------

    def _deliver(self, i: int, event: Event) -> None:
        session = self.sessions[i]
        for effect in session.handle(self.now, event):
            self._perform(i, effect)

    def _perform(self, i: int, effect: Effect) -> None:
        match effect:
            case Place(role=role, avoid=avoid):
                names = [p.name for p in self.peers.values() if p.known and p.role is role and p.name not in avoid]
                self._deliver(i, Placed(role, self.rng.choice(names) if names else None))
            case Send(peer=peer, message=message):
                self._to_worker(self.peers[peer], message)
            case Emit(tokens=tokens, accepted=accepted):
                self.emitted[i].extend(tokens)
                self.accepted += accepted
            case Wake(at=when):
                self.at(when, lambda: self._deliver(i, Tick()))
            case Fail(message=message):
                self.failures.append(message)
            case Finish():
                pass

    def _broadcast(self, event: Event) -> None:
        for i in range(len(self.sessions)):
            self._deliver(i, event)

    # -- network -------------------------------------------------------------------------------------------------------

    def _transmit(self, peer: Peer, direction: str, action: Callable[[], None]) -> None:
        """Deliver in order after a delay, unless the stream breaks first; lose or double as the weather has it."""
        life = peer.life
        faulty = self.now < HEALED
        if faulty and self.rng.random() < self.weather.loss:
            return
        for _ in range(2 if faulty and self.rng.random() < self.weather.doubling else 1):
            arrival = max(self.now + self.rng.expovariate(1 / self.weather.delay), peer.arrivals.get(direction, 0.0))
            peer.arrivals[direction] = arrival
            self.at(arrival, lambda: action() if peer.life == life else None)

    def _to_worker(self, peer: Peer, message: ToWorker) -> None:
        def arrive() -> None:
            for reply in peer.worker.receive(message) if peer.up else []:
                self._to_router(peer, reply)

        self._transmit(peer, "to", arrive)

    def _to_router(self, peer: Peer, message: FromWorker) -> None:
        assert isinstance(message, Verification | Proposal | Refused)
        session = message.session
        self._transmit(
            peer, "from", lambda: self._deliver(session, Received(peer.name, message)) if peer.known else None
        )

    def _schedule_step(self, peer: Peer) -> None:
        def step() -> None:
            if peer.up and self.now >= peer.hung_until:
                for message in peer.worker.step():
                    self._to_router(peer, message)
            if self._running():
                self._schedule_step(peer)

        self.at(self.now + peer.worker.step_seconds * self.rng.uniform(0.8, 1.5), step)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _schedule_faults(self, peer: Peer) -> None:
        self._repeat(self.weather.crash_every, lambda: self._crash(peer))
        self._repeat(self.weather.hang_every, lambda: self._hang(peer))

    def _repeat(self, mean: float, fault: Callable[[], None]) -> None:
        """Let ``fault`` happen again and again until the faults stop."""

        def strike() -> None:
            fault()
            self._repeat(mean, fault)

        when = self.now + self.rng.expovariate(1 / mean) if mean else HEALED
        if when < HEALED and self._running():
            self.at(when, strike)

    def _crash(self, peer: Peer) -> None:
        """Kill the worker; its replacement is empty. Half the time the router learns late, as after a lost FIN."""
        peer.life += 1
        peer.up = False
        peer.worker = self._worker(peer.role)
        life = peer.life
        late = self.now + self.rng.choice([0.003, 1.0])
        self.at(late, lambda: self._notice(peer) if peer.life == life and not peer.up else None)
        self.at(self.now + self.rng.uniform(0.01, 3.0), lambda: self._restart(peer))

    def _notice(self, peer: Peer) -> None:
        if peer.known:
            peer.known = False
            self._broadcast(Lost(peer.name))

    def _restart(self, peer: Peer) -> None:
        if peer.up and peer.known:
            return  # an earlier restart was enough
        self._notice(peer)
        peer.up = peer.known = True
        self._broadcast(Available(peer.role))

    def _hang(self, peer: Peer) -> None:
        """Stop the worker for a while. The router may cut the stream meanwhile, which ends the worker's sessions."""
        peer.hung_until = self.now + self.rng.uniform(0.05, 4.0)
        if self.rng.random() < 0.5:
            peer.life += 1
            peer.worker.sessions.clear()
            self._notice(peer)
            self.at(peer.hung_until, lambda: self._restart(peer))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds; on the first failure say how to replay it."""
    parser = argparse.ArgumentParser(
        prog="python -m speculation.faults", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--seeds", type=int, default=500, help="number of runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: %(default)s)")
    options = parser.parse_args(arguments)
    started, events, accepted, reopened = perf_counter(), 0, 0, 0
    for seed in range(options.first, options.first + options.seeds):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            sys.stderr.write(f"seed {seed}: {error}\nreplay: python -m speculation.faults --first {seed} --seeds 1\n")
            return 1
        events += world.events
        accepted += world.accepted
        reopened += sum(session.reopened for session in world.sessions)
    rate = options.seeds / (perf_counter() - started)
    tokens = options.seeds * SESSIONS * OUTPUT
    sys.stdout.write(
        f"{options.seeds} seeds passed ({rate:.0f} a second): {events} events, "
        f"{accepted} of about {tokens} tokens drafted, {reopened} failovers\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
