"""Workers that compute nothing, for a benchmark of a router: what they say was encoded before it is measured.

All sessions have one prompt and one text, so of a commit only its session's number and epoch differ. A target commits
for all its sessions at once, at a pace that is set while it runs; a drafter sends each of its sessions a proposal at
the same pace.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

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
from transport.codec import encode_from_worker, encode_to_worker
from transport.incoming import varint
from transport.server import Link, serve

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
        values = bytes(2 * self.feature_width * self.commit)
        return encode_from_worker(Features(SessionId(0), 0, 0, 1, self.feature_width, values))


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
    """A worker of either role; a :class:`transport.server.Handler`."""

    def __init__(self, role: Role, script: Script, pace: StepPace, phase: float) -> None:
        """``phase``: by what part of an interval its steps come after those of the first one."""
        self.address = ""
        self.made: dict[str, list[float]] = {}
        """By request: when each of its commits, or proposals, was made, by the clock that all processes share."""
        self.heard: dict[str, dict[int, float]] = {}
        """By request and number: when those of the other worker came."""
        self.relayed_bytes = 0
        """Of all that came of the other worker, features too, as long as the first of each kind."""
        self._sizes: dict[type, int] = {}
        self._role, self._script, self._pace, self._phase = role, script, pace, phase
        self._features = _parts(script.features) if role is Role.TARGET and script.feature_width else None
        self._commits: list[tuple[tuple[bytes, bytes], ...]] = []
        self._end = len(script.prompt), digests.of(script.prompt)
        self._sessions: dict[int, FakeSession] = {}
        self._requests: dict[int, str] = {}
        self.link: Link | None = None
        """The router's, once it has come."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeWorker]:
        """Listen, and step."""
        server = await serve(self, self._role.value, "127.0.0.1:0")
        self.address = server.address
        tasks = [asyncio.create_task(self._steps()), asyncio.create_task(self._loads())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(0)

    def connected(self, link: Link) -> Welcome:
        """The router came."""
        self.link = link
        return self._script.welcome

    def disconnected(self, _: Link) -> None:
        """The router went."""
        self.link = None

    def received(self, link: Link, messages: Sequence[ToWorker]) -> None:
        """What it opens and closes, and what came of the other worker."""
        now = time.monotonic()
        for message in messages:
            if isinstance(message, Open):
                self._open(link, message)
            elif isinstance(message, Close):
                self._sessions.pop(message.session, None)
            elif isinstance(message, Features | Proposal | Verification) and message.session in self._requests:
                kind = type(message)
                self._sizes[kind] = self._sizes.get(kind) or len(encode_to_worker(message))
                self.relayed_bytes += self._sizes[kind]
                if isinstance(message, Features):
                    continue
                position = message.anchor_position if isinstance(message, Proposal) else message.position
                number = (position - len(self._script.prompt)) // self._script.commit
                self.heard[self._requests[message.session]].setdefault(number, now)

    def _open(self, link: Link, opened: Open) -> None:
        heading = b"\x08" + varint(opened.session) + b"\x10" + varint(opened.epoch)
        self._sessions[opened.session] = FakeSession(opened.session, heading)
        request = self._requests[opened.session] = opened.request_options.request
        self.made.setdefault(request, [])
        self.heard.setdefault(request, {})
        link.put(self._next(self._sessions[opened.session], time.monotonic()))

    async def _loads(self) -> None:
        while True:
            await asyncio.sleep(LOAD_SECONDS)
            if self.link is not None:
                self.link.send(Load(len(self._sessions), free_tokens=1 << 24, capacity_tokens=1 << 24))

    async def _steps(self) -> None:
        number = 0
        while True:
            number = await self._pace.step(self._phase, number)
            while self.link is not None and self.link.outbox._entries:  # the router does not keep up
                await asyncio.sleep(0.001)
            if self.link is not None and self._sessions:
                self._step(self.link)

    def _step(self, link: Link) -> None:
        now, sessions = time.monotonic(), self._sessions.values()
        positions = [len(self._script.prompt) + each.commits * self._script.commit for each in sessions]
        for session in sessions:
            link.put(self._next(session, now))
        if self._features is not None:
            kind, rest = self._features
            for session, position in zip(sessions, positions, strict=True):
                link.put(_entry(kind, session.heading + b"\x18" + varint(position) + rest))
        if self._pace.ending:
            self._sessions.clear()

    def _next(self, session: FakeSession, now: float) -> bytes:
        """Its next commit or proposal."""
        while session.commits >= len(self._commits):
            self._commits.append(tuple(_parts(encode_from_worker(said)) for said in self._next_said()))
        kind, rest = self._commits[session.commits][self._pace.ending]
        session.commits += 1
        self.made[self._requests[session.number]].append(now)
        return _entry(kind, session.heading + rest)

    def _next_said(self) -> tuple[Proposal | Verification, Proposal | Verification]:
        """A commit or a proposal; the other one ends the text."""
        script, (position, digest) = self._script, self._end
        at = (len(self._commits) * script.commit) % len(script.text)
        tokens = tuple(script.text[(at + i) % len(script.text)] for i in range(script.commit))
        anchor = digest
        for token in tokens:
            digest = digests.extend(digest, token)
        self._end = position + len(tokens), digest
        session, kept = SessionId(0), script.commit - 1
        if self._role is Role.DRAFT:
            proposal = Proposal(session, 0, position, anchor, tokens, tuple(range(-1, kept)), (0.5,) * len(tokens))
            return proposal, proposal
        goes_on = Verification(session, 0, position, tokens, digest, kept, kept + 1, lead=8, took_us=9000)
        return goes_on, replace(goes_on, finish=FinishReason.LENGTH)


def _parts(entry: bytes) -> tuple[bytes, bytes]:
    """The kind of an entry without number and epoch, and what follows its length."""
    return entry[:1], entry[next(at for at in range(1, len(entry)) if entry[at] < 0x80) + 1 :]


def _entry(kind: bytes, about: bytes) -> bytes:
    return kind + varint(len(about)) + about
