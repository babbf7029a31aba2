"""Where a draft model works: on a worker of its own, a core each, or in the target's process, in turn with it.

    python -m benchmarks.placement --dtype bf16 --rounds 4

The pair is that of ``paceline up --stretched``: the bundled target at the cost of a larger model, drafted for by the
bundled draft. Contenders take turns prompt by prompt: plain decoding and drafting, each with one thread and with one
for every core. Drafts come from the draft model alone and nothing is remembered. Prints a line of JSON for each, beside
plain decoding on one core.
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

SETTINGS = ((1, 0.0), (1, 0.8), (8, 0.0), (8, 0.8))
"""Streams and temperature."""


async def measure(dtype: str, rounds: int, tokens: int) -> None:
    """Start all of them, and compare."""
    target, draft = noiseless_target(HIDDEN, LAYERS), ROOT / "models" / "draft"
    cores = len(os.sched_getaffinity(0))
    beside = ("--draft-model", str(draft))
    flags, wide_flags = (("--dtype", dtype, "--threads", str(threads)) for threads in (1, cores))
    plans = (
        WorkerPlan(Role.TARGET, target, 0, flags=flags),
        WorkerPlan(Role.DRAFT, draft, 1, flags=flags),
        WorkerPlan(Role.TARGET, target, 0, flags=(*flags, *beside)),
        WorkerPlan(Role.TARGET, target, None, flags=(*wide_flags, *beside)),
    )
    async with (
        all_running(plans) as (first, second, one, all_cores),
        connected(first, second) as own,
        connected(one) as in_turn,
        connected(all_cores) as wide,
    ):
        runners = {
            "plain, 1 core": served(own, PLAIN.speculation),
            "own, a core each": served(own, OURS.speculation),
            "shared, 1 core": served(in_turn, OURS.speculation),
            f"plain, {cores} cores": served(wide, PLAIN.speculation),
            f"shared, {cores} cores": served(wide, OURS.speculation),
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
