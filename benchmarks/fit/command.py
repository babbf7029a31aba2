"""``paceline fit``: which way to draft is best for a target and a kind of traffic."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fit.settings import FitOptions
from benchmarks.harness.command import Bench
from benchmarks.harness.options import BadInput
from cluster.config.checks import check_heads, check_model, check_tokenizer
from cluster.config.environment import BUNDLED
from cluster.config.pools import AT_TARGET
from speculation.messages import Source

if TYPE_CHECKING:
    from benchmarks.harness.prompts import Prompt

ABOUT = "find the best way to draft for a target and your traffic: which draft, how deep, how many, until when"
DETAILS = """\
Decodes prompts with the target, counts how far every draft and source would have followed that text, measures what
steps cost on this machine, and simulates the rest. Prints tables, one line of advice and the configuration to paste.

  paceline fit
  paceline fit --target ./llama-8b --draft ./llama-1b --draft ./llama-3b --prompts traffic.jsonl --out fit
  paceline fit --target ./llama-8b --draft ./qwen-0.5b --source lookup --round-trip 20 --validate
  paceline fit --target ./llama-8b --medusa ./llama-8b-medusa --source lookup,medusa,suffix
  paceline fit --target ./llama-8b --draft ./llama-1b --eagle ./llama-8b-eagle --eagle-at drafter

Prompts: JSON lines with "prompt" or "messages" and perhaps "kind", or plain text with a prompt a line. Without any,
short sets of code, JSON, prose and creative writing are taken. Keep the machine quiet meanwhile.
"""


class FitBench(Bench):
    """With defaults that depend on each other, and models and prompts that are looked at before anything runs."""

    def read(self, args: argparse.Namespace) -> FitOptions:
        """See :class:`benchmarks.harness.command.Bench`."""
        options = FitOptions.read(args)
        _check_out(options.out)
        for draft in options.drafts:
            if options.drafts.count(draft) > 1:
                raise BadInput(f"--draft {draft} is given {options.drafts.count(draft)} times; give each once")
        options = replace(
            options,
            target=options.target or str(BUNDLED / "target"),
            drafts=options.drafts or (() if options.target else (str(BUNDLED / "draft"),)),
            sources=options.sources or ("none", "lookup", *map(str, options.heads)),
            prompts=tuple(_prompts([Path(str(file)) for file in options.prompts])),
            sessions=tuple(sorted({1, *options.sessions})),
        )
        if not options.ways:
            raise BadInput("there is nothing to compare: give a --draft, or --source lookup")
        _check_models(options)
        return options


BENCH = FitBench(ABOUT, DETAILS, FitOptions, "benchmarks.fit.main", what="fit")
add, run = BENCH.add, BENCH.run


def _prompts(files: Sequence[Path]) -> list[Prompt]:
    from benchmarks.harness.prompts import PromptError, bundled, read

    try:
        return [prompt for file in files for prompt in read(file)] if files else bundled()
    except PromptError as error:
        raise BadInput(f"--prompts {error}") from error


def _check_models(options: FitOptions) -> None:
    check_model(options.target, "--target")
    check_tokenizer(options.target)
    if options.medusa and options.eagle:
        raise BadInput("--medusa and --eagle: a target has one of them; give one at a time")
    for source, what in ((Source.MEDUSA, "Medusa heads"), (Source.EAGLE, "an EAGLE-3 head")):
        folder = options.heads.get(source, "")
        if folder and source not in options.sources:
            given = f"--source has {', '.join(options.sources)}"
            raise BadInput(f"--{source} {folder}: {given}; add {source}, or leave --{source} out")
        if not folder and source in options.sources:
            at = f" and --eagle-at {AT_TARGET}" if options.away else ""
            raise BadInput(f"--source {source}: give the folder of the heads with --{source} DIR{at}")
        check_heads(folder, f"--{source}", what)
    check_heads(options.away, "--eagle", "an EAGLE-3 head")
    for draft in options.drafts:
        check_model(draft, "--draft")


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: must be a folder in one that exists")
    if not find_spec("matplotlib"):
        raise BadInput("--out draws a plot, for which matplotlib is needed: pip install matplotlib")
