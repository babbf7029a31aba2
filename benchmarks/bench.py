"""``paceline bench``: the measurements, on this machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.chaos.settings import ChaosOptions, SoakOptions
from benchmarks.gpu.settings import GpuOptions
from benchmarks.harness import options
from benchmarks.harness.options import FIGURES, Options, between, flag, known
from benchmarks.http.scale import ScaleOptions
from benchmarks.serve.settings import ServeOptions
from benchmarks.speculation.settings import SpeculationOptions
from cluster.config.flags import Parser
from cluster.console import BadInput
from cluster.local.threads import usable_cores

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
HIDDEN_MULTIPLE = 256
"""Of the engine benchmark's model: four heads of 64 share a key head."""
PARTS = ("eagle", "steps", "repetition", "vocabularies", "staged", "structured", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Options):
    """How large the model is, and how many cores compute.

    By default 260 million parameters: a quarter of the layers of the Llama 3.2 of a billion. With more and thinner
    layers, more of a step is overhead.
    """

    BENCH = "engine"
    ABOUT = "the target worker's engine: its steps, its batches and its memory, and transformers"
    DETAILS = "The quick run takes about four minutes, the full one about ten."
    MODULE = "benchmarks.engine.run"
    FOLDER = "-engine"
    quick: bool = flag(False, "fewer rounds; writes no folder")
    json: Path | None = flag(None, FIGURES)
    out: Path | None = flag(None, "folder of a full run (default: benchmarks/results/DATE-engine)", metavar="DIR")
    hidden: int = flag(2048, "hidden size of the model")
    layers: int = flag(4, "layers of the model", least=1)
    threads: int = flag(1, "cores, and threads of a step")

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        if self.hidden < HIDDEN_MULTIPLE or self.hidden % HIDDEN_MULTIPLE:
            raise BadInput(f"--hidden must be a multiple of {HIDDEN_MULTIPLE}, got {self.hidden}")
        between("--threads", self.threads, 1, usable_cores(), ", the cores usable here")
        return self

    @property
    def rounds(self) -> int:
        """Times every step and every way to read is timed."""
        return 12 if self.quick else 40

    @property
    def turns(self) -> int:
        """Times every contender decodes, and pairs of prompts with the same prefix."""
        return 3 if self.quick else 7

    @property
    def mixed_turns(self) -> int:
        """Times both decode requests of mixed lengths: as many seconds each as all others together."""
        return 2 if self.quick else 5


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
    json: Path | None = flag(None, FIGURES)
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
