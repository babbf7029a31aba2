"""The model that the engine benchmark runs, what it is asked, what it needs, and what was measured of it: the figures.

A Llama of random weights, which are noise because speed does not depend on them. Its text is senseless but not
degenerate, and its greedy choices are close ones: in bfloat16 two correct implementations soon write different texts.

Requests have different lengths, as chat traffic has them: equal ones are the best case of a padded batch. In traffic
both prompts and answers spread widely; here they are drawn from log-normal distributions in the proportions of
ShareGPT's conversations, whose mean prompt has 161 tokens and whose mean answer 338 (Kwon et al. 2023, "Efficient
memory management for large language model serving with PagedAttention", section 6.1). All lengths are divided by
:data:`SHORTENED` so that a batch takes seconds on one core. The paper shows the spread but gives no figure for it: we
take a standard deviation as large as the mean. The draw is the same in every run; only the tokens of the prompts are
new ones.

What a target worker process holds in memory beyond its weights, its cache and the numbers of one step is taken from a
real ``paceline worker target``, without Ray, after it has served one batch of requests: everything resident (shared
libraries in full, as if no other process used them), less what is known to be needed:

- weights: every parameter once;
- cache: all of its slots; the worker gets no more of them than the batch needs, so that none stays untouched;
- activations: the widest place of the largest step (see :func:`activations`), a low estimate.

A ratio is taken round by round, of things measured in the same round, and given as the median over the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import torch
from transformers import LlamaForCausalLM

from benchmarks.engine.settings import HEAD_SIZE, VOCABULARY, EngineOptions, LlamaShape
from benchmarks.engine.steps import PREFIX, TREE, chain, many
from benchmarks.harness.measure import Batch, Run
from benchmarks.harness.report import Goal, Result, Table, describe_machine
from cluster.config.config import Config
from engine.model import placed

CONCURRENT = 16
SEED = 0
MEAN_PROMPT, MEAN_ANSWER = 161, 338
"""Tokens, before they are shortened."""
SHORTENED = 4
LENGTH_SPREAD = math.sqrt(math.log(2.0))
"""Standard deviation of a length's logarithm: that of the length equals its mean."""
LONGEST = 256
"""Of prompts, and of answers."""
MEGABYTE = 1e6


def write_model(options: EngineOptions, folder: Path) -> None:
    """A checkpoint in bfloat16, the same for the same shape."""
    torch.manual_seed(SEED)
    placed(LlamaForCausalLM(options.shape.config), torch.bfloat16).save_pretrained(folder)


def random_prompts(count: int, tokens: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Prompts that share no beginning."""
    return [tuple(row) for row in torch.randint(VOCABULARY, (count, tokens), generator=generator).tolist()]


def activations(shape: LlamaShape, tokens: int, rows: int) -> int:
    """Numbers alive at the widest place of a step, about: residual, norm, the MLP's three products, and logits.

    ``rows``: of logits, counted three times, as the model's number format and as float32.
    """
    return tokens * (2 * shape.hidden + 3 * shape.intermediate) + 3 * rows * shape.vocabulary


def lengths(count: int) -> list[tuple[int, int]]:
    """Tokens of prompt and answer for ``count`` requests."""
    rng = Random(SEED)
    return [(_length(rng, MEAN_PROMPT), _length(rng, MEAN_ANSWER)) for _ in range(count)]


def _length(rng: Random, mean: float) -> int:
    centre = math.log(mean / SHORTENED) - LENGTH_SPREAD**2 / 2
    return min(max(round(rng.lognormvariate(centre, LENGTH_SPREAD)), 1), LONGEST)


def mixed_batch(count: int, generator: torch.Generator) -> Batch:
    """``count`` requests at once, with prompts that share no beginning."""
    asked, answers = zip(*lengths(count), strict=True)
    prompts = tuple(random_prompts(1, tokens, generator)[0] for tokens in asked)
    return Batch(prompts, max(answers), each=answers)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one worker process, in bytes."""

    resident: int
    private: int
    """Those that no other process shares at the moment."""
    weights: int
    cache: int
    activations: int

    @property
    def overhead(self) -> int:
        """What is left: interpreter, libraries, allocator, copies."""
        return self.resident - self.weights - self.cache - self.activations


def memory_of(process: int, shape: LlamaShape, item: int, slots: int, rows: int) -> Memory:
    """Of the worker with this process id; ``item``: bytes of a number, ``rows``: of logits in its widest step."""
    fields = read_rollup(Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii"))
    return Memory(
        resident=fields["Rss"],
        private=fields["Private_Clean"] + fields["Private_Dirty"],
        weights=item * shape.weights_read,
        cache=item * slots * 2 * shape.layers * shape.kv_heads * HEAD_SIZE,
        activations=item * activations(shape, Config().target.prompt_tokens, rows),
    )


def read_rollup(text: str) -> dict[str, int]:
    """The fields of ``/proc/PID/smaps_rollup`` (proc_pid_smaps(5)), in bytes."""
    lines = (line.split() for line in text.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


ALONE, TOGETHER = "1 request", f"{CONCURRENT} requests"
MIXED = f"{CONCURRENT} requests of mixed lengths"

Seconds = Mapping[str, Sequence[float]]
"""By name of what was timed, then by round."""


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
    prefixes: Sequence[tuple[float, float]]
    """Seconds to the first token of a prompt with a new prefix, then of another with the same one."""
    memory: Memory

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


def _steps(one: str, other: str) -> Callable[[str], Callable[[Measured], float]]:
    """Of whoever is named so: a step over another one, or over the floor."""
    return lambda owner: (
        lambda measured: ratio(measured.steps[owner + one], measured.steps[owner + other] if other else measured.floors)
    )


def _batch(owner: str) -> Callable[[Measured], float]:
    return lambda measured: ratio(rates(measured.runs[owner + TOGETHER]), rates(measured.runs[owner + ALONE]))


def _over_theirs(name: str, measured: Measured, *, whole: bool = True) -> float:
    return ratio(rates(measured.runs[name], whole=whole), rates(measured.runs[PREFIX + name], whole=whole))


_over_floor, _eight_over_one = _steps(chain(1), ""), _steps(chain(8), chain(1))
GOALS: tuple[Goal[Measured], ...] = (
    Goal("step_over_floor", "decode step over its floor", 1.4, True, _over_floor(""), _over_floor(PREFIX)),
    Goal("verify8_over_step1", "verify 8 over step of 1", 1.5, True, _eight_over_one(""), _eight_over_one(PREFIX)),
    Goal("batch16_over_batch1", "tokens/s, 16 over 1", 5.0, False, _batch(""), _batch(PREFIX)),
    Goal("over_transformers_batch16", "tokens/s over transformers, 16", 2.0, False, partial(_over_theirs, TOGETHER)),
    Goal("over_transformers_batch16_mixed", "the same, of mixed lengths", 2.0, False, partial(_over_theirs, MIXED)),
    Goal(
        *("prefix_hit_ttft_ratio", "first token, repeated prefix over cold", 0.1, True),
        lambda measured: median(repeated / cold for cold, repeated in measured.prefixes),
    ),
    Goal(
        *("memory_overhead_mb", "worker's memory beyond need, MB", 600.0, True),
        lambda measured: measured.memory.overhead / MEGABYTE,
    ),
)


def steps(measured: Measured) -> Table:
    """How long a step takes, by the tokens in it."""
    sizes = [int(name.split()[1]) for name in measured.steps if name.startswith(chain(0)[:-1])]
    named = [(str(n), chain(n), many(n) if n > 1 else chain(1), PREFIX + chain(n)) for n in sizes]
    milliseconds = {name: f"{1e3 * median(seconds):.2f}" for name, seconds in measured.steps.items()}
    lines = [
        (
            *(size, milliseconds[own], f"{ratio(measured.steps[own], measured.floors):.2f}"),
            *(milliseconds.get(name, "") for name in (together, theirs)),
        )
        for size, own, together, theirs in [*named, (TREE, TREE, "", "")]
    ]
    columns = ("tokens", "one sequence ms", "over floor", "as many sequences ms", "transformers, one sequence ms")
    return Table("A step, by its tokens", columns, lines)


def pace(measured: Measured) -> Table:
    """Tokens a second of every contender."""
    lines = []
    for name, runs in measured.runs.items():
        found = rates(runs)
        shown = median(found), median(rates(runs, whole=True)), min(found), max(found)
        lines.append((name if name.startswith(PREFIX) else f"ours, {name}", *(f"{rate:.1f}" for rate in shown)))
    columns = ("contender", "decoding", "with the prompts", "slowest", "fastest")
    return Table("Plain decoding, tokens/s", columns, lines)


def result(options: EngineOptions, dtype: str, measured: Measured) -> Result:
    """All that is shown."""
    sizes = {"parameters": options.shape.weights_read, "hidden": options.hidden, "layers": options.layers}
    return Result(
        "The engine",
        options,
        (steps(measured), pace(measured)),
        notes(options, dtype, measured),
        {
            "transformers": {goal.key: goal.transformers(measured) for goal in GOALS if goal.transformers},
            "dtype": dtype,
            "model": {**sizes, "weights": "random"},
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
            "first_token_seconds": [dict(zip(("cold", "repeated"), pair, strict=True)) for pair in measured.prefixes],
            "memory_bytes": asdict(measured.memory),
        },
        GOALS,
        measured,
    )


def notes(options: EngineOptions, dtype: str, measured: Measured) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    bandwidths, (prompts, answers) = measured.bandwidths, zip(*lengths(CONCURRENT), strict=True)
    together, alone = (_over_theirs(name, measured, whole=False) for name in (TOGETHER, ALONE))
    held = {name: value / MEGABYTE for name, value in asdict(measured.memory).items()}
    processor = describe_machine()["processor"]
    return [
        f"{processor}, {options.threads} cores; {dtype}. A Llama of {options.shape.weights_read / 1e6:.0f}M parameters "
        f"(hidden size {options.hidden}, {options.layers} layers, tied embeddings) with random weights: its speed is "
        "real, its text is not.",
        f"Floor: {measured.weight_bytes / MEGABYTE:.0f} MB of weights at {median(bandwidths) / 1e9:.1f} GB/s "
        f"(best {max(bandwidths) / 1e9:.1f}), read by the same core in the same rounds: "
        f"{1e3 * median(measured.floors):.2f} ms.",
        "Over transformers: from the requests to the last token, prompts included. While all decode it is "
        f"{together:.2f}, for a request alone {alone:.2f}.",
        f"Of mixed lengths: prompts of {min(prompts)} to {max(prompts)} tokens, answers of {min(answers)} to "
        f"{max(answers)}, log-normal in ShareGPT's proportions, the same for both. transformers pads prompts on the "
        "left and goes on until the longest answer is done; only what was asked for counts.",
        "Memory of a worker process after a batch: {resident:.0f} MB resident, less {weights:.0f} of weights, "
        "{cache:.0f} of cache and {activations:.1f} of activations (computed); {private:.0f} MB are not "
        "shared with other processes.".format(**held),
    ]
