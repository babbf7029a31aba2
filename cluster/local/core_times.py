"""Measures how long steps of a target and a drafter take with different numbers of threads, in a process of its own.

    python -m cluster.local.core_times --target FOLDER --draft FOLDER --threads 1 2

prints :func:`cluster.local.cores.encoded` as one line of JSON, and whether it had the cores for itself, as ``alone``. A
process of its own because it may take more memory than there is, because torch keeps what it once took, and so that the
one who asked can end it. One model is loaded at a time, on the CPU. Decides nothing; :mod:`cluster.local.threads` runs
it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.flags import add_parent
from cluster.console import FAILED, complain, say
from cluster.local.cores import DRAFTS, StepTimes, encoded
from cluster.processes.imports import import_engine, stores_plain_weights
from cluster.processes.starting import exit_with

if TYPE_CHECKING:
    from engine.interface import Chunk
    from engine.step import Engine

PREFIX = 16
"""Tokens that are there already when a step is timed."""
REPEATS = 7
"""Steps timed of one kind, at most; what counts is their median."""
ENOUGH_SECONDS = 0.2
"""No further step of a kind is timed after so long."""
DELAYED = 0.1
"""Share of the time that its threads may wait for a core, all together, before others' work counts as in the way."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.local.core_times", description="Time steps of two models.")
    for role in ("target", "draft"):
        parser.add_argument(f"--{role}", required=True, metavar="FOLDER", help="model folder or hub id")
        parser.add_argument(f"--{role}-dtype", default="auto", metavar="TEXT", help="number format (default: auto)")
        about = "of the weights (default: none)"
        parser.add_argument(f"--{role}-quantization", default="none", metavar="TEXT", help=about)
    parser.add_argument("--threads", type=int, nargs="+", required=True, metavar="N", help="numbers of threads")
    add_parent(parser)
    args = parser.parse_args(argv)
    if args.exit_with is not None:
        exit_with(args.exit_with)
    weights = ((args.target, args.target_quantization), (args.draft, args.draft_quantization))
    plain = all(how == "none" and stores_plain_weights(model) for model, how in weights)
    import_engine("engine.step", "engine.loading.loader", plain=plain)  # most of the time that this process has
    from engine.model import ModelError

    began, waited = time.perf_counter(), _waited()
    try:
        target = step_times(
            args.target, args.target_dtype, args.target_quantization, DRAFTS, args.threads, invariant=True
        )
        draft = step_times(args.draft, args.draft_dtype, args.draft_quantization, (0,), args.threads, invariant=False)
    except ModelError as error:
        complain(str(error))
        return FAILED
    times = encoded({count: StepTimes(target[count], draft[count][0]) for count in args.threads})
    say(json.dumps({**times, "alone": _waited() - waited < DELAYED * (time.perf_counter() - began)}))
    return 0


def step_times(
    model: str, dtype: str, quantization: str, drafts: Sequence[int], threads: Sequence[int], *, invariant: bool
) -> dict[int, dict[int, float]]:
    """By number of threads, then of drafts: a step of the model over one token and the drafts, in milliseconds.

    ``invariant``: as the worker computes, see :class:`engine.step.Engine`. Raises :class:`engine.model.ModelError`.
    """
    from engine.cache.kv_cache import KVCache
    from engine.cpu.thread_choice import leave_cores_to_steps, set_threads
    from engine.interface import Chunk
    from engine.loading.loader import load
    from engine.step import Engine

    # Whether it computes correctly is for the worker to test.
    loaded = load(model, dtype=dtype, device="cpu", quantization=quantization, threads=max(threads), self_test=False)
    cache = KVCache(loaded.layers, PREFIX + 1 + max(drafts), dtype=loaded.dtype, device=loaded.device)
    engine = Engine(loaded, cache, invariant=invariant)
    sequence = cache.sequence()
    tokens = [token % loaded.vocabulary for token in range(PREFIX + 1 + max(drafts))]
    engine.run([Chunk(sequence, tokens[:PREFIX])])
    sequence.advance(range(PREFIX))
    found: dict[int, dict[int, float]] = {}
    for count in threads:
        set_threads(count)
        leave_cores_to_steps()
        steps = {k: Chunk(sequence, tokens[PREFIX : PREFIX + 1 + k], rows=range(1 + k)) for k in drafts}
        found[count] = {k: _milliseconds(engine, step) for k, step in steps.items()}
    return found


def _waited() -> float:
    """Seconds that this process's threads have waited for a core so far, as far as the system tells."""
    seconds = 0.0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
            seconds += 1e-9 * int(task.read_text().split()[1])
    return seconds


def _milliseconds(engine: Engine, step: Chunk) -> float:
    """The median of some steps. The first, when threads may still have to start, counts only if it is the only one."""
    times: list[float] = []
    while len(times) <= REPEATS and sum(times) < ENOUGH_SECONDS:
        started = time.perf_counter()
        engine.run([step])
        times.append(time.perf_counter() - started)
        step.sequence.rollback()
    return 1e3 * statistics.median(times[1:] or times)


if __name__ == "__main__":
    sys.exit(main())
