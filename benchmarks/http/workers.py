"""Workers that compute nothing, for a benchmark of a router: what they say was encoded before it is measured.

All sessions have one prompt and one text, so of a commit only its session's number and epoch differ. A target commits
for all its sessions at once, at a pace that is set while it runs; a drafter sends each of its sessions a proposal at
the same pace. What the router sends is read no further than whom it opens, and which message of the other worker it
relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc

from speculation import digest as digests
from speculation.events import Role
from speculation.messages import (
    Close,
    Features,
    FinishReason,
    Load,
    Open,
    Proposal,
    SessionId,
    ToWorker,
    Verification,
    Welcome,
)
from transport.codec import decode_to_worker, encode_from_worker

OPEN, PROPOSE, VERIFIED, CLOSE, FEATURES = 0x0A, 0x12, 0x1A, 0x22, 0x32
"""First bytes of these entries of a router's frame; the last one of a target's, too."""
PING, PONG = 0x11, 0x19
"""First bytes of these fields of a frame: eight bytes follow."""
LOAD_SECONDS = 0.25
PAUSE = 1e9
"""An interval without steps: what is opened gets its first commit, and no other."""
LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Script:
    """The one text of all sessions."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    commit: int
    """Tokens of a commit, all but the last of them drafted, out of one draft more than were kept."""
    welcome: Welcome
    feature_width: int = 0
    """Numbers in bfloat16 that go to the drafter with each committed token; 0: none do."""

    @property
    def features(self) -> bytes:
        """Of a commit, but for their session and position."""
        return bytes(
            encode_from_worker(
                Features(SessionId(0), 0, 0, 1, self.feature_width, bytes(2 * self.feature_width * self.commit))
            )
        )


@dataclass(slots=True)
class FakeSession:
    """One that is open here."""

    number: int
    heading: bytes
    """Its number and epoch, as every message of it begins."""
    commits: int = 0


@dataclass(slots=True)
class StepPace:
    """What all workers go by."""

    interval: float = PAUSE
    """Seconds from one step of a target to its next."""
    ending: bool = False
    """Whether every text ends with its next commit."""

    async def step(self, phase: float, last: int) -> int:
        """Wait for the one after the ``last`` of whoever is later than another by this part of an interval."""
        interval = self.interval
        while True:
            number = math.floor(at := time.monotonic() / self.interval - phase)
            if interval != self.interval:
                interval, last = self.interval, number  # a change is no step
            if number != last:
                return number
            await asyncio.sleep(min((number + 1 - at) * self.interval, LOOK_SECONDS))


class FakeWorker:
    """A worker of either role."""

    def __init__(self, role: Role, script: Script, pace: StepPace, phase: float) -> None:
        """``phase``: by what part of an interval its steps come after those of the first one."""
        self.address = ""
        self.made: dict[str, list[float]] = {}
        """By request: when each of its commits, or proposals, was made, by the clock that all processes share."""
        self.heard: dict[str, dict[int, float]] = {}
        """By request and number: when those of the other worker came."""
        self.relayed_bytes = 0
        """Of all that came of the other worker, features too."""
        self._role, self._script, self._pace, self._phase = role, script, pace, phase
        self._kind = bytes((2 << 3 | 2,)) if role is Role.TARGET else bytes((3 << 3 | 2,))
        self._features = _body(script.features) if role is Role.TARGET and script.feature_width else b""
        self._bodies: list[tuple[bytes, bytes]] = []
        self._end = len(script.prompt), digests.of(script.prompt)
        self._sessions: dict[int, FakeSession] = {}
        self._requests: dict[int, str] = {}
        self._out: asyncio.Queue[bytes] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeWorker]:
        """Listen, and step."""
        server = grpc.aio.server()
        name = f"paceline.v1.{self._role.value.capitalize()}"
        handler = grpc.stream_stream_rpc_method_handler(self._run)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Run": handler}),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        tasks = [asyncio.create_task(self._steps()), asyncio.create_task(self._loads())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0)

    async def _run(self, frames: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        self._out = asyncio.Queue()
        self._say(encode_from_worker(self._script.welcome))
        reading = asyncio.create_task(self._read(frames))
        try:
            while True:
                yield await self._out.get()
        finally:
            reading.cancel()

    async def _read(self, frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            for entry in self._entries(frame):
                if entry[0] in (OPEN, CLOSE):
                    self._hear(decode_to_worker(entry))
                elif entry[0] in (PROPOSE, VERIFIED, FEATURES):
                    self.relayed_bytes += len(entry)
                    if entry[0] != FEATURES:
                        self._relayed(entry)

    def _entries(self, frame: bytes) -> Iterator[bytes]:
        """Of a router's frame; answers its ping."""
        at = 0
        while at < len(frame):
            if frame[at] == PING:
                self._out.put_nowait(bytes((PONG,)) + frame[at + 1 : at + 9])
                at += 9
                continue
            length, start = _read_varint(frame, at + 1)
            yield frame[start : start + length]
            at = start + length

    def _hear(self, message: ToWorker) -> None:
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Close):
            self._sessions.pop(message.session, None)

    def _relayed(self, entry: bytes) -> None:
        """Note when a message of the other worker came: it begins with session, epoch and position."""
        now, at = time.monotonic(), _read_varint(entry, 1)[1]
        session, at = _read_varint(entry, at + 1)
        _, at = _read_varint(entry, at + 1)
        position, _ = _read_varint(entry, at + 1)
        if session in self._requests:
            number = (position - len(self._script.prompt)) // self._script.commit
            self.heard[self._requests[session]].setdefault(number, now)

    def _open(self, opened: Open) -> None:
        heading = b"\x08" + varint(opened.session) + b"\x10" + varint(opened.epoch)
        self._sessions[opened.session] = FakeSession(opened.session, heading)
        request = self._requests[opened.session] = opened.request_options.request
        self.made.setdefault(request, [])
        self.heard.setdefault(request, {})
        self._say(self._next(self._sessions[opened.session], time.monotonic()))

    def _say(self, *entries: bytes) -> None:
        self._out.put_nowait(b"".join(b"\x0a" + varint(len(entry)) + entry for entry in entries))

    async def _loads(self) -> None:
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            load = Load(len(self._sessions), free_tokens=1 << 24, capacity_tokens=1 << 24)
            self._say(encode_from_worker(load))

    async def _steps(self) -> None:
        number = 0
        while True:
            number = await self._pace.step(self._phase, number)
            while not self._out.empty():  # the router does not keep up
                await asyncio.sleep(0.001)
            if self._sessions:
                self._step()

    def _step(self) -> None:
        now, sessions = time.monotonic(), self._sessions.values()
        features = [self._features_of(session) for session in sessions] if self._features else []
        self._say(*[self._next(session, now) for session in sessions], *features)
        if self._pace.ending:
            self._sessions.clear()

    def _next(self, session: FakeSession, now: float) -> bytes:
        """Its next commit or proposal."""
        about = session.heading + self._body(session.commits)[self._pace.ending]
        session.commits += 1
        self.made[self._requests[session.number]].append(now)
        return self._kind + varint(len(about)) + about

    def _features_of(self, session: FakeSession) -> bytes:
        """Of its next commit."""
        position = len(self._script.prompt) + session.commits * self._script.commit
        about = session.heading + b"\x18" + varint(position) + self._features
        return bytes((FEATURES,)) + varint(len(about)) + about

    def _body(self, number: int) -> tuple[bytes, bytes]:
        """What a commit or a proposal says beside its heading; the other one ends the text."""
        while number >= len(self._bodies):
            self._bodies.append(self._next_body())
        return self._bodies[number]

    def _next_body(self) -> tuple[bytes, bytes]:
        script, (position, digest) = self._script, self._end
        at = (len(self._bodies) * script.commit) % len(script.text)
        tokens = tuple(script.text[(at + i) % len(script.text)] for i in range(script.commit))
        anchor = digest
        for token in tokens:
            digest = digests.extend(digest, token)
        self._end = position + len(tokens), digest
        session, kept = SessionId(0), script.commit - 1
        if self._role is Role.DRAFT:
            chain = tuple(range(-1, kept))
            body = _body(
                encode_from_worker(Proposal(session, 0, position, anchor, tokens, chain, (0.5,) * len(tokens)))
            )
            return body, body
        said = [
            Verification(session, 0, position, tokens, digest, kept, kept + 1, finish, lead=8, took_us=9000)
            for finish in (None, FinishReason.LENGTH)
        ]
        return _body(encode_from_worker(said[0])), _body(encode_from_worker(said[1]))


def _body(entry: bytes) -> bytes:
    """Of an entry without number and epoch: what follows its kind and its length."""
    return entry[_read_varint(entry, 1)[1] :]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that is written there, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def varint(value: int) -> bytes:
    """A whole number, not negative, as protobuf writes it."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
