"""What a worker says of its own load, asked over gRPC as a router would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from speculation.events import Role
from speculation.messages import FromWorker, Load, Welcome
from transport.client import WorkerConnection
from transport.codec import MalformedMessage


@dataclass
class _Ear:
    """Keeps what is heard. Implements :class:`transport.client.Listener`."""

    heard: asyncio.Queue[Load] = field(default_factory=asyncio.Queue)

    def up(self, welcome: Welcome) -> None:
        pass

    def received(self, message: FromWorker) -> None:
        if isinstance(message, Load):
            self.heard.put_nowait(message)

    def malformed(self, error: MalformedMessage) -> None:
        pass

    def down(self, why: str) -> None:
        pass


async def load_of(
    address: str, role: Role, until: Callable[[Load], bool] = lambda _: True, seconds: float = 10.0
) -> Load:
    """The first report that fits. Raises TimeoutError."""
    ear = _Ear()
    connection = asyncio.create_task(WorkerConnection(address, role.value, ear).run())
    try:
        async with asyncio.timeout(seconds):
            while not until(load := await ear.heard.get()):
                pass
        return load
    finally:
        connection.cancel()
        await asyncio.gather(connection, return_exceptions=True)


def idle(load: Load) -> bool:
    """Whether nothing is left of any session."""
    return not load.sessions and not load.waiting and load.free_tokens == load.capacity_tokens
