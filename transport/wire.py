"""What messages of several kinds share on the wire: the largest sizes of what they carry, and the sources of drafts.

Built-in sources are numbers. Any other is a name, which a message lists once and refers to by numbers from
:data:`FIRST_NAMED` on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from protos.paceline.v1 import worker_pb2 as pb
from speculation.messages import FeatureFormat, SessionId, Source, SourceName
from speculation.sources.registry import MAX_SOURCES, NAME

MAX_TOKENS = 1 << 20
"""Longest sequence in one message."""
MAX_TEXT = 4096
"""Longest message text, in characters."""
MAX_COMMITTED = 1 << 12
"""Most tokens of one verification."""
MAX_PLAIN_BYTES = 1 << 16
"""Longest message of a target that tells no log-probabilities; the longest there is has a few kilobytes."""

SOURCE = {
    pb.SOURCE_DRAFT: Source.DRAFT,
    pb.SOURCE_LOOKUP: Source.LOOKUP,
    pb.SOURCE_PREDICTION: Source.PREDICTION,
    pb.SOURCE_GRAMMAR: Source.GRAMMAR,
    pb.SOURCE_MEDUSA: Source.MEDUSA,
    pb.SOURCE_SUFFIX: Source.SUFFIX,
    pb.SOURCE_EAGLE: Source.EAGLE,
}
SOURCE_OUT: dict[SourceName, pb.Source] = {value: number for number, value in SOURCE.items()}
FEATURE_FORMAT = {
    pb.FEATURE_FORMAT_BF16: FeatureFormat.BF16,
    pb.FEATURE_FORMAT_FP8: FeatureFormat.FP8,
}
FEATURE_FORMAT_OUT = {value: number for number, value in FEATURE_FORMAT.items()}
FIRST_NAMED = 64


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """What a target was asked to tell of an opening's tokens."""

    tokens: int | None = None
    """With the log-probability of each committed one those of so many likeliest ones; None: nothing."""
    prompt: int | None = None
    """The same of the prompt's; None: nothing, or it has told them."""
    prompt_tokens: int = 0
    """How many these are."""

    @property
    def max_bytes(self) -> int:
        """No message of the target about the opening is longer."""
        committed = 0 if self.tokens is None else MAX_COMMITTED * (16 + 9 * self.tokens)
        prompt = 0 if self.prompt is None else self.prompt_tokens * (16 + 9 * self.prompt)
        return MAX_PLAIN_BYTES + committed + prompt


Asked = Callable[[SessionId, int], AskedLogprobs | None]
"""Of a session under an epoch; None: it is not open there, or not any more."""


def check_asked(message: pb.Verification, asked: Asked | None) -> pb.Verification:
    """Raise ValueError for log-probabilities that nobody asked for; drop them where the session is no longer open.

    The message. ``asked``: None: any may be told.
    """
    committed, prompt = len(message.logprobs), len(message.prompt_logprobs)
    if asked is None or not (committed or prompt):
        return message
    wanted = asked(SessionId(message.session), message.epoch)
    if wanted is None:
        message.ClearField("logprobs")
        message.ClearField("prompt_logprobs")
    else:
        at_most("logprobs", committed, 0 if wanted.tokens is None else MAX_COMMITTED)
        at_most("prompt_logprobs", prompt, 0 if wanted.prompt is None else wanted.prompt_tokens)
    return message


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
