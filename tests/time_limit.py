"""A test that hangs fails, with where it stood; the others go on."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
import traceback
from collections.abc import Generator
from typing import Any

import pytest

SECONDS = 1200.0
"""That a test may take without its fixtures: twice the longest wait in one, and below ``faulthandler_timeout``."""


class Hung(Exception):
    """A test took longer than any may."""


class Alarm(KeyboardInterrupt):
    """Passes what catches exceptions, an event loop and its tasks as well."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Interrupt the test when its time is over. What runs outside Python for ever is left to ``faulthandler``."""

    def ring(*_: object) -> None:
        tell()
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return (yield)
    except Alarm:
        raise Hung(f"{item.nodeid} took more than {SECONDS:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def tell() -> None:
    """Where the tasks of the running loop wait and all threads stand, on stderr."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop runs
        tasks = set()
    for task in tasks:
        sys.stderr.write(f"{task.get_name()} waits:\n")
        awaited: Any = task.get_coro()
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            traceback.print_stack(frame, limit=1)
            awaited = awaited.cr_await
    sys.stderr.flush()
    faulthandler.dump_traceback(2)
