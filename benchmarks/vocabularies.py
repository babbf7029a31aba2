"""A draft with another tokenizer than the target's, one with the same, and none: tokens a second, side by side.

    python -m benchmarks.vocabularies --rounds 10

One stretched target and two drafts of one size (the bundled ones), a process each; contenders take turns prompt by
prompt, and the drafts are never busy at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.harness.contenders import OURS, PLAIN, rows
from benchmarks.harness.measure import Batch, Runner, served, take_turns
from benchmarks.harness.pair import ROOT, Shape, held_out, stretched_pair
from benchmarks.harness.report import tell
from benchmarks.harness.workers import WorkerPlan, all_running, connected
from cluster.console import say
from draft_service.translation.tokenizer import SharedVocabulary
from draft_service.translation.translation import overlap, read_vocabularies
from engine.build import build
from engine.settings import EngineSettings
from speculation.events import Role

SAME, OTHER = ROOT / "models" / "draft", ROOT / "models" / "draft_other"
WARM_UP = 2
"""Rounds before those that count."""
SAME_NAME, OTHER_NAME = "draft, same tokenizer", "draft, another tokenizer"


@asynccontextmanager
async def contenders(target: Path) -> AsyncIterator[Mapping[str, Runner]]:
    """The target alone, and with either draft."""
    flags = ("--dtype", "bfloat16")
    plans = [
        WorkerPlan(Role.TARGET, target, 0, flags=flags),
        WorkerPlan(Role.DRAFT, SAME, 1, flags=flags),
        WorkerPlan(Role.DRAFT, OTHER, 1, flags=(*flags, "--target-tokenizer", str(target))),
    ]
    async with (
        all_running(plans) as (verifying, same, other),
        connected(verifying, same) as with_same,
        connected(verifying, other) as with_other,
    ):
        yield {
            PLAIN.name: served(with_same, PLAIN.speculation),
            SAME_NAME: served(with_same, OURS.speculation),
            OTHER_NAME: served(with_other, OURS.speculation),
        }


def shared_vocabulary(target: Path) -> dict[str, float]:
    """How much the other draft shares with the target."""
    known = read_vocabularies(str(OTHER), str(target))
    assert known is not None, "the other draft has the target's tokenizer"
    engine = build(EngineSettings(str(OTHER), device="cpu", cache_tokens=4096))
    shared = SharedVocabulary(known.target, known.own, target_size=known.target_size, own_size=engine.model.vocabulary)
    found = overlap(engine, shared)
    return {"vocabulary": round(shared.share, 3), "said": round(found.said, 3), "heard": round(found.heard, 3)}


async def main(rounds: int, tokens: int, temperatures: Sequence[float]) -> None:
    """Measure and print, a line of JSON for each contender."""
    pair = stretched_pair(Shape())
    say(f"{pair.about.split(' Draft:')[0]} Drafts: models/draft and models/draft_other.")
    tell({"shared": shared_vocabulary(pair.target)})
    prompts = held_out(rounds)
    async with contenders(pair.target) as runners:
        for temperature in temperatures:
            batches = [Batch((prompt,), tokens, temperature, seed) for seed, prompt in enumerate(prompts)]
            for row in rows(await take_turns(runners, batches, WARM_UP), exact=False):
                tell({"temperature": temperature, **row})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A draft model with another tokenizer than the target's")
    parser.add_argument("--rounds", type=int, default=10, help="prompts that count (default: 10)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: 96)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0, then 0.8)")
    chosen = parser.parse_args()
    asyncio.run(main(chosen.rounds, chosen.tokens, chosen.temperature or [0.0, 0.8]))
