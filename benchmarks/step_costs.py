"""What drafting costs the steps of a target: verify loops that differ only in what drafts for them, steps in turn.

All are in this process and verify as many drafts in each step: a text is written first and then expected of all of
them (a prediction), so that every loop computes the same rows, and commits the same tokens with each. A step is all
that a worker computes between two looks at its messages, and the encoding of what it says. One loop has a twin, since
equal loops whose weights lie elsewhere in memory are not equally fast.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.steps import GREEDY
from benchmarks.harness.measure import order
from engine.build import build_target, welcome
from engine.settings import EngineSettings
from speculation.messages import (
    Close,
    Limits,
    Open,
    RequestOptions,
    SessionId,
    Source,
    Speculation,
    Subscribe,
    Token,
    Verification,
)
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from transport.codec import encode_from_worker

NONE, TWIN, REMOTE, LOCAL = "none", "none, its twin", "eagle remote", "eagle local"
DRAFTS = 5
"""Of each session in each step; a head drafts as deep."""
LINK = "router"

Prompts = Sequence[tuple[Token, ...]]


class DraftingTime:
    """What drafts in a target's process, and how long it was at work; what it says of its own ``seconds`` stays."""

    def __init__(self, real: Any) -> None:
        self._real, self.at_work = real, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return found(*arguments, **named)
            finally:
                self.at_work += time.perf_counter() - started

        return timed if callable(found) else found


class CostedLoop:
    """A verify loop with what drafts for it, and the texts that are under way in it."""

    def __init__(self, settings: EngineSettings, source: Source | None = None) -> None:
        """``source``: what drafts here, beside the prediction."""
        engine = build_target(settings)
        self._head = engine.eagle.fingerprint if engine.eagle is not None else 0
        limits = TargetLimits(adaptive=False, budget=Budget(drafts_per_session=DRAFTS))
        self._loop = VerifyLoop(engine, welcome(settings, engine.model, "target"), limits)
        self._drafting = [DraftingTime(one) for one in self._loop._drafters]
        self._loop._drafters[:] = self._drafting  # type: ignore[assignment]
        sources = frozenset({Source.PREDICTION} if source is None else {Source.PREDICTION, source})
        self._speculation = Speculation(max_depth=DRAFTS, sources=sources, remember=False)
        self._numbers = itertools.count(1)
        self._open: dict[SessionId, list[Token]] = {}

    def open(self, prompts: Prompts, tokens: int, expected: Sequence[Sequence[Token]] = ()) -> None:
        """Begin a text behind each prompt, and go on until all are past their prompts; none expected: plainly."""
        speculation = self._speculation if expected else Speculation(enabled=False)
        for prompt, prediction in zip_longest(prompts, expected, fillvalue=()):
            session, limits = SessionId(next(self._numbers)), Limits(len(prompt) + tokens)
            self._open[session] = []
            options = RequestOptions(prediction=tuple(prediction))
            opened = Open(session, 1, tuple(prompt), GREEDY, limits, speculation, request_options=options)
            self._loop.receive(LINK, opened, time.perf_counter())
            if self._head and expected:
                self._loop.receive(LINK, Subscribe(session, 1, self._head))
        while not all(self._open.values()):
            self.step()

    def _drafted(self) -> float:
        return sum(one.at_work for one in self._drafting)

    def step(self) -> tuple[float, float, bool]:
        """Seconds of one, seconds of drafting among them, and whether a text has ended with it."""
        drafting, started = self._drafted(), time.perf_counter()
        outgoing = self._loop.step() or []
        for _, message in outgoing:
            encode_from_worker(message)
        seconds = time.perf_counter() - started
        said = [message for _, message in outgoing if isinstance(message, Verification)]
        for verification in said:
            self._open[verification.session] += verification.tokens
        return seconds, self._drafted() - drafting, any(verification.finish for verification in said)

    def close(self) -> list[list[Token]]:
        """End all texts; what they came to."""
        for session in self._open:
            self._loop.receive(LINK, Close(session, 1))
        texts = [*self._open.values()]
        self._open.clear()
        return texts


def costed_loops(target: Path, eagle: Path) -> dict[str, CostedLoop]:
    """All of them, the one without any drafting first."""
    plain = EngineSettings(str(target), dtype="bfloat16", device="cpu", cache_tokens=16384)
    headed = replace(plain, eagle=str(eagle))
    return {
        NONE: CostedLoop(plain),
        TWIN: CostedLoop(plain),
        REMOTE: CostedLoop(replace(headed, eagle_away=True)),
        LOCAL: CostedLoop(headed, Source.EAGLE),
    }


def measure(
    loops: Mapping[str, CostedLoop], prompts: Iterator[tuple[Token, ...]], sessions: int, rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """A row for each: so many sessions at once, each round with prompts of its own."""
    names = list(loops)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        some = [*itertools.islice(prompts, sessions)]
        first = loops[names[0]]
        first.open(some, tokens)
        while not first.step()[2]:
            pass
        expected = first.close()
        for loop in loops.values():
            loop.open(some, tokens, expected)
        ended, number = False, 0
        while not ended:
            turn = {name: loops[name].step() for name in order(names, number)}
            ended, number = any(end for _, _, end in turn.values()), number + 1
            for name, (seconds, drafting, _) in turn.items():
                if not ended:
                    taken[name].append((seconds, drafting))
        for loop in loops.values():
            for text, wanted in zip(loop.close(), expected, strict=True):
                assert text[: len(wanted)] == wanted[: len(text)], "the text depends on how it was drafted"
    return [{"sessions": sessions, "drafting": name, **_figures(taken[name], taken[names[0]])} for name in names]


def _figures(own: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(mine[0] / other[0] for mine, other in zip(own, base, strict=True))
    # Order statistics around the median: between them it lies in 95 of 100 such runs.
    reach = 0.98 * math.sqrt(len(ratios))
    low, high = max(math.floor(len(ratios) / 2 - reach), 0), min(math.ceil(len(ratios) / 2 + reach), len(ratios) - 1)
    return {
        "step_ms": round(1e3 * median(seconds for seconds, _ in own), 2),
        "ratio_to_none": round(median(ratios), 4),
        "interval": [round(ratios[low], 4), round(ratios[high], 4)],
        "drafting_ms": round(1e3 * median(drafting for _, drafting in own), 3),
        "steps": len(own),
    }
