"""The processes of a pretend cluster as the kernel shows them: which is which replica, where it listens, what it holds.

Ray titles its processes; that, the nodes' addresses and the sockets are all that is used. Nothing is asked of Ray, so
that what is seen does not depend on what is being broken.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from cluster.config.pools import KINDS
from speculation.events import Role
from transport.address import join

REPLICA = "ray::ServeReplica:paceline:"
ROUTER, CONTROLLER, HAPROXY = f"{REPLICA}Router", "ray::ServeController", "bin/haproxy"
"""In the titles of what is no worker. HAProxy: the one that is asked, and older ones that still carry streams."""
MEGABYTE = 1 << 20
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied)
_IDLE = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, psutil.STATUS_DEAD)
Told = TypeVar("Told")


def _unless_gone(ask: Callable[[], Told], otherwise: Told) -> Told:
    try:
        return ask()
    except GONE:
        return otherwise


@dataclass(frozen=True, slots=True)
class Process:
    """One that was found running. Of one that is gone, everything is nothing."""

    title: str
    handle: Any

    @property
    def pid(self) -> int:
        """Its number."""
        return int(self.handle.pid)

    @property
    def running(self) -> bool:
        """Whether it lives and is not held by SIGSTOP."""
        return _unless_gone(lambda: self.handle.is_running() and self.handle.status() not in _IDLE, False)

    @property
    def resident_mb(self) -> float:
        """Memory."""
        return _unless_gone(lambda: self.handle.memory_info().rss / MEGABYTE, 0.0)

    @property
    def descriptors(self) -> int:
        """Open files and sockets."""
        return _unless_gone(lambda: int(self.handle.num_fds()), 0)

    @property
    def node(self) -> str:
        """Address of the pretend node it runs on."""
        words: list[str] = _unless_gone(lambda: list(self.handle.parent().cmdline()), [])
        flag = "--node_ip_address="
        return next((word.removeprefix(flag) for word in words if word.startswith(flag)), "")

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        _unless_gone(lambda: self.handle.send_signal(number), None)

    def connections(self) -> list[Any]:
        """Its TCP sockets."""
        return _unless_gone(lambda: list(self.handle.net_connections("tcp")), [])

    def listens(self) -> str:
        """Where a worker serves gRPC: its one port on the address of its node. Empty if it does not yet."""
        node = self.node
        found = [c.laddr for c in self.connections() if c.status == psutil.CONN_LISTEN]
        ports = [address.port for address in found if _plain(address.ip) == node]
        return join(node, ports[0]) if len(ports) == 1 else ""

    def peers(self) -> list[str]:
        """Where its connections lead."""
        found = [c.raddr for c in self.connections() if c.status == psutil.CONN_ESTABLISHED]
        return [join(_plain(address.ip), address.port) for address in found]


@dataclass(frozen=True, slots=True)
class WorkerReplica:
    """A replica of a worker pool, and the processes of its other ranks."""

    node: str
    address: str
    """Where it serves gRPC; empty if it does not."""
    replica: Process
    ranks: tuple[Process, ...]

    @property
    def running(self) -> bool:
        """Whether all its processes are."""
        return all(process.running for process in (self.replica, *self.ranks))


def processes(root: int, words: str = "") -> list[Process]:
    """Those below the one of this id that are titled so, oldest first."""
    found = []
    for handle in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(*GONE):
            if handle.status() != psutil.STATUS_ZOMBIE and words in (title := " ".join(handle.cmdline())):
                found.append(Process(title, handle))
    return sorted(found, key=lambda process: process.pid)


def workers(root: int, role: Role) -> list[WorkerReplica]:
    """The workers of a role, as far as they have started. A node holds one at most."""
    found = []
    everything = processes(root)
    for replica in everything:
        if f"{REPLICA}{KINDS[role]}" in replica.title:
            node = replica.node
            ranks = (p for p in everything if f"ray::paceline:{role}" in p.title and p.node == node)
            found.append(WorkerReplica(node, replica.listens(), replica, tuple(ranks)))
    return sorted(found, key=lambda worker: worker.node)


def _plain(ip: str) -> str:
    """An IPv4 address that a socket for both families calls ``::ffff:`` and so on."""
    return ip.removeprefix("::ffff:")
