"""Ranks that are forked from a process with all imports done, which are nearly all that the start of one takes.

They run what others run, from reading their task on. How a process comes that far is tested with others.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

from cluster.processes.child import environment

PRELOADED = ["cluster.processes.rank_processes", "engine.build", "transformers.models.llama.modeling_llama"]

_context = multiprocessing.get_context("forkserver")


class ForkedProcess:
    """What is asked of a :class:`subprocess.Popen`, of a fork that is no child of this process."""

    def __init__(self, module: str) -> None:
        """Start it."""
        stdin, self.stdin = _context.Pipe(duplex=False)
        self._stdout, stdout = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_become, args=(module, environment(), stdin, stdout), daemon=True)
        _context.set_forkserver_preload(PRELOADED)
        self._process.start()
        stdin.close()
        stdout.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout = os.fdopen(self._stdout.fileno(), errors="replace", closefd=False)
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._await, daemon=True).start()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises :class:`subprocess.TimeoutExpired`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def _await(self) -> None:
        self._process.join()
        self.returncode = self._process.exitcode
        self._ended.set()


def _become(module: str, variables: Mapping[str, str], stdin: Connection, stdout: Connection) -> None:
    """Be the rank that ``python -m module`` is; whoever starts it holds the other end of ``stdin``."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(stdin.fileno(), 0)
    for descriptor in (1, 2):
        os.dup2(stdout.fileno(), descriptor)
    stdin.close()
    stdout.close()
    sys.stdin, sys.argv = os.fdopen(0, closefd=False), [module, str(os.getppid())]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
