"""What a process of ours begins with: an OpenMP runtime, a claim to the processor, and its ties to who started it.

OpenMP is LLVM's, where it is installed and nobody has chosen. PyTorch brings GCC's libgomp. There, threads that have
nothing to do let others run but stay awake, so a step on two threads takes many times as long as soon as anything else
wants a core, be it the router (docs/engine.md has figures). LLVM's runtime has the functions of both, so PyTorch and
what GCC compiles compute with one team of threads. It has to be loaded before PyTorch's, so the environment that a
process is started with names it: whoever starts a worker adds :func:`openmp_environment`; a worker that somebody
started by hand begins once more with it. Decides nothing about the number of threads, and no bit of a result depends on
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cluster.config.environment import current, variable

LIBRARY = "cmeel.prefix/lib/libomp.so"
"""Where the package cmeel-libomp has it, below the folder that it is installed in."""
CHOICE = "PACELINE_OPENMP"
"""Variable that says what was chosen: ``llvm``, or anything else, such as ``system``, for what PyTorch brings."""
PRELOAD = "LD_PRELOAD"
WAITING = "KMP_BLOCKTIME"
WAITING_MS = "0"
"""How long a thread without work stays awake. Target and drafter share cores: what one waits, the other lacks."""
_RUNTIME = re.compile(r"(^|[/:\s])lib(g|i|)omp5?\.so")
"""Any OpenMP runtime in a list of libraries."""
NICENESS: Mapping[str, str] = {"RAY_worker_niceness": "0"}
"""With what claim to the processor Ray runs our processes: the environment of a replica, or of a node, for Serve's
controller and proxies as well. The same for what serves as for what starts.

Ray's own is 15, but a process takes it on only once it has joined its node. Before, for the seconds in which it imports
Ray, it has niceness 0: the weight of 28 processes that serve (``sched_prio_to_weight`` in Linux: 1024 to 36). Where
cores are few, a replica that is started then all but stops those that stream.
"""
READY, STOPPING = "READY=1", "STOPPING=1"
"""States of a service of ``Type=notify``."""
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


@cache
def runtime() -> Path | None:
    """The library, if it is installed, on the platform it was measured on."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    installed = (Path(folder, LIBRARY).absolute() for folder in sys.path if folder)
    return next((path for path in installed if path.is_file() and not re.search(r"[\s:]", str(path))), None)


def openmp_environment() -> dict[str, str]:
    """What to add to the environment of a process that computes; nothing where somebody has chosen already."""
    before = current()
    library, preloaded = runtime(), before.get(PRELOAD, "")
    if library is None or CHOICE in before or _RUNTIME.search(preloaded):
        return {}
    waiting = before.get(WAITING, WAITING_MS)
    return {CHOICE: "llvm", PRELOAD: f"{library} {preloaded}".strip(), WAITING: waiting}


def begin_again() -> None:
    """Run the command line of this process once more with that environment, if it is to compute with it."""
    chosen = openmp_environment()
    if chosen:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], current() | chosen)


def exit_with(parent: int) -> None:
    """Have the kernel end this process when the parent with this id ends, even killed without a chance to clean up.

    Linux only; elsewhere nothing happens. The signal comes when the *thread* that started this process ends, so start
    children from a lasting one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(128 + signal.SIGKILL)


def notify(state: str) -> None:
    """Send a state to systemd, by the protocol of sd_notify(3), if it started this process."""
    address = variable("NOTIFY_SOCKET")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
