"""What messages of several kinds share on the wire: the largest sizes of what they carry, and the sources of drafts.

Built-in sources are numbers. Any other is a name, which a message lists once and refers to by numbers from
:data:`FIRST_NAMED` on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from protos.paceline.v1 import worker_pb2 as pb
from speculation.messages import Source, SourceName
from speculation.sources.registry import MAX_SOURCES, NAME

MAX_TOKENS = 1 << 20
"""Longest sequence in one message."""
MAX_TEXT = 4096
"""Longest message text, in characters."""

SOURCE = {
    pb.SOURCE_DRAFT: Source.DRAFT,
    pb.SOURCE_LOOKUP: Source.LOOKUP,
    pb.SOURCE_PREDICTION: Source.PREDICTION,
    pb.SOURCE_GRAMMAR: Source.GRAMMAR,
    pb.SOURCE_MEDUSA: Source.MEDUSA,
    pb.SOURCE_SUFFIX: Source.SUFFIX,
}
SOURCE_OUT: dict[SourceName, pb.Source] = {value: number for number, value in SOURCE.items()}
FIRST_NAMED = 64


def at_most(field: str, count: int, limit: int) -> None:
    """Raise ValueError, which names the field, if it has more entries than are taken."""
    if count > limit:
        raise ValueError(f"{field} has {count} entries; at most {limit} are allowed")


def names_in(sources: Collection[SourceName]) -> list[SourceName]:
    """Those without a number, each once, in an order that depends on nothing else."""
    return sorted(set(sources) - SOURCE_OUT.keys()) if sources else []


def numbers(sources: Iterable[SourceName], named: Sequence[SourceName]) -> list[int]:
    """What stands for each on the wire; ``named``: those that the message lists."""
    known = SOURCE_OUT | {name: FIRST_NAMED + i for i, name in enumerate(named)} if named else SOURCE_OUT
    return [known[source] for source in sources]


def sources_of(numbers: Sequence[int], named: Sequence[SourceName]) -> tuple[SourceName, ...]:
    """The other way round. A number that means nothing here is read as a draft model."""
    if not numbers:
        return ()
    known: dict[int, SourceName] = SOURCE | {FIRST_NAMED + i: name for i, name in enumerate(named)}
    return tuple(known.get(number, Source.DRAFT) for number in numbers)


def read_names(field: str, names: Sequence[str]) -> tuple[SourceName, ...]:
    """Names of draft sources as they came. Raises ValueError."""
    at_most(field, len(names), MAX_SOURCES)
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(f"{field} has {name[:80]!r}; a name has up to 32 lower-case letters, digits, - and _")
    return tuple(names)
