"""Ways to draft without a small sibling, in one run: each benchmark a process of its own, then what was wanted of it.

Every part prints its figures as it goes, and can be run alone: ``python -m benchmarks.medusa`` and so on. What is kept
is what they said, a line of JSON for each contender, and the table of the figures that were wanted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from benchmarks.harness.command import Bench, dated
from benchmarks.harness.options import Options, flag, known
from cluster.config.environment import CHECKOUT
from cluster.config.flags import FAILED
from cluster.console import CommandError, say

Figures = Sequence[dict[str, Any]]
"""What a part said, a line each."""
READING = "coupled"
"""Acceptance as it is lived: how often both models draw the same token with the noise they share."""


class PartFailed(CommandError):
    """A benchmark ended without its figures."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One that was wanted."""

    name: str
    wanted: float
    measured: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether it was."""
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark."""

    name: str
    judge: Callable[[Figures], list[Figure]]
    quick: tuple[str, ...] | None
    """Its arguments in a quick run; None: left out."""
    out: tuple[str, ...] | None = None
    """The argument, if it needs one, and the name of what it writes its figures to; None: it prints them."""


def _alignment(found: Figures) -> list[Figure]:
    (one,) = found
    gains = [one["after"][kind][READING] - one["before"][kind][READING] for kind in one["before"]]
    return [Figure("acceptance gained by aligning a draft of other text, least of all kinds of text", 0.05, min(gains))]


def _repetition(found: Figures) -> list[Figure]:
    def best(kind: str, temperature: float) -> float:
        alone = [row for row in found if row.get("kind") == kind and row["temperature"] == temperature]
        return max(float(row["ratio_to_plain"]) for row in alone if row["contender"] in ("lookup", "suffix"))

    return [Figure(f"lookup or suffix alone over plain decoding, {kind}", 1.8, best(kind, 0.0)) for kind in KINDS]


def _medusa(found: Figures) -> list[Figure]:
    return [Figure("Medusa heads alone over plain decoding", 1.3, _ratio(found, "medusa alone"))]


def _vocabularies(found: Figures) -> list[Figure]:
    return [
        Figure("a draft with another tokenizer over plain decoding", 1.2, _ratio(found, "draft, another tokenizer"))
    ]


def _fit(found: Figures) -> list[Figure]:
    figures = []
    for one in found:
        checked, pair = one["validation"], one["pair"]
        away = abs(checked["best_depth_predicted"] - checked["best_depth_measured"])
        figures += [
            Figure(f"fit, {pair} pair: best depth predicted from best measured", 1, away, at_most=True),
            Figure(f"fit, {pair} pair: largest error of a speed-up", 0.15, checked["largest_error"], at_most=True),
        ]
    return figures


def _ratio(found: Figures, contender: str) -> float:
    """Over plain decoding, at temperature 0."""
    (row,) = (row for row in found if row.get("contender") == contender and row["temperature"] == 0)
    return float(row["ratio_to_plain"])


KINDS = ("rows", "edits")
PARTS = (
    Part("medusa", _medusa, ("--rounds", "3", "--tokens", "48")),
    Part("repetition", _repetition, ("--rounds", "2", "--temperature", "0")),
    Part("vocabularies", _vocabularies, ("--rounds", "3", "--tokens", "48", "--temperature", "0")),
    Part("alignment", _alignment, ("--steps", "40", "--other-steps", "60"), ("--json", "alignment.json")),
    Part("fit", _fit, None, ("fit",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOptions(Options):
    """What to measure."""

    BENCH: ClassVar[str] = "drafting"
    quick: bool = flag(False, "few prompts; writes a folder only with --out")
    out: Path | None = flag(None, "folder (default: benchmarks/results/DATE-drafting)", metavar="DIR")
    only: tuple[str, ...] = flag((), "only this part (may be given again)", metavar="PART")

    def check(self) -> None:
        """See :class:`benchmarks.harness.options.Options`."""
        known("--only", self.only, [part.name for part in PARTS], "part")


BENCH = Bench(
    "every way to draft without a small sibling, alignment, and what fit predicts",
    "The quick run takes about five minutes and leaves fit out, the full one about half an hour.",
    DraftingOptions,
    "benchmarks.drafting",
)


def main(options: DraftingOptions) -> int:
    """Measure, print the table and write it. Raises :class:`PartFailed`."""
    with TemporaryDirectory() as folder:
        out = options.out or (Path(folder) if options.quick else dated("-drafting"))
        out.mkdir(parents=True, exist_ok=True)
        figures: list[Figure] = []
        for part in PARTS:
            wanted = part.name in options.only or (not options.only and not (options.quick and part.quick is None))
            if wanted:
                say(f"\n{part.name}")
                figures += part.judge(_run(part, out, options.quick))
        document = json.dumps([_as_json(figure) for figure in figures], indent=1)
        (out / "figures.json").write_text(f"{document}\n", "utf-8")
    say(f"\n{table(figures)}")
    return 0


def table(figures: Sequence[Figure]) -> str:
    """In Markdown."""
    rows = ["| figure | wanted | measured |", "|---|---|---|"]
    for one in figures:
        bound, verdict = "at most" if one.at_most else "at least", "" if one.reached else " (short)"
        measured = f"**{one.measured:.2f}**" if one.reached else f"{one.measured:.2f}{verdict}"
        rows.append(f"| {one.name} | {bound} {one.wanted:g} | {measured} |")
    return "\n".join(rows)


def _as_json(figure: Figure) -> dict[str, Any]:
    about = asdict(figure)
    return {"figure": about.pop("name"), **about, "reached": figure.reached}


def _run(part: Part, out: Path, quick: bool) -> Figures:
    """Let it measure, passing on what it says."""
    command = [sys.executable, "-m", f"benchmarks.{part.name}", *((quick and part.quick) or ())]
    kept = out / (part.out[-1] if part.out else f"{part.name}.jsonl")
    if part.out:
        command += [*part.out[:-1], str(kept.absolute())]
    said: list[str] = []
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            say(line.rstrip("\n"))
            if line.startswith("{"):
                said.append(line)
    if process.returncode:
        raise PartFailed(f"benchmarks.{part.name} ended with status {process.returncode}", FAILED)
    if not part.out:
        kept.write_text("".join(said), "utf-8")
    return _read(kept)


def _read(kept: Path) -> Figures:
    """Lines of JSON, one JSON, or a folder of folders with a ``fit.json`` each."""
    if kept.is_dir():
        files = sorted(kept.glob("*/fit.json"))
        return [json.loads(file.read_text("utf-8")) | {"pair": file.parent.name} for file in files]
    text = kept.read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if kept.suffix == ".jsonl" else [json.loads(text)]
