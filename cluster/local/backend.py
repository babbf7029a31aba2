"""The local backend: workers and a router as child processes, watched and started again, without Ray.

Every process keeps its port for life, so routers find a worker again where it was. Stopping stops all of them; if this
process is killed, the kernel ends them (see :mod:`cluster.processes.starting`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cluster.config.config import Config, max_replicas_of
from cluster.config.flags import AFTER_INPUT
from cluster.config.serving import worker_config
from cluster.console import CommandError, Stages, complain
from cluster.local.gpus import Turns, here
from cluster.processes.child import Child, HeldPort, ours
from cluster.processes.starting import openmp_environment

POLL_SECONDS = 0.1
STOP_SECONDS = 8.0
"""How long children get to end by themselves."""
DRAIN_SECONDS = 5.0
"""How long of that running requests get."""


class LocalProcesses:
    """All processes of a Paceline on this machine. Used from one thread, the one that lives longest."""

    def __init__(self, config: Config) -> None:
        # All parts stop together, so there is nowhere to move to.
        router = replace(config.router, drain_timeout=min(config.router.drain_timeout, DRAIN_SECONDS))
        config = replace(config, drain_timeout=min(config.drain_timeout, DRAIN_SECONDS), router=router)
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        self._report: Stages | None = None
        self._stopping = False
        self._workers: list[Child] = []
        self._ports: list[HeldPort] = []
        arguments: list[str] = []
        turns = Turns(here())
        for pool in config.pools():
            file = self._write(f"{pool.deployment}.yaml", worker_config(config, pool))
            for index in range(max_replicas_of(pool.settings)):
                port = HeldPort()
                command = self._command(file, "worker", pool.role.value, "--listen", port.address)
                variables = turns.environment(pool.settings) | openmp_environment()
                self._workers.append(Child(f"{pool} {index}", command, self._heard, variables))
                self._ports.append(port)
                arguments += [f"--{pool.role}", port.address]
        file = self._write("paceline.yaml", config)
        self._router = Child("router", self._command(file, "router", AFTER_INPUT, *arguments), self._heard)

    @property
    def children(self) -> list[Child]:
        """Every process, the router last."""
        return [*self._workers, self._router]

    def start(self, report: Stages) -> None:
        """Start everything and wait until it serves. Raises :class:`cluster.console.CommandError`."""
        self._report = report
        deadline = time.monotonic() + self._config.start_timeout
        for child in self.children:
            report("starting", child.name)
            child.start(time.monotonic(), held=child is self._router)
        self._await(self._workers, deadline, lambda worker: worker.listens)
        self._router.release()  # it serves, and says in /ready what workers do
        self._await(self.children, deadline, lambda child: child.ready)
        self._report = None

    def watch(self) -> None:
        """Start again what ends. Returns never."""
        while True:
            for child in self.children:
                if happened := child.restart_if_due(time.monotonic()):
                    complain(happened)
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End all processes and remove what was written."""
        self._stopping = True
        for child in reversed(self.children):
            child.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self.children:
            child.stop(max(deadline - time.monotonic(), 0.0))
        for port in self._ports:
            port.close()
        self._folder.cleanup()

    def _await(self, children: list[Child], deadline: float, there: Callable[[Child], bool]) -> None:
        while waiting := [child for child in children if not there(child)]:
            for child in waiting:
                if child.ended:
                    raise CommandError(f"{child.name} cannot start: {child.reason}")
            if time.monotonic() > deadline:
                text = f"not ready within {self._config.start_timeout:.0f} s (start_timeout)"
                raise CommandError(f"{text}: {', '.join(child.name for child in waiting)}")
            time.sleep(POLL_SECONDS)

    def _write(self, name: str, config: Config) -> str:
        file = Path(self._folder.name) / name
        file.write_text(config.to_yaml(), encoding="utf-8")
        return str(file)

    def _command(self, file: str, *arguments: str) -> list[str]:
        return ours("cluster.cli", *arguments, "--config", file, "--exit-with", str(os.getpid()))

    def _heard(self, name: str, line: str) -> None:
        """Progress while starting; later whatever a process has to say, but not that others end while all do."""
        if self._report is not None:
            self._report(line.removesuffix(" ..."), name)
        elif not self._stopping:
            complain(f"[{name}] {line}")
