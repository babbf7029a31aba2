"""What happens when this machine has no descriptor, memory or process left for a connection, a file or a child.

Decides what counts as that, and that it is logged once in a while instead of at every attempt: a listener alone tries
2,048 times a second (asyncio's loop over its backlog). What is under way goes on; what begins is refused. Where
no thread is left, what was to run there stays in its queue and runs, for nobody, once there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN})
"""The last is what starting a process says beyond a limit on them."""
NO_THREAD = "can't start new thread"
"""All that Python says where the system gives it none."""
QUIET_SECONDS = 30.0
MAX_DESCRIPTORS = 65536
"""As in our systemd units. Every stream takes one, and many systems give a process 1,024 at first."""


def raise_limit() -> None:
    """Let this process have :data:`MAX_DESCRIPTORS`, or as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_exhausted(error: object) -> bool:
    """Whether an error says that this machine has no more of what it gives to processes."""
    if isinstance(error, RuntimeError):
        return str(error) == NO_THREAD
    return isinstance(error, OSError) and error.errno in EXHAUSTED


class ExhaustionLog:
    """A line for the first time, then one in a while with how often it happened since. Used from one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: float | None = None
        self._unlogged = 0

    def add(self, what: str, error: object) -> None:
        """``what`` could not be done."""
        now = self._clock()
        if self._logged is not None and now - self._logged < QUIET_SECONDS:
            self._unlogged += 1
            return
        since = f", and {self._unlogged} times since the last such line" if self._unlogged else ""
        log.error("%s: %s%s; see the limits on open files and processes (ulimit -n, -u)", what, error, since)
        self._logged, self._unlogged = now, 0

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An event loop's exception handler, for what a listener cannot accept; all else is asyncio's own."""
        error = context.get("exception")
        if is_exhausted(error) and "socket" in context:
            self.add("cannot accept a connection", error)
        else:
            loop.default_exception_handler(context)
