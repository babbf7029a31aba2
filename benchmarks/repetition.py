"""Output that repeats (JSON rows, code edits), drafted for without a model: tokens a second against plain decoding.

    python -m benchmarks.repetition --rounds 6

One stretched target, no drafter. Every kind is several similar requests in turn (:mod:`benchmarks.grammar_prompts`);
contenders take turns request by request. Each has a scope of its own for what is remembered, so that it never drafts
from another contender's answer to the same request; the first requests, which nothing was remembered for, are asked but
not counted.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from benchmarks.grammar_prompts import KINDS
from benchmarks.harness.contenders import rows
from benchmarks.harness.measure import Batch, served, take_turns
from benchmarks.harness.pair import Shape, stretched_pair
from benchmarks.harness.report import tell
from benchmarks.harness.workers import serving
from cluster.console import say
from router.text.tokenizer import Tokenizer
from speculation.messages import RequestOptions, Source, Speculation

CONTENDERS = {
    "plain": Speculation(enabled=False, remember=False),
    "lookup": Speculation(sources=frozenset({Source.LOOKUP}), remember=False),
    "suffix": Speculation(sources=frozenset({Source.SUFFIX})),
    "both": Speculation(sources=frozenset({Source.LOOKUP, Source.SUFFIX})),
}
TEMPERATURES = (0.0, 0.7)
MAX_TOKENS = 200
NOT_COUNTED = 2
"""Requests of a kind that come first."""


async def main(rounds: int, kinds: Sequence[str], temperatures: Sequence[float]) -> None:
    """Measure and print, a line of JSON for each contender."""
    pair = stretched_pair(Shape())
    say(pair.about)
    tokenizer = Tokenizer.load(str(pair.target))
    async with serving(pair.target) as dispatcher:
        for kind in kinds:
            asked = [
                (tokenizer.encode(one.prompt, special=False), one.grammar)
                for one in KINDS[kind]()[: rounds + NOT_COUNTED]
            ]
            for temperature in temperatures:
                runners = {
                    name: served(dispatcher, speculation, RequestOptions(scope=f"{kind} at {temperature}, {name}"))
                    for name, speculation in CONTENDERS.items()
                }
                batches = [
                    Batch((prompt,), MAX_TOKENS, temperature, number, grammar=grammar)
                    for number, (prompt, grammar) in enumerate(asked)
                ]
                runs = await take_turns(runners, batches, 0)
                for row in rows({name: own[NOT_COUNTED:] for name, own in runs.items()}):
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
