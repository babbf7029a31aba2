"""The design of the benchmark of the engine on a GPU: its stages, the shapes of models, the steps that are timed.

Imports no torch: a mistake on the command line is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from benchmarks.harness.command import Bench
from benchmarks.harness.options import BadInput, Options, flag, known

VOCABULARY, CONTEXT = 32_768, 8_192


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama of random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = VOCABULARY
    tied: bool = False
    """Whether the output layer is the embedding."""


SHAPES = {
    "8B": Shape(4096, 14336, 32, 32, 8),
    "1B": Shape(2048, 8192, 16, 32, 8),
    "tiny": Shape(128, 352, 2, 4, 2, vocabulary=4096, tied=True),
}
"""Llama 3 8B and Llama 3.2 1B, with a vocabulary of a quarter and untied; the bundled draft."""

CPU_SHAPE = "tiny"
FLOOR = "floor"
STAGES: Mapping[str, Sequence[str]] = {
    FLOOR: (),
    "steps": ("8B",),
    "draft": ("1B", "tiny"),
    "exact": ("8B", "1B", "tiny"),
    "prompt": ("8B",),
    "transformers": ("8B",),
}
"""Every stage and the shapes it measures, unless others are asked for; none: it measures the device."""

ONE, CHAIN, TREE, MANY, MANY_CHAINS, MOST = "1 token", "chain 8", "tree 16", "16 x 1", "16 x 4", "64 x 1"
ONE_FAR, TREE_FAR = "1 token, far", "tree 16, far"
PROMPT = "prompt"
TREE_PARENTS = [parent for level in range(8) for parent in (2 * level - 1, 2 * level - 1)]
"""Two tokens a level, both below the second of the level before."""
CASES: Mapping[str, tuple[int, Sequence[int], bool]] = {
    ONE: (1, (-1,), False),
    CHAIN: (1, range(-1, 7), False),
    TREE: (1, TREE_PARENTS, False),
    MANY: (16, (-1,), False),
    MANY_CHAINS: (16, range(-1, 3), False),
    MOST: (64, (-1,), False),
    ONE_FAR: (1, (-1,), True),
    TREE_FAR: (1, TREE_PARENTS, True),
}
"""Steps that are timed: how many sequences, the parents of each one's tokens, and whether behind a long text."""
DRAFT_LEVELS = 8
DRAFTING_SESSIONS = (1, 8)
DRAFT_WIDTH, DRAFT_CHILDREN = 4, 3
"""Places of a session that a draft level expands, and drafts that hang from each."""


def one_by_one(sessions: int) -> str:
    """Name of so many draft levels of as many sessions, a step each."""
    return f"{sessions} x {DRAFT_LEVELS} levels, a step each"


def launched(sessions: int) -> str:
    """The same in one launch."""
    return f"{sessions} x {DRAFT_LEVELS} levels, one launch"


OURS, GENERATE, COMPILED = "ours", "transformers", "transformers compiled"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    context: int = 200
    """Tokens before a timed step."""
    far: int = 8000
    """The same of those behind a long text."""
    prompt: int = 2048
    request: int = 64
    """Tokens of a prompt that is continued, and new ones."""
    batches: tuple[int, ...] = (1, 16)
    rounds: int = 30
    turns: int = 3
    read_bytes: int = 4 << 30
    cache_tokens: int = 32_768


CPU_SIZES = Sizes(
    context=12, far=70, prompt=80, request=4, rounds=2, turns=1, read_bytes=1 << 22, cache_tokens=4096
)  # fmt: skip
"""For a stand-in that computes row by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions(Options):
    """What is measured."""

    BENCH: ClassVar[str] = "gpu"
    json: Path | None = flag(None, "write the figures there, after each stage")
    stages: tuple[str, ...] = flag((), "only these stages (default: all)", name="--stage", metavar="NAME,...")
    shapes: tuple[str, ...] = flag((), "these models instead of each stage's own", name="--shape", metavar="NAME,...")
    device: str = flag("cuda", "cpu: the same on a tiny model, without kernels", choices=("cuda", "cpu"))
    quantization: str = flag(
        "none", "of all models' weights; needs torchao (default: none)", choices=("none", "int8", "fp8")
    )

    def check(self) -> None:
        """See :class:`benchmarks.harness.options.Options`."""
        known("--stage", self.stages, STAGES, "stage")
        known("--shape", self.shapes, SHAPES if self.device == "cuda" else [CPU_SHAPE], "shape")
        if self.device == "cuda" and not import_module("torch").cuda.is_available():
            only = "this benchmark is for a GPU, and torch finds none here; --device cpu tries it on a tiny model"
            raise BadInput(only)

    @property
    def sizes(self) -> Sizes:
        """A CPU has no need of large ones."""
        return CPU_SIZES if self.device == "cpu" else Sizes()

    def plan(self) -> dict[str, list[str]]:
        """By shape, "" for the device itself, the stages to be run; each model is built once."""
        found: dict[str, list[str]] = {}
        for shape in ("", *SHAPES):
            stages = [stage for stage in STAGES if stage in (self.stages or STAGES) and shape in self._shapes(stage)]
            found |= {shape: stages} if stages else {}
        return found

    def _shapes(self, stage: str) -> Sequence[str]:
        if not STAGES[stage]:
            return ("",)
        return self.shapes or ((CPU_SHAPE,) if self.device == "cpu" else STAGES[stage])


BENCH = Bench(
    "the engine on a GPU: its steps over the memory's pace, whether they are exact, prompts, and transformers",
    "Takes less than five minutes on an H100; needs torch, transformers and triton, and nothing that serves.",
    GpuOptions,
    "benchmarks.gpu.run",
)
