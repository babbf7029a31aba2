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

from benchmarks.grammar_prompts import random_schema
from benchmarks.harness.contenders import rows
from benchmarks.harness.measure import Batch, served, take_turns
from benchmarks.harness.pair import Shape, held_out, stretched_pair
from benchmarks.harness.report import tell
from benchmarks.harness.workers import serving
from cluster.console import say
from router.dispatch import Dispatcher
from router.schema.structured import json_schema_grammar
from router.text.tokenizer import Tokenizer
from speculation.messages import Source, Speculation

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
MAX_TOKENS = 200
WARM_UP = 2
"""Rounds before those that count."""


async def measure_random(dispatcher: Dispatcher, tokenizer: Tokenizer, schemas: int, seed: int) -> dict[str, Any]:
    """Plain decoding and all sources over random schemas, in turn; raises AssertionError if a text differs or is wrong.

    Texts may reach their last token before they end; those are only compared.
    """
    rng, prompts = random.Random(seed), held_out()
    asked = [random_schema(rng) for _ in range(schemas)]
    batches = [
        Batch(
            (prompts[number % len(prompts)],),
            MAX_TOKENS,
            1.0,
            number,
            grammar=json_schema_grammar(schema, "schema", {}),
        )
        for number, schema in enumerate(asked)
    ]
    names = ("plain", "all sources")
    runs = await take_turns({name: served(dispatcher, CONTENDERS[name]) for name in names}, batches, 0)
    texts = {name: [run.decoded[0].tokens for run in runs[name]] for name in names}
    ended = 0
    for number, (schema, plain, drafted) in enumerate(zip(asked, *texts.values(), strict=True)):
        assert plain == drafted, f"schema {number} of seed {seed}: the text depends on drafts"
        if len(plain) < MAX_TOKENS:
            ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(plain)), schema)
    tokens = sum(map(len, texts["plain"]))
    speeds = {name: tokens / sum(len(run.decoded[0].tokens) / run.whole_rate for run in runs[name]) for name in names}
    return {
        "schemas": schemas,
        "same_text": schemas,
        "ended_and_valid": ended,
        "tokens": tokens,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio_to_plain": round(speeds["all sources"] / speeds["plain"], 2),
        "tokens_per_step": round(tokens / sum(len(run.decoded[0].commits) for run in runs["all sources"]), 2),
    }


async def main(rounds: int, layouts: Sequence[str], schemas: int, seed: int) -> None:
    """Measure and print, a line of JSON for each contender, or one for all random schemas."""
    pair = stretched_pair(Shape())
    say(pair.about)
    async with serving(pair.target, draft=pair.draft) as dispatcher:
        if schemas:
            tell(await measure_random(dispatcher, Tokenizer.load(str(pair.target)), schemas, seed))
            return
        runners = {name: served(dispatcher, speculation) for name, speculation in CONTENDERS.items()}
        for layout in layouts:
            grammar = json_schema_grammar(RECORD, "schema", LAYOUTS[layout])
            batches = [Batch((prompt,), MAX_TOKENS, grammar=grammar) for prompt in held_out(rounds)]
            for row in rows(await take_turns(runners, batches, WARM_UP)):
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
