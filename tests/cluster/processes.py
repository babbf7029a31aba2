"""Paceline's own commands as processes of a test: what they print, how they end, and that nothing outlives them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "cluster.cli"]
PATIENCE = 600.0
"""Seconds that anything may take on a machine with too much to do. Tests that wait go on as soon as it has come."""

STAGE = re.compile(r"^(?!paceline: ).* \.\.\.\n", re.MULTILINE)
"""A line on stderr that says what goes on."""

STARTS = 600.0
"""Seconds that all parts on a Ray of their own may take to start."""


def run(*arguments: str, timeout: float = PATIENCE, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself. Its stderr is without stages, which are told only if they last."""
    ended = subprocess.run(
        [*COMMAND, *arguments], cwd=CHECKOUT, input=stdin or "", capture_output=True, text=True, timeout=timeout
    )
    ended.stderr = STAGE.sub("", ended.stderr)
    return ended


def running(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended by then. Where nobody reaps orphans, they stay as zombies, which have ended."""
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        # `is_running` compares start times, so a reused id is not taken for it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Paceline:
    """A command that stays up. Leaving the block stops it and checks that no process of it is left."""

    def __init__(self, *arguments: str) -> None:
        """Start it."""
        self._family: dict[int, psutil.Process] = {}
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._all_said = False
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Paceline:
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.stop(signal.SIGTERM)
        finally:
            left = self._left()
            for process in left:
                process.kill()
            self.process.wait(10)
        assert not left, f"left running: {left}\n{self.output}"

    @property
    def output(self) -> str:
        """All it printed so far."""
        return "\n".join(self.lines)

    def expect(self, pattern: str, timeout: float = PATIENCE) -> str:
        """Wait for a line that matches; its first group, or the line."""
        deadline = time.monotonic() + timeout
        with self._said:
            while True:
                ended = self._all_said
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match[1] if match.groups() else line
                assert not ended, f"ended without {pattern!r}:\n{self.output}"
                assert time.monotonic() < deadline, f"no {pattern!r} within {timeout} s:\n{self.output}"
                self._said.wait(0.1)

    def stop(self, number: signal.Signals, timeout: float = PATIENCE) -> int:
        """Send a signal; the exit code."""
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.ended(timeout)

    def stop_all(self, number: signal.Signals, timeout: float = PATIENCE) -> int:
        """Send a signal to it and all its descendants, as one to a group or a service does; the exit code."""
        family = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(number)  # first, so that it is not left to find the others gone
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return self.ended(timeout)

    def ended(self, timeout: float = PATIENCE) -> int:
        """Wait until it has ended and all that it printed is here; the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(PATIENCE)
        return code

    def descendants(self, words: str = "") -> list[psutil.Process]:
        """Its running processes whose command line contains ``words``, oldest first."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._family |= {process.pid: process for process in found}
        return sorted((p for p in found if words in _command_line(p)), key=lambda process: process.create_time())

    def successor(self, ended: psutil.Process, words: str, timeout: float = PATIENCE) -> psutil.Process:
        """Wait for a process whose command line contains ``words`` and that is not the one that ended."""
        deadline = time.monotonic() + timeout
        while True:
            found = [process for process in self.descendants(words) if process.pid != ended.pid]
            if found:
                return found[0]
            assert time.monotonic() < deadline, f"nothing with {words!r} came after {ended.pid}:\n{self.output}"
            time.sleep(0.05)

    def _left(self) -> list[psutil.Process]:
        return running(list(self._family.values()), 30)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._all_said = True
            self._said.notify_all()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
