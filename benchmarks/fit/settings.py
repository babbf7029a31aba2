"""What is asked of a fit, and which ways to draft are compared.

Imports nothing of what serves: a mistake on the command line is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.options import BadInput, Options, flag
from cluster.config.listed import count, round_trip
from cluster.config.pools import DTYPES
from cluster.local.threads import usable_cores
from speculation.messages import Sampling, Source, Speculation

if TYPE_CHECKING:
    from benchmarks.fit.prompts import Prompt

NONE = "none"
SOURCES = {str(source): source for source in (Source.LOOKUP, Source.MEDUSA, Source.SUFFIX)}
"""Sources at the target that can be compared, by the names of the flag."""
DEPTH = Speculation().max_depth
"""Longest path of drafts that is tried: what a request gets that asks for nothing."""


class FitError(BadInput):
    """The models do not fit what was asked. One line that says what would be right."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft: a draft model, sources at the target, or both; with neither, plain decoding."""

    draft: str | None = None
    """As it was given: a folder or a hub id."""
    local: frozenset[Source] = frozenset()

    @property
    def heads(self) -> bool:
        """Whether Medusa heads guess for it."""
        return Source.MEDUSA in self.local

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
        """For tables and sentences."""
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


COMPARED, CASE, WORKERS, RESULTS = "what is compared", "the case", "workers", "results"
MOST_SESSIONS = 64
"""A target computes no more at a time, unless it is told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions(Options):
    """A fit."""

    target: str = flag("", "folder or hub id (default: the bundled target)", metavar="MODEL", group=COMPARED)
    drafts: tuple[str, ...] = flag(
        (),
        "folder or hub id of a draft model; repeat (default: the bundled draft, for the bundled target)",
        name="--draft",
        metavar="MODEL",
        whole=True,
        group=COMPARED,
    )
    medusa: str = flag(
        "", "folder of Medusa heads for the target (default: they are not compared)", metavar="DIR", group=COMPARED
    )
    sources: tuple[str, ...] = flag(
        (),
        "sources at the target, compared in every combination, beside each draft and alone: lookup, medusa, suffix "
        "(earlier answers to these prompts); none: also each draft alone; repeat (default: none,lookup, and medusa "
        "with --medusa)",
        name="--source",
        metavar="X,Y",
        parse=_source,
        group=COMPARED,
    )
    prompts: tuple[Prompt, ...] = flag(
        (),
        "file with prompts of your traffic; repeat (default: bundled ones, by kind of text)",
        metavar="FILE",
        whole=True,
        group=COMPARED,
    )
    tokens: int = flag(64, "new tokens a prompt", least=16, most=4096, group=CASE)
    """At most; a text that the target ends sooner ends there."""
    temperature: float = flag(0.0, "of all requests", least=0.0, most=100.0, metavar="X", group=CASE)
    seed: int = flag(0, "of all requests", least=0, most=2**63 - 1, group=CASE)
    round_trips: tuple[float, ...] = flag(
        (0.0, 0.005, 0.02),
        "from router to drafters and back, in ms; the first decides (default: 0,5,20)",
        name="--round-trip",
        metavar="X,Y",
        parse=round_trip,
        group=CASE,
    )
    """Seconds, beyond what this machine's own messages take."""
    sessions: tuple[int, ...] = flag(
        (1, 4, 16),
        "requests at a time to measure steps with (default: 1,4,16)",
        metavar="X,Y",
        parse=lambda text: count(text, MOST_SESSIONS),
        group=CASE,
    )
    """Rising."""
    dtype: str = flag("auto", "number format", choices=DTYPES, group=WORKERS)
    device: str = flag("auto", "auto, cpu, cuda ...", group=WORKERS)
    threads: int = flag(
        1, "threads of each worker; with one, each has a core of its own", least=1, most=usable_cores(), group=WORKERS
    )
    out: Path | None = flag(None, "write fit.json, fit.png and paceline.yaml there", metavar="DIR", group=RESULTS)
    validate: bool = flag(
        False, "serve the best way for real, at a few depths, and compare with what was predicted", group=RESULTS
    )

    @property
    def sampling(self) -> Sampling:
        """How all text is drawn."""
        return Sampling(temperature=self.temperature, seed=self.seed)

    @property
    def ways(self) -> list[Way]:
        """All that drafts, those with the fewest parts first."""
        names = [SOURCES[name] for name in self.sources if name != NONE]
        least = 0 if NONE in self.sources else 1
        local = [frozenset(some) for count in range(least, len(names) + 1) for some in combinations(names, count)]
        drafts: Sequence[str | None] = (None, *self.drafts)
        return [way for draft in drafts for some in local if (way := Way(draft, some)).sources]
