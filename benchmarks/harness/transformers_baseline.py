"""The same pair in transformers: ``generate``, and its assisted generation.

    python -m benchmarks.harness.transformers_baseline TARGET DRAFT --dtype bfloat16 --threads 2

A process of its own, driven line by line: a JSON request on stdin, its outcome on stdout. Greedy, batch 1, both models
in one process with all the threads that the workers of ours have together, number format and prompts as ours. It runs
while ours is idle, in turn with it. Both ends are here, and which settings are tried; the best is what we compare with.
"""

# Tensor names carry their shapes: B prompts, T tokens.
# ruff: noqa: N803
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from benchmarks.harness.measure import Batch, Decoded, Run, Runner, TimedCommit
from benchmarks.harness.pair import Pair
from benchmarks.harness.processes import ReadyProcess, child
from engine.loading.loader import DTYPES
from models.pair import load

CORES = 2
"""Ours has one for the target and one for the drafter."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How transformers decodes."""

    kind: str
    """``plain``, or ``assisted`` by the draft model."""
    length: int = 0
    """Draft tokens a step; where the heuristic schedule begins."""
    schedule: str = "constant"
    confidence: float = 0.0
    """Drafting ends early where the draft model is less sure than this."""

    def __str__(self) -> str:
        """For tables."""
        return self.kind if not self.length else f"{self.kind} {self.length} {self.schedule} {self.confidence:g}"


PLAIN = Mode("plain")
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


class Clock(StoppingCriteria):
    """Notes when tokens were decided; stops nothing."""

    def __init__(self, prompt: int) -> None:
        """``prompt``: tokens in the prompt."""
        self._length = prompt
        self.commits: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002 - as transformers calls it
        """Called after every step. Returns done_B: nothing is."""
        length = input_ids.shape[1]
        self.commits.append((time.perf_counter(), length - self._length))
        self._length = length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersPair:
    """Both models, loaded."""

    def __init__(self, target: Path, draft: Path, dtype: torch.dtype) -> None:
        """Text ends by length only, as in all runs of a benchmark."""
        self._target: Any = load(target, dtype)  # the types of ``generate`` fit no model
        self._draft = load(draft, dtype)
        self._reached: dict[tuple[str, int], int] = {}
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = None

    def generate(self, prompt: list[int], tokens: int, mode: dict[str, Any]) -> dict[str, Any]:
        """Continue ``prompt`` by ``tokens``, as a :class:`Mode` says."""
        if mode["kind"] == "plain":
            return self._continue(prompt, tokens)
        settings = self._draft.generation_config
        start = (mode["schedule"], mode["length"])
        # The heuristic schedule begins a text with the length at which it ended the last one.
        settings.num_assistant_tokens = self._reached.get(start, mode["length"])
        settings.num_assistant_tokens_schedule = mode["schedule"]
        settings.assistant_confidence_threshold = mode["confidence"]
        outcome = self._continue(prompt, tokens, assistant_model=self._draft)
        self._reached[start] = settings.num_assistant_tokens
        return outcome

    def _continue(self, prompt: list[int], tokens: int, **options: Any) -> dict[str, Any]:
        new_BT, commits = continue_greedily(self._target, torch.tensor([prompt]), tokens, **options)
        return {"tokens": new_BT[0].tolist(), "commits": commits}


@torch.inference_mode()
def continue_greedily(
    model: Any, prompts_BT: Tensor, tokens: int, mask_BT: Tensor | None = None, **options: Any
) -> tuple[Tensor, list[tuple[float, int]]]:
    """``generate``: the new tokens of every prompt, ``[B, tokens]``, and when how many of them were decided.

    ``mask_BT``: 0 where a prompt is padded, on its left; by default none is.
    """
    clock = Clock(prompts_BT.shape[1])
    continued_BT = model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT) if mask_BT is None else mask_BT,
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )
    return continued_BT[:, prompts_BT.shape[1] :], clock.commits


def serve(pair: TransformersPair, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        answers.write(json.dumps(pair.generate(**json.loads(line))) + "\n")
        answers.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, say so with a line, and serve."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.transformers_baseline")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    pair = TransformersPair(options.target, options.draft, DTYPES[options.dtype])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    serve(pair, sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
