"""Speculative against plain decoding of the same system: one target, one drafter, a core each.

    python -m benchmarks.speculation [--quick] [--json FILE]

Both contenders are the same processes; a request says whether it wants drafts. They take turns on the same held-out
prompts, and the ratio is taken prompt by prompt, so a machine that changes its pace changes both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.pair import ROOT, Pair, Shape, stretched_pair, trained_pair
from benchmarks.workers import WorkerPlan, connected, running
from models.corpus import read_prompts
from router.dispatch import Dispatcher
from router.generation import Committed, Generation
from speculation.events import Role
from speculation.messages import Load, Sampling, Speculation, Token

WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Decoded:
    """One generation and its pace after the first token."""

    tokens: tuple[Token, ...]
    seconds: float
    accepted: int
    offered: int
    steps: int

    @property
    def rate(self) -> float:
        """Tokens a second, from the first token to the last."""
        return (len(self.tokens) - 1) / self.seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """What one setting came to. Times in milliseconds, rates in tokens a second, the rest ratios."""

    temperature: float
    plain_rate: float
    drafted_rate: float
    over_plain: float
    over_plain_spread: tuple[float, float]
    """Lowest and highest over the prompts."""
    offered_kept: float
    """Share of the drafts offered that were kept; those behind a refused one count as refused."""
    tokens_per_step: float
    same_text: float
    """Share of prompts with the same text both ways. In bfloat16 a near tie may fall differently with the batch."""
    target_step_ms: float
    draft_step_ms: float


async def decode(dispatcher: Dispatcher, generation: Generation) -> Decoded:
    """Run one generation and time it."""
    tokens: list[Token] = []
    accepted = offered = steps = 0
    started = time.perf_counter()
    async for item in dispatcher.generate(generation):
        if isinstance(item, Committed):
            if not tokens:
                started = time.perf_counter()
            tokens += item.tokens
            accepted, offered, steps = accepted + item.accepted, offered + item.offered, steps + 1
    return Decoded(tuple(tokens), time.perf_counter() - started, accepted, offered, steps)


def _step_ms(before: Load, after: Load) -> float:
    steps = after.counters["steps"] - before.counters["steps"]
    micros = after.counters["step_microseconds"] - before.counters["step_microseconds"]
    return micros / max(steps, 1) / 1000


class Loads:
    """What the workers last reported, by role."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def now(self, role: Role) -> Load:
        """A report that covers everything until now."""
        await asyncio.sleep(0.6)
        return next(peer.load for peer in self._dispatcher.pool.peers.values() if peer.role is role)


async def compare(
    dispatcher: Dispatcher, prompts: Sequence[tuple[Token, ...]], tokens: int, temperature: float, progress: Progress
) -> Summary:
    """Decode every prompt plainly and with drafts, in turn."""
    loads = Loads(dispatcher)
    plain: list[Decoded] = []
    drafted: list[Decoded] = []
    target_micros = {False: [0, 0], True: [0, 0]}
    task = progress.add_task(f"temperature {temperature}", total=len(prompts) + WARM_UP)
    draft_before = await loads.now(Role.DRAFT)
    for number, prompt in enumerate([*prompts[:WARM_UP], *prompts]):
        for speculate in (False, True):
            before = await loads.now(Role.TARGET)
            sampling = Sampling(temperature=temperature, seed=number)
            generation = Generation(prompt, sampling, tokens, speculation=Speculation(enabled=speculate))
            decoded = await decode(dispatcher, generation)
            after = await loads.now(Role.TARGET)
            if number >= WARM_UP:
                (drafted if speculate else plain).append(decoded)
                for i, name in enumerate(("steps", "step_microseconds")):
                    target_micros[speculate][i] += after.counters[name] - before.counters[name]
        progress.advance(task)
    draft_after = await loads.now(Role.DRAFT)
    ratios = [fast.rate / slow.rate for fast, slow in zip(drafted, plain, strict=True)]
    return Summary(
        temperature=temperature,
        plain_rate=statistics.median(run.rate for run in plain),
        drafted_rate=statistics.median(run.rate for run in drafted),
        over_plain=statistics.median(ratios),
        over_plain_spread=(min(ratios), max(ratios)),
        offered_kept=sum(run.accepted for run in drafted) / max(sum(run.offered for run in drafted), 1),
        tokens_per_step=sum(len(run.tokens) for run in drafted) / sum(run.steps for run in drafted),
        same_text=statistics.mean(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
        target_step_ms=target_micros[False][1] / max(target_micros[False][0], 1) / 1000,
        draft_step_ms=_step_ms(draft_before, draft_after),
    )


async def measure(pair: Pair, options: argparse.Namespace) -> list[Summary]:
    """Start the workers and compare at every temperature."""
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in read_prompts(ROOT / "models" / "prompts.jsonl")]
    flags = ["--dtype", options.dtype, "--threads", "1"]
    target = WorkerPlan(Role.TARGET, pair.target, 0, [*flags, "--max-draft", str(options.max_draft)])
    draft = WorkerPlan(Role.DRAFT, pair.draft, 1, flags)
    with Progress(console=Console(stderr=True)) as progress:
        async with (
            running(target) as target_address,
            running(draft) as draft_address,
            connected([target_address], [draft_address]) as dispatcher,
        ):
            return [
                await compare(dispatcher, prompts[: options.prompts], options.tokens, temperature, progress)
                for temperature in options.temperatures
            ]


def show(pair: Pair, summaries: Sequence[Summary], options: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(title=f"speculative over plain decoding, {options.dtype}, one core each, batch 1")
    for column in ("temperature", "plain tok/s", "drafted tok/s", "speed-up", "lowest to highest", "drafts kept",
                   "tokens a step", "same text", "target step", "draft step", "ratio"):  # fmt: skip
        table.add_column(column, justify="right")
    for s in summaries:
        table.add_row(
            f"{s.temperature:g}",
            f"{s.plain_rate:.1f}",
            f"{s.drafted_rate:.1f}",
            f"{s.over_plain:.2f} x",
            f"{s.over_plain_spread[0]:.2f} to {s.over_plain_spread[1]:.2f}",
            f"{s.offered_kept:.2f}",
            f"{s.tokens_per_step:.2f}",
            f"{s.same_text:.0%}",
            f"{s.target_step_ms:.1f} ms",
            f"{s.draft_step_ms:.2f} ms",
            f"{s.target_step_ms / s.draft_step_ms:.1f}",
        )
    console = Console(width=160 if not sys.stdout.isatty() else None)
    console.print(table)
    console.print(pair.about)


def machine() -> str:
    """The processor, as the kernel names it."""
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{cpus[0]}, {len(cpus)} cores" if cpus else platform.processor()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the pair, measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    parser.add_argument("--quick", action="store_true", help="fewer prompts, temperature 0 only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens a prompt (default: %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-draft", type=int, default=8, help="most drafts verified a step (default: %(default)s)")
    parser.add_argument("--trained", action="store_true", help="the bundled pair itself instead of the stretched one")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--acceptance", type=float, default=0.8, help="greedy agreement to calibrate for")
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.temperatures = min(options.prompts, 5), [0.0]
    shape = Shape(options.hidden, options.layers, options.acceptance)
    pair = trained_pair() if options.trained else stretched_pair(shape)
    summaries = asyncio.run(measure(pair, options))
    show(pair, summaries, options)
    if options.json:
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "pair": asdict(pair) | {"target": pair.target.name, "draft": pair.draft.name},
            "settings": [asdict(summary) for summary in summaries],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
