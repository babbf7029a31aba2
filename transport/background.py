"""A call in a thread that nobody waits for at the end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """What a call returns or raises, in a thread of this name that neither a loop nor the process waits for.

    It cannot be cancelled: whoever gives up waiting does not take the future from the thread.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # raised by whoever waits
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
