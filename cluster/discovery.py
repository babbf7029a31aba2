"""How a router learns where the workers are: a directory tells it, at once and at every change, on one event loop.

On Ray, Serve's long poll pushes changes, but it is a private interface: so all replicas are asked as well, now and then
while it works and every second when it does not. Serve lists a worker once it has loaded; until then it announces
itself. Without Ray, the list is fixed, or in a file that is read again whenever it changes, one worker a line::

    # rack 1
    target 10.0.0.5:7001
    draft  10.0.0.6:7002

An edit that cannot be read changes nothing: the list before it stays in force, and the log says why. The directory says
who is *meant* to be there; whether a worker is reachable, the router's own stream to it tells, and sooner.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.console import BadInput
from speculation.events import Role
from transport.address import AddressError, parse
from transport.files import stamp

if TYPE_CHECKING:
    from ray.serve._private.long_poll import LongPollClient
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Pause between questions to all replicas, or looks at the file, where nothing is pushed."""
CHECK_SECONDS = 5.0
"""The same where changes are pushed."""
CONTRADICTIONS = 2
"""Answers in a row that make what was pushed wrong: one may have crossed with a change."""
ANSWER_SECONDS = 5.0
ANNOUNCED_SECONDS = 10.0
"""How long it holds that a worker which Serve does not list is there."""
ENDPOINT = "endpoint"
"""Key in a replica's metadata, and the name of the method that answers the same."""

Handles = Sequence[tuple[Role, "DeploymentHandle[Any]"]]
"""The deployments of workers, each with the role of its replicas."""
Changed = Callable[[Role, Sequence[str]], None]
"""Hears the addresses of all workers of a role."""


Hear = Callable[[int, Sequence[str]], None]
"""Hears all workers of a deployment, named by its place among the handles."""


class ServeDirectory:
    """Deployments of Ray Serve: subscribed to, and asked now and then in case the subscription misses something.

    What replicas say themselves wins when it contradicts the subscription twice in a row. A subscription that ended is
    made again; without one, replicas are asked often.
    """

    def __init__(self, handles: Handles, subscribe: Callable[[Handles, Hear], LongPollClient]) -> None:
        self._handles, self._subscribe = handles, subscribe
        self._known: list[list[str]] = [[] for _ in handles]
        self._announced: dict[tuple[Role, str], float] = {}
        """Workers that said that they load, and until when that holds."""
        self._contradicted = [0] * len(handles)
        self._subscription: LongPollClient | None = None
        self._changed: Changed | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, changed: Changed) -> None:
        """Begin to tell."""
        self._changed = changed
        self._resubscribe()
        self._task = asyncio.create_task(self._check(), name="endpoint directory")

    def close(self) -> None:
        """Stop telling."""
        self._changed = None
        if self._task is not None:
            self._task.cancel()
        if self._subscription is not None:
            self._subscription.stop()

    def _resubscribe(self) -> None:
        try:
            self._subscription = self._subscribe(self._handles, self._hear)
            if self._changed is None:  # closed meanwhile
                self._subscription.stop()
        except Exception as error:  # the controller is away: the next round tries again
            log.warning("cannot subscribe to Serve's controller: %s", error)

    def _hear(self, deployment: int, addresses: Sequence[str]) -> None:
        """All workers of a deployment; those of the same role in the others stay."""
        self._contradicted[deployment] = 0
        found = sorted(addresses)
        if self._changed is None or found == self._known[deployment]:
            return
        self._known[deployment] = found
        self._tell(self._handles[deployment][0])

    def announced(self, role: Role, address: str) -> None:
        """A worker listens there and loads; to be said again while it does."""
        new = (role, address) not in self._announced
        self._announced[role, address] = asyncio.get_running_loop().time() + ANNOUNCED_SECONDS
        if new:
            self._tell(role)

    def _tell(self, role: Role) -> None:
        if self._changed is None:
            return
        listed = [some for (other, _), some in zip(self._handles, self._known, strict=True) if other is role]
        loading = [address for other, address in self._announced if other is role]
        self._changed(role, sorted({*loading, *(address for some in listed for address in some)}))

    async def _check(self) -> None:
        while True:
            subscribed = self._subscription is not None and self._subscription.is_running
            await asyncio.sleep(CHECK_SECONDS if subscribed else POLL_SECONDS)
            if not subscribed:
                await asyncio.to_thread(self._resubscribe)  # where Ray's head is away it waits, and streams go on
            now = asyncio.get_running_loop().time()
            for role, address in [key for key, until in self._announced.items() if until <= now]:
                del self._announced[role, address]
                self._tell(role)
            patience = CONTRADICTIONS if subscribed else 1
            for deployment, (_, handle) in enumerate(self._handles):
                with contextlib.suppress(Exception):  # a replica that dies while asked: the next round knows
                    answers: list[str] = await handle.broadcast(ENDPOINT).results_async(timeout_s=ANSWER_SECONDS)
                    self._compare(deployment, answers, patience)

    def _compare(self, deployment: int, answers: Sequence[str], patience: int) -> None:
        if sorted(answers) == self._known[deployment]:
            self._contradicted[deployment] = 0
            return
        self._contradicted[deployment] += 1
        if self._contradicted[deployment] >= patience:
            self._hear(deployment, answers)


def long_poll(loop: asyncio.AbstractEventLoop, handles: Handles, hear: Hear) -> LongPollClient:
    """A subscription to the Serve controller, which pushes every change of a deployment's replicas until it is lost.

    Made from any thread; ``hear`` is called in the loop. Ray's own LLM router uses this private interface too.
    """
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
    from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

    def told(number: int, info: Any) -> None:
        metadata = [replica.replica_metadata for replica in info.running_replicas]
        hear(number, [entry[ENDPOINT] for entry in metadata if ENDPOINT in entry])

    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    listeners: dict[Any, Callable[[Any], None]] = {
        (LongPollNamespace.DEPLOYMENT_TARGETS, handle.deployment_id): partial(told, number)
        for number, (_, handle) in enumerate(handles)
    }
    return LongPollClient(controller, listeners, call_in_event_loop=loop, client_id="paceline-endpoint-directory")


MAX_BYTES = 1 << 20


class WorkerListError(BadInput):
    """A list that cannot be used. One line that names the file, the line and what would be right."""


class StaticDirectory:
    """A list that never changes."""

    def __init__(self, workers: Mapping[Role, Sequence[str]]) -> None:
        self.workers = workers

    def start(self, changed: Changed) -> None:
        """Begin to tell."""
        for role, addresses in self.workers.items():
            changed(role, addresses)

    def close(self) -> None:
        """Stop telling."""


class FileDirectory(StaticDirectory):
    """Tells what the file says, at once and after every change that can be read."""

    def __init__(self, file: Path, poll_seconds: float = POLL_SECONDS) -> None:
        """Reads the file; raises :class:`WorkerListError`."""
        self._file, self._poll_seconds = file, poll_seconds
        self._seen = stamp(file)
        self._task: asyncio.Task[None] | None = None
        super().__init__(read_list(file))

    def start(self, changed: Changed) -> None:
        """Begin to tell."""
        super().start(changed)
        self._task = asyncio.create_task(self._watch(changed), name=f"watch {self._file}")

    def close(self) -> None:
        """Stop telling."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, changed: Changed) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            if (seen := stamp(self._file)) == self._seen:
                continue
            self._seen = seen
            try:
                workers = read_list(self._file)
            except WorkerListError as error:
                log.error("%s; the list before it stays in force", error)
                continue
            for role, addresses in workers.items():
                if addresses != self.workers[role]:
                    log.info("%s lists %d %s workers", self._file, len(addresses), role)
                    changed(role, addresses)
            self.workers = workers


def addresses_in(args: argparse.Namespace) -> dict[Role, list[str]]:
    """The workers that --target, --draft and --workers name. Raises AddressError, CommandError."""
    listed: dict[Role, list[str]] = {role: [*getattr(args, role.value)] for role in Role}
    for address in (*args.target, *args.draft):
        parse(address)
    if args.workers is not None:
        try:
            for role, addresses in read_list(args.workers).items():
                listed[role] += addresses
        except WorkerListError as error:
            raise BadInput(f"--workers {error}") from error
    return listed


def read_list(file: Path) -> dict[Role, list[str]]:
    """The workers that a file lists, in its order; every role has an entry. Raises :class:`WorkerListError`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise WorkerListError(f"{file}: is larger than {MAX_BYTES >> 20} MiB; give a list of workers")
        text = content.decode("utf-8")
    except OSError as error:
        raise WorkerListError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkerListError(f"{file}: is not a text file") from error
    found: dict[Role, dict[str, None]] = {role: {} for role in Role}
    for number, line in enumerate(text.splitlines(), 1):
        words, where = line.partition("#")[0].split(), f"{file}, line {number}"
        if not words:
            continue
        if len(words) != 2 or words[0] not in list(Role):
            raise WorkerListError(f"{where}: must be 'target HOST:PORT' or 'draft HOST:PORT', got {' '.join(words)!r}")
        try:
            parse(words[1])
        except AddressError as error:
            raise WorkerListError(f"{where}: {error}") from error
        found[Role(words[0])][words[1]] = None
    if not found[Role.TARGET]:
        raise WorkerListError(f"{file}: lists no target worker; a line such as 'target 10.0.0.5:7001' does")
    return {role: list(addresses) for role, addresses in found.items()}
