"""``paceline fit``: which way to draft is best for a target and a kind of traffic; its flags, and what is compared.

Imports nothing of what serves: a mistake on the command line is answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.harness import options
from benchmarks.harness.options import Options, flag
from cluster.config.checks import check_head, check_model, check_tokenizer
from cluster.config.environment import BUNDLED
from cluster.config.flags import count, round_trip
from cluster.config.pools import AT_DRAFTER, AT_TARGET, DTYPES
from cluster.console import BadInput
from cluster.local.threads import usable_cores
from speculation.messages import Sampling, Source, Speculation

if TYPE_CHECKING:
    from benchmarks.harness.prompts import Prompt

ABOUT = "find the best way to draft for a target and your traffic: which draft, how deep, how many, until when"
DETAILS = """\
Decodes prompts with the target, counts how far every draft and source would have followed that text, measures what
steps cost on this machine, and simulates the rest. Prints tables, one line of advice and the configuration to paste.

  paceline fit
  paceline fit --target ./llama-8b --draft ./llama-1b --draft ./llama-3b --prompts traffic.jsonl --out fit
  paceline fit --target ./llama-8b --draft ./qwen-0.5b --source lookup --round-trip 20 --validate
  paceline fit --target ./llama-8b --eagle ./llama-8b-eagle --source lookup,eagle,suffix
  paceline fit --target ./llama-8b --draft ./llama-1b --eagle ./llama-8b-eagle --eagle-at drafter

Prompts: JSON lines with "prompt" or "messages" and perhaps "kind", or plain text with a prompt a line. Without any,
short sets of code, JSON, prose and creative writing are taken. Keep the machine quiet meanwhile.
"""
NONE = "none"
SOURCES = {str(source): source for source in (Source.LOOKUP, Source.EAGLE, Source.SUFFIX)}
"""Sources at the target that can be compared, by the names of the flag."""
DEPTH = Speculation().max_depth
"""Longest path of drafts that is tried: what a request gets that asks for nothing."""


class FitError(BadInput):
    """The models do not fit what was asked. One line that says what would be right."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft: a draft worker, sources at the target, or both; with neither, plain decoding."""

    draft: str | None = None
    """Its model, or its EAGLE head, as it was given: a folder or a hub id."""
    local: frozenset[Source] = frozenset()

    @property
    def remembers(self) -> bool:
        """Whether it drafts from earlier outputs."""
        return Source.SUFFIX in self.local

    @property
    def sources(self) -> frozenset[Source]:
        """What its requests allow."""
        return self.local | ({Source.DRAFT} if self.draft is not None else set())

    def speculation(self, depth: int = DEPTH) -> Speculation:
        """What its requests ask for."""
        return Speculation(enabled=bool(self.sources), max_depth=depth, sources=self.sources)

    def __str__(self) -> str:
        names = [] if self.draft is None else [short(self.draft)]
        return " + ".join([*names, *sorted(self.local)]) or "plain"


PLAIN = Way()


def short(model: str) -> str:
    """What a model is called: the last part of its path or hub id."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model.split("/")[-1]


def _source(text: str) -> str:
    if text not in (NONE, *SOURCES):
        raise ValueError(f"one of {', '.join((NONE, *SOURCES))}")
    return text


MOST_SESSIONS = 64
"""A target computes no more at a time, unless it is told to."""
_compared, _case, _workers, _results = (
    partial(flag, group=title) for title in ("what is compared", "the case", "workers", "results")
)
_DRAFTS = "folder or hub id of a draft model; repeat (default: the bundled draft, for the bundled target)"
_SOURCES = (
    "sources at the target, compared in every combination, beside each draft and alone: lookup, eagle, suffix "
    "(earlier answers to these prompts); none: also each draft alone; repeat (default: none,lookup, and eagle where a "
    "head is given)"
)
_EAGLE_AT = "where that head drafts: target, as a source, or drafter: on a draft worker, as a draft does"
_PROMPTS = "file with prompts of your traffic; repeat (default: bundled ones, by kind of text)"
_TRIPS = "from router to drafters and back, in ms; the first decides (default: 0,5,20)"
_SESSIONS = "requests at a time to measure steps with (default: 1,4,16)"
_THREADS = "threads of each worker; with one, each has a core of its own"
_VALIDATE = "serve the best way for real, at a few depths, and compare with what was predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions(Options):
    """A fit."""

    BENCH = "fit"
    MODULE = "benchmarks.fit.main"
    target: str = _compared("", "folder or hub id (default: the bundled target)", metavar="MODEL")
    drafts: tuple[str, ...] = _compared((), _DRAFTS, name="--draft", metavar="MODEL", whole=True)
    eagle: str = _compared("", "folder of an EAGLE-3 head for the target (default: none)", metavar="DIR")
    eagle_at: str = _compared(AT_TARGET, _EAGLE_AT, choices=(AT_TARGET, AT_DRAFTER))
    sources: tuple[str, ...] = _compared((), _SOURCES, name="--source", metavar="X,Y", parse=_source)
    prompts: tuple[Prompt, ...] = _compared((), _PROMPTS, metavar="FILE", whole=True)
    tokens: int = _case(64, "new tokens a prompt", least=16, most=4096)
    """At most; a text that the target ends sooner ends there."""
    temperature: float = _case(0.0, "of all requests", least=0.0, most=100.0, metavar="X")
    seed: int = _case(0, "of all requests", least=0, most=2**63 - 1)
    round_trips: tuple[float, ...] = _case(
        (0.0, 0.005, 0.02), _TRIPS, name="--round-trip", metavar="X,Y", parse=round_trip
    )
    """Seconds, beyond what this machine's own messages take."""
    sessions: tuple[int, ...] = _case((1, 4, 16), _SESSIONS, metavar="X,Y", parse=partial(count, maximum=MOST_SESSIONS))
    dtype: str = _workers("auto", "number format", choices=DTYPES)
    device: str = _workers("auto", "auto, cpu, cuda ...")
    threads: int = _workers(1, _THREADS, least=1, most=usable_cores())
    json: Path | None = None
    out: Path | None = _results(None, "write a page, fit.json, fit.png and paceline.yaml there", metavar="DIR")
    validate: bool = _results(False, _VALIDATE)

    def checked(self) -> Self:
        """With defaults that depend on each other; models and prompts are looked at before anything runs."""
        _check_out(self.out)
        for draft in self.drafts:
            if self.drafts.count(draft) > 1:
                raise BadInput(f"--draft {draft} is given {self.drafts.count(draft)} times; give each once")
        found = replace(
            self,
            target=self.target or str(BUNDLED / "target"),
            drafts=self.drafts or (() if self.target else (str(BUNDLED / "draft"),)),
            sources=self.sources or ("none", "lookup", *(["eagle"] if self.at_target else [])),
            prompts=tuple(_prompts([Path(str(file)) for file in self.prompts])),
            sessions=tuple(sorted({1, *self.sessions})),
        )
        if not found.ways:
            raise BadInput("there is nothing to compare: give a --draft, or --source lookup")
        _check_models(found)
        return found

    @property
    def command(self) -> str:
        """See :class:`benchmarks.harness.options.Options`; how it was asked for stands in its JSON."""
        return f"paceline fit --target {self.target}"

    @property
    def sampling(self) -> Sampling:
        """How all text is drawn."""
        return Sampling(temperature=self.temperature, seed=self.seed)

    @property
    def away(self) -> str:
        """The EAGLE head that drafts on a worker of its own, if one does."""
        return self.eagle if self.eagle_at == AT_DRAFTER else ""

    @property
    def at_target(self) -> str:
        """The EAGLE head that drafts at the target, if one does."""
        return self.eagle if self.eagle_at == AT_TARGET else ""

    @property
    def drafters(self) -> tuple[str, ...]:
        """What draft workers draft with, one after the other."""
        return (*self.drafts, self.away) if self.away else self.drafts

    @property
    def ways(self) -> list[Way]:
        """All that drafts, those with the fewest parts first."""
        names = [SOURCES[name] for name in self.sources if name != NONE]
        least = 0 if NONE in self.sources else 1
        local = [frozenset(some) for count in range(least, len(names) + 1) for some in combinations(names, count)]
        drafts: Sequence[str | None] = (None, *self.drafters)
        return [way for draft in drafts for some in local if (way := Way(draft, some)).sources]


add = FitOptions.add


def run(args: argparse.Namespace) -> int:
    """Fit and report."""
    return options.run(FitOptions, args, "fit")


def _prompts(files: Sequence[Path]) -> list[Prompt]:
    from benchmarks.harness.prompts import PromptError, bundled, read

    try:
        return [prompt for file in files for prompt in read(file)] if files else bundled()
    except PromptError as error:
        raise BadInput(f"--prompts {error}") from error


def _check_models(options: FitOptions) -> None:
    check_model(options.target, "--target")
    check_tokenizer(options.target, "--target")
    if options.eagle_at == AT_DRAFTER and not options.eagle:
        raise BadInput("--eagle-at drafter: give the folder of the head with --eagle DIR")
    if options.at_target and Source.EAGLE not in options.sources:
        given = f"--source has {', '.join(options.sources)}"
        raise BadInput(f"--eagle {options.eagle}: {given}; add eagle, or leave --eagle out")
    if not options.at_target and Source.EAGLE in options.sources:
        at = f" and --eagle-at {AT_TARGET}" if options.away else ""
        raise BadInput(f"--source eagle: give the folder of the head with --eagle DIR{at}")
    check_head(options.eagle, "--eagle")
    for draft in options.drafts:
        check_model(draft, "--draft")


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: must be a folder in one that exists")
    if not find_spec("matplotlib"):
        raise BadInput("--out draws a plot, for which matplotlib is needed: pip install matplotlib")
