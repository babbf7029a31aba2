"""The processes of a pretend cluster as the kernel shows them: which is which replica, where it listens, what it holds.

Ray titles its processes; that, the nodes' addresses and the sockets are all that is used. Nothing is asked of Ray, so
that what is seen does not depend on what is being broken.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

from speculation.events import Role
from transport.address import join

REPLICA = "ray::ServeReplica:paceline:"
CONTROLLER = "ray::ServeController"
_KINDS = {Role.TARGET: "TargetWorker", Role.DRAFT: "DraftWorker"}
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied)


@dataclass(frozen=True, slots=True)
class Process:
    """One that was found running."""

    title: str
    handle: Any

    @property
    def pid(self) -> int:
        """Its number."""
        return int(self.handle.pid)

    @property
    def running(self) -> bool:
        """Whether it lives and is not held by SIGSTOP."""
        with contextlib.suppress(*GONE):
            return self.handle.is_running() and self.handle.status() not in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_STOPPED,
                psutil.STATUS_DEAD,
            )
        return False

    @property
    def resident(self) -> int:
        """Bytes of memory; 0 if it is gone."""
        with contextlib.suppress(*GONE):
            return int(self.handle.memory_info().rss)
        return 0

    @property
    def descriptors(self) -> int:
        """Open files and sockets; 0 if it is gone."""
        with contextlib.suppress(*GONE):
            return int(self.handle.num_fds())
        return 0

    @property
    def node(self) -> str:
        """Address of the pretend node it runs on."""
        with contextlib.suppress(*GONE):
            for part in self.handle.parent().cmdline():
                if part.startswith("--node_ip_address="):
                    return str(part.partition("=")[2])
        return ""

    def send(self, number: signal.Signals) -> None:
        """A signal; nothing happens if it is gone."""
        with contextlib.suppress(*GONE):
            self.handle.send_signal(number)

    def connections(self) -> list[Any]:
        """Its TCP sockets."""
        with contextlib.suppress(*GONE):
            return list(self.handle.net_connections("tcp"))
        return []

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

    role: Role
    node: str
    address: str
    """Where it serves gRPC; empty if it does not."""
    replica: Process
    ranks: tuple[Process, ...]

    @property
    def running(self) -> bool:
        """Whether all its processes are."""
        return all(process.running for process in (self.replica, *self.ranks))


class Processes:
    """All processes below one."""

    def __init__(self, root: int) -> None:
        """``root``: the id of the process that runs the pretend nodes."""
        self._root = psutil.Process(root)

    def found(self, words: str) -> list[Process]:
        """Those titled so, oldest first."""
        return sorted((p for p in self._all() if words in p.title), key=lambda process: process.pid)

    def workers(self, role: Role) -> list[WorkerReplica]:
        """The workers of a role, as far as they have started. A node holds one at most."""
        everything = list(self._all())
        found = []
        for replica in everything:
            if f"{REPLICA}{_KINDS[role]}" in replica.title:
                node = replica.node
                ranks = (p for p in everything if f"ray::paceline:{role}" in p.title and p.node == node)
                found.append(WorkerReplica(role, node, replica.listens(), replica, tuple(ranks)))
        return sorted(found, key=lambda worker: worker.node)

    def routers(self) -> list[Process]:
        """The routers' processes."""
        return self.found(f"{REPLICA}Router")

    def haproxies(self) -> list[Process]:
        """The processes of HAProxy: the one that is asked, and older ones that still carry streams."""
        return self.found("bin/haproxy")

    def _all(self) -> Iterator[Process]:
        for handle in self._root.children(recursive=True):
            with contextlib.suppress(*GONE):
                if handle.status() != psutil.STATUS_ZOMBIE:
                    yield Process(" ".join(handle.cmdline()), handle)


def _plain(ip: str) -> str:
    """An IPv4 address that a socket for both families calls ``::ffff:`` and so on."""
    return ip.removeprefix("::ffff:")
