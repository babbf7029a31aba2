"""Where a draft model works: on a worker of its own, a core each, or in the target's process, in turn with it.

    python -m benchmarks.placement --dtype bf16 --rounds 4

The pair is that of ``paceline up --stretched``: the bundled target at the cost of a larger model, drafted for by the
bundled draft. Contenders are what ``up`` may start, with the threads that it gives them, and take turns prompt by
prompt. Drafts come from the draft model alone and nothing is remembered. Prints a line of JSON for each, beside plain
decoding on all cores but one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os

from benchmarks.harness.contenders import OURS, PLAIN, rows
from benchmarks.harness.measure import Batch, served, take_turns
from benchmarks.harness.pair import ROOT, held_out, noiseless_target
from benchmarks.harness.report import tell
from benchmarks.harness.workers import WorkerPlan, all_running, connected
from cluster.local.stretched import HIDDEN, LAYERS
from speculation.events import Role

SETTINGS = ((1, 0.0), (4, 0.0), (8, 0.0), (1, 0.8), (8, 0.8))
"""Streams and temperature."""


async def measure(dtype: str, rounds: int, tokens: int) -> None:
    """Start all of them, and compare."""
    target, draft = noiseless_target(HIDDEN, LAYERS), ROOT / "models" / "draft"
    cores = len(os.sched_getaffinity(0))
    beside = ("--draft-model", str(draft))
    fewer = max(cores - 1, 1)
    flags, wide_flags, alone = (
        ("--dtype", dtype, "--threads", str(threads), "--max-threads", str(most))
        for threads, most in ((fewer, cores), (cores, cores), (1, 1))
    )
    plans = (
        WorkerPlan(Role.TARGET, target, None, flags=flags),
        WorkerPlan(Role.DRAFT, draft, None, flags=alone),
        WorkerPlan(Role.TARGET, target, None, flags=(*flags, *beside)),
        WorkerPlan(Role.TARGET, target, None, flags=(*wide_flags, *beside)),
    )
    async with (
        all_running(plans) as (first, second, some, every),
        connected(first, second) as own,
        connected(some) as in_turn,
        connected(every) as wide,
    ):
        runners = {
            f"plain, {fewer} of {cores} cores": served(own, PLAIN.speculation),
            "own": served(own, OURS.speculation),
            f"shared, {fewer} of {cores} cores": served(in_turn, OURS.speculation),
            "plain, all cores": served(wide, PLAIN.speculation),
            "shared, all cores": served(wide, OURS.speculation),
        }
        for streams, temperature in SETTINGS:
            endless = itertools.cycle(held_out())
            batches = [
                Batch(tuple(itertools.islice(endless, streams)), tokens, temperature, seed=number)
                for number in range(rounds)
            ]
            for row in rows(await take_turns(runners, batches, 1), exact=False):
                tell({"streams": streams, "temperature": temperature, **row})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=4, help="batches of prompts in a setting (default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    given = parser.parse_args()
    asyncio.run(measure(given.dtype, given.rounds, given.tokens))
