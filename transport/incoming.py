"""Reads what a worker says on one stream, whatever it says.

What another worker waits for is passed on before it is read (:class:`Route`). All is read in small slices: the event
loop writes and hears others in between, and who feeds it waits while much is unread (:attr:`Incoming.behind`).

A malformed message is reported to the listener and otherwise skipped, unless there are too many: more than
:data:`MAX_MALFORMED` and one in :data:`HEARD_PER_MALFORMED`, or more entries in a frame than anybody writes. Then the
stream is given up, unread messages and all. Messages of a kind not known here do not count: newer workers send them.

Log-probabilities may take long to read. Those that nobody asked for make a message malformed before they are.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protos.paceline.v1 import worker_pb2 as pb
from speculation.messages import FromWorker, Load, Loading, Proposal, SessionId, Verification, Welcome
from transport.codec import MalformedMessage, UnknownKind, decode_from_worker
from transport.codec_parts import decode_loading
from transport.outbox import MAX_FRAME_ENTRIES
from transport.wire import MAX_PLAIN_BYTES, Asked, AskedLogprobs, heading, heading_of_any, relayed

log = logging.getLogger(__name__)

READ_AT_ONCE = 4
"""Messages read in one turn of the event loop, in which nothing is written and nobody else is heard."""
MAX_UNREAD = 4096
"""Messages that wait to be read; with more, no other frame is to be taken."""
MAX_MALFORMED = 16
"""Malformed messages that a stream survives in any case ..."""
HEARD_PER_MALFORMED = 100
"""... and one more for so many messages."""


class Listener(Protocol):
    """The router's view of a worker's stream. All calls come from the event loop and must not block."""

    def up(self, welcome: Welcome) -> None:
        """The worker introduced itself; sessions may be opened."""
        ...

    def loading(self, loading: Loading | None) -> None:
        """What it does before it can; None: its stream has ended meanwhile."""
        ...

    def received(self, message: FromWorker) -> None:
        """The worker sent a message (never a Welcome)."""
        ...

    def malformed(self, error: MalformedMessage) -> None:
        """The worker, while up, sent a message that breaks the protocol. It is dropped; the stream goes on."""
        ...

    def down(self, why: str) -> None:
        """The worker is lost, and with it everything opened there. Connecting goes on in the background."""
        ...


class EntrySink(Protocol):
    """Where entries can be sent: :class:`transport.client.WorkerConnection`."""

    def put(self, entry: bytes, *, hint: bool = False) -> bool:
        """Queue an encoded message, or a ``hint`` that may be dropped; whether it was, and not dropped."""
        ...


@dataclass(frozen=True, slots=True)
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
    held: SessionId | None = None
    """Whose it is, if it may have to be passed on once it is read."""


def nothing_open(session: SessionId, epoch: int) -> AskedLogprobs | None:
    """For who opens no sessions."""
    del session, epoch
    return None


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
        later: Later | None = None,
        give_up: Callable[[str], object] = log.warning,
        unrouted: Callable[[], object] = lambda: None,
        asked: Asked = nothing_open,
    ) -> None:
        """``worker`` is for logs. Without ``later`` nothing is put off. ``asked``: which log-probabilities it may tell.

        ``give_up`` is called once, with the reason, if the stream is to be ended because of what came on it;
        ``unrouted`` for features that nobody waits for.
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
        self._give_up, self._unrouted, self._asked = give_up, unrouted, asked
        self._unread: deque[_Unread] = deque()
        self._held: Counter[SessionId] = Counter()
        """Of each session, what is unread and was not passed on: nothing may overtake it."""
        self._counter_names: tuple[str, ...] = ()
        self._heard = self._reported = self._malformed = 0

    @property
    def unread(self) -> int:
        """Messages that wait to be read."""
        return len(self._unread)

    @property
    def behind(self) -> bool:
        """Whether so much is unread that no more is to be taken."""
        return len(self._unread) > MAX_UNREAD

    def take(self, frame: pb.Frame) -> None:
        """Pass on what another worker waits for, now; tell the listener what the messages say, in order, soon."""
        if self.broken:
            return
        if len(frame.messages) > MAX_FRAME_ENTRIES:
            self._break(f"a frame of {len(frame.messages)} messages; at most {MAX_FRAME_ENTRIES} are allowed")
            return
        idle = not self._unread
        for entry in frame.messages:
            if not self.up and (loading := decode_loading(entry)):
                self.loading = True
                self._listener.loading(loading)
                continue
            unread = self._relay(entry) if self.up else _Unread(entry)
            if unread is not None:
                self._unread.append(unread)
        if not self.up and self._unread:
            self._read()
        if self._later is None:
            self.finish()
        elif idle and self._unread:
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
        if head.features:  # which may overtake: they say of which tokens they are
            if route is None or route.epoch != head.epoch:
                self._unrouted()
            else:
                route.onto.put(relayed(entry, head, route.there), hint=True)
            return None
        known = route is not None and route.epoch == head.epoch and not self._held[head.session]
        if route is not None and known and route.onto.put(relayed(entry, head, route.there), hint=self._hints):
            return _Unread(entry, route.there)
        self._held[head.session] += 1
        return _Unread(entry, held=head.session)

    def _read_some(self) -> None:
        assert self._later is not None
        try:
            for _ in range(READ_AT_ONCE):
                if self._unread:
                    self._read()
        finally:
            if self._unread:
                self._later(self._read_some)

    def _read(self) -> None:
        entry, passed, held = self._unread.popleft()
        self._heard += 1
        if held is not None:
            self._held[held] -= 1
            if not self._held[held]:
                del self._held[held]
        try:
            if self._outlived(entry):
                return
            message = decode_from_worker(entry, self._counter_names, self._asked)
            if passed and isinstance(message, Proposal | Verification):
                object.__setattr__(message, "passed", passed)  # a value that nobody else has seen yet
            self._pass_on(message)
        except MalformedMessage as error:
            self._report(error)

    def _outlived(self, entry: bytes) -> bool:
        """Whether it is long and of a session that is not open there any more; nothing else may be longer than asked.

        To parse it would take long, whatever becomes of it. Raises :class:`MalformedMessage`.
        """
        if self._role != "target" or len(entry) <= MAX_PLAIN_BYTES:
            return False
        head = heading_of_any(entry)
        if head is None or head.role != self._role:
            raise MalformedMessage(f"a message of {len(entry)} bytes; at most {MAX_PLAIN_BYTES} are allowed")
        asked = self._asked(head.session, head.epoch)
        if asked is not None and len(entry) > asked.max_bytes:
            why = f"a verification of {len(entry)} bytes; what was asked for takes at most {asked.max_bytes}"
            raise MalformedMessage(why, head.session, head.epoch)
        return asked is None

    def _pass_on(self, message: FromWorker) -> None:
        match message:
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
        self._reported += 1
        if self._reported.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...: a broken worker must not flood the log
            log.warning("malformed message %d from worker %s: %s", self._reported, self._worker, error)
        if self.up:
            self._listener.malformed(error)
        self._malformed += not isinstance(error, UnknownKind)
        if self._malformed > MAX_MALFORMED + self._heard // HEARD_PER_MALFORMED:
            self._break(f"{self._malformed} of {self._heard} messages are malformed, the last one: {error}")

    def _break(self, why: str) -> None:
        self.broken = True
        self._unread.clear()
        self._held.clear()
        self._give_up(why)
