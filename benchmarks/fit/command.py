"""``paceline fit``: which way to draft is best for a target and a kind of traffic."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.options import BadInput
from cluster.checkout import BUNDLED
from cluster.config.checks import check_heads, check_model, check_tokenizer
from cluster.config.flags import FAILED, Parser
from cluster.config.listed import count, round_trip, values
from cluster.config.pools import DTYPES
from cluster.console import CommandError
from cluster.local.threads import usable_cores

if TYPE_CHECKING:
    from benchmarks.fit.prompts import Prompt
    from benchmarks.fit.settings import FitOptions

ABOUT = "find the best way to draft for a target and your traffic: which draft, how deep, how many, until when"
DETAILS = """\
Decodes prompts with the target, counts how far every draft and source would have followed that text, measures what
steps cost on this machine, and simulates the rest. Prints tables, one line of advice and the configuration to paste.

  paceline fit
  paceline fit --target ./llama-8b --draft ./llama-1b --draft ./llama-3b --prompts traffic.jsonl --out fit
  paceline fit --target ./llama-8b --draft ./qwen-0.5b --source lookup --round-trip 20 --validate
  paceline fit --target ./llama-8b --medusa ./llama-8b-medusa --source lookup,medusa,suffix

Prompts: JSON lines with "prompt" or "messages" and perhaps "kind", or plain text with a prompt a line. Without any,
short sets of code, JSON, prose and creative writing are taken. Keep the machine quiet meanwhile.
"""
SOURCES = "none,lookup"
ROUND_TRIPS = "0,5,20"
SESSIONS = "1,4,16"
LEAST_TOKENS, MOST_TOKENS = 16, 4096
MOST_SESSIONS = 64
"""A target computes no more at a time, unless it is told to."""


def add(parser: Parser) -> None:
    """Its flags."""
    compared = parser.add_argument_group("what is compared")
    compared.add_argument("--target", metavar="MODEL", help="folder or hub id (default: the bundled target)")
    about = "folder or hub id of a draft model; repeat (default: the bundled draft, for the bundled target)"
    compared.add_argument("--draft", action="append", metavar="MODEL", help=about)
    compared.add_argument("--medusa", default="", metavar="DIR", help="folder of Medusa heads for the target")
    about = (
        "sources at the target, compared in every combination, beside each draft and alone: lookup, medusa, suffix "
        f"(earlier answers to these prompts); none: also each draft alone; repeat (default: {SOURCES}, and medusa "
        "with --medusa)"
    )
    compared.add_argument("--source", action="append", metavar="X,Y", help=about)
    about = "file with prompts of your traffic; repeat (default: bundled ones, by kind of text)"
    compared.add_argument("--prompts", type=Path, action="append", metavar="FILE", help=about)
    case = parser.add_argument_group("the case")
    case.add_argument("--tokens", type=int, default=64, metavar="N", help="new tokens a prompt (default: 64)")
    case.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of all requests (default: 0)")
    case.add_argument("--seed", type=int, default=0, metavar="N", help="of all requests (default: 0)")
    about = f"from router to drafters and back, in ms; the first decides (default: {ROUND_TRIPS})"
    case.add_argument("--round-trip", action="append", metavar="X,Y", help=about)
    about = f"requests at a time to measure steps with (default: {SESSIONS})"
    case.add_argument("--sessions", action="append", metavar="X,Y", help=about)
    workers = parser.add_argument_group("workers")
    workers.add_argument("--dtype", default="auto", choices=DTYPES, help="number format (default: auto)")
    workers.add_argument("--device", default="auto", metavar="TEXT", help="auto, cpu, cuda ... (default: auto)")
    about = "threads of each worker; with one, each has a core of its own (default: 1)"
    workers.add_argument("--threads", type=int, default=1, metavar="N", help=about)
    results = parser.add_argument_group("results")
    results.add_argument("--out", type=Path, metavar="DIR", help="write fit.json, fit.png and paceline.yaml there")
    about = "serve the best way for real, at a few depths, and compare with what was predicted"
    results.add_argument("--validate", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Fit and report."""
    options = _options(args)
    from benchmarks.fit.main import main
    from benchmarks.harness.processes import WorkerFailed
    from engine.model import ModelError
    from router.generation import GenerationError
    from router.text.tokenizer import TokenizerError

    try:
        return main(options)
    except (TokenizerError, ModelError) as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise CommandError(f"the fit ended early: {error or 'a worker did not answer'}", FAILED) from error
    except (WorkerFailed, GenerationError) as error:
        raise CommandError(f"the fit ended early: {error}", FAILED) from error


def _options(args: argparse.Namespace) -> FitOptions:
    """All that can be refused at once."""
    _check_numbers(args)
    _check_out(args.out)
    from benchmarks.fit.settings import NONE, FitOptions
    from benchmarks.fit.settings import SOURCES as KNOWN

    def source(text: str) -> str:
        if text not in (NONE, *KNOWN):
            raise ValueError(f"one of {', '.join((NONE, *KNOWN))}")
        return text

    sources = values(args, "source", f"{SOURCES},medusa" if args.medusa else SOURCES, source)
    options = FitOptions(
        target=args.target or str(BUNDLED / "target"),
        drafts=_drafts(args),
        sources=sources,
        medusa=args.medusa,
        prompts=tuple(_prompts(args.prompts)),
        tokens=args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        round_trips=values(args, "round_trip", ROUND_TRIPS, round_trip),
        sessions=tuple(sorted({1, *values(args, "sessions", SESSIONS, _sessions)})),
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        out=args.out,
        validate=args.validate,
    )
    if not options.ways:
        raise BadInput("there is nothing to compare: give a --draft, or --source lookup")
    _check_models(options)
    return options


def _drafts(args: argparse.Namespace) -> tuple[str, ...]:
    drafts = args.draft or ([] if args.target else [str(BUNDLED / "draft")])
    for draft in drafts:
        if drafts.count(draft) > 1:
            raise BadInput(f"--draft {draft} is given {drafts.count(draft)} times; give each once")
    return tuple(drafts)


def _prompts(files: list[Path] | None) -> list[Prompt]:
    from benchmarks.fit.prompts import PromptError, bundled, read

    try:
        return [prompt for file in files for prompt in read(file)] if files else bundled()
    except PromptError as error:
        raise BadInput(f"--prompts {error}") from error


def _check_models(options: FitOptions) -> None:
    check_model(options.target, "--target")
    check_tokenizer(options.target)
    if options.medusa and "medusa" not in options.sources:
        given = f"--source has {', '.join(options.sources)}"
        raise BadInput(f"--medusa {options.medusa}: {given}; add medusa, or leave --medusa out")
    if "medusa" in options.sources:
        if not options.medusa:
            raise BadInput("--source medusa: give the folder of the heads with --medusa DIR")
        check_heads(options.medusa, "--medusa")
    for draft in options.drafts:
        check_model(draft, "--draft")


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least, most in (
        ("tokens", LEAST_TOKENS, MOST_TOKENS),
        ("temperature", 0.0, 100.0),
        ("seed", 0, 2**63 - 1),
        ("threads", 1, usable_cores()),
    ):
        value = getattr(args, name)
        if not least <= value <= most:
            raise BadInput(f"--{name} {value:g}: must be from {least:g} to {most:g}")


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; give a folder")
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: must be a folder in one that exists")
    if not find_spec("matplotlib"):
        raise BadInput("--out draws a plot, for which matplotlib is needed: pip install matplotlib")


def _sessions(text: str) -> int:
    return count(text, MOST_SESSIONS)
