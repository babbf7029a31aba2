"""JSON that a schema demands, with speculation and without: tokens a second, side by side in one run.

    python -m benchmarks.structured --rounds 12
    python -m benchmarks.structured --random 200

One stretched target and its draft, a process each, on whatever cores there are; contenders take turns prompt by prompt.
No answer is remembered for another to copy. Compact JSON leaves much text without a choice, JSON with free whitespace
none: both are measured. Or, instead of one schema greedily, as many random ones at temperature 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema

from benchmarks.harness.pair import Shape, stretched_pair
from benchmarks.random_schemas import random_schema
from benchmarks.turns import WARM_UP, RunTotals, accepted, decode, held_out, rows, serving, take_turns, tell
from cluster.console import say
from router.dispatch import Dispatcher
from router.generation import Generation
from router.schema.structured import json_schema_grammar
from router.text.tokenizer import Tokenizer
from speculation.messages import RequestOptions, Sampling, Source, Speculation, Token

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "arguments": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "identifier": {"type": "string", "maxLength": 12},
                    "required": {"type": "boolean"},
                    "position": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["identifier", "required", "position"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 3,
        },
        "visibility": {"enum": ["public", "private", "protected"]},
    },
    "required": ["name", "arguments", "visibility"],
    "additionalProperties": False,
}
LAYOUTS: dict[str, dict[str, object]] = {
    "compact": {"whitespace_flexible": False, "whitespace_pattern": None},
    "free": {},
}
CONTENDERS = {
    "plain": Speculation(enabled=False, remember=False),
    "forced text alone": Speculation(sources=frozenset({Source.GRAMMAR}), remember=False),
    "draft alone": Speculation(sources=frozenset({Source.DRAFT}), remember=False),
    "all sources": Speculation(remember=False),
}
MOST_TOKENS = 200


def rounds_of(prompts: Sequence[tuple[Token, ...]], grammar: str) -> list[dict[str, Generation]]:
    """What contenders are asked: greedily to say JSON."""
    extras = RequestOptions(grammar=grammar)
    return [
        {
            name: Generation(
                prompt, Sampling(temperature=0.0), MOST_TOKENS, request_options=extras, speculation=speculation
            )
            for name, speculation in CONTENDERS.items()
        }
        for prompt in prompts
    ]


async def measure_random(
    dispatcher: Dispatcher, prompts: Sequence[tuple[int, ...]], tokenizer: Tokenizer, schemas: int, seed: int
) -> dict[str, Any]:
    """Plain decoding and all sources over random schemas, in turn; raises AssertionError if a text differs or is wrong.

    Texts may reach their last token before they end; those are only compared.
    """
    rng = random.Random(seed)
    tallies = {name: RunTotals() for name in ("plain", "all sources")}
    ended = 0
    for number in range(schemas):
        schema, sampling = random_schema(rng), Sampling(temperature=1.0, seed=number)
        extras = RequestOptions(grammar=json_schema_grammar(schema, "schema", {}))
        said: dict[str, list[int]] = {}
        for name in rng.sample(list(tallies), 2):
            prompt = prompts[number % len(prompts)]
            generation = Generation(prompt, sampling, MOST_TOKENS, request_options=extras, speculation=CONTENDERS[name])
            said[name] = await decode(dispatcher, generation, tallies[name])
        assert said["plain"] == said["all sources"], f"schema {number} of seed {seed}: the text depends on drafts"
        if len(said["plain"]) < MOST_TOKENS:
            ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(said["plain"])), schema)
    speeds = {name: tally.tokens / tally.seconds for name, tally in tallies.items()}
    return {
        "schemas": schemas,
        "same_text": schemas,
        "ended_and_valid": ended,
        "tokens": tallies["plain"].tokens,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio_to_plain": round(speeds["all sources"] / speeds["plain"], 2),
        "tokens_per_step": round(tallies["all sources"].tokens / tallies["all sources"].steps, 2),
    }


async def main(rounds: int, layouts: Sequence[str], schemas: int, seed: int) -> None:
    """Measure and print, a line of JSON for each contender, or one for all random schemas."""
    pair = stretched_pair(Shape())
    say(pair.about)
    tokenizer = Tokenizer.load(str(pair.target))
    prompts = held_out(tokenizer, rounds + WARM_UP)
    async with serving(pair.target, draft=pair.draft) as dispatcher:
        if schemas:
            tell(await measure_random(dispatcher, prompts, tokenizer, schemas, seed))
            return
        for layout in layouts:
            grammar = json_schema_grammar(RECORD, "schema", LAYOUTS[layout])
            for row in rows(await take_turns(dispatcher, rounds_of(prompts, grammar)), accepted):
                tell({"layout": layout, **row})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="JSON output under speculation against plain decoding")
    parser.add_argument("--rounds", type=int, default=12, help="prompts that count (default: 12)")
    parser.add_argument("--layout", choices=list(LAYOUTS), help="of the JSON (default: one after the other)")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random schemas instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random schemas (default: 0)")
    chosen = parser.parse_args()
    shapes = [chosen.layout] if chosen.layout else list(LAYOUTS)
    asyncio.run(main(chosen.rounds, shapes, chosen.random, chosen.seed))
