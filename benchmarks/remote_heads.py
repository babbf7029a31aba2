"""Tokens a step with drafts from afar, by depth too: a draft model or an EAGLE-3 head, at round trips in made-up time.

    python -m benchmarks.remote_heads

The bundled target and a drafter are the loops that serve; what is between them, and time, is made up: a step of the
target takes ``--step`` ms and ``--row`` ms for each of its rows, a forward of a drafter ``--forward`` ms, a message
half a round trip. So what is counted does not depend on the machine, and comes out the same again. Measured beside it
are what a target that never waits for drafts makes of the head, and the head in the target's process.

With ``--simulated`` only the head at the target is measured, for its text, and of all ways it is said what the
simulator (:mod:`simulation.simulate`) expects: how near it comes to what was measured is how far it can be believed.

With ``--chains N`` each step drafts a chain of N tokens behind the target's own, and nothing takes time: what a draft
model and a head give by themselves, the head also with its states rounded as they are where it drafts away from the
target.
"""

# Tensor legend: T tokens, A states read, D hidden size.
# ruff: noqa: N803
from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partialmethod
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.fit import teacher
from benchmarks.fit.command import FitOptions
from benchmarks.fit.serving import TargetText
from benchmarks.harness.measure import reached
from benchmarks.harness.pair import BUNDLED, DRAFT, EAGLE, held_out
from benchmarks.harness.report import tell
from cluster.config.config import SpeculationConfig
from draft_service.eagle import HeadLookahead
from draft_service.lookahead import Lookahead
from draft_service.service import ROLE as DRAFTER
from draft_service.service import DraftSettings, load_head
from engine.build import build, build_target, welcome
from engine.eagle.cached import packed, unpacked
from engine.eagle.head import EagleHead
from engine.settings import EngineSettings
from models.pair import VOCABULARY
from simulation.agreement import AgreementPassage, Passages
from simulation.costs import FAR, Costs, Curve
from simulation.simulate import Bounds, SimulationSettings, simulate_texts
from speculation.messages import (
    Close,
    FeatureFormat,
    Features,
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
from target_service.scheduler import Budget
from target_service.service import ROLE as TARGET
from target_service.verify_loop import TargetLimits, VerifyLoop
from transport.worker import Outgoing

TARGET_SETTINGS = EngineSettings(str(BUNDLED), dtype="fp32", device="cpu", cache_tokens=4096, threads=1)
LIMITS = TargetLimits(budget=Budget(drafts_per_session=SpeculationConfig().max_draft))
LINK = "router"
PLACES = 8
"""At which it is told how many steps kept a draft there."""
LOCAL = "eagle local"
"""Drafts in the target's process; its time is left out."""
NEVER_WAITING = "eagle remote, never waiting"
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
    waiting: bool = False
    """For a message, or for ``free_at``."""


class World:
    """A target, a drafter if there is one, and the way between them."""

    def __init__(self, clock: Clock, target: VerifyLoop, drafter: Lookahead | None, one_way: float) -> None:
        self._clock, self._one_way = clock, one_way
        self._target = Actor(target)
        self._drafter = None if drafter is None else Actor(drafter)
        self._mail: list[tuple[float, int, Actor, Any]] = []
        self._number = itertools.count()
        self.tokens: list[Token] = []
        self.accepted: list[int] = []
        self.offered = self.pushes = 0

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
            to.idle, to.free_at = False, at if to.waiting else max(to.free_at, at)
            return self._send(to, to.machine.receive(LINK, message, at))
        assert busy is not None, "everyone waits"
        self._clock.now = busy.free_at
        found, due = busy.machine.step(), busy.machine.due()
        busy.idle, busy.waiting = found is None and due is None, found is None
        busy.free_at = max(self._clock.now, due or 0.0 if found is None else 0.0, busy.free_at + SOON)
        return self._send(busy, found or [])

    def _send(self, sender: Actor, outgoing: Outgoing) -> bool:
        done, to = False, self._drafter if sender is self._target else self._target
        for _, message in outgoing:
            if isinstance(message, Verification):
                self.tokens += message.tokens
                self.accepted.append(message.accepted)
                self.offered += message.offered
                done = done or bool(message.finish)
            self.pushes += isinstance(message, Proposal)
            if to is not None:
                heapq.heappush(self._mail, (self._clock.now + self._one_way, next(self._number), to, message))
        return done


def world(way: str, clock: Clock, options: argparse.Namespace, one_way: float) -> World:
    """The loops of a way to draft, ``one_way`` seconds apart."""
    settings = TARGET_SETTINGS
    if way != "draft model":
        settings = replace(settings, eagle=str(EAGLE), eagle_away=way != LOCAL)
    engine = build_target(settings)
    told, drafter = welcome(settings, engine.model, TARGET), None
    forward = options.forward / 1e3
    if way == "draft model":
        small = replace(TARGET_SETTINGS, model=str(DRAFT))
        own: Any = build(small, invariant=False)
        timed: Any = Timed(own, clock, forward)
        drafter = Lookahead(timed, welcome(small, own.model, DRAFTER))
    elif way != LOCAL:
        head, introduction = load_head(DraftSettings(settings, eagle_format=options.format))
        computes: Any = Timed(head._head, clock, forward)
        head._head = computes
        drafter, told = HeadLookahead(head, introduction), replace(told, head=introduction.head)
    verifies: Any = Timed(engine, clock, options.step / 1e3, options.row / 1e3)
    return World(clock, VerifyLoop(verifies, told, LIMITS), drafter, one_way)


def measure(
    way: str, trip: float, options: argparse.Namespace, texts: list[TargetText] | None = None
) -> dict[str, object]:
    """The figures of a way at a round trip in ms; what was said is added to ``texts``."""
    clock = Clock()
    waiting = patch.object(planner, "worth_waiting", lambda *_: None) if way == NEVER_WAITING else nullcontext()
    with patch("time.perf_counter", clock), waiting:
        made = world(way, clock, options, trip / 2e3)
        for number, prompt in enumerate(held_out(options.prompts), 1):
            limits, before = Limits(len(prompt) + options.tokens), len(made.tokens)
            speculation, greedy = Speculation(sources=sources_of(way)), Sampling(temperature=0.0)
            made.run(Open(SessionId(number), 1, prompt, greedy, limits, speculation, prompt=len(prompt)))
            if texts is not None:
                texts.append(TargetText("held out", prompt, tuple(made.tokens[before:])))
    row = _row(way, trip, len(made.tokens), len(made.accepted), clock.now, made.offered)
    found = {"pushes_a_token": round(made.pushes / len(made.tokens), 2)}
    return {**row, **found, "steps_reaching_place": reached(made.accepted, PLACES)}


def _row(way: str, trip: float, said: int, steps: int, seconds: float, offered: int) -> dict[str, object]:
    return {
        "way": way,
        "round_trip_ms": trip,
        "tokens_per_step": round(said / steps, 3),
        "ms_a_token": round(1e3 * seconds / said, 2),
        "offered_a_step": round(offered / steps, 2),
        "steps": steps,
    }


def sources_of(way: str) -> frozenset[Source]:
    """What its requests allow."""
    return frozenset({Source.EAGLE if way == LOCAL else Source.DRAFT})


def simulated(
    way: str, trip: float, options: argparse.Namespace, passages: Sequence[AgreementPassage]
) -> dict[str, object]:
    """What the simulator expects of the same texts, first steps and all."""
    step = Curve((rows, (options.step + options.row * rows) / 1e3, 1.0) for rows in (1, FAR))
    costs = Costs({1: step}, Curve.straight(options.forward / 1e3, 0.0), to_target=0.0, to_draft=0.0)
    setting = SimulationSettings(rtt=trip / 1e3, sources=sources_of(way), features=way == "eagle remote")
    requests, said = len(passages), sum(len(passage.tokens) for passage in passages)
    texts, bounds = Passages(passages, VOCABULARY), Bounds(drafts_per_session=LIMITS.budget.drafts_per_session)
    report = simulate_texts(setting, costs, texts, Random(0), tokens=said - requests, warm_up=0, bounds=bounds)
    steps, said = report.verifications + requests, report.tokens + requests
    return _row(f"{way}, simulated", trip, said, steps, report.seconds, report.offered)


def by_head(
    told: FitOptions, drafted: Sequence[AgreementPassage], texts: Sequence[TargetText]
) -> list[AgreementPassage]:
    """What is said along the texts where the head drafts in place of the draft model."""
    said = teacher.by_age(replace(told, eagle=str(EAGLE)), texts)
    return [replace(one, places=(), by_age=by_age) for one, by_age in zip(drafted, said, strict=True)]


def _sent(
    head: EagleHead, wanted: FeatureFormat, aux_1TA: Tensor, fuse: Callable[..., Tensor] = EagleHead.fuse
) -> Tensor:
    """The states as a drafter elsewhere has them, ``[1, T, D]``."""
    states_TD = fuse(head, aux_1TA)[0]
    values, scales = packed(states_TD, wanted)
    features = Features(SessionId(0), 0, 0, 0, states_TD.shape[1], values, wanted, scales)
    return unpacked(features, states_TD.shape[1], torch.float32)[None]


def in_chains(way: str, passages: Sequence[AgreementPassage], depth: int) -> dict[str, object]:
    """The figures of greedy decoding from the second token on, each step with a chain of this depth."""
    kept: list[int] = []
    for passage in passages:
        place = 1
        while place + depth <= len(passage.tokens):
            kept.append(passage.kept(place, depth))
            place += kept[-1] + 1
    found = {"tokens_per_step": round(1 + sum(kept) / len(kept), 3), "steps_reaching_place": reached(kept, depth)}
    return {"way": way, "depth": depth, **found, "steps": len(kept)}


def replay_all(options: argparse.Namespace) -> None:
    """Tell what comes of what all ways say along the target's text: in chains, or as the simulator expects."""
    texts: list[TargetText] = []
    tell(measure(LOCAL, 0.0, options, texts))
    told = FitOptions(target=str(BUNDLED), drafts=(str(DRAFT),), dtype="float32", device="cpu")
    drafted = teacher.passages(told, str(DRAFT), texts)
    headed = by_head(told, drafted, texts)
    if options.chains:
        tell(in_chains("draft model", drafted, options.chains))
        tell(in_chains("eagle", headed, options.chains))
        for sent in FeatureFormat:
            with patch.object(EagleHead, "fuse", partialmethod(_sent, sent)):
                rounded = by_head(told, drafted, texts)
            tell(in_chains(f"eagle, states in {sent}", rounded, options.chains))
        return
    tell(simulated(LOCAL, 0.0, options, headed))
    for way, passages in (("eagle remote", headed), ("draft model", drafted)):
        for trip in options.trips:
            tell(simulated(way, trip, options, passages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tokens a step of drafts from afar, in made-up time")
    parser.add_argument("--prompts", type=int, default=40, help="prompts (default: 40, all there are)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: 96)")
    parser.add_argument("--step", type=float, default=30.0, help="ms of a step of the target (default: 30)")
    parser.add_argument("--row", type=float, default=0.3, help="ms of each of its rows (default: 0.3)")
    parser.add_argument("--forward", type=float, default=1.25, help="ms of a forward of a drafter (default: 1.25)")
    parser.add_argument("--trips", type=float, nargs="+", default=[0.0, 5.0, 20.0], help="ms (default: 0 5 20)")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS, help="to draft (default: all)")
    parser.add_argument("--format", choices=list(FeatureFormat), default=FeatureFormat.BF16, help="of what heads read")
    parser.add_argument("--simulated", action="store_true", help="say what the simulator expects")
    parser.add_argument("--chains", type=int, default=0, metavar="N", help="only count, in chains of N drafts a step")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.simulated or chosen.chains:
        replay_all(chosen)
        raise SystemExit
    for one in chosen.ways:
        for each in chosen.trips if one != LOCAL else (0.0,):
            tell(measure(one, each, chosen))
