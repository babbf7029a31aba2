"""What the relay between a target and a drafter takes: real streams through a real router, and nothing computed.

Each part is a process of its own. Messages carry the time they were made at as a token id, so one-way times are read
where they arrive. Beside the router runs, in turn, a bare one that passes the same bytes on through gRPC's streams and
reads nothing: the difference is ours, the rest is what two streams cost on this machine as it is now. And a bare pair
without a router, which is what one stream costs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from benchmarks.harness.command import Bench
from benchmarks.harness.options import FIGURES, Options, between, flag
from benchmarks.harness.processes import ReadyProcess, WorkerFailed, child
from benchmarks.harness.report import Result, Table
from cluster.console import stages

PACELINE, FEATURES, BARE, DIRECT = "paceline", "with features", "bare", "bare, no router"
"""What is measured: a router between two workers; the same with features of every committed token; three processes that
pass as many bytes on through gRPC as the first; and two that send them to each other, which is the least that a stream
between target and drafter would take."""
CONTENDERS = (PACELINE, FEATURES, BARE, DIRECT)
VERIFIED, PROPOSED = "target to drafter", "drafter to target"
"""The two ways."""
WAYS = (VERIFIED, PROPOSED)
WANTED_MS = 0.5
"""Most that each way may take, in the median."""
COMMIT_TOKENS = 3
"""Of a verification, the last of which is when it was sent."""
PROPOSED_TOKENS = 4
"""Of a proposal, the first of which is when it was sent."""
CLOCK_US = 1 << 31
"""Times are sent as token ids: microseconds of the clock that all processes of a machine share, from 0 to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions(Options):
    """How large the benchmark is."""

    BENCH: ClassVar[str] = "relay"
    json: Path | None = flag(None, FIGURES)
    sessions: int = flag(16, "sessions at once", least=1, most=256)
    """At most as many as a target runs in one step."""
    steps: float = flag(125.0, "steps of the target a second", least=1, most=1000)
    """Every session is in each."""
    host_ms: float = flag(1.0, "Python in each step of the target", metavar="MS")
    """How long either worker is busy in Python in each step: meanwhile its event loop has to get hold of the GIL."""
    feature_width: int = flag(4096, "numbers of a committed token's features, where they travel", least=1, most=65536)
    """In bfloat16, as an EAGLE head away from its target reads them."""
    rounds: int = flag(3, "turns of the router and of the bare relay", least=1, most=100)
    """In each of which every contender has its turn."""
    seconds: float = flag(4.0, "how long a turn is measured", least=0.1, most=600, metavar="S")

    def check(self) -> None:
        """See :class:`benchmarks.harness.options.Options`."""
        between("--host-ms", self.host_ms, 0, 1000 / self.steps, ", a step")


BENCH = Bench(
    "what the router's relay takes from target to drafter and back, beside bare gRPC streams",
    "No model is computed. Takes less than a minute.",
    RelayOptions,
    "benchmarks.relay.run",
)
WARM_UP_SECONDS = 1.0
PARTS = dict.fromkeys((PACELINE, FEATURES), ("target", "draft", "router")) | {
    BARE: ("bare-target", "bare-draft", "bare-router")
}
"""Of those with a router: what each process is told to be."""


@dataclass(frozen=True, slots=True)
class RelayTurn:
    """One turn of a contender. Times in milliseconds, by the way they were taken on."""

    contender: str
    heard: dict[str, list[float]]
    """From one machine to the event loop of the other."""
    taken: dict[str, list[float]]
    """And until the other machine took the message up."""
    cpu_us: dict[str, float]
    """Processor time of each part for a verification and its proposal."""


@dataclass(frozen=True, slots=True)
class RelayFigures:
    """One way of one contender, over all its turns."""

    messages: int
    p50_ms: float
    p99_ms: float
    taken_p50_ms: float
    """Until the machine took it up: a target does so between two steps."""


def figures(turns: Sequence[RelayTurn], contender: str, way: str) -> RelayFigures:
    """What was measured of one way."""
    own = [turn for turn in turns if turn.contender == contender]
    heard = sorted(time for turn in own for time in turn.heard[way])
    taken = [time for turn in own for time in turn.taken[way]]
    if not heard:
        raise WorkerFailed(f"nothing came from {way} through {contender}")
    return RelayFigures(len(heard), median(heard), heard[99 * len(heard) // 100], median(taken))


def cpu(turns: Sequence[RelayTurn], contender: str, part: str) -> float:
    """Microseconds of a part for a verification and its proposal: the median of its turns; 0: it has no such part."""
    return median(turn.cpu_us.get(part, 0.0) for turn in turns if turn.contender == contender)


def summary(turns: Sequence[RelayTurn]) -> dict[str, float]:
    """The figures that matter, the first two of which have a goal of :data:`WANTED_MS`."""
    ours = {way: figures(turns, PACELINE, way) for way in WAYS}
    bare = {way: figures(turns, BARE, way) for way in WAYS}
    return {
        "verified_p50_ms": ours[VERIFIED].p50_ms,
        "proposed_p50_ms": ours[PROPOSED].p50_ms,
        "verified_p99_ms": ours[VERIFIED].p99_ms,
        "proposed_p99_ms": ours[PROPOSED].p99_ms,
        "verified_over_bare": ours[VERIFIED].p50_ms / bare[VERIFIED].p50_ms,
        "proposed_over_bare": ours[PROPOSED].p50_ms / bare[PROPOSED].p50_ms,
        "router_cpu_us": cpu(turns, PACELINE, "router"),
        "router_cpu_us_with_features": cpu(turns, FEATURES, "router"),
    }


async def measure(options: RelayOptions, report: Callable[[str], None] = lambda _: None) -> list[RelayTurn]:
    """All turns. Raises WorkerFailed, TimeoutError."""
    turns = []
    for number in range(options.rounds):
        for contender in CONTENDERS if number % 2 else reversed(CONTENDERS):
            report(f"round {number + 1} of {options.rounds}: {contender}")
            turns.append(await _turn(contender, options))
    return turns


async def _turn(contender: str, options: RelayOptions) -> RelayTurn:
    async with AsyncExitStack() as stack:
        parts = await _started(stack, contender, options)
        await asyncio.sleep(WARM_UP_SECONDS)
        before = {name: json.loads(await part.ask()) for name, part in parts.items()}
        await asyncio.sleep(options.seconds)
        told = {name: json.loads(await part.ask()) for name, part in parts.items()}
    # A bare frame is as long as the messages of a step.
    frames = options.sessions if contender in (BARE, DIRECT) else 1
    proposals = max(len(told["target"]["heard"]) * frames, 1)
    return RelayTurn(
        contender,
        {VERIFIED: told["draft"]["heard"], PROPOSED: told["target"]["heard"]},
        {VERIFIED: told["draft"]["taken"], PROPOSED: told["target"]["taken"]},
        {name: 1e6 * (told[name]["cpu"] - before[name]["cpu"]) / proposals for name in parts},
    )


async def _started(stack: AsyncExitStack, contender: str, options: RelayOptions) -> dict[str, ReadyProcess]:
    """The processes of a contender by what they are, until the stack is left."""
    width = options.feature_width if contender == FEATURES else 0
    size = [f"{options.host_ms}", f"{options.steps}", f"{options.sessions}", f"{width}"]

    async def start(part: str, *arguments: str) -> ReadyProcess:
        return await stack.enter_async_context(child(f"{part} of the relay", "benchmarks.relay.part", part, *arguments))

    if contender == DIRECT:
        target = await start("bare-target", *size)
        return {"target": target, "draft": await start("bare-caller", target.first, size[2])}
    target_part, draft_part, router_part = PARTS[contender]
    target, draft = await start(target_part, *size), await start(draft_part, *size)
    router = await start(router_part, target.first, draft.first, size[2])
    return {"target": target, "draft": draft, "router": router}


def main(options: RelayOptions) -> int:
    """Measure, show, write."""
    with stages() as report:
        turns = asyncio.run(measure(options, report))
    result(options, turns).publish()
    return 0


def table(turns: Sequence[RelayTurn]) -> Table:
    """Each way of each contender."""
    lines = []
    for contender in CONTENDERS:
        processor = "/".join(f"{cpu(turns, contender, part):.0f}" for part in ("target", "router", "draft"))
        for way in WAYS:
            found = figures(turns, contender, way)
            goal = "" if contender != PACELINE else "yes" if found.p50_ms < WANTED_MS else "NO"
            times = (f"{ms:.2f}" for ms in (found.p50_ms, found.p99_ms, found.taken_p50_ms))
            lines.append((contender, way, str(found.messages), *times, processor, goal))
    columns = ("", "way", "messages", "p50 ms", "p99", "taken p50", "CPU us target/router/draft", f"< {WANTED_MS:g} ms")
    return Table("The relay", columns, lines)


def notes(options: RelayOptions) -> list[str]:
    """What a reader of the figures must know."""
    return [
        f"{options.sessions} sessions, {options.steps:g} steps a second of all of them at once, {options.host_ms:g} ms "
        "of Python in each at the target. Target, drafter and router are processes on the same machine.",
        "From a machine that made a message to the event loop of the other one; taken: until its machine took it up. "
        "CPU: for a verification and its proposal together.",
        f"With features: {COMMIT_TOKENS} tokens of {options.feature_width} numbers in bf16 go with each verification.",
    ]


def result(options: RelayOptions, turns: Sequence[RelayTurn]) -> Result:
    """All that is shown."""
    figures_of = {
        contender: {
            **{way: asdict(figures(turns, contender, way)) for way in WAYS},
            "cpu_us": {part: cpu(turns, contender, part) for part in ("target", "router", "draft")},
        }
        for contender in CONTENDERS
    }
    goals = {name: {"below": WANTED_MS} for name in ("verified_p50_ms", "proposed_p50_ms")}
    document = {"summary": summary(turns), "wanted": goals, "figures": figures_of}
    return Result("relay", "The relay", options, [table(turns)], notes(options), document)
