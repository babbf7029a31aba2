"""Which OpenMP runtime the process of a worker computes with: LLVM's, where it is installed and nobody has chosen.

PyTorch brings GCC's libgomp. There, threads that have nothing to do let others run but stay awake, so a step on two
threads takes many times as long as soon as anything else wants a core, be it the router (docs/engine.md has figures).
LLVM's runtime has the functions of both, so PyTorch and what GCC compiles compute with one team of threads.

It has to be loaded before PyTorch's, so the environment that a process is started with names it: whoever starts a
worker adds :func:`environment`; a worker that somebody started by hand begins once more with it. Decides nothing about
the number of threads, and no bit of a result depends on it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from functools import cache
from pathlib import Path

from cluster.config.environment import current

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


@cache
def runtime() -> Path | None:
    """The library, if it is installed, on the platform it was measured on."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    installed = (Path(folder, LIBRARY).absolute() for folder in sys.path if folder)
    return next((path for path in installed if path.is_file() and not re.search(r"[\s:]", str(path))), None)


def environment() -> dict[str, str]:
    """What to add to the environment of a process that computes; nothing where somebody has chosen already."""
    before = current()
    library, preloaded = runtime(), before.get(PRELOAD, "")
    if library is None or CHOICE in before or _RUNTIME.search(preloaded):
        return {}
    waiting = before.get(WAITING, WAITING_MS)
    return {CHOICE: "llvm", PRELOAD: f"{library} {preloaded}".strip(), WAITING: waiting}


def begin_again() -> None:
    """Run the command line of this process once more with that environment, if it is to compute with it."""
    chosen = environment()
    if chosen:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], current() | chosen)
