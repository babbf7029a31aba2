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
from typing import TYPE_CHECKING, Any, Protocol

from speculation.events import Role

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
ENDPOINT = "endpoint"
"""Key in a replica's metadata, and the name of the method that answers the same."""

Handles = Mapping[Role, "DeploymentHandle[Any]"]
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
        self._workers = workers

    def start(self, changed: Changed) -> None:
        """Tell once."""
        for role, addresses in self._workers.items():
            changed(role, addresses)

    def close(self) -> None:
        """Nothing to do."""


class PollingDirectory:
    """Asks all replicas of each deployment, with public means only."""

    def __init__(self, handles: Handles) -> None:
        """Deployments by the role of their replicas."""
        self._handles = handles
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, changed: Changed) -> None:
        """Begin to ask."""
        self._tasks = [asyncio.create_task(self._poll(*pair, changed)) for pair in self._handles.items()]

    def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()

    async def _poll(self, role: Role, handle: DeploymentHandle[Any], changed: Changed) -> None:
        known: list[str] | None = None
        while True:
            with contextlib.suppress(Exception):  # a replica that dies while asked: the next round knows
                answers: list[str] = await handle.broadcast(ENDPOINT).results_async(timeout_s=5.0)
                if sorted(answers) != known:
                    known = sorted(answers)
                    changed(role, known)
            await asyncio.sleep(POLL_SECONDS)


class LongPollDirectory:
    """Subscribes to the Serve controller, which pushes every change of a deployment's replicas.

    Ray's own LLM router does the same, but the interface is private: constructing this raises ``ImportError`` or
    ``AttributeError`` where it is missing.
    """

    def __init__(self, handles: Handles) -> None:
        """Deployments by the role of their replicas."""
        import ray
        from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
        from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

        self._client_type: Any = LongPollClient
        self._controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        targets = LongPollNamespace.DEPLOYMENT_TARGETS
        self._keys = {role: (targets, handle.deployment_id) for role, handle in handles.items()}
        self._client: Any = None

    def start(self, changed: Changed) -> None:
        """Subscribe."""
        listeners = {key: self._listener(role, changed) for role, key in self._keys.items()}
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
    def _listener(role: Role, changed: Changed) -> Callable[[Any], None]:
        def hear(info: Any) -> None:
            metadata = [replica.replica_metadata for replica in info.running_replicas]
            changed(role, sorted(entry[ENDPOINT] for entry in metadata if ENDPOINT in entry))

        return hear


def serve_directory(handles: Handles) -> EndpointDirectory:
    """The best directory that this version of Ray Serve allows."""
    try:
        return LongPollDirectory(handles)
    except (ImportError, AttributeError) as error:
        log.warning("Serve's long poll is not where it was (%s); asking every %.0f s instead", error, POLL_SECONDS)
        return PollingDirectory(handles)
