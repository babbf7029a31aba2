"""From what the engine benchmark measured to its figures: medians and ratios, which must be reached, and their tables.

A ratio is taken round by round, of things measured in the same round, and given as the median over the rounds. Nothing
is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from benchmarks.engine.model import MEGABYTE, Memory, lengths, parameters
from benchmarks.engine.settings import CONCURRENT, EngineOptions
from benchmarks.engine.steps import PREFIX, TREE, chain, many
from benchmarks.harness.measure import Run
from benchmarks.harness.report import Goal, Result, Table, against, goals_table

ALONE, TOGETHER = "1 request", f"{CONCURRENT} requests"
MIXED = f"{CONCURRENT} requests of mixed lengths"
"""See :mod:`benchmarks.engine.model`."""

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
    read_bytes: int
    """What every entry of ``reads`` read."""
    reads: Seconds
    """In the same rounds as ``steps``."""
    steps: Seconds
    runs: Mapping[str, Sequence[Run]]
    """In turn, by contender."""
    prefixes: Sequence[Repeated]
    memory: Memory | None
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


def rates(runs: Sequence[Run], *, whole: bool = False) -> list[float]:
    """Tokens a second of every run, from when all its requests decode; ``whole``: the prompts' computation included."""
    return [run.whole_rate if whole else run.rate for run in runs]


def _step_over_floor(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(measured.steps[owner + chain(1)], measured.floors)


def _verify_over_step(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(measured.steps[owner + chain(8)], measured.steps[owner + chain(1)])


def _batch_over_one(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(rates(measured.runs[owner + TOGETHER]), rates(measured.runs[owner + ALONE]))


def _over_transformers(name: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(
        rates(measured.runs[name], whole=True), rates(measured.runs[PREFIX + name], whole=True)
    )


def _repeated_prefix(measured: Measured) -> float:
    return median(pair.repeated / pair.cold for pair in measured.prefixes)


def _overhead(measured: Measured) -> float | None:
    return None if measured.memory is None else measured.memory.overhead / MEGABYTE


GOALS: tuple[Goal[Measured], ...] = (
    Goal("step_over_floor", "decode step over its floor", 1.4, True, _step_over_floor(""), _step_over_floor(PREFIX)),
    Goal("verify8_over_step1", "verify 8 over step of 1", 1.5, True, _verify_over_step(""), _verify_over_step(PREFIX)),
    Goal("batch16_over_batch1", "tokens/s, 16 over 1", 5.0, False, _batch_over_one(""), _batch_over_one(PREFIX)),
    Goal("over_transformers_batch16", "tokens/s over transformers, 16", 2.0, False, _over_transformers(TOGETHER)),
    Goal("over_transformers_batch16_mixed", "the same, of mixed lengths", 2.0, False, _over_transformers(MIXED)),
    Goal("prefix_hit_ttft_ratio", "first token, repeated prefix over cold", 0.1, True, _repeated_prefix),
    Goal("memory_overhead_mb", "worker's memory beyond need, MB", 600.0, True, _overhead),
)


@dataclass(frozen=True, slots=True)
class TextAgreement:
    """How far two contenders write the same texts."""

    texts: int
    same: int
    tokens: float
    """Median number of tokens before the first difference."""


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> TextAgreement:
    """Text by text, of runs over the same prompts."""
    pairs = [
        (one.tokens, other.tokens)
        for run, their in zip(ours, theirs, strict=True)
        for one, other in zip(run.decoded, their.decoded, strict=True)
    ]
    agreed = [_agreed(*pair) for pair in pairs]
    return TextAgreement(len(pairs), sum(one == other for one, other in pairs), median(agreed))


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def steps(measured: Measured) -> Table:
    """How long a step takes, by the tokens in it."""
    sizes = [int(name.split()[1]) for name in measured.steps if name.startswith(chain(0)[:-1])]

    def over_floor(name: str) -> str:
        return f"{ratio(measured.steps[name], measured.floors):.2f}"

    def milliseconds(name: str) -> str:
        return f"{1e3 * median(measured.steps[name]):.2f}"

    lines = [
        (
            f"{size}",
            milliseconds(chain(size)),
            over_floor(chain(size)),
            milliseconds(many(size) if size > 1 else chain(1)),
            milliseconds(PREFIX + chain(size)),
        )
        for size in sizes
    ]
    lines.append((TREE, milliseconds(TREE), over_floor(TREE), "", ""))
    columns = ("tokens", "one sequence ms", "over floor", "as many sequences ms", "transformers, one sequence ms")
    return Table("A step, by its tokens", columns, lines)


def pace(measured: Measured) -> Table:
    """Tokens a second of every contender."""
    rows = [(name if name.startswith(PREFIX) else f"ours, {name}", runs) for name, runs in measured.runs.items()]
    figures = [(name, rates(runs), rates(runs, whole=True)) for name, runs in rows]
    lines = [
        (name, *(f"{rate:.1f}" for rate in (median(found), median(whole), min(found), max(found))))
        for name, found, whole in figures
    ]
    columns = ("contender", "decoding", "with the prompts", "slowest", "fastest")
    return Table("Plain decoding, tokens/s", columns, lines)


def result(options: EngineOptions, dtype: str, measured: Measured, **about: Any) -> Result:
    """All that is shown. ``summary`` and ``wanted`` have exactly the keys of the goals."""
    model = {"parameters": parameters(options.shape), **asdict(options.shape), "weights": "random"}
    found = Result(
        "engine",
        "The engine",
        options,
        (steps(measured), pace(measured), goals_table(GOALS, measured)),
        [],
        {
            **against(GOALS, measured),
            "transformers": {goal.key: goal.transformers(measured) for goal in GOALS if goal.transformers},
            "dtype": dtype,
            "model": model,
            "floor": {
                "weight_bytes": measured.weight_bytes,
                "bytes_per_second": measured.bandwidths,
                "read_seconds": measured.reads,
            },
            "step_seconds": measured.steps,
            "tokens_per_second": {
                name: {"decoding": rates(runs), "with_prompts": rates(runs, whole=True)}
                for name, runs in measured.runs.items()
            },
            "agreement": {
                dtype: asdict(agreement(measured.runs[TOGETHER], measured.runs[PREFIX + TOGETHER])),
                "float32": asdict(agreement(measured.exact[TOGETHER], measured.exact[PREFIX + TOGETHER])),
            },
            "first_token_seconds": [asdict(pair) for pair in measured.prefixes],
            "memory_bytes": None if measured.memory is None else asdict(measured.memory),
        },
        **about,
    )
    return replace(found, notes=notes(options, dtype, measured, found.machine["processor"]))


def notes(options: EngineOptions, dtype: str, measured: Measured, processor: str) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    shape, threads, bandwidths = options.shape, options.threads, measured.bandwidths
    prompts, answers = zip(*lengths(CONCURRENT), strict=True)

    def over_transformers(name: str) -> float:
        return ratio(rates(measured.runs[name]), rates(measured.runs[PREFIX + name]))

    answer = [
        f"{processor}, {'one core' if threads == 1 else f'{threads} cores'}; {dtype}. "
        f"A Llama of {parameters(shape) / 1e6:.0f}M parameters (hidden size {shape.hidden}, {shape.layers} layers, "
        "tied embeddings) with random weights: its speed is real, its text is not.",
        f"Floor: {measured.weight_bytes / MEGABYTE:.0f} MB of weights at {median(bandwidths) / 1e9:.1f} GB/s "
        f"(best {max(bandwidths) / 1e9:.1f}), read by the same core in the same rounds: "
        f"{1e3 * median(measured.floors):.2f} ms.",
        f"Texts of ours and transformers: {_agreed_texts(measured.exact)} in float32; "
        f"{_agreed_texts(measured.runs)} in {dtype}, where rounding decides between close tokens.",
        "Over transformers: from the requests to the last token, prompts included. While all decode it is "
        f"{over_transformers(TOGETHER):.2f}, for a request alone {over_transformers(ALONE):.2f}.",
        f"Of mixed lengths: prompts of {_range(prompts)} tokens, answers of {_range(answers)}, log-normal in "
        "ShareGPT's proportions, the same for both. transformers pads prompts on the left and goes on until the "
        "longest answer is done; only what was asked for counts.",
    ]
    if measured.memory is not None:
        held = {name: value / MEGABYTE for name, value in asdict(measured.memory).items()}
        answer.append(
            "Memory of a worker process after a batch: {resident:.0f} MB resident, less {weights:.0f} of weights, "
            "{cache:.0f} of cache and {activations:.1f} of activations (computed); {private:.0f} MB are not "
            "shared with other processes.".format(**held)
        )
    return answer


def _agreed_texts(runs: Mapping[str, Sequence[Run]]) -> str:
    found = agreement(runs[TOGETHER], runs[PREFIX + TOGETHER])
    return f"{found.same} of {found.texts} equal, in the median for {found.tokens:g} tokens"


def _range(tokens: Sequence[int]) -> str:
    return f"{min(tokens)} to {max(tokens)} (mean {mean(tokens):.0f})"
