"""The design of the engine benchmark: the model's size, the steps and requests that are timed, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.harness.options import FIGURES, BadInput, Options, between, flag
from cluster.local.threads import usable_cores

HEAD_SIZE = 64
GROUP = 4
"""Query heads that share a key head."""
EXPANSION = 4
"""How many times wider than the model its MLP is."""
HIDDEN_MULTIPLE = HEAD_SIZE * GROUP
CONCURRENT = 16


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
