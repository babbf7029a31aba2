"""Tokens a step with drafts from afar: a draft model or an EAGLE-3 head, at round trips in made-up time.

    python -m benchmarks.remote_heads

The bundled target and a drafter are the loops that serve; what is between them, and time, is made up: a step of the
target takes ``--step`` ms and ``--row`` ms for each of its rows, a forward of a drafter ``--forward`` ms, a message
half a round trip. So what is counted does not depend on the machine, and comes out the same again. What a target that
never waits for drafts makes of the head is measured beside it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness.pair import BUNDLED, ROOT, held_out
from benchmarks.harness.report import tell
from draft_service.eagle import HeadLookahead
from draft_service.lookahead import Lookahead
from draft_service.service import ROLE as DRAFT
from draft_service.service import DraftSettings, load_head
from engine.build import build, build_target, welcome
from engine.settings import EngineSettings
from speculation.messages import (
    Close,
    Limits,
    Open,
    Proposal,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Subscribe,
    Token,
    Verification,
)
from speculation.verifying import planner
from target_service.service import ROLE as TARGET
from target_service.verify_loop import VerifyLoop
from transport.worker import Outgoing

EAGLE = str(ROOT / "models" / "eagle")
TARGET_SETTINGS = EngineSettings(str(BUNDLED), dtype="fp32", device="cpu", cache_tokens=4096, threads=1)
LINK = "router"
LOCAL, NEVER_WAITING = "eagle local", "eagle remote, never waiting"
WAYS = (LOCAL, "eagle remote", NEVER_WAITING, "draft model")
SOON = 1e-5
"""Seconds after which a worker that computed nothing looks again."""


class Clock:
    """Made-up seconds, of whoever computes just now."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """As ``time.perf_counter``."""
        return self.now


class Timed:
    """What computes for a worker, in made-up time."""

    def __init__(self, real: Any, clock: Clock, seconds: float, a_row: float = 0.0) -> None:
        self._real, self._clock, self._seconds, self._row = real, clock, seconds, a_row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run(self, chunks: Sequence[Any]) -> Any:
        """As the real one's."""
        rows = sum(len(chunk.tokens) for chunk in chunks)
        found = self._real.run(chunks)
        self._clock.now += self._seconds + self._row * rows
        return found


@dataclass(eq=False)
class Actor:
    """A worker, and when it is done with what it computes; idle ones wait for a message."""

    machine: Any
    free_at: float = 0.0
    idle: bool = True


class World:
    """A target, a drafter if there is one, and the way between them."""

    def __init__(self, clock: Clock, target: VerifyLoop, drafter: Lookahead | None, one_way: float) -> None:
        self._clock, self._one_way = clock, one_way
        self._target = Actor(target)
        self._drafter = None if drafter is None else Actor(drafter)
        self._mail: list[tuple[float, int, Actor, Any]] = []
        self._number = itertools.count()
        self.tokens: list[Token] = []
        """All that was said."""
        self.steps = self.offered = self.pushes = 0

    def run(self, one: Open) -> None:
        """A session from its opening to its end."""
        actors = [actor for actor in (self._target, self._drafter) if actor is not None]
        start = max(self._clock.now, *(actor.free_at for actor in actors))
        self._mail.clear()
        self._clock.now = start
        for actor in actors:
            actor.free_at, actor.idle = start, False
            actor.machine.receive(LINK, one, start)
        if self._drafter is not None and isinstance(self._drafter.machine, HeadLookahead):
            told = self._drafter.machine.welcome()
            self._target.machine.receive(LINK, Subscribe(one.session, one.epoch, told.head, told.features))
        while not self._turn(actors):
            pass
        if self._drafter is not None:
            self._drafter.machine.receive(LINK, Close(one.session, one.epoch))

    def _turn(self, actors: Sequence[Actor]) -> bool:
        """The next message, or the next step of who is free first; whether the session is over."""
        busy = min((actor for actor in actors if not actor.idle), key=lambda actor: actor.free_at, default=None)
        if self._mail and (busy is None or self._mail[0][0] <= busy.free_at):
            at, _, to, message = heapq.heappop(self._mail)
            self._clock.now = at
            to.idle, to.free_at = False, max(to.free_at, at)
            return self._send(to, to.machine.receive(LINK, message, at))
        assert busy is not None, "everyone waits"
        self._clock.now = busy.free_at
        found, due = busy.machine.step(), busy.machine.due()
        busy.idle = found is None and due is None
        busy.free_at = max(self._clock.now, due or 0.0 if found is None else 0.0, busy.free_at + SOON)
        return self._send(busy, found or [])

    def _send(self, sender: Actor, outgoing: Outgoing) -> bool:
        done, to = False, self._drafter if sender is self._target else self._target
        for _, message in outgoing:
            if isinstance(message, Verification):
                self.tokens += message.tokens
                self.steps += 1
                self.offered += message.offered
                done = done or bool(message.finish)
            self.pushes += isinstance(message, Proposal)
            if to is not None:
                heapq.heappush(self._mail, (self._clock.now + self._one_way, next(self._number), to, message))
        return done


def world(way: str, clock: Clock, options: argparse.Namespace, one_way: float) -> World:
    """The loops of a way to draft, ``one_way`` seconds apart."""
    local = way == LOCAL
    settings = replace(TARGET_SETTINGS, eagle="" if way == "draft model" else EAGLE, eagle_away=not local)
    engine = build_target(settings)
    told, drafter = welcome(settings, engine.model, TARGET), None
    forward = options.forward / 1e3
    if way == "draft model":
        small = replace(TARGET_SETTINGS, model=str(ROOT / "models" / "draft"))
        own: Any = build(small, invariant=False)
        timed: Any = Timed(own, clock, forward)
        drafter = Lookahead(timed, welcome(small, own.model, DRAFT))
    elif not local:
        head, introduction = load_head(DraftSettings(replace(TARGET_SETTINGS, eagle=EAGLE)))
        computes: Any = Timed(head._head, clock, forward)
        head._head = computes
        drafter, told = HeadLookahead(head, introduction), replace(told, head=introduction.head)
    verifies: Any = Timed(engine, clock, options.step / 1e3, options.row / 1e3)
    return World(clock, VerifyLoop(verifies, told), drafter, one_way)


def measure(way: str, trip: float, options: argparse.Namespace) -> dict[str, object]:
    """The figures of a way at a round trip in ms."""
    clock = Clock()
    speculation = Speculation(sources=frozenset({Source.EAGLE if way == LOCAL else Source.DRAFT}))
    with ExitStack() as patched:
        patched.enter_context(patch("time.perf_counter", clock))
        if way == NEVER_WAITING:
            patched.enter_context(patch.object(planner, "worth_waiting", lambda *_: None))
        made = world(way, clock, options, trip / 2e3)
        for number, prompt in enumerate(held_out(options.prompts), 1):
            limits = Limits(len(prompt) + options.tokens)
            made.run(
                Open(SessionId(number), 1, prompt, Sampling(temperature=0.0), limits, speculation, prompt=len(prompt))
            )
    said = len(made.tokens)
    return {
        "way": way,
        "round_trip_ms": trip,
        "tokens_per_step": round(said / made.steps, 3),
        "ms_a_token": round(1e3 * clock.now / said, 2),
        "offered_a_step": round(made.offered / made.steps, 2),
        "pushes_a_token": round(made.pushes / said, 2),
        "steps": made.steps,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tokens a step of drafts from afar, in made-up time")
    parser.add_argument("--prompts", type=int, default=40, help="prompts (default: 40, all there are)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: 96)")
    parser.add_argument("--step", type=float, default=30.0, help="ms of a step of the target (default: 30)")
    parser.add_argument("--row", type=float, default=0.3, help="ms of each of its rows (default: 0.3)")
    parser.add_argument("--forward", type=float, default=1.25, help="ms of a forward of a drafter (default: 1.25)")
    parser.add_argument("--trips", type=float, nargs="+", default=[0.0, 5.0, 20.0], help="ms (default: 0 5 20)")
    parser.add_argument("--only", choices=WAYS, nargs="+", default=WAYS, help="ways (default: all)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for one in chosen.only:
        for trip in [0.0] if one == LOCAL else chosen.trips:
            tell(measure(one, trip, chosen))
