"""What is asked of a fit, and which ways to draft are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from benchmarks.fit.prompts import Prompt
from benchmarks.harness.options import BadInput
from simulation.simulate import Bounds
from speculation.messages import Sampling, Source, Speculation

NONE = "none"
SOURCES = {str(source): source for source in (Source.LOOKUP, Source.MEDUSA, Source.SUFFIX)}
"""Sources at the target that can be compared, by the names of the flag."""
SUFFIX_TOKENS = Bounds().suffix_tokens
"""Of earlier outputs that a target keeps, if they are drafted from; as it does unless told otherwise."""
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


@dataclass(frozen=True, slots=True)
class FitOptions:
    """A fit."""

    target: str
    drafts: tuple[str, ...]
    sources: tuple[str, ...]
    """Keys of :data:`SOURCES`, which are tried in every combination with each draft model and without any; and
    :data:`NONE`, if draft models are to be tried alone."""
    prompts: tuple[Prompt, ...]
    medusa: str = ""
    """Folder of the heads, if they are compared."""
    tokens: int = 64
    """New tokens a prompt at most; a text that the target ends sooner ends there."""
    temperature: float = 0.0
    seed: int = 0
    round_trips: tuple[float, ...] = (0.0, 0.005, 0.02)
    """Seconds from router to drafter and back, beyond what this machine's own messages take."""
    sessions: tuple[int, ...] = (1, 4, 16)
    """Requests at a time for which steps are measured, rising."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 1
    """Of a worker; with one, each worker has a core of its own."""
    out: Path | None = None
    validate: bool = False

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
