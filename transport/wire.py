"""What messages share on the wire: the largest sizes, the sources of drafts, and what a router passes on undecoded.

Built-in sources are numbers. Any other is a name, which a message lists once and refers to by numbers from
:data:`FIRST_NAMED` on.

Short entries in the usual order of fields go from worker to worker as they came (:func:`relayed`), by what
:func:`heading` reads of them: whoever gets one decodes it, and so checks it, as the router does for itself once it is
on its way. All else is decoded first, and encoded again (:mod:`transport.codec`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


MAX_RELAYED_BYTES = 1 << 12
"""A longer message is encoded again on its way from worker to worker: fields unknown here are no way to send much."""

MAX_SHIFT = 63
"""Of the last seven bits of a number of 64."""

_FEATURES = bytes((pb.FromWorker.DESCRIPTOR.fields_by_name["features"].number << 3 | 2,))
_KINDS = {
    bytes((pb.FromWorker.DESCRIPTOR.fields_by_name[said].number << 3 | 2,)): (
        role,
        bytes((pb.ToWorker.DESCRIPTOR.fields_by_name[told].number << 3 | 2,)),
    )
    for role, said, told in (
        ("target", "verified", "verified"),
        ("draft", "proposed", "propose"),
        ("target", "features", "features"),
    )
}
"""By the first byte of what a worker says: the role that says it, and the first byte of what the other is told."""
RELAYED = frozenset(told for _, told in _KINDS.values())
"""First bytes of entries that a router may have passed on unread."""
_SESSION = bytes((pb.Verification.DESCRIPTOR.fields_by_name["session"].number << 3,))
_EPOCH = bytes((pb.Verification.DESCRIPTOR.fields_by_name["epoch"].number << 3,))
for _fields in (each.DESCRIPTOR.fields_by_name for each in (pb.Verification, pb.Proposal, pb.Features)):
    assert (_fields["session"].number << 3, _fields["epoch"].number << 3) == (_SESSION[0], _EPOCH[0])


class Heading(NamedTuple):
    """What a verification or a proposal is about, read without decoding it."""

    role: str
    """Of the workers that say such things."""
    session: SessionId
    epoch: int
    start: int
    """Where its own fields begin."""
    features: bool = False
    """Whether these are features, of which whoever passes them on reads no more than this."""


def heading(entry: bytes) -> Heading | None:
    """Of one entry of a worker's frame; None: something else, long, or written in an unusual way."""
    return None if len(entry) > MAX_RELAYED_BYTES and not is_features(entry) else heading_of_any(entry)


def heading_of_any(entry: bytes) -> Heading | None:
    """The same, however long it is."""
    kind = _KINDS.get(entry[:1])
    if kind is None:
        return None
    try:
        length, start = _read_varint(entry, 1)
        session, after_session = _read_varint(entry, start + 1)
        epoch, _ = _read_varint(entry, after_session + 1)
        usual = start + length == len(entry) and entry[start] == _SESSION[0] and entry[after_session] == _EPOCH[0]
    except IndexError:
        return None
    return Heading(kind[0], SessionId(session), epoch, start, is_features(entry)) if usual else None


def is_features(entry: bytes) -> bool:
    """Whether an entry of a worker's frame holds features: a hint, and a long one."""
    return entry[:1] == _FEATURES


def relayed(entry: bytes, head: Heading, epoch: int) -> bytes:
    """One entry of a router's frame: what a worker said of a session, under the epoch that it has at the other one.

    Where a field comes twice, the last one counts. So what it is about is put after the bytes that came, whatever they
    say.
    """
    about = _SESSION + _varint(head.session) + _EPOCH + _varint(epoch)
    length = len(entry) - head.start + len(about)
    return b"".join((_KINDS[entry[:1]][1], _varint(length), entry[head.start :], about))


def _varint(value: int) -> bytes:
    """A whole number, not negative, as protobuf writes it."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that is written there, and where it ends. Raises IndexError, also if it is longer than any is."""
    value = data[at] & 0x7F
    shift = 0
    while data[at] >= 0x80:
        if shift == MAX_SHIFT:
            raise IndexError("a number of more than 64 bits")
        at += 1
        shift += 7
        value |= (data[at] & 0x7F) << shift
    return value, at + 1
