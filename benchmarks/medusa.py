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
from typing import Any

from benchmarks.harness.pair import Shape, stretched_heads, stretched_pair
from benchmarks.turns import WARM_UP, RunTotals, accepted, held_out, rows, serving, take_turns, tell
from cluster.console import say
from router.generation import Generation
from router.text.tokenizer import Tokenizer
from speculation.messages import Sampling, Source, Speculation

CONTENDERS = {
    "plain": Speculation(enabled=False),
    "medusa alone": Speculation(sources=frozenset({Source.MEDUSA})),
    "lookup alone": Speculation(sources=frozenset({Source.LOOKUP})),
    "medusa and lookup": Speculation(sources=frozenset({Source.MEDUSA, Source.LOOKUP})),
}
PLACES = 4


def reached(tally: RunTotals) -> dict[str, Any]:
    """Share of steps that kept a draft at the first place, the second, and so on; and whose drafts were accepted."""
    steps = len(tally.commits)
    shares = [round(sum(commit.accepted > place for commit in tally.commits) / steps, 3) for place in range(PLACES)]
    return {"steps_reaching_place": shares, **accepted(tally)}


async def main(rounds: int, tokens: int, shape: Shape) -> None:
    """Measure and print, a line of JSON for each contender."""
    pair, heads = stretched_pair(shape), stretched_heads(shape)
    say(pair.about)
    prompts = held_out(Tokenizer.load(str(pair.target)), rounds + WARM_UP)
    async with serving(pair.target, "--medusa", str(heads)) as dispatcher:
        for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.8, seed=1)):
            asked = [
                {
                    name: Generation(prompt, sampling, tokens, speculation=speculation)
                    for name, speculation in CONTENDERS.items()
                }
                for prompt in prompts
            ]
            for row in rows(await take_turns(dispatcher, asked), reached):
                tell({"temperature": sampling.temperature, **row})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Medusa heads against plain decoding")
    parser.add_argument("--rounds", type=int, default=12, help="prompts that count (default: 12)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: 96)")
    about = "greedy agreement of the unstretched target with the stretched one (default: 1, no noise)"
    parser.add_argument("--acceptance", type=float, default=1.0, help=about)
    chosen = parser.parse_args()
    asyncio.run(main(chosen.rounds, chosen.tokens, Shape(acceptance=chosen.acceptance)))
