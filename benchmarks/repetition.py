"""Output that repeats (JSON rows, code edits), drafted for without a model: tokens a second against plain decoding.

    python -m benchmarks.repetition --rounds 6

One stretched target, no drafter. Every kind is several similar requests in turn (:mod:`benchmarks.repetition_texts`);
contenders take turns request by request. Each has a scope of its own for what is remembered, so that it never drafts
from another contender's answer to the same request; the first requests, which nothing was remembered for, are asked but
not counted.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.pair import Shape, stretched_pair
from benchmarks.repetition_texts import KINDS, GrammarPrompt
from benchmarks.turns import WARM_UP, RunTotals, rows, serving, take_turns, tell
from cluster.console import say
from router.generation import Generation
from router.text.tokenizer import Tokenizer
from speculation.messages import RequestOptions, Sampling, Source, Speculation

CONTENDERS = {
    "plain": Speculation(enabled=False, remember=False),
    "lookup": Speculation(sources=frozenset({Source.LOOKUP}), remember=False),
    "suffix": Speculation(sources=frozenset({Source.SUFFIX})),
    "both": Speculation(sources=frozenset({Source.LOOKUP, Source.SUFFIX})),
}
TEMPERATURES = (0.0, 0.7)
MOST_TOKENS = 200


def rounds_of(
    tokenizer: Tokenizer, requests: Sequence[GrammarPrompt], temperature: float, about: str
) -> list[dict[str, Generation]]:
    """What contenders are asked. ``about`` is for the scopes: what was remembered under another name is not found."""
    return [
        {
            name: Generation(
                tokenizer.encode(request.prompt, special=False),
                Sampling(temperature=temperature, seed=number),
                MOST_TOKENS,
                request_options=RequestOptions(grammar=request.grammar, scope=f"{about}, {name}"),
                speculation=speculation,
            )
            for name, speculation in CONTENDERS.items()
        }
        for number, request in enumerate(requests)
    ]


def accepted_a_step(tally: RunTotals) -> dict[str, Any]:
    """Drafts of each source."""
    return {"accepted_per_step": {name: round(count / tally.steps, 2) for name, count in tally.sources.items()}}


async def main(rounds: int, kinds: Sequence[str], temperatures: Sequence[float]) -> None:
    """Measure and print, a line of JSON for each contender."""
    pair = stretched_pair(Shape())
    say(pair.about)
    tokenizer = Tokenizer.load(str(pair.target))
    async with serving(pair.target) as dispatcher:
        for kind in kinds:
            requests = KINDS[kind]()[: rounds + WARM_UP]
            for temperature in temperatures:
                asked = rounds_of(tokenizer, requests, temperature, f"{kind} at {temperature}")
                for row in rows(await take_turns(dispatcher, asked), accepted_a_step):
                    tell({"kind": kind, "temperature": temperature, **row})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="output that repeats, drafted for without a model")
    about = "requests of a kind that count (default: 6, which is all)"
    parser.add_argument("--rounds", type=int, default=6, help=about)
    parser.add_argument("--kind", choices=list(KINDS), help="default: one after the other")
    parser.add_argument("--temperature", type=float, help="default: 0, then 0.7")
    chosen = parser.parse_args()
    kinds = [chosen.kind] if chosen.kind else list(KINDS)
    asyncio.run(main(chosen.rounds, kinds, TEMPERATURES if chosen.temperature is None else [chosen.temperature]))
