"""One supervised process: its ready line, what it said last, and when it may be started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from cluster.config.environment import CHECKOUT, current
from cluster.console import CommandError

RESTART_SECONDS = (0.2, 1.0, 3.0, 10.0)
"""Pauses before starting a process again that ended; the last one repeats."""
STEADY_SECONDS = 60.0
"""After this long a process counts as healthy: the next pause is the first one again."""
REMEMBERED_LINES = 5
LAST_WORDS_SECONDS = 5.0
"""How long the last lines of a process that ended are waited for."""


class Child:
    """A process that says on stdout when it is ready. All methods are called from one thread."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        heard: Callable[[str, str], None],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``heard`` gets the name and each line on stderr, from other threads; ``variables``: see :func:`spawn`."""
        self.name, self._command, self._heard = name, command, heard
        self._variables = variables or {}
        self._process: subprocess.Popen[str] | None = None
        self._said: deque[str] = deque(maxlen=REMEMBERED_LINES)
        self._told: set[str] = set()
        self._readers: list[threading.Thread] = []
        self._ends = 0
        self._started = self._again = 0.0

    @property
    def ready(self) -> bool:
        """Whether the running process said so."""
        return "ready" in self._told

    @property
    def listens(self) -> bool:
        """Whether the running process said that it does, ready or not."""
        return "loading" in self._told

    @property
    def pid(self) -> int:
        """Of the process started last."""
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it ended, or was never started."""
        return self._process is None or self._process.poll() is not None

    @property
    def reason(self) -> str:
        """Why it ended: the signal, else the last line it said, else its exit code."""
        assert self._process is not None
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by signal {-code}"
        for reader in self._readers if code is not None else ():
            reader.join(LAST_WORDS_SECONDS)
        return self._said[-1].removeprefix("paceline: ") if self._said else f"exit code {code}"

    def start(self, now: float, *, held: bool = False) -> None:
        """Start it; the previous process must have ended. ``held``: its input ends only with :meth:`release`."""
        assert self.ended
        self._told, self._started = set(), now
        self._said.clear()
        self._process = process = spawn(self._command, self._variables, held=held)
        assert process.stdout and process.stderr
        self._readers = [
            threading.Thread(target=_read_output, args=(process.stdout, self._told), daemon=True, name=self.name),
            threading.Thread(target=self._read_errors, args=(process.stderr,), daemon=True, name=self.name),
        ]
        for reader in self._readers:
            reader.start()

    def restart_if_due(self, now: float) -> str | None:
        """Start it again if it ended, after a pause; what happened, if something did."""
        if not self.ended:
            return None
        if not self._again:
            self._ends = 1 if now - self._started > STEADY_SECONDS else self._ends + 1
            pause = RESTART_SECONDS[min(self._ends, len(RESTART_SECONDS)) - 1]
            self._again = now + pause
            return f"{self.name} ended ({self.reason}); starting it again"
        if now >= self._again:
            try:
                self.start(now)
            except OSError as error:  # this machine has no process or no file left for it
                self._again = now + RESTART_SECONDS[-1]
                return f"{self.name} cannot be started ({error.strerror}); trying again"
            self._again = 0.0
        return None

    def release(self) -> None:
        """End its input."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self, seconds: float) -> None:
        """Wait for a terminated process to end; kill it when it takes too long."""
        if self._process is None:
            return
        self.release()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _read_errors(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if text := line.rstrip():
                    self._said.append(text)
                    self._heard(self.name, text)


def _read_output(stream: IO[str], told: set[str]) -> None:
    with stream:
        for line in stream:
            told.update(state for state in ("loading", "ready") if f" {state} on " in line)


def spawn(
    command: Sequence[str], variables: Mapping[str, str], *, held: bool = False, merged: bool = False
) -> subprocess.Popen[str]:
    """Start a process that is read from; ``variables`` are added to its environment.

    Its input is empty; ``held``: it has not ended yet, so that the process can wait for the end. ``merged``: what it
    says on stderr comes by stdout. In a session of its own, so that Ctrl-C reaches only the process that started it.
    """
    return subprocess.Popen(
        command,
        env=environment() | dict(variables),
        stdin=subprocess.PIPE if held else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def ours(module: str, *arguments: str) -> list[str]:
    """A command line that runs one of our modules with this interpreter; see :func:`environment`."""
    # -P: a folder named cluster where the user happens to be must not be taken for ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """The environment of this process, with Paceline importable."""
    inherited = current()
    paths = [str(CHECKOUT), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": os.pathsep.join(paths)}


class HeldPort:
    """A port that nobody else is given: neither whoever asks for a free one, nor a connection.

    It is bound and not listened on. Linux lets one other socket listen there nevertheless, where both say SO_REUSEADDR,
    as servers do; a second one is refused as ever. Elsewhere nothing is held: the port was free a moment ago.
    """

    def __init__(self) -> None:
        """Raises :class:`cluster.console.CommandError` when no port is free."""
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", 0))
            self.number: int = self._socket.getsockname()[1]
        except OSError as error:
            self._socket.close()
            raise CommandError(f"no port of 127.0.0.1 is free: {error.strerror}") from error
        self.address = f"127.0.0.1:{self.number}"
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()
