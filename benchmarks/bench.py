"""``paceline bench``: the measurements, on this machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.chaos.settings import ChaosOptions, SoakOptions
from benchmarks.engine.settings import EngineOptions
from benchmarks.gpu.settings import GpuOptions
from benchmarks.harness import options
from benchmarks.harness.options import Options, flag, known
from benchmarks.http.scale import ScaleOptions
from benchmarks.serve.settings import ServeOptions
from benchmarks.speculation.settings import SpeculationOptions
from cluster.config.flags import Parser
from cluster.console import BadInput

ABOUT = "measure decoding speed on this machine, against other ways to decode, and what faults do to streams"
DETAILS = """\
Everything is measured side by side in one run, with models built from the bundled ones or of random weights; `serve`
measures servers that run already. Keep the machine quiet meanwhile.

  paceline bench engine --quick
  paceline bench speculation --quick --json figures.json
  paceline bench speculation
  paceline bench drafting --only eagle
  paceline bench gpu --json figures.json
  paceline bench scale --streams 512
  paceline bench serve --url http://127.0.0.1:8000 --against-plain
  paceline bench chaos --only kill-target
  paceline bench soak --minutes 2
"""
PARTS = ("eagle", "steps", "repetition", "vocabularies", "staged", "structured", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOptions(Options):
    """What :mod:`benchmarks.drafting` measures."""

    BENCH = "drafting"
    ABOUT = "every way to draft without a small sibling, drafts of JSON, and where a draft model works"
    DETAILS = (
        f"Parts: {', '.join(PARTS)}.\n"
        "The quick run leaves the last three out and takes about five minutes, the full one half an hour."
    )
    MODULE = "benchmarks.drafting"
    FOLDER = "-drafting"
    quick: bool = flag(False, "few prompts; writes no folder")
    out: Path | None = flag(None, "folder of a full run (default: benchmarks/results/DATE-drafting)", metavar="DIR")
    rounds: int = flag(0, "prompts of each part that count, instead of its own number (default)", least=0)
    only: tuple[str, ...] = flag((), "only this part (may be given again)", metavar="PART")
    device: str = flag("cpu", "cuda: part eagle, on a target of billions of parameters", choices=("cpu", "cuda"))

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        known("--only", self.only, PARTS, "part")
        if self.device == "cuda" and self.only != ("eagle",):
            raise BadInput("--device cuda: part eagle alone is measured on a GPU; add --only eagle")
        return self


_ALL = (
    *(EngineOptions, GpuOptions, SpeculationOptions, DraftingOptions, ScaleOptions, ServeOptions),
    *(ChaosOptions, SoakOptions),
)
BENCHES: dict[str, type[Options]] = {one.BENCH: one for one in _ALL}


def add(parser: Parser) -> None:
    """Its flags."""
    names = ",".join(BENCHES)
    benches = parser.add_subparsers(dest="bench", title="benchmarks", metavar=f"{{{names}}}", required=True)
    for name, one in BENCHES.items():
        one.add(benches.add_parser(name, help=one.ABOUT, description=f"Measures {one.ABOUT}.\n\n{one.DETAILS}"))


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    return options.run(BENCHES[args.bench], args)
