"""From what the engine benchmark measured to its figures: medians and ratios, and which must be reached.

A ratio is taken round by round, of things measured in the same round, and given as the median over the rounds. Nothing
is measured or shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.engine_memory import MEGABYTE, Memory
from benchmarks.engine_settings import CONCURRENT
from benchmarks.engine_steps import StepParts, chain
from benchmarks.engine_stock import PREFIX
from benchmarks.measure import Run
from benchmarks.tables import Goal

ALONE, TOGETHER = "1 request", f"{CONCURRENT} requests"
MIXED = f"{CONCURRENT} requests of mixed lengths"
"""See :mod:`benchmarks.engine_traffic`."""

Seconds = Mapping[str, Sequence[float]]
"""By name of what was timed, then by round."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Time to first token, in seconds: of a prompt with a new prefix, then of another with the same one."""

    cold: float
    repeated: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All that one run of the benchmark measured."""

    weight_bytes: int
    """What a step reads."""
    read_bytes: int
    """What every entry of ``reads`` read."""
    reads: Seconds
    """In the same rounds as ``steps``."""
    steps: Seconds
    runs: Mapping[str, Sequence[Run]]
    """In turn, by contender."""
    prefixes: Sequence[Repeated]
    memory: Memory | None
    """None where the system does not tell."""
    parts: Sequence[StepParts]
    through_router: Mapping[str, Sequence[Run]]
    """Over gRPC, to a worker process; full run only."""
    exact: Mapping[str, Sequence[Run]]
    """In float32."""

    @property
    def bandwidths(self) -> list[float]:
        """Bytes a second in every round, by the way that was the fastest in it."""
        return [self.read_bytes / min(way) for way in zip(*self.reads.values(), strict=True)]

    @property
    def floors(self) -> list[float]:
        """Seconds in which the core can read the weights, in every round."""
        return [self.weight_bytes / bandwidth for bandwidth in self.bandwidths]


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of one over the other."""
    return median(one / other for one, other in zip(ones, others, strict=True))


def rates(runs: Sequence[Run]) -> list[float]:
    """Tokens a second of every run, from when all its requests decode."""
    return [run.rate for run in runs]


def whole_rates(runs: Sequence[Run]) -> list[float]:
    """Tokens a second of every run, the prompts' computation included."""
    return [run.whole_rate for run in runs]


def _step_over_floor(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(measured.steps[owner + chain(1)], measured.floors)


def _verify_over_step(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(measured.steps[owner + chain(8)], measured.steps[owner + chain(1)])


def _batch_over_one(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(rates(measured.runs[owner + TOGETHER]), rates(measured.runs[owner + ALONE]))


def _over_transformers(name: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(whole_rates(measured.runs[name]), whole_rates(measured.runs[PREFIX + name]))


def _repeated_prefix(measured: Measured) -> float:
    return median(pair.repeated / pair.cold for pair in measured.prefixes)


def _overhead(measured: Measured) -> float | None:
    return None if measured.memory is None else measured.memory.overhead / MEGABYTE


GOALS: tuple[Goal[Measured], ...] = (
    Goal("step_over_floor", "decode step over its floor", 1.4, True, _step_over_floor(""), _step_over_floor(PREFIX)),
    Goal("verify8_over_step1", "verify 8 over step of 1", 1.5, True, _verify_over_step(""), _verify_over_step(PREFIX)),
    Goal("batch16_over_batch1", "tokens/s, 16 over 1", 5.0, False, _batch_over_one(""), _batch_over_one(PREFIX)),
    Goal("over_transformers_batch16", "tokens/s over transformers, 16", 2.0, False, _over_transformers(TOGETHER)),
    Goal(
        "over_transformers_batch16_mixed",
        "the same, of mixed lengths",
        2.0,
        False,
        _over_transformers(MIXED),
    ),
    Goal("prefix_hit_ttft_ratio", "first token, repeated prefix over cold", 0.1, True, _repeated_prefix),
    Goal("memory_overhead_mb", "worker's memory beyond need, MB", 600.0, True, _overhead),
)


def summary(measured: Measured) -> dict[str, float | None]:
    """The figure of every goal."""
    return {goal.key: goal.ours(measured) for goal in GOALS}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two contenders write the same texts."""

    texts: int
    same: int
    """Texts that are equal to the end."""
    tokens: float
    """Median number of tokens before the first difference."""


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> Agreement:
    """Text by text, of runs over the same prompts."""
    pairs = [
        (one.tokens, other.tokens)
        for run, their in zip(ours, theirs, strict=True)
        for one, other in zip(run.decoded, their.decoded, strict=True)
    ]
    agreed = [_agreed(*pair) for pair in pairs]
    return Agreement(len(pairs), sum(one == other for one, other in pairs), median(agreed))


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
