"""Traces: when requests come and how long they are, from a CSV file or made up.

A trace file has the columns ``seconds`` (since the start, never falling), ``prompt_tokens`` and ``output_tokens``, in
any order, named in its first line:

    seconds,prompt_tokens,output_tokens
    0.0,812,190
    1.75,96,403
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

FIELDS = ("seconds", "prompt_tokens", "output_tokens")
LONGEST = 7 * 86400.0
MAX_REQUESTS = 10**6
MAX_TOKENS = 10**6
PROMPT, OUTPUT = 400.0, 200.0
"""Tokens of made-up requests: the median of a log-normal distribution."""
SPREAD = 0.7


class TraceError(Exception):
    """A trace that cannot be used: one line that names file, line and field, and what would be right."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request."""

    at: float
    """Seconds since the start of the trace."""
    prompt: int
    """Tokens, as is ``output``; at least 1."""
    output: int


def read(path: Path) -> list[Arrival]:
    """The requests of a trace file, in the order in which they come. Raises :class:`TraceError`."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            return list(_arrivals(path, csv.DictReader(stream)))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; give a CSV file or one of {', '.join(MADE_UP)}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: is not a CSV file") from error


def _arrivals(path: Path, rows: csv.DictReader[str]) -> Iterator[Arrival]:
    columns = [name.strip() for name in rows.fieldnames or []]
    if missing := [name for name in FIELDS if name not in columns]:
        raise TraceError(f"{path}: line 1 must name the columns {', '.join(FIELDS)}; it lacks {', '.join(missing)}")
    rows.fieldnames = columns
    last = 0.0
    count = 0
    for count, row in enumerate(rows, 1):
        where = f"{path}: line {rows.line_num}"
        at = _number(where, row, "seconds", last, LONGEST)
        prompt, output = (int(_number(where, row, name, 1, MAX_TOKENS)) for name in FIELDS[1:])
        if count > MAX_REQUESTS:
            raise TraceError(f"{where}: a trace has at most {MAX_REQUESTS:,} requests")
        yield Arrival(at, prompt, output)
        last = at
    if not count:
        raise TraceError(f"{path}: has no requests")


def _number(where: str, row: Mapping[str, str | None], name: str, minimum: float, maximum: float) -> float:
    text = (row[name] or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    whole = name == "seconds" or value == math.floor(value) if math.isfinite(value) else False
    if not whole or not minimum <= value <= maximum:
        kind = "a number" if name == "seconds" else "a whole number"
        raise TraceError(f"{where}: {name} must be {kind} from {minimum:g} to {maximum:g}, got {text!r}")
    return value


# -- made up -----------------------------------------------------------------------------------------------------------

Rate = Callable[[float], float]
"""Requests a second, by the time as a share of the trace."""

HIGHEST_RATE = 12.0

MADE_UP: Mapping[str, tuple[float, Rate]] = {
    "steady": (1200.0, lambda _: 6.0),
    "ramp": (1200.0, lambda x: HIGHEST_RATE * max(1.0 - abs(2.0 * x - 1.0), 0.0)),
    "burst": (1200.0, lambda x: HIGHEST_RATE if 0.2 <= x < 0.35 else 1.0),
    "day": (7200.0, lambda x: 4.0 * (1.0 - math.cos(2.0 * math.pi * x))),
}
"""Seconds and rate by name: as even as chance allows; up from nothing and back; a sudden rush; a day in two hours."""


def made_up(name: str, rng: Random, scale: float = 1.0) -> list[Arrival]:
    """A trace of :data:`MADE_UP`, with ``scale`` times as many requests: a Poisson process of that rate."""
    seconds, rate = MADE_UP[name]
    found: list[Arrival] = []
    at = 0.0
    while (at := at + rng.expovariate(HIGHEST_RATE * scale)) < seconds:
        if rng.random() * HIGHEST_RATE < rate(at / seconds):
            found.append(Arrival(at, _length(rng, PROMPT), _length(rng, OUTPUT)))
    return found


def _length(rng: Random, median: float) -> int:
    return max(round(median * rng.lognormvariate(0.0, SPREAD)), 1)


def seconds_of(arrivals: Sequence[Arrival]) -> float:
    """How long a trace lasts: until its last request comes."""
    return arrivals[-1].at if arrivals else 0.0
