"""The design of the benchmark on a GPU: its stages, the shapes of models, the steps that are timed, how drafts are had.

Imports no torch: a mistake on the command line is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Self

from benchmarks.engine.settings import LlamaShape
from benchmarks.harness.options import Options, check_stretched, flag, known
from cluster.config.flags import count, number
from cluster.console import BadInput

SHAPES = {
    "8B": LlamaShape(4096, 14336, 32, 32, 8),
    "1B": LlamaShape(2048, 8192, 16, 32, 8),
    "tiny": LlamaShape(128, 352, 2, 4, 2, vocabulary=4096, tied=True),
}
"""Llama 3 8B and Llama 3.2 1B, with a vocabulary of a quarter and untied; the bundled draft."""

CPU_SHAPE = "tiny"
STRETCHED = "stretched"
"""A checkpoint of the stage on speculation alone: the bundled target at the cost of a larger one."""
FLOOR, SPECULATION = "floor", "speculation"
STAGES: Mapping[str, Sequence[str]] = {
    FLOOR: (),
    "steps": ("8B",),
    "draft": ("1B", "tiny"),
    "exact": ("8B", "1B", "tiny"),
    "prompt": ("8B",),
    "kernels": ("8B",),
    "transformers": ("8B",),
    SPECULATION: (STRETCHED,),
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
PROFILED = (TREE, MOST, ONE_FAR)
"""Of these, where the device's time goes."""
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

SHARED, OWN, CPU = "shared", "own", "cpu"
PLACEMENTS = (SHARED, OWN, CPU)
"""Where the draft model works: in the target's process, in turn; a process and device of its own; the host's CPU."""
SAME_GPU = "same GPU"
"""What ``OWN`` comes to where there is only one: a process of its own that shares the target's GPU by time."""
RIGHT, WRONG, DEAD = "right", "wrong", "dead"
DRAFTERS = (RIGHT, WRONG, DEAD)
"""What becomes of drafts: right as often as was asked for, at random, or none, since their worker was killed."""
MAX_ROUNDS = 12
"""There are prompts for no more of them."""


@dataclass(frozen=True, slots=True)
class DraftingSetting:
    """What drafting and plain decoding are compared in."""

    drafter: str
    streams: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.drafter} drafter, {self.streams} at once, T {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    context: int = 200
    far: int = 8000
    """The same of those behind a long text."""
    prompt: int = 2048
    request: int = 64
    """Tokens of a prompt that is continued, and new ones."""
    batches: tuple[int, ...] = (1, 16)
    warm_up: int = 10
    """Times that a step is computed before it is timed."""
    rounds: int = 30
    turns: int = 3
    read_bytes: int = 4 << 30
    cache_tokens: int = 32_768
    hidden: int = 4096
    layers: int = 24
    """Of the stretched target; so it has 4.5 billion parameters."""
    streams: tuple[int, ...] = (1, 8, 32)


CPU_SIZES = Sizes(
    context=12,
    far=70,
    prompt=80,
    request=4,
    warm_up=1,
    rounds=2,
    turns=1,
    read_bytes=1 << 22,
    cache_tokens=4096,
    hidden=512,
    layers=8,
    streams=(1, 2),
)


def _drafting(default: Any, about: str, **how: Any) -> Any:
    return flag(default, f"speculation: {about}", **how)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions(Options):
    """What is measured."""

    BENCH = "gpu"
    ABOUT = "the engine on a GPU: its steps over the memory's pace, their exactness, prompts, transformers, speculation"
    DETAILS = (
        "The stages of the engine take less than five minutes on an H100; they need torch, transformers and triton, "
        "and nothing that serves. Speculation needs what workers need; how long it takes depends on what is asked for."
    )
    MODULE = "benchmarks.gpu.run"
    json: Path | None = flag(None, "write the figures there, after each stage")
    stages: tuple[str, ...] = flag((), "only these stages (default: all)", name="--stage", metavar="NAME,...")
    shapes: tuple[str, ...] = flag((), "these models instead of each stage's own", name="--shape", metavar="NAME,...")
    device: str = flag("cuda", "cpu: the same on a tiny model, without kernels", choices=("cuda", "cpu"))
    quantization: str = flag(
        "none", "of all models' weights; needs torchao (default: none)", choices=("none", "int8", "fp8")
    )
    streams: tuple[int, ...] = _drafting(
        (), "texts at once (default: 1,8,32; on a CPU 1,2)", metavar="N,...", parse=partial(count, maximum=64)
    )
    temperatures: tuple[float, ...] = _drafting(
        (0.0, 0.8), "of sampling (default: 0,0.8)", metavar="X,...", parse=partial(number, maximum=2.0)
    )
    placements: tuple[str, ...] = _drafting(
        (), "where the draft model works, of shared, own and cpu (default: all)", metavar="NAME,..."
    )
    drafters: tuple[str, ...] = _drafting((), "its drafts, of right, wrong and dead (default: all)", metavar="NAME,...")
    agreement: float = _drafting(0.8, "how often the right drafter is to be right", least=0.0, most=1.0)
    hidden: int = _drafting(0, "hidden size of the target (default: 4096; on a CPU 512)", least=0)
    layers: int = _drafting(0, "its layers (default: 24; on a CPU 8)", least=0)
    tokens: int = _drafting(64, "new tokens of a text", least=8, most=512)
    rounds: int = _drafting(3, "turns of each contender, besides those that warm up", least=1, most=MAX_ROUNDS)
    budget_s: float = _drafting(0.0, "seconds after which it stops with what it has; 0: none", least=0.0)
    records: str = _drafting("", "folder for the workers' records of steps, which slow them down", metavar="DIR")

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        known("--stage", self.stages, STAGES, "stage")
        known("--shape", self.shapes, SHAPES if self.device == "cuda" else [CPU_SHAPE], "shape")
        known("--placements", self.placements, PLACEMENTS, "placement")
        known("--drafters", self.drafters, DRAFTERS, "drafter")
        check_stretched(self.sizes.hidden, self.sizes.layers)
        if self.records and not Path(self.records).is_dir():
            raise BadInput(f"--records {self.records}: no such folder")
        if self.device == "cuda" and not import_module("torch").cuda.is_available():
            only = "this benchmark is for a GPU, and torch finds none here; --device cpu tries it on a tiny model"
            raise BadInput(only)
        return self

    @property
    def sizes(self) -> Sizes:
        """A CPU has no need of large ones."""
        given = {name: value for name in ("hidden", "layers", "streams") if (value := getattr(self, name))}
        return replace(CPU_SIZES if self.device == "cpu" else Sizes(), **given)

    @property
    def placed(self) -> list[str]:
        """Where draft models work."""
        return [placement for placement in PLACEMENTS if placement in (self.placements or PLACEMENTS)]

    @property
    def settings(self) -> list[DraftingSetting]:
        """Those that drafting is measured in; a drafter dies last."""
        drafters = [drafter for drafter in DRAFTERS if drafter in (self.drafters or DRAFTERS)]
        if self.placed == [SHARED]:
            drafters = [drafter for drafter in drafters if drafter != DEAD]  # it would take the target with it
        return [DraftingSetting(*each) for each in product(drafters, self.sizes.streams, self.temperatures)]

    def plan(self) -> dict[str, list[str]]:
        """By shape, "" for the device itself, the stages to be run; each model is built once."""
        found: dict[str, list[str]] = {}
        for shape in ("", *SHAPES, STRETCHED):
            stages = [stage for stage in STAGES if stage in (self.stages or STAGES) and shape in self._shapes(stage)]
            found |= {shape: stages} if stages else {}
        return found

    def _shapes(self, stage: str) -> Sequence[str]:
        if not STAGES[stage]:
            return ("",)
        if stage == SPECULATION:
            return STAGES[stage]
        return self.shapes or ((CPU_SHAPE,) if self.device == "cpu" else STAGES[stage])
