"""What the benchmark on a GPU must reach, and how that is shown; written anew after each of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.gpu import settings
from benchmarks.gpu.settings import DraftingSetting, GpuOptions, launched
from benchmarks.harness.report import Goal, Result, Table, table_of


@dataclass(frozen=True, slots=True)
class StepTiming:
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

    @property
    def over_floor(self) -> float | None:
        """The graph's time over the floor."""
        return self.graph / self.floor if self.graph and self.floor else None

    @property
    def around(self) -> float | None:
        """What the step takes beyond its graph."""
        return None if self.graph is None else self.wall - self.graph


@dataclass(frozen=True, slots=True)
class Speedup:
    """Drafting from one place beside plain decoding, over the same rounds of prompts."""

    placement: str
    setting: DraftingSetting
    plain: tuple[float, ...]
    drafted: tuple[float, ...]
    """Tokens a second of every round, after the prompts."""
    ratios: tuple[float, ...]
    """The second over the first."""
    offered: float
    kept: float
    """Drafts verified of a text in a step, and those of them that became text."""
    same_text: float
    """Share of the texts that are those of plain decoding."""
    plain_ms: float
    drafted_ms: float
    """From one commit of a text to its next, median: a step and what is between two."""

    @property
    def ratio(self) -> float:
        """Median over the rounds."""
        return median(self.ratios)


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage, or a part of one, came to with one shape."""

    stage: str = ""
    shape: str = ""
    part: str = ""
    seconds: float = 0.0
    steps: Mapping[str, StepTiming] = field(default_factory=dict)
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Tokens a second of every turn, by contender and batch; see :func:`contender`."""
    speedups: Sequence[Speedup] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    """Why it, or a part of it, did not work; one line."""


def contender(name: str, batch: int) -> str:
    """Who continues how many prompts at once."""
    return f"{name}, {batch} at once"


def _of(outcomes: Sequence[StageResult], stage: str, shape: str) -> StageResult:
    """What was measured; nothing, if it was not."""
    return next((one for one in outcomes if (one.stage, one.shape) == (stage, shape)), StageResult())


Figure = Callable[[Sequence[StageResult]], float | None]


def _worst(stage: str, shape: str, figure: Callable[[StepTiming], float | None], *names: str) -> Figure:
    """The largest of some steps of a stage, or of all; none, if none was measured."""

    def worst(outcomes: Sequence[StageResult]) -> float | None:
        steps = _of(outcomes, stage, shape).steps
        found = [figure(step) for name, step in steps.items() if name in (names or steps)]
        return max((one for one in found if one is not None), default=None)

    return worst


def _over_floor(*names: str) -> Figure:
    return _worst("steps", "8B", lambda step: step.over_floor, *names)


def _wall(stage: str, shape: str, *names: str) -> Figure:
    return _worst(stage, shape, lambda step: step.wall, *names)


def _exact(outcomes: Sequence[StageResult]) -> float | None:
    found = [_of(outcomes, "exact", shape).facts.get("exact") for shape in ("8B", "1B")]
    return None if None in found else found.count(True) / len(found)


def _over_compiled(batch: int) -> Figure:
    def figure(outcomes: Sequence[StageResult]) -> float | None:
        rates = _of(outcomes, "transformers", "8B").rates
        ours, theirs = (rates.get(contender(name, batch), ()) for name in (settings.OURS, settings.COMPILED))
        # One that failed on its way has fewer turns.
        return median(one / other for one, other in zip(ours, theirs, strict=False)) if ours and theirs else None

    return figure


def _speedups(outcomes: Sequence[StageResult]) -> list[Speedup]:
    return [one for outcome in outcomes if outcome.shape == settings.STRETCHED for one in outcome.speedups]


def _speedup(placement: str, streams: int, temperature: float = 0.0) -> Figure:
    wanted = (placement, DraftingSetting(settings.RIGHT, streams, temperature))
    return lambda outcomes: next(
        (one.ratio for one in _speedups(outcomes) if (one.placement, one.setting) == wanted), None
    )


def _slowest(outcomes: Sequence[StageResult]) -> float | None:
    return min((one.ratio for one in _speedups(outcomes)), default=None)


_FEW = settings.ONE, settings.CHAIN, settings.TREE
_UP_TO_32, _OF_64 = _over_floor(*_FEW, settings.MANY), _over_floor(settings.MANY_CHAINS, settings.MOST)
_around, _levels = _worst("steps", "8B", lambda step: step.around), _wall("draft", "tiny", launched(1))
GOALS: tuple[Goal[Sequence[StageResult]], ...] = (
    Goal("step_over_floor", "8B, up to 32 tokens, over the floor", 1.3, True, _UP_TO_32),
    Goal("step64_over_floor", "8B, 64 tokens, over the floor", 1.4, True, _OF_64),
    Goal("wall_over_graph_ms", "8B, a step's wall time over its graph, ms", 0.5, True, _around),
    Goal("far_tree_over_floor", "8B, tree of 16 behind 8,000 tokens", 1.6, True, _over_floor(settings.TREE_FAR)),
    Goal("draft_1B_ms", "1B, a draft step, ms", 1.6, True, _wall("draft", "1B", *_FEW)),
    Goal("draft_tiny_ms", "bundled draft, a draft step, ms", 0.5, True, _wall("draft", "tiny", *_FEW)),
    Goal("launch_tiny_ms", "bundled draft, 8 levels in a launch, ms", 1.6, True, _levels),
    Goal("exact", "share of 8B and 1B that are exact", 1.0, False, _exact),
    Goal("over_compiled_1", "tokens/s over transformers compiled, 1", 1.15, False, _over_compiled(1)),
    Goal("over_compiled_16", "tokens/s over transformers compiled, 16", 2.0, False, _over_compiled(16)),
    Goal("prompt_ms", "8B, a prompt of 2,048 tokens, ms", 75.0, True, _wall("prompt", "8B")),
    Goal("own_1", "drafting over plain, own GPU, 1 stream", 2.8, False, _speedup(settings.OWN, 1)),
    Goal("own_1_sampled", "the same at temperature 0.8", 1.8, False, _speedup(settings.OWN, 1, 0.8)),
    Goal("own_8", "drafting over plain, own GPU, 8 streams", 1.8, False, _speedup(settings.OWN, 8)),
    Goal("own_32", "drafting over plain, own GPU, 32 streams", 1.1, False, _speedup(settings.OWN, 32)),
    Goal("shared_1", "drafting over plain, on one GPU, 1 stream", 2.2, False, _speedup(settings.SHARED, 1)),
    Goal("shared_8", "drafting over plain, on one GPU, 8 streams", 1.4, False, _speedup(settings.SHARED, 8)),
    Goal("slowest", "drafting over plain, the worst of what was run", 0.97, False, _slowest),
)


def result(options: GpuOptions, device: str, outcomes: Sequence[StageResult], warnings: Sequence[str]) -> Result:
    """What there is so far."""
    figures = {
        "device": device,
        "sizes": asdict(options.sizes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    return Result("On a GPU", options, tables(outcomes), notes(device, warnings), figures, GOALS, outcomes)


def tables(outcomes: Sequence[StageResult]) -> list[Table]:
    """All that have lines."""
    steps = table_of(
        "Steps",
        [(outcome, name, step) for outcome in outcomes for name, step in outcome.steps.items()],
        {
            "stage": lambda of: of[0].stage,
            "shape": lambda of: of[0].shape,
            "step": lambda of: of[1],
            "tokens": lambda of: of[2].tokens,
            "rows": lambda of: of[2].rows or "",
            "graph ms": lambda of: of[2].graph,
            "over floor": lambda of: of[2].over_floor,
            "wall ms": lambda of: of[2].wall,
            "beside ms": lambda of: of[2].around,
            "layout ms": lambda of: of[2].layout,
        },
    )
    rates = table_of(
        "Plain decoding with its prompts, tokens/s",
        [(outcome.shape, name, of_one) for outcome in outcomes for name, of_one in outcome.rates.items()],
        {
            "shape": lambda of: of[0],
            "contender": lambda of: of[1],
            "median": lambda of: f"{median(of[2]):.1f}",
            "slowest": lambda of: f"{min(of[2]):.1f}",
            "fastest": lambda of: f"{max(of[2]):.1f}",
        },
    )
    facts = [
        (outcome.stage, outcome.shape, what, f"{fact:.4g}" if isinstance(fact, float) else f"{fact}")
        for outcome in outcomes
        for what, fact in (outcome.facts | ({"failed": outcome.failed} if outcome.failed else {})).items()
    ]
    found = (steps, rates, _drafting(outcomes), Table("Besides", ("stage", "shape", "what", "found"), facts))
    return [table for table in found if table.lines]


def _drafting(outcomes: Sequence[StageResult]) -> Table:
    return table_of(
        "Drafting, tokens/s",
        [one for outcome in outcomes for one in outcome.speedups],
        {
            "draft model": lambda one: one.placement,
            "drafts": lambda one: one.setting.drafter,
            "streams": lambda one: one.setting.streams,
            "T": lambda one: f"{one.setting.temperature:g}",
            "plain": lambda one: f"{median(one.plain):.0f}",
            "drafted": lambda one: f"{median(one.drafted):.0f}",
            "over plain": lambda one: one.ratio,
            "by round": lambda one: " ".join(f"{ratio:.2f}" for ratio in one.ratios),
            "kept a step": lambda one: f"{one.kept:.2f} of {one.offered:.2f}",
            "same text": lambda one: one.same_text,
            "plain ms": lambda one: one.plain_ms,
            "drafted ms": lambda one: one.drafted_ms,
        },
    )


def notes(device: str, warnings: Sequence[str]) -> list[str]:
    """What a reader of the figures must know."""
    return [
        f"{device}; random weights, made on the device: the speed is real, the text is not.",
        "Floor: the weights that a step reads, at the pace of a large sum on the same device. Far: behind a long text.",
        "transformers runs in the same process and in turn, with attention as torch chooses it, but with our settings "
        "of cuBLAS, which keep it from splitting sums.",
        "Drafting: the target is a trained model stretched with random weights. Drafts of the draft model only, "
        "prompts all different, in turn with plain decoding by the same kind of worker. own: another GPU; same GPU: "
        "another process on the target's; shared: in the target's process; cpu: on the host's. ms: from one commit "
        "of a text to the next.",
        *warnings,
    ]
