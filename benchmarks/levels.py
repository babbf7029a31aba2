"""Multi-level drafting: a drafter whose forwards verify guesses, beside the same drafter without.

    python -m benchmarks.levels --json levels.json
    python -m benchmarks.levels --only alone --prompts 4

**Alone**: the drafter follows a text that the target wrote, and at every few tokens of it drafts until it is eight
tokens ahead: how many forwards and how much processor time that takes. **Served**: tokens a second of the target with
each kind of drafter, a process and a core each. Contenders take turns throughout, and none's answers are remembered for
another to copy. The target is the bundled one, stretched; drafters are its unstretched self, cheap beside it, and that
stretched to a fifth of the target's cost. Guesses come from lookup, from the bundled draft, or from a model that says
what the drafter says, which no real assistant does: the most that could be gained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from alignment.writing import continuations
from benchmarks.harness.contenders import PLAIN, pace, sequential
from benchmarks.harness.measure import Batch, Run, served, take_turns
from benchmarks.harness.pair import BUNDLED, ROOT, Pair, Shape, slow_draft, stretched_pair
from benchmarks.harness.workers import WorkerPlan, connected, running
from benchmarks.turns import tell
from cluster.console import say
from draft_service.assistant import Assistant
from draft_service.lookahead import Lookahead
from draft_service.staged_drafting import Guesser, Lookup, StagedDrafting
from engine.build import build, welcome
from engine.settings import EngineSettings
from engine.step import Engine
from models.corpus import read_prompts
from models.pair import load
from speculation import digest as digests
from speculation.events import Role
from speculation.messages import Limits, Open, Sampling, SessionId, Source, Speculation, Token, Verification

AHEAD = 8
"""Tokens that a drafter shall be ahead of the text."""
STRIDE = 5
"""Tokens of the text that a verification commits."""
CACHE_TOKENS = 8192
SMALL = ROOT / "models" / "draft"
KINDS = ("repetitive", "free")
_FIELDS = ("name", "size", "color", "path", "mode", "owner", "label", "state", "width", "height")
REPETITIVE_TOKENS, FREE_TOKENS = 128, 12
CONTENDERS: Mapping[str, tuple[bool, Path | None]] = {
    "one level": (False, None),
    "lookup": (True, None),
    "assistant": (False, SMALL),
    "assistant, always right": (False, BUNDLED),
}
"""Whether there is lookup, and which model assists."""
REQUESTS = {
    "trie": Speculation(sources=frozenset({Source.DRAFT}), remember=False),
    "trie and lookup at the target": Speculation(remember=False),
    "sequential, K = 8": sequential(8).speculation,
}
WARM_UP = 2
"""Rounds before those that count."""


def prompts(kind: str, count: int) -> list[list[Token]]:
    """Token ids, all of one length: accessors of a class, each like the one before; or the bundled held-out prompts."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    if kind == "free":
        rows = [tokenizer.encode(text).ids for text in read_prompts(ROOT / "models" / "prompts.jsonl")]
        return [row[:FREE_TOKENS] for row in rows if len(row) >= FREE_TOKENS][:count]
    texts = []
    for first in range(count):
        fields = [_FIELDS[(first + i) % len(_FIELDS)] for i in range(len(_FIELDS))]
        lines = [f"    def get_{one}(self):\n        return self._{one}\n\n" for one in fields]
        texts.append("class Item:\n" + "".join(lines))
    return [tokenizer.encode(text).ids[:REPETITIVE_TOKENS] for text in texts]


@dataclass(slots=True)
class Spent:
    """What it took one contender to get ahead, at one place."""

    forwards: int
    seconds: float
    """Of processor time: other programs at work disturb it little."""


class Alone:
    """A drafter without a wire."""

    def __init__(self, engine: Engine, settings: EngineSettings, guessers: Sequence[Guesser]) -> None:
        introduction = welcome(settings, engine.model, "draft")
        self.worker = Lookahead(engine, introduction, staged=StagedDrafting(introduction.vocabulary, guessers))
        self.spent: list[Spent] = []

    def open(self, prompt: Sequence[Token], end: int) -> None:
        """Begin a text, and read its prompt."""
        self.worker.receive(self, Open(SessionId(1), 1, tuple(prompt), Sampling(temperature=0.0), Limits(end)))

    def commit(self, text: Sequence[Token], start: int) -> None:
        """The target has said ``text[start:]``."""
        verification = Verification(SessionId(1), 1, start, tuple(text[start:]), digests.of(tuple(text)), offered=1)
        self.worker.receive(self, verification)

    def get_ahead(self) -> None:
        """Draft until it is far enough ahead, or has nothing more to say."""
        (sequence,) = self.worker._sequences.values()
        before, began = self.worker.counters.steps, time.thread_time()
        while sequence.session.trie.lead < AHEAD and sequence.session.frontier():
            self.worker.step()
        self.spent.append(Spent(self.worker.counters.steps - before, time.thread_time() - began))


def follow(contenders: Mapping[str, Alone], text: Sequence[Token], prompt: int) -> None:
    """Have every contender draft along a text, in turn at every place."""
    for contender in contenders.values():
        contender.open(text[:prompt], len(text) + 64)
    names = list(contenders)
    for number, end in enumerate(range(prompt, len(text), STRIDE)):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if end > prompt:
                contenders[name].commit(text[:end], end - STRIDE)
            contenders[name].get_ahead()
    for contender in contenders.values():
        contender.worker.forget(contender)


def alone(target: Path, draft: Path, count: int, tokens: int, dtype: str) -> list[dict[str, Any]]:
    """How fast a drafter gets ahead of the target's text, by kind of text and of guesses."""
    settings = EngineSettings(str(draft), dtype=dtype, device="cpu", cache_tokens=CACHE_TOKENS)
    engine = build(settings, invariant=False)
    assistants = {
        model: build(EngineSettings(str(model), dtype=dtype, device="cpu", cache_tokens=CACHE_TOKENS), invariant=False)
        for model in (SMALL, BUNDLED)
    }
    rows = []
    for kind in KINDS:
        contenders = {
            name: Alone(
                engine, settings, [*([Lookup()] if lookup else []), *([Assistant(assistants[model])] if model else [])]
            )
            for name, (lookup, model) in CONTENDERS.items()
        }
        started = prompts(kind, count)
        texts_BT = continuations(load(target, torch.bfloat16), torch.tensor(started), tokens, 0.0)
        for text in texts_BT.tolist():
            follow(contenders, text, len(started[0]))
        rows += [
            {"draft": draft.name, "text": kind, "contender": name, **_spent(one)} for name, one in contenders.items()
        ]
    return rows


def _spent(contender: Alone) -> dict[str, Any]:
    """The figures of one contender, once it has learned what forwards take and what guesses are worth."""
    counters = contender.worker.counters
    later = contender.spent[len(contender.spent) // 4 :]
    forwards, seconds = sum(one.forwards for one in later), sum(one.seconds for one in later)
    return {
        "forwards_per_place": round(forwards / len(later), 2),
        "ms_per_place": round(seconds / len(later) * 1e3, 2),
        "ms_per_forward": round(seconds / max(forwards, 1) * 1e3, 2),
        "guesses_per_forward": round(counters.guessed / counters.steps, 2),
        "followed": round(counters.followed / max(counters.guessed, 1), 2),
    }


async def together(target: Path, draft: Path, count: int, tokens: int, dtype: str) -> list[dict[str, Any]]:
    """Tokens a second of the target with each kind of drafter."""
    rows = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = WorkerPlan(Role.TARGET, target, 0, folder / "target.jsonl", ("--dtype", dtype))
        verifying = await stack.enter_async_context(running(plan))
        dispatchers = {}
        for number, (name, (lookup, model)) in enumerate(CONTENDERS.items()):
            flags = ["--dtype", dtype, "--second-level", "lookup" if lookup else "none"]
            flags += ["--assistant", str(model)] if model else []
            drafting = WorkerPlan(Role.DRAFT, draft, 1, folder / f"draft{number}.jsonl", flags)
            worker = await stack.enter_async_context(running(drafting))
            dispatchers[name] = await stack.enter_async_context(connected(verifying, worker))
        for kind in KINDS:
            batches = [Batch((tuple(prompt),), tokens) for prompt in prompts(kind, count)]
            for request, speculation in REQUESTS.items():
                runners = {name: served(one, speculation) for name, one in dispatchers.items()}
                runners["plain"] = served(dispatchers["one level"], PLAIN.speculation)
                runs = await take_turns(runners, batches, WARM_UP, lambda: None)
                assert len({tuple(run.decoded[0].tokens for run in those) for those in runs.values()}) == 1
                rows += [{"draft": draft.name, "text": kind, "request": request, **_pace(name, runs)} for name in runs]
    return rows


def _pace(name: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    ratios = [run.rate / other.rate for run, other in zip(runs[name], runs["one level"], strict=True)]
    counted = [commit for run in runs[name] for commit in run.counted]
    return {
        "contender": name,
        "tokens_per_second": round(pace(runs[name]), 1),
        "ratio_to_one_level": round(statistics.median(ratios), 2),
        "tokens_per_step": round(statistics.mean(commit.tokens for commit in counted), 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print, a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description="drafting several levels a forward against one")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="number format (default: %(default)s)")
    parser.add_argument("--only", choices=("alone", "served"), help="default: both")
    parser.add_argument("--draft", choices=("cheap", "slow"), help="which drafter (default: one after the other)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    pair: Pair = stretched_pair(Shape())
    say(pair.about)
    drafts = {"cheap": lambda: BUNDLED, "slow": slow_draft}
    figures: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in [chosen.draft] if chosen.draft else drafts:
        sizes = pair.target, drafts[name](), chosen.prompts, chosen.tokens, chosen.dtype
        if chosen.only != "served":
            figures["alone"] += _said(alone(*sizes))
        if chosen.only != "alone":
            figures["served"] += _said(asyncio.run(together(*sizes)))
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


def _said(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        tell(row)
    return rows


if __name__ == "__main__":
    main()
