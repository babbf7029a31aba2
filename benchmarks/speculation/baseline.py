"""Another library as a contender: transformers, in a process of its own.

It gets what ours gets: the same two models, prompts and number format, and as many cores in all. It runs while ours is
idle, in turn with it. Which of its settings are tried is decided here; the best of them is what we compare with.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass

from benchmarks.harness.measure import Batch, Decoded, Run, Runner, TimedCommit
from benchmarks.harness.pair import Pair
from benchmarks.harness.processes import ReadyProcess, child

CORES = 2
"""Ours has one for the target and one for the drafter."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How transformers decodes."""

    kind: str
    """``plain``, ``assisted`` (by the draft model) or ``lookup``."""
    length: int = 0
    """Draft tokens a step; where the heuristic schedule begins."""
    schedule: str = "constant"
    confidence: float = 0.0
    """Drafting ends early where the draft model is less sure than this."""

    def __str__(self) -> str:
        """For tables."""
        return self.kind if not self.length else f"{self.kind} {self.length} {self.schedule} {self.confidence:g}"


PLAIN = Mode("plain")
LOOKUP = Mode("lookup", 10)
ASSISTED = (
    Mode("assisted", 3),
    Mode("assisted", 5),
    Mode("assisted", 8),
    Mode("assisted", 5, "heuristic"),
    Mode("assisted", 20, confidence=0.4),
)
"""Settings of assisted generation that are tried; the last is the library's default."""


def runner(process: ReadyProcess, mode: Mode) -> Runner:
    """The contender that decodes so; greedy, one prompt at a time."""

    async def run(batch: Batch) -> Run:
        assert len(batch.prompts) == 1 and batch.temperature == 0.0
        request = {"prompt": batch.prompts[0], "tokens": batch.wanted[0], "mode": asdict(mode)}
        answer = json.loads(await process.ask(json.dumps(request)))
        commits = tuple(TimedCommit(at, tokens) for at, tokens in answer["commits"])
        return Run((Decoded(tuple(answer["tokens"]), commits),))

    return run


def transformers(pair: Pair, dtype: str) -> AbstractAsyncContextManager[ReadyProcess]:
    """The process with the pair loaded, while it runs; raises :class:`benchmarks.harness.processes.WorkerFailed`."""
    threads = min(CORES, len(os.sched_getaffinity(0)))
    flags = ["--dtype", dtype, "--threads", str(threads)]
    models = str(pair.target), str(pair.draft)
    return child("transformers process", "benchmarks.harness.transformers_baseline", *models, *flags)
