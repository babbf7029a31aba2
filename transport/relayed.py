"""What a router passes on from one worker to the other without decoding it.

It goes on as it came (:func:`relayed`), by what :func:`heading` reads of it: whoever gets it decodes it, and so checks
it, as the router does for itself once it is on its way. Decided here is what goes on so: short entries in the usual
order of fields. All else is decoded first, and encoded again (:mod:`transport.codec`).
"""

from __future__ import annotations

from typing import NamedTuple

from protos.paceline.v1 import worker_pb2 as pb
from speculation.messages import SessionId

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
