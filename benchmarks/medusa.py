"""Medusa heads alone against plain decoding, and beside other sources: side by side in one run.

    python -m benchmarks.medusa --rounds 8

One stretched target with the bundled heads, stretched likewise, in a process on a core of its own; no draft worker.
Contenders take turns prompt by prompt. Without noise the stretched target computes the function that the heads were
trained for, so they are its own. With --acceptance below 1 it gets the noise that sets how often a draft model agrees;
its hidden states are then as noisy, and the heads are those of another model.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from benchmarks.harness.contenders import rows
from benchmarks.harness.measure import Batch, Run, served, take_turns
from benchmarks.harness.pair import Shape, held_out, stretched_heads, stretched_pair
from benchmarks.harness.report import tell
from benchmarks.harness.workers import serving
from cluster.console import say
from speculation.messages import Source, Speculation

CONTENDERS = {
    "plain": Speculation(enabled=False),
    "medusa alone": Speculation(sources=frozenset({Source.MEDUSA})),
    "lookup alone": Speculation(sources=frozenset({Source.LOOKUP})),
    "medusa and lookup": Speculation(sources=frozenset({Source.MEDUSA, Source.LOOKUP})),
}
SAMPLINGS = ((0.0, 0), (0.8, 1))
"""Temperature and seed."""
PLACES = 4
WARM_UP = 2
"""Rounds before those that count."""


def reached(runs: Sequence[Run]) -> list[float]:
    """Share of steps that kept a draft at the first place, the second, and so on."""
    kept = [commit.accepted for run in runs for commit in run.counted]
    return [round(sum(accepted > place for accepted in kept) / len(kept), 3) for place in range(PLACES)]


async def main(rounds: int, tokens: int, shape: Shape) -> None:
    """Measure and print, a line of JSON for each contender."""
    pair, heads = stretched_pair(shape), stretched_heads(shape)
    say(pair.about)
    async with serving(pair.target, "--medusa", str(heads)) as dispatcher:
        runners = {name: served(dispatcher, speculation) for name, speculation in CONTENDERS.items()}
        for temperature, seed in SAMPLINGS:
            runs = await take_turns(
                runners, [Batch((prompt,), tokens, temperature, seed) for prompt in held_out(rounds)], WARM_UP
            )
            for row in rows(runs):
                tell({"temperature": temperature, **row, "steps_reaching_place": reached(runs[row["contender"]])})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Medusa heads against plain decoding")
    parser.add_argument("--rounds", type=int, default=12, help="prompts that count (default: 12)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: 96)")
    about = "greedy agreement of the unstretched target with the stretched one (default: 1, no noise)"
    parser.add_argument("--acceptance", type=float, default=1.0, help=about)
    chosen = parser.parse_args()
    asyncio.run(main(chosen.rounds, chosen.tokens, Shape(acceptance=chosen.acceptance)))
