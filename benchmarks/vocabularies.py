"""A draft with another tokenizer than the target's, one with the same, and none: tokens a second, side by side.

    python -m benchmarks.vocabularies --rounds 10

One stretched target and two drafts of one size (the bundled ones), a process each; contenders take turns prompt by
prompt, and the drafts are never busy at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.contenders import OURS, PLAIN
from benchmarks.harness.measure import Batch, Run, Runner, served, take_turns
from benchmarks.harness.pair import ROOT, Shape, stretched_pair
from benchmarks.harness.workers import WorkerPlan, connected, running
from benchmarks.turns import WARM_UP, held_out, tell
from cluster.console import say
from draft_service.translation.overlap import overlap
from draft_service.translation.translation import read_vocabularies
from draft_service.translation.vocabulary import SharedVocabulary
from engine.build import build
from engine.settings import EngineSettings
from router.text.tokenizer import Tokenizer
from speculation.events import Role

SAME, OTHER = ROOT / "models" / "draft", ROOT / "models" / "draft_other"
SAME_NAME, OTHER_NAME = "draft, same tokenizer", "draft, another tokenizer"


@asynccontextmanager
async def contenders(target: Path, folder: Path) -> AsyncIterator[Mapping[str, Runner]]:
    """The target alone, and with either draft."""
    flags = ("--dtype", "bfloat16")
    plans = [
        WorkerPlan(Role.TARGET, target, 0, folder / "target.jsonl", flags),
        WorkerPlan(Role.DRAFT, SAME, 1, folder / "same.jsonl", flags),
        WorkerPlan(Role.DRAFT, OTHER, 1, folder / "other.jsonl", (*flags, "--target-tokenizer", str(target))),
    ]
    async with (
        running(plans[0]) as served_model,
        running(plans[1]) as same,
        running(plans[2]) as other,
        connected(served_model, same) as with_same,
        connected(served_model, other) as with_other,
    ):
        yield {
            PLAIN.name: served(with_same, PLAIN.speculation),
            SAME_NAME: served(with_same, OURS.speculation),
            OTHER_NAME: served(with_other, OURS.speculation),
        }


def rows(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """The figures of each contender."""
    plain = runs[PLAIN.name]
    found = []
    for name, each in runs.items():
        commits = [commit for run in each for commit in run.counted]
        offered = sum(commit.offered for commit in commits)
        ratios = [run.rate / base.rate for run, base in zip(each, plain, strict=True)]
        same = [run.decoded[0].tokens == base.decoded[0].tokens for run, base in zip(each, plain, strict=True)]
        found.append(
            {
                "contender": name,
                "tokens_per_second": round(median(run.rate for run in each), 1),
                "ratio_to_plain": round(median(ratios), 2),
                "lowest_and_highest": [round(min(ratios), 2), round(max(ratios), 2)],
                "tokens_per_step": round(sum(commit.tokens for commit in commits) / len(commits), 2),
                "kept_of_offered": round(sum(commit.accepted for commit in commits) / offered, 2) if offered else None,
                "same_text": sum(same) / len(same),
            }
        )
    return found


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
    prompts = held_out(Tokenizer.load(str(pair.target)), rounds)
    with tempfile.TemporaryDirectory() as folder:
        async with contenders(pair.target, Path(folder)) as runners:
            for temperature in temperatures:
                batches = [Batch((prompt,), tokens, temperature, seed) for seed, prompt in enumerate(prompts)]
                for row in rows(await take_turns(runners, batches, WARM_UP, lambda: None)):
                    tell({"temperature": temperature, **row})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A draft model with another tokenizer than the target's")
    parser.add_argument("--rounds", type=int, default=10, help="prompts that count (default: 10)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: 96)")
    parser.add_argument("--temperature", type=float, action="append", help="may be given again (default: 0, then 0.8)")
    chosen = parser.parse_args()
    asyncio.run(main(chosen.rounds, chosen.tokens, chosen.temperature or [0.0, 0.8]))
