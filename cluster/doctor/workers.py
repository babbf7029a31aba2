"""Workers as a router meets them: reachable, who they say they are, how far away, and whether drafting pays there.

A round trip is what opening a TCP connection takes: the network's share of the way, whatever the worker computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from cluster.doctor.finding import Finding, ok, problem, warning
from router.sessions.choice import same_tokenizer
from simulation.agreement import made_up
from simulation.costs import Costs, Curve
from simulation.simulate import Bounds, SimulationSettings, simulate
from speculation.events import Role
from speculation.messages import Loading, Schedule, Welcome
from transport.address import parse
from transport.client import WorkerConnection
from transport.incoming import Listener
from transport.tls import Identity

TRIPS = 20
"""How often a round trip is measured."""
CONNECT_SECONDS = 3.0
WELCOME_SECONDS = 5.0
UNEVEN = 10.0
"""A worst round trip of so many times the median is worth a word, if it is also :data:`LONG_SECONDS`."""
LONG_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Met:
    """What meeting one worker came to."""

    role: Role
    address: str
    unreachable: str = ""
    """Why no connection could be opened."""
    welcome: Welcome | Loading | None = None
    """Also one of the other role."""
    trips: Sequence[float] = ()
    """Seconds."""
    reasons: Sequence[str] = ()
    """Why no stream came up, if none did."""

    @property
    def subject(self) -> str:
        """For the report."""
        return f"{self.role} {self.address}"

    @property
    def is_target(self) -> bool:
        """Whether it answered as one, wherever it is listed."""
        said = self.welcome
        return said.role == Role.TARGET if isinstance(said, Welcome) else said is not None and self.role is Role.TARGET

    @property
    def trip(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.trips)


@dataclass(slots=True)
class _Greeting(Listener):
    """Hears a worker introduce itself."""

    welcome: asyncio.Future[Welcome | Loading] = field(default_factory=asyncio.Future)

    def up(self, welcome: Welcome) -> None:
        if not self.welcome.done():
            self.welcome.set_result(welcome)

    def loading(self, loading: Loading | None) -> None:
        if loading is not None and not self.welcome.done():
            self.welcome.set_result(loading)


async def meet_all(addresses: Mapping[Role, Iterable[str]], identity: Identity | None = None) -> list[Met]:
    """Meet all workers at once, as a router of this identity."""
    pairs = [(role, one) for role, listed in addresses.items() for one in listed]
    return list(await asyncio.gather(*(meet(*pair, identity) for pair in pairs)))


async def meet(role: Role, address: str, identity: Identity | None = None) -> Met:
    """Connect to a worker as a router does; raises :class:`transport.address.AddressError` for no address."""
    try:
        trips = [await _trip(*parse(address)) for _ in range(TRIPS)]
    except TimeoutError:
        return Met(role, address, f"no answer within {CONNECT_SECONDS:.0f} s")
    except OSError as error:
        return Met(role, address, os.strerror(error.errno) if error.errno else str(error))
    welcome, reasons = await _welcome(role, address, identity)
    if welcome is None:  # a worker has no ear for routers that take it for one of the other role
        (other,) = set(Role) - {role}
        of_other, _ = await _welcome(other, address, identity)
        welcome = of_other if isinstance(of_other, Welcome) else None
    return Met(role, address, welcome=welcome, trips=trips, reasons=reasons)


def judge(met: Sequence[Met]) -> Iterator[Finding]:
    """What is wrong with the workers, each alone and all together."""
    for worker in met:
        yield from _judge_one(worker)
    if met and not any(worker.is_target for worker in met):
        fix = "start one: `paceline worker target --model ... --listen ...`"
        yield problem("targets", "no target worker answers", fix)
    yield from _judge_models(met)


def _judge_models(met: Sequence[Met]) -> Iterator[Finding]:
    known = [(worker, worker.welcome) for worker in met if isinstance(worker.welcome, Welcome)]
    targets = [welcome for worker, welcome in known if worker.is_target]
    drafts = [(worker, welcome) for worker, welcome in known if not worker.is_target]
    for worker, welcome in drafts if targets else ():
        if not any(same_tokenizer(welcome.tokenizer, target.tokenizer) for target in targets):
            text = f"the tokenizer of {welcome.model} is that of no target"
            fix = "start it with --target-tokenizer, or choose a draft model with that tokenizer"
            yield problem(worker.subject, text, fix)
    for plain in sorted({welcome.model for welcome in targets if not welcome.speculates}):
        yield warning("targets", f"{plain} cannot speculate", "drafters are of no use to it; leave them out")


def _judge_one(worker: Met) -> Iterator[Finding]:
    welcome = worker.welcome
    if worker.unreachable:
        yield problem(worker.subject, worker.unreachable, "start the worker, or open the way to it (firewall, policy)")
    elif welcome is None:
        text = ": ".join(filter(None, ("takes connections but does not introduce itself", "; ".join(worker.reasons))))
        fix = "use the same security settings here and there, and restart it if it hangs"
        yield problem(worker.subject, text, fix)
    elif isinstance(welcome, Loading):
        yield warning(worker.subject, f"not up yet: {welcome.doing}", "wait until it has loaded")
    elif welcome.role != worker.role.value:
        yield problem(worker.subject, f"is a {welcome.role} worker", f"list it as --{welcome.role}")
    else:
        worst = max(worker.trips)
        trip = f"round trip {1000 * worker.trip:.2f} ms, worst of {len(worker.trips)} {1000 * worst:.2f} ms"
        if worst > LONG_SECONDS and worst > UNEVEN * worker.trip:
            yield warning(worker.subject, f"{trip}: uneven", "look for a busy link or an overloaded machine")
        else:
            said = ", ".join(filter(None, (welcome.dtype, welcome.exactness)))
            yield ok(worker.subject, f"{welcome.model} in {said}, {trip}")


async def _trip(host: str, port: int) -> float:
    started = time.perf_counter()
    async with asyncio.timeout(CONNECT_SECONDS):
        _, writer = await asyncio.open_connection(host, port)
    seconds = time.perf_counter() - started
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return seconds


async def _welcome(
    role: Role, address: str, identity: Identity | None
) -> tuple[Welcome | Loading | None, Sequence[str]]:
    """How the worker introduces itself, or what it does before, if it says so in time; else why no stream came up."""
    greeting = _Greeting()
    connection = WorkerConnection(address, role.value, greeting, identity=identity)
    running = asyncio.create_task(connection.run())
    try:
        async with asyncio.timeout(WELCOME_SECONDS):
            return await greeting.welcome, ()
    except TimeoutError:
        return None, tuple(connection.reasons)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


PAYS = 1.05
"""Below this speed-up drafters are not worth their machines."""
TOKENS = 600


def speedup(target: float, draft: float, acceptance: float, rtt: float) -> float:
    """Of one request over plain decoding, by seconds of steps, and with ``rtt`` from drafter to target and back."""
    costs = Costs(
        verify={1: Curve.straight(target, 0.01)},
        draft=Curve.straight(draft, 0.04),
        to_target=rtt / 2,
        to_draft=rtt / 2,
    )
    outcomes = made_up(Random(0), acceptance, None)
    drafted, plain = (
        simulate(SimulationSettings(schedule), costs, outcomes, Random(0), tokens=TOKENS, bounds=Bounds()).rate
        for schedule in (Schedule.TRIE, None)
    )
    return drafted / plain


def judge_distance(met: Sequence[Met], target: float, draft: float, acceptance: float) -> Iterator[Finding]:
    """For the farthest drafter and target, whose steps take so many seconds, and drafts that are so often right.

    Drafts take the way through the router, where this runs.
    """
    far = {role: max((met_.trip for met_ in met if met_.role is role and met_.trips), default=None) for role in Role}
    to_target, to_draft = far[Role.TARGET], far[Role.DRAFT]
    if to_target is None or to_draft is None:
        return
    rtt = to_target + to_draft
    gain = speedup(target, draft, acceptance, rtt)
    text = (
        f"{1000 * rtt:.1f} ms from drafter to target and back make drafting {gain:.2f} times as fast as plain decoding "
        f"(simulated: steps of {1000 * target:g} and {1000 * draft:g} ms, acceptance {acceptance:g})"
    )
    far_off = warning("distance", text, "put drafters nearer, or do without them")
    yield far_off if gain < PAYS else ok("distance", text)
