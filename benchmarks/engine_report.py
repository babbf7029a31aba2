"""Shows what the engine benchmark measured: tables on the terminal, a JSON file, a folder with a section for a README.

Decides nothing about the figures; see :mod:`benchmarks.engine_figures`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console

from benchmarks.engine_figures import (
    ALONE,
    GOALS,
    TOGETHER,
    Measured,
    agreement,
    rates,
    ratio,
    summary,
    whole_rates,
)
from benchmarks.engine_memory import MEGABYTE
from benchmarks.engine_model import parameters
from benchmarks.engine_settings import CONCURRENT, Options
from benchmarks.engine_steps import TREE, Part, chain, many
from benchmarks.engine_stock import PREFIX
from benchmarks.engine_traffic import lengths
from benchmarks.measure import Run
from benchmarks.tables import Table, describe_machine, goals_table


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the benchmark."""

    day: date
    options: Options
    dtype: str
    measured: Measured
    machine: dict[str, Any] = field(default_factory=describe_machine)


def goals(result: Result) -> Table:
    """What must be reached, beside what was, and beside what transformers comes to."""
    return goals_table(GOALS, result.measured)


def steps(result: Result) -> Table:
    """How long a step takes, by the tokens in it."""
    measured = result.measured
    sizes = [int(name.split()[1]) for name in measured.steps if name.startswith(chain(0)[:-1])]
    lines = [
        (
            f"{size}",
            _milliseconds(measured.steps[chain(size)]),
            f"{ratio(measured.steps[chain(size)], measured.floors):.2f}",
            _milliseconds(measured.steps[many(size) if size > 1 else chain(1)]),
            _milliseconds(measured.steps[PREFIX + chain(size)]),
        )
        for size in sizes
    ]
    tree = measured.steps[TREE]
    lines.append((TREE, _milliseconds(tree), f"{ratio(tree, measured.floors):.2f}", "", ""))
    columns = ("tokens", "one sequence ms", "over floor", "as many sequences ms", "transformers, one sequence ms")
    return Table("A step, by its tokens", columns, lines)


def parts(result: Result) -> Table:
    """Where the time of a step through the verify loop goes."""
    lines = [
        (
            f"{one.sequences}",
            f"{1e3 * one.total:.2f}",
            *(f"{1e3 * one.parts[part]:.2f} ({one.parts[part] / one.total:.0%})" for part in Part),
        )
        for one in result.measured.parts
    ]
    return Table("Where the time of a decoding step goes, ms", ("sequences", "step", *Part), lines)


def pace(result: Result) -> Table:
    """Tokens a second of every contender."""
    measured = result.measured
    rows: list[tuple[str, Sequence[Run]]] = [
        *((f"ours, {name}" if not name.startswith(PREFIX) else name, runs) for name, runs in measured.runs.items()),
        *((f"ours through the router, {name}", runs) for name, runs in measured.through_router.items()),
    ]
    lines = [
        (
            name,
            f"{median(rates(runs)):.1f}",
            f"{median(whole_rates(runs)):.1f}",
            f"{min(rates(runs)):.1f}",
            f"{max(rates(runs)):.1f}",
        )
        for name, runs in rows
    ]
    columns = ("contender", "decoding", "with the prompts", "slowest", "fastest")
    return Table("Plain decoding, tokens/s", columns, lines)


def tables(result: Result) -> tuple[Table, ...]:
    """All, the one that matters last."""
    return steps(result), parts(result), pace(result), goals(result)


def notes(result: Result) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    measured, shape, threads = result.measured, result.options.shape, result.options.threads
    bandwidths = measured.bandwidths
    prompts, answers = zip(*lengths(CONCURRENT), strict=True)

    def over_transformers(name: str) -> float:
        return ratio(rates(measured.runs[name]), rates(measured.runs[PREFIX + name]))

    answer = [
        f"{result.machine['processor']}, {'one core' if threads == 1 else f'{threads} cores'}; {result.dtype}. "
        f"A Llama of {parameters(shape) / 1e6:.0f}M parameters (hidden size {shape.hidden}, {shape.layers} layers, "
        "tied embeddings) with random weights: its speed is real, its text is not.",
        f"Floor: {measured.weight_bytes / MEGABYTE:.0f} MB of weights at {median(bandwidths) / 1e9:.1f} GB/s "
        f"(best {max(bandwidths) / 1e9:.1f}), read by the same core in the same rounds: "
        f"{1e3 * median(measured.floors):.2f} ms.",
        f"Texts of ours and transformers: {_agreement(measured.exact)} in float32; {_agreement(measured.runs)} in "
        f"{result.dtype}, where rounding decides between close tokens.",
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


def _agreement(runs: Mapping[str, Sequence[Run]]) -> str:
    found = agreement(runs[TOGETHER], runs[PREFIX + TOGETHER])
    return f"{found.same} of {found.texts} equal, in the median for {found.tokens:g} tokens"


def _range(tokens: Sequence[int]) -> str:
    return f"{min(tokens)} to {max(tokens)} (mean {mean(tokens):.0f})"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.2f}"


def show(result: Result) -> None:
    """Print the tables and notes on stdout."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(result):
        console.print(table.rich())
    for note in notes(result):
        console.print(note, highlight=False)


def document(result: Result) -> dict[str, Any]:
    """What :func:`write_json` writes: ``summary`` and ``wanted`` have exactly the keys of the goals."""
    measured = result.measured
    return {
        "summary": summary(measured),
        "wanted": {goal.key: {"at_most" if goal.at_most else "at_least": goal.bound} for goal in GOALS},
        "transformers": {goal.key: goal.transformers(measured) for goal in GOALS if goal.transformers},
        "date": result.day.isoformat(),
        "hardware": result.machine,
        "command": result.options.command,
        "dtype": result.dtype,
        "model": {"parameters": parameters(result.options.shape), **asdict(result.options.shape), "weights": "random"},
        "notes": notes(result),
        "floor": {
            "weight_bytes": measured.weight_bytes,
            "bytes_per_second": measured.bandwidths,
            "read_seconds": measured.reads,
        },
        "step_seconds": measured.steps,
        "parts": [asdict(one) for one in measured.parts],
        "tokens_per_second": {
            name: {"decoding": rates(runs), "with_prompts": whole_rates(runs)} for name, runs in measured.runs.items()
        },
        "through_router": {
            name: {"decoding": rates(runs), "with_prompts": whole_rates(runs)}
            for name, runs in measured.through_router.items()
        },
        "agreement": {
            result.dtype: asdict(agreement(measured.runs[TOGETHER], measured.runs[PREFIX + TOGETHER])),
            "float32": asdict(agreement(measured.exact[TOGETHER], measured.exact[PREFIX + TOGETHER])),
        },
        "first_token_seconds": [asdict(pair) for pair in measured.prefixes],
        "memory_bytes": None if measured.memory is None else asdict(measured.memory),
    }


def write_json(result: Result, file: Path) -> None:
    """Everything, for other programs."""
    file.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")


def write_folder(result: Result, folder: Path) -> None:
    """Write JSON, and ``README.md`` with the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, folder / "engine.json")
    (folder / "README.md").write_text(markdown(result), encoding="utf-8")


def markdown(result: Result) -> str:
    """The section for a README."""
    *others, first = tables(result)
    shown = [
        f"## The engine, {result.day.isoformat()}",
        f"`{result.options.command}`",
        "\n".join(f"- {note}" for note in notes(result)),
        *(table.markdown() for table in (first, *others)),
    ]
    return "\n\n".join(shown) + "\n"
