"""``paceline bench``: the measurements, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.chaos import settings as chaos
from benchmarks.engine import settings as engine
from benchmarks.gpu import settings as gpu
from benchmarks.harness.command import Bench
from benchmarks.harness.options import FIGURES, Options, flag, known
from benchmarks.http import scale
from benchmarks.serve import settings as serve
from benchmarks.speculation import settings as speculation
from cluster.config.flags import Parser

ABOUT = "measure decoding speed on this machine, against other ways to decode, and what faults do to streams"
DETAILS = """\
Everything is measured side by side in one run, with models built from the bundled ones or of random weights; `serve`
measures servers that run already. Keep the machine quiet meanwhile.

  paceline bench engine --quick
  paceline bench speculation --quick --json figures.json
  paceline bench speculation
  paceline bench drafting --only medusa
  paceline bench gpu --json figures.json
  paceline bench scale --streams 512
  paceline bench serve --url http://127.0.0.1:8000 --against-plain
  paceline bench chaos --only kill-target
  paceline bench soak --minutes 2
"""


PARTS = ("medusa", "eagle", "steps", "repetition", "vocabularies", "structured", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOptions(Options):
    """What :mod:`benchmarks.drafting` measures."""

    BENCH: ClassVar[str] = "drafting"
    FOLDER: ClassVar[str | None] = "-drafting"
    quick: bool = flag(False, "few prompts; writes no folder")
    json: Path | None = flag(None, FIGURES)
    out: Path | None = flag(None, "folder of a full run (default: benchmarks/results/DATE-drafting)", metavar="DIR")
    rounds: int = flag(0, "prompts of each part that count, instead of its own number (default)", least=0)
    only: tuple[str, ...] = flag((), "only this part (may be given again)", metavar="PART")

    def check(self) -> None:
        """See :class:`benchmarks.harness.options.Options`."""
        known("--only", self.only, PARTS, "part")


DRAFTING = Bench(
    "every way to draft without a small sibling, drafts of JSON, and where a draft model works",
    f"Parts: {', '.join(PARTS)}.\n"
    "The quick run leaves the last two out and takes about five minutes, the full one half an hour.",
    DraftingOptions,
    "benchmarks.drafting",
)
BENCHES: Mapping[str, Bench] = {
    "engine": engine.BENCH,
    "gpu": gpu.BENCH,
    "speculation": speculation.BENCH,
    "drafting": DRAFTING,
    "scale": scale.BENCH,
    "serve": serve.BENCH,
    "chaos": chaos.CHAOS,
    "soak": chaos.SOAK,
}


def add(parser: Parser) -> None:
    """Its flags."""
    names = ",".join(BENCHES)
    benches = parser.add_subparsers(dest="bench", title="benchmarks", metavar=f"{{{names}}}", required=True)
    for name, bench in BENCHES.items():
        described = f"Measures {bench.about}.\n\n{bench.details}"
        bench.add(benches.add_parser(name, help=bench.about, description=described))


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    return BENCHES[args.bench].run(args)
