"""Reads what a worker says on one stream, whatever it says.

What another worker waits for is passed on before it is read (:class:`Route`). Short entries in the usual order of
fields go from worker to worker as they came (:func:`relayed`), by what :func:`heading` reads of them: whoever gets one
decodes it, and so checks it, as the router does for itself once it is on its way. All else is decoded first, and
encoded again (:mod:`transport.codec`). All is read in small slices: the event loop writes and hears others in between,
and who feeds it waits while much is unread (:attr:`Incoming.behind`).

A malformed message is reported to the listener and otherwise skipped, unless there are too many: more than
:data:`MAX_MALFORMED` and one in :data:`HEARD_PER_MALFORMED`, more entries in a frame than anybody writes, or what is no
frame. Then the stream is given up, unread messages and all. Messages of a kind not known here do not count: newer
workers send them.

Log-probabilities and proposals may take long to read. Log-probabilities that nobody asked for make a message malformed
before they are; a long message of a session that is not open there is dropped before. Those of a prompt are left to who
shows them, beside the event loop: there they are checked, and end no more than a request.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol

from protos.paceline.v1 import worker_pb2 as pb
from speculation.frozen import frozen
from speculation.messages import FromWorker, Load, Loading, Proposal, SessionId, SessionMessage, Verification, Welcome
from transport.codec import (
    MAX_PROPOSAL_BYTES,
    RELAYED,
    MalformedMessage,
    UnknownKind,
    decode_from_worker,
    is_features,
)
from transport.codec_parts import MAX_FEATURE_BYTES, MAX_PLAIN_BYTES, AskedLogprobs
from transport.outbox import MAX_FRAME_ENTRIES

log = logging.getLogger(__name__)

READ_AT_ONCE = 16
"""Messages read in one turn of the event loop, in which nothing is written and nobody else is heard: under 2 ms. With
eight, a token took 9 % more of a router's CPU."""
READ_BYTES = 1 << 14
"""After which no other is read in the same turn: a long one takes as long as many."""
MAX_UNREAD = 4096
"""Messages that wait to be read; with more, no other frame is to be taken ..."""
MAX_UNREAD_BYTES = 4 << 20
"""... nor with more bytes."""
MAX_MALFORMED = 16
"""Malformed messages that a stream survives in any case ..."""
HEARD_PER_MALFORMED = 100
"""... and one more for so many messages."""


class Listener:
    """The router's view of a worker's stream. All calls come from the event loop and must not block.

    This one does nothing, and opens no sessions.
    """

    __slots__ = ()

    def up(self, welcome: Welcome) -> None:
        """The worker introduced itself; sessions may be opened."""

    def loading(self, loading: Loading | None) -> None:
        """What it does before it can; None: its stream has ended meanwhile."""

    def received(self, message: SessionMessage | Load) -> None:
        """The worker, while up, sent a message."""

    def malformed(self, error: MalformedMessage) -> None:
        """The worker, while up, sent a message that breaks the protocol, or is of a kind not known here.

        It is dropped; the stream goes on.
        """

    def down(self, why: str) -> None:
        """The worker is lost, and with it everything opened there. Connecting goes on in the background."""

    def asked(self, session: SessionId, epoch: int) -> AskedLogprobs | None:  # noqa: ARG002
        """What it may tell of a session's tokens; None: it is not open there under this epoch."""
        return None

    def unrouted(self) -> None:
        """Features came that nobody waits for."""


class EntrySink(Protocol):
    """Where entries can be sent: :class:`transport.client.WorkerConnection`."""

    def put(self, entry: bytes, *, hint: bool = False) -> bool:
        """Queue an encoded message, or a ``hint`` that may be dropped; whether it was, and not dropped."""


@frozen
class Route:
    """Where to pass on what a worker says of a session under ``epoch``, and under which epoch."""

    epoch: int
    onto: EntrySink
    there: int


class _Unread(NamedTuple):
    """One entry that came."""

    entry: bytes
    passed: int = 0
    """Under which epoch it was passed on; 0: it was not."""
    session: SessionId | None = None
    """Whose it is, if it is of a session that another worker may wait for."""


MAX_RELAYED_BYTES = 1 << 12
"""A longer message is encoded again on its way from worker to worker: fields unknown here are no way to send much."""
MAX_RELAYED_FEATURES = MAX_FEATURE_BYTES + MAX_PLAIN_BYTES
"""Longest message of features, with all that stands beside its values: a longer one is passed on to nobody."""

MAX_SHIFT = 63
"""Of the last seven bits of a number of 64."""

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


def heading(entry: bytes) -> Heading | None:
    """Of one entry of a worker's frame; None: something else, or written in an unusual way."""
    kind = RELAYED.get(entry[:1])
    if kind is None:
        return None
    try:
        length, start = _read_varint(entry, 1)
        session, after_session = _read_varint(entry, start + 1)
        epoch, _ = _read_varint(entry, after_session + 1)
        usual = start + length == len(entry) and entry[start] == _SESSION[0] and entry[after_session] == _EPOCH[0]
    except IndexError:
        return None
    return Heading(kind[0], SessionId(session), epoch) if usual else None


def relayed(entry: bytes, head: Heading, epoch: int) -> bytes:
    """One entry of a router's frame: what a worker said of a session, under the epoch that it has at the other one.

    Where a message comes twice, both are one, and of a field that comes twice the last one counts. So what it is about
    is said again after what came, whatever that says.
    """
    kind = RELAYED[entry[:1]][1]
    return b"".join((kind, entry[1:], kind, _about(head.session, epoch)))


@lru_cache(MAX_UNREAD)
def _about(session: SessionId, epoch: int) -> bytes:
    """Session and epoch alone, with their length before them."""
    about = _SESSION + varint(session) + _EPOCH + varint(epoch)
    return varint(len(about)) + about


def varint(value: int) -> bytes:
    """A whole number, not negative, as protobuf writes it: seven bits a byte, and whether another follows."""
    last = max(value.bit_length() - 1, 0) // 7
    return bytes(value >> 7 * at & 0x7F | (0x80 if at < last else 0) for at in range(last + 1))


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


Later = Callable[[Callable[[], None]], object]
"""Has something done in the next turn of the event loop."""


class Incoming:
    """What a worker says on one stream."""

    def __init__(
        self,
        worker: str,
        role: str,
        listener: Listener,
        routes: Mapping[SessionId, Route],
        later: Later = lambda call: call(),
        give_up: Callable[[str], object] = log.warning,
    ) -> None:
        """``worker`` is for logs. By default nothing is put off.

        ``give_up`` is called once, with the reason, if the stream is to be ended because of what came on it.
        """
        self.up = False
        """Whether the worker introduced itself."""
        self.loading = False
        """Whether it said that it will, but is loading."""
        self.instance = ""
        """Which start of the worker it is, as far as it says so."""
        self.broken = False
        """Whether the stream was given up: nothing that comes on it is heard any more."""
        self._worker, self._role, self._listener, self._routes, self._later = worker, role, listener, routes, later
        self._hints = role == "draft"
        self._give_up = give_up
        self._unread: deque[_Unread] = deque()
        self._unread_bytes = 0
        self._pending: dict[SessionId, tuple[int, int]] = {}
        """Of each session, how much is unread, and under which epoch that was passed on (0: not all of it was).

        What comes next is passed on at once only behind what went the same way: nothing may overtake it.
        """
        self._counter_names: tuple[str, ...] = ()
        self._heard = self._malformed = 0
        self._newer = False

    @property
    def unread(self) -> int:
        """Messages that wait to be read."""
        return len(self._unread)

    @property
    def behind(self) -> bool:
        """Whether so much is unread that no more is to be taken."""
        return len(self._unread) > MAX_UNREAD or self._unread_bytes > MAX_UNREAD_BYTES

    def take(self, frame: pb.Frame | None) -> None:
        """Pass on what another worker waits for, now; tell the listener what the messages say, in order, soon.

        None: what came is no frame.
        """
        if self.broken:
            return
        if frame is None:
            self._break("what came is no frame")
            return
        if len(frame.messages) > MAX_FRAME_ENTRIES:
            self._break(f"a frame of {len(frame.messages)} messages; at most {MAX_FRAME_ENTRIES} are allowed")
            return
        idle = not self._unread
        for entry in frame.messages:
            unread = self._relay(entry) if self.up else _Unread(entry)
            if unread is not None:
                self._unread.append(unread)
                self._unread_bytes += len(entry)
        if not self.up:
            self._read_slice()
        if idle and self._unread:
            self._later(self._read_some)

    def finish(self) -> None:
        """Read all that has come."""
        while self._unread:
            self._read()

    def _relay(self, entry: bytes) -> _Unread | None:
        """Pass an entry on if it can be; what is to be read of it, if anything."""
        head = heading(entry)
        if head is None or head.role != self._role:
            return _Unread(entry)
        route = self._routes.get(head.session)
        if is_features(entry):  # which may overtake: they say of which tokens they are
            if len(entry) > MAX_RELAYED_FEATURES:
                return _Unread(entry)
            if route is None or route.epoch != head.epoch:
                self._listener.unrouted()
            else:
                route.onto.put(relayed(entry, head, route.there), hint=True)
            return None
        (count, passed), there = self._pending.get(head.session, (0, 0)), 0
        if route is not None and route.epoch == head.epoch and (not count or passed == route.there):
            short = len(entry) <= MAX_RELAYED_BYTES
            if short and route.onto.put(relayed(entry, head, route.there), hint=self._hints):
                there = route.there
        self._pending[head.session] = count + 1, there
        return _Unread(entry, there, head.session)

    def _read_some(self) -> None:
        try:
            self._read_slice()
        finally:
            if self._unread:
                self._later(self._read_some)

    def _read_slice(self) -> None:
        unread = self._unread_bytes
        for _ in range(READ_AT_ONCE):
            if not self._unread or unread - self._unread_bytes >= READ_BYTES:
                return
            self._read()

    def _read(self) -> None:
        entry, passed, session = self._unread.popleft()
        self._unread_bytes -= len(entry)
        self._heard += 1
        if session is not None:
            count, there = self._pending.pop(session)
            if count > 1:
                self._pending[session] = count - 1, there
        try:
            if len(entry) > MAX_PLAIN_BYTES and self._outlived(entry):
                return
            message = decode_from_worker(entry, self._counter_names, self._listener.asked)
            if passed and isinstance(message, Proposal | Verification):
                object.__setattr__(message, "passed", passed)  # a value that nobody else has seen yet
            self._pass_on(message)
        except MalformedMessage as error:
            self._report(error)

    def _outlived(self, entry: bytes) -> bool:
        """Whether it is long and of a session that is not open there any more; nothing else may be longer than asked.

        To parse it would take long, whatever becomes of it. Raises :class:`MalformedMessage`.
        """
        head = heading(entry)
        if head is None or head.role != self._role:
            raise MalformedMessage(f"a message of {len(entry)} bytes; at most {MAX_PLAIN_BYTES} are allowed")
        asked, why = self._listener.asked(head.session, head.epoch), ""
        if is_features(entry):
            if len(entry) > MAX_RELAYED_FEATURES:
                why = f"features of {len(entry)} bytes; at most {MAX_RELAYED_FEATURES} are allowed"
        elif self._role == "draft":
            if len(entry) > MAX_PROPOSAL_BYTES:
                why = f"a proposal of {len(entry)} bytes; at most {MAX_PROPOSAL_BYTES} are allowed"
        elif asked is not None and len(entry) > asked.max_bytes:
            why = f"a verification of {len(entry)} bytes; what was asked for takes at most {asked.max_bytes}"
        if why:
            raise MalformedMessage(why, head.session, head.epoch)
        return asked is None

    def _pass_on(self, message: FromWorker | Loading) -> None:
        match message:
            case Loading() if self.up:
                raise UnknownKind
            case Loading():
                self.loading = True
                self._listener.loading(message)
                return
            case Welcome() if self.up:
                raise MalformedMessage("a second Welcome")
            case Welcome():
                self.up, self.loading, self.instance = True, False, message.instance
                self._listener.up(message)
                return
            case Load():
                self._counter_names = tuple(message.counters)
        if self.up:
            self._listener.received(message)

    def _report(self, error: MalformedMessage) -> None:
        if isinstance(error, UnknownKind):
            if not self._newer:
                log.info("worker %s sends messages of kinds that are not known here: it is newer", self._worker)
            self._newer = True
        else:
            self._malformed += 1
            if self._malformed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a broken worker must not flood the log
                log.warning("malformed message %d from worker %s: %s", self._malformed, self._worker, error)
        if self.up:
            self._listener.malformed(error)
        if self._malformed > MAX_MALFORMED + self._heard // HEARD_PER_MALFORMED:
            self._break(f"{self._malformed} of {self._heard} messages are malformed, the last one: {error}")

    def _break(self, why: str) -> None:
        self.broken = True
        self._unread.clear()
        self._unread_bytes = 0
        self._pending.clear()
        self._give_up(why)
