"""A pretend cluster with a running Paceline: starts it, knows when it is whole, and ends it.

What is wrong with it is always told in words, so that a table can say why it does not heal.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.chaos import processes
from benchmarks.chaos.nodes import ENVIRONMENT
from benchmarks.chaos.processes import ROUTER, WorkerReplica
from benchmarks.chaos.settings import FRESH, HEAL_SECONDS, Body, FaultOptions, haproxy_environment
from benchmarks.chaos.workload import Reply, ReplyTally, client, cluster_view, plain_text, tally
from benchmarks.harness.options import BenchError
from benchmarks.harness.processes import ReadyProcess, child
from cluster.config.environment import CHECKOUT, current
from router.sessions.snapshot import WorkerState
from speculation.events import Role

NODES_SECONDS = 300.0
READY_SECONDS = 600.0
STOP_SECONDS = 180.0
POLL_SECONDS = 0.3
IDLE_SECONDS = 15.0
AT_ONCE = 16


class StageError(BenchError):
    """The cluster could not be started, or does not do what it was told. One line or more of output."""


class Stage:
    """A cluster, as the two processes that hold it: the nodes, and ``paceline up``."""

    def __init__(self, nodes: ReadyProcess, folder: Path, settings: dict[str, Any], *, haproxy: bool) -> None:
        """Made by :func:`running`."""
        self.url = f"http://127.0.0.1:{settings['router']['port']}"
        self._ranks = settings["target"]["tensor_parallel_size"]
        self._nodes, self._folder = nodes, folder
        self._settings, self._haproxy = settings, haproxy
        self._texts: dict[str, str] = {}
        self._numbers = 0
        self._up: Process | None = None

    async def up(self) -> None:
        """Start Paceline and wait until it serves with all its workers. Raises :class:`StageError`."""
        self._up = await self._paceline(self._settings, "paceline.log")
        deadline = time.monotonic() + READY_SECONDS
        while "Ctrl-C stops it" not in self.said():
            if self._up.returncode is not None or time.monotonic() > deadline:
                raise StageError(f"paceline up did not come up:\n{self.said()}")
            await asyncio.sleep(POLL_SECONDS)
        await self.whole(READY_SECONDS)

    @property
    def ended(self) -> str:
        """The last words of ``paceline up`` if it has ended, which nothing here asks it to do."""
        if self._up is None or self._up.returncode is None:
            return ""
        return f"paceline up ended: {self.said().strip().splitlines()[-1]}"

    def setting(self, section: str, name: str) -> Any:
        """What was last deployed."""
        return self._settings[section][name]

    def wanted(self, role: Role) -> tuple[int, int]:
        """How many workers of a role there must be, at least and at most."""
        pool = self._settings[role.value]
        if most := pool.get("max_replicas"):
            return pool["min_replicas"], most
        return (pool["replicas"] + pool.get("standby", 0),) * 2

    async def view(self) -> dict[str, Any]:
        """What a router tells of the cluster. Raises httpx.HTTPError."""
        return await cluster_view(self.url)

    def said(self) -> str:
        """All that ``paceline up`` has printed."""
        return (self._folder / "paceline.log").read_text(encoding="utf-8", errors="replace")

    @asynccontextmanager
    async def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[None]:
        """Meanwhile with some settings changed, by section, and whole; afterwards as before, and whole again.

        Raises :class:`StageError`, TimeoutError.
        """
        before = self._settings
        try:
            if changes:
                await self.update(changes)
                await self.whole()
            yield
        finally:
            self._settings = before
            await self.update({})
            await self.whole()

    async def update(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Deploy with some settings changed, by section, while it serves, and wait until that is done.

        Raises :class:`StageError`, TimeoutError.
        """
        changed = {name: {**self._settings.get(name, {}), **section} for name, section in changes.items()}
        self._settings = {**self._settings, **changed}
        update = await self._paceline(self._settings, "update.log", "--detach")
        try:
            async with asyncio.timeout(READY_SECONDS):
                if await update.wait():
                    raise StageError((self._folder / "update.log").read_text(encoding="utf-8"))
        finally:
            if update.returncode is None:
                update.kill()
                await update.wait()

    async def node(self, order: str, name: str) -> None:
        """``add`` or ``remove`` a pretend node. Raises :class:`benchmarks.harness.processes.WorkerFailed`."""
        await asyncio.wait_for(self._nodes.ask(f"{order} {name}"), NODES_SECONDS)

    async def found(self, words: str) -> list[processes.Process]:
        """All processes that are titled so."""
        return await asyncio.to_thread(processes.processes, self._nodes.process.pid, words)

    async def workers(self, role: Role) -> list[WorkerReplica]:
        """Those that there are, running or not."""
        return await asyncio.to_thread(processes.workers, self._nodes.process.pid, role)

    async def missing(self, *roles: Role) -> str:
        """What keeps the cluster, or its workers of some roles, from being whole; empty if nothing does."""
        addresses = []
        for role in roles or Role:
            least, most = self.wanted(role)
            workers = await self.workers(role)
            ranks = self._ranks - 1 if role is Role.TARGET else 0
            well = [w for w in workers if w.running and w.address and len(w.ranks) == ranks]
            if not least <= len(well) == len(workers) <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                return f"{len(well)} {role} workers are well of {len(workers)}, wanted {wanted}"
            addresses += [worker.address for worker in well]
        return await self._unusable(addresses)

    async def _unusable(self, workers: list[str]) -> str:
        """What keeps routers from using these workers; empty if nothing does."""
        routers = await self.found(ROUTER)
        if len(routers) != (count := self.setting("router", "replicas")):
            return f"{len(routers)} routers run, wanted {count}"
        for router in routers:
            unknown = set(workers) - set(await asyncio.to_thread(router.peers))
            if unknown:
                return f"router {router.pid} is not connected to {', '.join(sorted(unknown))}"
        try:
            up = {part["address"] for part in (await self.view())["workers"] if part["state"] == WorkerState.UP}
        except httpx.HTTPError as error:
            return f"no router tells of the cluster: {error}"
        loading = set(workers) - up  # to which a router is connected as well
        return f"{', '.join(sorted(loading))} cannot be used yet" if loading else ""

    async def whole(self, seconds: float = HEAL_SECONDS) -> None:
        """Wait until all workers run and routers can use all of them. Raises :class:`StageError`."""
        await until_nothing(self.missing, seconds, "not whole again")

    async def shrunk(self) -> None:
        """Wait until every pool has as few workers as it may have. Raises :class:`StageError`."""

        async def more() -> str:
            return ", ".join([role for role in Role if len(await self.workers(role)) > self.wanted(role)[0]])

        await until_nothing(more, HEAL_SECONDS, "more workers than needed without load")

    async def left(self) -> list[str]:
        """What is wrong when nothing is asked for any more: Paceline has ended, or workers still hold sessions."""
        found = [self.ended] if self.ended else []

        async def busy() -> str:
            return ", ".join([part["id"] for part in (await self.view())["workers"] if _is_busy(part)])

        try:
            await until_nothing(busy, IDLE_SECONDS, "sessions or cache are still held")
        except (StageError, httpx.HTTPError) as error:
            found.append(str(error))
        return found

    def fresh(self, options: FaultOptions, tokens: int, count: int = FRESH) -> list[Body]:
        """So many requests that no row has asked for before."""
        first, self._numbers = self._numbers, self._numbers + count
        return options.requests(tokens, count, first)

    async def tally(self, requests: Sequence[Body], replies: Sequence[Reply]) -> ReplyTally:
        """Compare the replies with what is right. Raises httpx.HTTPError."""
        return tally(replies, await self.right_texts(requests, replies))

    async def right_texts(self, requests: Sequence[Body], replies: Sequence[Reply]) -> dict[int, str]:
        """The texts of the requests that were asked for, in plain decoding, undisturbed; each computed once."""
        turn = asyncio.Semaphore(AT_ONCE)

        async def text(http: httpx.AsyncClient, number: int) -> str:
            key = str(sorted(requests[number].items()))
            async with turn:
                if key not in self._texts:
                    self._texts[key] = await plain_text(http, self.url, requests[number])
            return self._texts[key]

        numbers = sorted({reply.number for reply in replies})
        async with client() as http:
            http.timeout = httpx.Timeout(READY_SECONDS)  # nothing is said before a text is whole, however long it is
            return dict(zip(numbers, await asyncio.gather(*(text(http, number) for number in numbers)), strict=True))

    async def down(self) -> str:
        """End Paceline; what was wrong with how it ended, if anything."""
        if self._up is None:
            return ""
        if self._up.returncode is None:
            self._up.send_signal(signal.SIGINT)
        try:
            code = await asyncio.wait_for(self._up.wait(), STOP_SECONDS)
        except TimeoutError:
            self._up.kill()
            code = await self._up.wait()
        return f"paceline up ended with {code}:\n{self.said()}" if code else ""

    async def _paceline(self, settings: dict[str, Any], log: str, *flags: str) -> Process:
        file = self._folder / "paceline.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "cluster.cli", "up", "--address", self._nodes.first, "--config", str(file)]
        with (self._folder / log).open("w") as output:
            return await asyncio.create_subprocess_exec(
                *(*command, *flags),
                cwd=CHECKOUT,
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                env=environment(haproxy=self._haproxy),
            )


def environment(*, haproxy: bool = False) -> dict[str, str]:
    """Of every process of the stage."""
    told = haproxy_environment() if haproxy else {}
    return {**current(), **ENVIRONMENT, **told, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"}


@asynccontextmanager
async def running(settings: dict[str, Any], *, haproxy: bool = False) -> AsyncIterator[Stage]:
    """A stage that serves, with all its workers. Raises :class:`StageError`.

    ``haproxy``: behind HAProxy, as in Kubernetes, and not behind Serve's own proxy.
    """
    nodes = child(
        "pretend nodes",
        "benchmarks.chaos.nodes",
        *("--serve", str(settings["router"]["port"])),
        env=environment(haproxy=haproxy),
        patience=STOP_SECONDS,
    )
    async with nodes as holding:
        with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder:
            stage = Stage(holding, Path(folder), settings, haproxy=haproxy)
            try:
                await stage.up()
                yield stage
            except BaseException:
                await stage.down()
                raise
            if complaint := await stage.down():
                raise StageError(complaint)


async def until_nothing(wrong: Callable[[], Awaitable[str]], seconds: float, why: str) -> None:
    """Ask what is wrong until nothing is. Raises :class:`StageError`."""
    deadline = time.monotonic() + seconds
    while said := await wrong():
        if time.monotonic() > deadline:
            raise StageError(f"{why} after {seconds:.0f} s: {said}")
        await asyncio.sleep(POLL_SECONDS)


def _is_busy(worker: Mapping[str, Any]) -> bool:
    """Whether anything is left of any session, as a router knows a worker that is up."""
    cache = worker["cache"]
    left = worker["sessions"] or worker["waiting"] or cache["free"] != cache["capacity"]
    return worker["state"] == WorkerState.UP and bool(left)
