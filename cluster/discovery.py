"""How a router learns where the workers are: an :class:`EndpointDirectory` tells it, at once and at every change.

Three ways, in order of preference: Serve's long poll (pushed, but a private interface of Ray), asking all replicas
every second, and a fixed list. The directory says who is *meant* to be there; whether a worker is reachable, the
router's own stream to it tells, and sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from speculation.events import Role

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
ENDPOINT = "endpoint"
"""Key in a replica's metadata, and the name of the method that answers the same."""

Handles = Sequence[tuple[Role, "DeploymentHandle[Any]"]]
"""The deployments of workers, each with the role of its replicas."""
Changed = Callable[[Role, Sequence[str]], None]
"""Hears the addresses of all workers of a role."""


class EndpointDirectory(Protocol):
    """Knows the addresses of the workers of one or more roles. Used from one event loop."""

    def start(self, changed: Changed) -> None:
        """Begin to tell."""
        ...

    def close(self) -> None:
        """Stop telling."""
        ...


class StaticDirectory:
    """A list that never changes."""

    def __init__(self, workers: Mapping[Role, Sequence[str]]) -> None:
        """Addresses by role."""
        self.workers = workers

    def start(self, changed: Changed) -> None:
        """Tell once."""
        for role, addresses in self.workers.items():
            changed(role, addresses)

    def close(self) -> None:
        """Nothing to do."""


class _Together:
    """The workers of each role, from what is heard of each deployment."""

    def __init__(self, handles: Handles, changed: Changed) -> None:
        self._roles = [role for role, _ in handles]
        self._known: list[Sequence[str]] = [()] * len(handles)
        self._changed = changed

    def hear(self, deployment: int, addresses: Sequence[str]) -> None:
        """All workers of a deployment, named by its place among the handles."""
        role = self._roles[deployment]
        self._known[deployment] = addresses
        known = zip(self._roles, self._known, strict=True)
        self._changed(role, sorted(address for other, some in known if other is role for address in some))


class PollingDirectory:
    """Asks all replicas of each deployment, with public means only."""

    def __init__(self, handles: Handles) -> None:
        """Nothing is asked yet."""
        self._handles = handles
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, changed: Changed) -> None:
        """Begin to ask."""
        together = _Together(self._handles, changed)
        self._tasks = [
            asyncio.create_task(self._poll(handle, partial(together.hear, number)))
            for number, (_, handle) in enumerate(self._handles)
        ]

    def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()

    @staticmethod
    async def _poll(handle: DeploymentHandle[Any], hear: Callable[[Sequence[str]], None]) -> None:
        known: list[str] | None = None
        while True:
            with contextlib.suppress(Exception):  # a replica that dies while asked: the next round knows
                answers: list[str] = await handle.broadcast(ENDPOINT).results_async(timeout_s=5.0)
                if sorted(answers) != known:
                    known = sorted(answers)
                    hear(known)
            await asyncio.sleep(POLL_SECONDS)


class LongPollDirectory:
    """Subscribes to the Serve controller, which pushes every change of a deployment's replicas.

    Ray's own LLM router does the same, but the interface is private: constructing this raises ``ImportError`` or
    ``AttributeError`` where it is missing.
    """

    def __init__(self, handles: Handles) -> None:
        """Finds the controller."""
        import ray
        from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
        from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

        self._client_type: Any = LongPollClient
        self._controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        targets = LongPollNamespace.DEPLOYMENT_TARGETS
        self._handles = handles
        self._keys = [(targets, handle.deployment_id) for _, handle in handles]
        self._client: Any = None

    def start(self, changed: Changed) -> None:
        """Subscribe."""
        together = _Together(self._handles, changed)
        listeners = {key: self._listener(partial(together.hear, number)) for number, key in enumerate(self._keys)}
        self._client = self._client_type(
            self._controller,
            listeners,
            call_in_event_loop=asyncio.get_running_loop(),
            client_id="paceline-endpoint-directory",
        )

    def close(self) -> None:
        """Unsubscribe."""
        if self._client is not None:
            self._client.stop()

    @staticmethod
    def _listener(hear: Callable[[Sequence[str]], None]) -> Callable[[Any], None]:
        def told(info: Any) -> None:
            metadata = [replica.replica_metadata for replica in info.running_replicas]
            hear([entry[ENDPOINT] for entry in metadata if ENDPOINT in entry])

        return told


def serve_directory(handles: Handles) -> EndpointDirectory:
    """The best directory that this version of Ray Serve allows."""
    try:
        return LongPollDirectory(handles)
    except (ImportError, AttributeError) as error:
        log.warning("Serve's long poll is not where it was (%s); asking every %.0f s instead", error, POLL_SECONDS)
        return PollingDirectory(handles)
