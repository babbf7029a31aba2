"""What ``paceline bench gpu`` measures and must reach, and how that is shown; written anew after each of its stages.

Decides the stages, the shapes of models and the figures that are wanted. Measures nothing, and imports no torch: a
mistake on the command line is answered at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.tables import Goal, Table, describe_machine, goals_table

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


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, and where the figures go."""

    stages: Sequence[str]
    shapes: Sequence[str] = ()
    """Instead of each stage's own."""
    device: str = "cuda"
    json: Path | None = None
    command: str = "paceline bench gpu"
    quantization: str = "none"
    """Of the models' weights (:data:`engine.quantisation.CHOICES`)."""

    @property
    def sizes(self) -> Sizes:
        """A CPU has no need of large ones."""
        return CPU_SIZES if self.device == "cpu" else Sizes()

    def plan(self) -> dict[str, list[str]]:
        """By shape, "" for the device itself, the stages to be run; each model is built once."""
        found: dict[str, list[str]] = {}
        for shape in ("", *SHAPES):
            stages = [stage for stage in STAGES if stage in self.stages and shape in self._shapes(stage)]
            found |= {shape: stages} if stages else {}
        return found

    def _shapes(self, stage: str) -> Sequence[str]:
        if not STAGES[stage]:
            return ("",)
        return self.shapes or ((CPU_SHAPE,) if self.device == "cpu" else STAGES[stage])


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step; medians, in milliseconds."""

    tokens: int
    rows: int
    """The class it fell in; 0: it was not computed by rows, or in several pieces."""
    wall: float
    """From the call to the drawn tokens on the host."""
    graph: float | None
    """What was replayed, on the device; None: nothing was."""
    layout: float | None
    """On the host, from the call to the first replay."""
    floor: float | None = None
    """Reading the weights once."""

    @property
    def over_floor(self) -> float | None:
        """The graph's time over the floor."""
        return self.graph / self.floor if self.graph and self.floor else None

    @property
    def around(self) -> float | None:
        """What the step takes beyond its graph."""
        return None if self.graph is None else self.wall - self.graph


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage came to with one shape."""

    stage: str = ""
    shape: str = ""
    seconds: float = 0.0
    steps: Mapping[str, StepTime] = field(default_factory=dict)
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Tokens a second of every turn, by contender and batch; see :func:`contender`."""
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    """Why it, or a part of it, did not work; one line."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the benchmark."""

    day: date
    options: Options
    device: str
    outcomes: list[Outcome] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Of the engine, such as why it did without its kernels."""
    machine: dict[str, Any] = field(default_factory=describe_machine)

    @property
    def failed(self) -> bool:
        """Whether anything did."""
        return any(outcome.failed for outcome in self.outcomes)


def contender(name: str, batch: int) -> str:
    """Who continues how many prompts at once."""
    return f"{name}, {batch} at once"


def _of(outcomes: Sequence[Outcome], stage: str, shape: str) -> Outcome:
    """What was measured; nothing, if it was not."""
    return next((one for one in outcomes if (one.stage, one.shape) == (stage, shape)), Outcome())


Figure = Callable[[Sequence[Outcome]], float | None]


def _worst(stage: str, shape: str, figure: Callable[[StepTime], float | None], *names: str) -> Figure:
    """The largest of some steps of a stage, or of all; none, if none was measured."""

    def worst(outcomes: Sequence[Outcome]) -> float | None:
        steps = _of(outcomes, stage, shape).steps
        found = [figure(step) for name, step in steps.items() if name in (names or steps)]
        return max((one for one in found if one is not None), default=None)

    return worst


def _over_floor(*names: str) -> Figure:
    return _worst("steps", "8B", lambda step: step.over_floor, *names)


_around = _worst("steps", "8B", lambda step: step.around)
_prompt = _worst("prompt", "8B", lambda step: step.wall)


def _draft(shape: str) -> Figure:
    return _worst("draft", shape, lambda step: step.wall, ONE, CHAIN, TREE)


def _launch(shape: str) -> Figure:
    return _worst("draft", shape, lambda step: step.wall, launched(1))


def _exact(outcomes: Sequence[Outcome]) -> float | None:
    found = [_of(outcomes, "exact", shape).facts.get("exact") for shape in ("8B", "1B")]
    return None if None in found else found.count(True) / len(found)


def _over_compiled(batch: int) -> Figure:
    def figure(outcomes: Sequence[Outcome]) -> float | None:
        rates = _of(outcomes, "transformers", "8B").rates
        ours, theirs = (rates.get(contender(name, batch), ()) for name in (OURS, COMPILED))
        # One that failed on its way has fewer turns.
        return median(one / other for one, other in zip(ours, theirs, strict=False)) if ours and theirs else None

    return figure


GOALS: tuple[Goal[Sequence[Outcome]], ...] = (
    Goal("step_over_floor", "8B, up to 32 tokens, over the floor", 1.3, True, _over_floor(ONE, CHAIN, TREE, MANY)),
    Goal("step64_over_floor", "8B, 64 tokens, over the floor", 1.4, True, _over_floor(MANY_CHAINS, MOST)),
    Goal("wall_over_graph_ms", "8B, a step's wall time over its graph, ms", 0.5, True, _around),
    Goal("far_tree_over_floor", "8B, tree of 16 behind 8,000 tokens", 1.6, True, _over_floor(TREE_FAR)),
    Goal("draft_1B_ms", "1B, a draft step, ms", 1.6, True, _draft("1B")),
    Goal("draft_tiny_ms", "bundled draft, a draft step, ms", 0.5, True, _draft("tiny")),
    Goal("launch_tiny_ms", "bundled draft, 8 levels in a launch, ms", 1.6, True, _launch("tiny")),
    Goal("exact", "share of 8B and 1B that are exact", 1.0, False, _exact),
    Goal("over_compiled_1", "tokens/s over transformers compiled, 1", 1.15, False, _over_compiled(1)),
    Goal("over_compiled_16", "tokens/s over transformers compiled, 16", 2.0, False, _over_compiled(16)),
    Goal("prompt_ms", "8B, a prompt of 2,048 tokens, ms", 75.0, True, _prompt),
)


def tables(result: Result) -> list[Table]:
    """All that have lines, the one that matters last."""
    steps = [
        (
            outcome.stage,
            outcome.shape,
            name,
            f"{step.tokens}",
            f"{step.rows or ''}",
            *(_two(figure) for figure in (step.graph, step.over_floor, step.wall, step.around, step.layout)),
        )
        for outcome in result.outcomes
        for name, step in outcome.steps.items()
    ]
    measures = ("graph ms", "over floor", "wall ms", "beside ms", "layout ms")
    rates = [
        (outcome.shape, name, f"{median(of_one):.1f}", f"{min(of_one):.1f}", f"{max(of_one):.1f}")
        for outcome in result.outcomes
        for name, of_one in outcome.rates.items()
    ]
    facts = [
        (outcome.stage, outcome.shape, what, f"{fact:.4g}" if isinstance(fact, float) else f"{fact}")
        for outcome in result.outcomes
        for what, fact in (outcome.facts | ({"failed": outcome.failed} if outcome.failed else {})).items()
    ]
    rate_columns = ("shape", "contender", "median", "slowest", "fastest")
    found = (
        Table("Steps", ("stage", "shape", "step", "tokens", "rows", *measures), steps),
        Table("Plain decoding with its prompts, tokens/s", rate_columns, rates),
        Table("Besides", ("stage", "shape", "what", "found"), facts),
    )
    return [*(table for table in found if table.lines), goals_table(GOALS, result.outcomes)]


def _two(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def notes(result: Result) -> list[str]:
    """What a reader of the figures must know."""
    return [
        f"{result.device}; random weights, made on the device: the speed is real, the text is not.",
        "Floor: the weights that a step reads, at the pace of a large sum on the same device. Far: behind a long text.",
        "transformers runs in the same process and in turn, with attention as torch chooses it, but with our settings "
        "of cuBLAS, which keep it from splitting sums.",
        *result.warnings,
    ]


def show(result: Result) -> None:
    """Print the tables and notes on stdout."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(result):
        console.print(table.rich())
    for note in notes(result):
        console.print(note, highlight=False)


def document(result: Result) -> dict[str, Any]:
    """What :func:`write_json` writes: ``summary`` and ``wanted`` have exactly the keys of the goals."""
    return {
        "summary": {goal.key: goal.ours(result.outcomes) for goal in GOALS},
        "wanted": {goal.key: {"at_most" if goal.at_most else "at_least": goal.bound} for goal in GOALS},
        "date": result.day.isoformat(),
        "device": result.device,
        "hardware": result.machine,
        "command": result.options.command,
        "sizes": asdict(result.options.sizes),
        "notes": notes(result),
        "outcomes": [asdict(outcome) for outcome in result.outcomes],
    }


def write_json(result: Result, file: Path) -> None:
    """Everything, for other programs."""
    file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
