"""The same models in transformers: ``generate`` with a batch, or with its assisted generation.

    python -m benchmarks.harness.transformers_baseline TARGET DRAFT DTYPE THREADS

Greedy, in our number format and of our prompts; it runs while ours is idle, in turn with it. Beside a router it is a
process of its own, since on a thread it keeps the router from hearing its workers: driven line by line, a JSON request
on stdin, its outcome on stdout. It has all the threads that the workers of ours have together. Both ends are here, and
which settings of assisted generation are tried; the best is what we compare with.
"""

# Tensor names carry their shapes: B prompts, T tokens.
from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from benchmarks.harness.measure import Batch, Decoded, Run, Runner, TimedCommit
from benchmarks.harness.pair import Pair
from benchmarks.harness.processes import ReadyProcess, child
from cluster.console import say
from engine.loading.checkpoint import DTYPES
from models.pair import load

CORES = 2
"""Ours has one for the target and one for the drafter."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How transformers decodes."""

    length: int = 0
    """Draft tokens a step, by the draft model; where the heuristic schedule begins. 0: plainly."""
    schedule: str = "constant"
    confidence: float = 0.0
    """Drafting ends early where the draft model is less sure than this."""

    def __str__(self) -> str:
        return f"assisted {self.length} {self.schedule} {self.confidence:g}" if self.length else "plain"


PLAIN = Mode()
ASSISTED = (Mode(3), Mode(5), Mode(8), Mode(5, "heuristic"), Mode(20, confidence=0.4))
"""Settings of assisted generation that are tried; the last is the library's default."""


class Clock(StoppingCriteria):
    """Notes when tokens were decided; stops nothing."""

    def __init__(self, prompt: int) -> None:
        self._length = prompt
        self.commits: list[TimedCommit] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002 - as transformers calls it
        """Called after every step. Returns done_B: nothing is."""
        length = input_ids.shape[1]
        self.commits.append(TimedCommit(time.perf_counter(), length - self._length))
        self._length = length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Stock:
    """A model in transformers, with one that drafts for it, if asked for. Its attention is torch's fused one (sdpa)."""

    def __init__(self, folder: Path, dtype: torch.dtype, draft: Path | None = None) -> None:
        """Text ends by length only."""
        self.model: Any = load(folder, dtype)  # the types of ``generate`` fit no model
        self._draft: Any = load(draft, dtype) if draft is not None else None
        self._reached: dict[Mode, int] = {}
        for model in filter(None, (self.model, self._draft)):
            model.set_attn_implementation("sdpa")
            model.generation_config.eos_token_id = None

    async def run(self, batch: Batch) -> Run:
        """Plainly; a :data:`benchmarks.harness.measure.Runner`."""
        return self.decode(batch)

    @torch.inference_mode()
    def decode(self, batch: Batch, mode: Mode = PLAIN) -> Run:
        """Continue prompts together, greedily, the shorter ones padded on their left; assisted, one alone.

        All go on until the longest text is done. What a shorter one would go on with is no part of the run.
        """
        assert batch.temperature == 0.0 and (mode == PLAIN or len(batch.prompts) == 1)
        asked = time.perf_counter()
        longest = max(len(prompt) for prompt in batch.prompts)
        padding = [longest - len(prompt) for prompt in batch.prompts]
        prompts_BT = torch.tensor([(0,) * pad + prompt for pad, prompt in zip(padding, batch.prompts, strict=True)])
        mask_BT = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
        clock = Clock(longest)
        continued_BT = self.model.generate(
            prompts_BT,
            attention_mask=mask_BT,
            max_new_tokens=batch.tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **self._assistant(mode),
        )
        if mode != PLAIN:
            self._reached[mode] = self._draft.generation_config.num_assistant_tokens
        new_BT = continued_BT[:, longest:].tolist()
        texts = zip(new_BT, batch.wanted, strict=True)
        # A plain step decides a token of every text; who is assisted has one text.
        return Run(
            tuple(
                Decoded(tuple(row[:tokens]), tuple(clock.commits[:tokens] if mode == PLAIN else clock.commits))
                for row, tokens in texts
            ),
            asked=asked,
        )

    def _assistant(self, mode: Mode) -> dict[str, Any]:
        if mode == PLAIN:
            return {}
        settings = self._draft.generation_config
        # The heuristic schedule begins a text with the length at which it ended the last one.
        settings.num_assistant_tokens = self._reached.get(mode, mode.length)
        settings.num_assistant_tokens_schedule = mode.schedule
        settings.assistant_confidence_threshold = mode.confidence
        return {"assistant_model": self._draft}


def transformers(pair: Pair, dtype: str) -> AbstractAsyncContextManager[ReadyProcess]:
    """The process with the pair loaded, while it runs; raises :class:`benchmarks.harness.processes.WorkerFailed`."""
    threads = str(min(CORES, len(os.sched_getaffinity(0))))
    models = str(pair.target), str(pair.draft)
    return child("transformers process", "benchmarks.harness.transformers_baseline", *models, dtype, threads)


def runner(process: ReadyProcess, mode: Mode) -> Runner:
    """The contender that decodes so; one prompt at a time."""

    async def run(batch: Batch) -> Run:
        request = {"prompts": batch.prompts, "tokens": batch.tokens, "mode": asdict(mode)}
        answer = json.loads(await process.ask(json.dumps(request)))
        return Run((Decoded(tuple(answer["tokens"]), tuple(TimedCommit(*commit) for commit in answer["commits"])),))

    return run


def main(target: str, draft: str, dtype: str, threads: str) -> None:
    """Load, say so with a line, and answer requests until there are no more."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(int(threads))
    stock = Stock(Path(target), DTYPES[dtype], Path(draft))
    say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        batch = Batch(tuple(map(tuple, asked["prompts"])), asked["tokens"])
        (decoded,) = stock.decode(batch, Mode(**asked["mode"])).decoded
        commits = [(commit.at, commit.tokens) for commit in decoded.commits]
        say(json.dumps({"tokens": decoded.tokens, "commits": commits}))


if __name__ == "__main__":
    main(*sys.argv[1:])
