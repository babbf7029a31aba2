"""A child process that does not outlive its parent, even when the parent is killed without a chance to clean up."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def exit_with(parent: int) -> None:
    """Have the kernel end this process when the parent with this id ends. Linux only; elsewhere nothing happens.

    The signal comes when the *thread* that started this process ends, so start children from a lasting one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(128 + signal.SIGKILL)
