"""How much memory this process may still use, and memory in pages of 2 MB.

On a CPU that is what the machine has left, and no more than what is left to each control group the process is in
(containers, systemd), of either version. Knows nothing of what the memory is for.

A step reads every weight once, in order. With pages of 4 KB the processor looks up a new one for every 64 lines, and
its prefetcher stops at the end of each; in huge pages the same products run some percent faster. Linux makes them of
memory that is there already (madvise(2), MADV_COLLAPSE, from 6.1 on), so nothing is allocated or rounded up for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who asks for the limits of a process alone need not wait for it
    import torch

GIB = 1 << 30


HUGE = 2 << 20
"""Bytes of a huge page: on x86-64, and on arm64 with pages of 4 KB."""
MADV_COLLAPSE = 25
"""As in Linux's ``mman-common.h``; Python's mmap module does not know it."""


FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files of the limit and of what is used, and the entry of ``memory.stat`` for file
contents that are dropped when memory is short, which count as used."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of one GPU, in bytes."""

    total: int
    free: int
    own: int
    """What this process holds."""


def gpu_memory(device: torch.device) -> GpuMemory:
    """How the memory of a GPU is used now."""
    import torch

    # Torch keeps what it no longer uses, such as the memory of weights that quantised ones have replaced.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_reserved(device))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory left to this process on the machine whose file system is at ``root``, in bytes."""
    left = [_left_in_group(folder, FILES[version]) for folder, version in control_groups("memory", root)]
    return max(0, min([_left_on_machine(root), *(bytes_ for bytes_ in left if bytes_ is not None)]))


def _left_on_machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The folder of each group that this process is in by ``controller``, outermost first, and its version: 1 or 2.

    As far as they can be seen from here, on the machine whose file system is at ``root``; a folder need not be there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder, version = root / "sys/fs/cgroup" / (controller if controllers else ""), 1 if controllers else 2
        for name in ("", *Path(path.lstrip("/")).parts):
            folder /= name
            yield folder, version


def _left_in_group(folder: Path, files: tuple[str, str, str]) -> int | None:
    """None: no limit, or none to be seen."""
    limit_file, used_file, cache = files
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get(cache, 0))


def collapse(address: int, size: int) -> int:
    """Ask for huge pages, as far as whole ones fit into ``size`` bytes at ``address``; return how many bytes got them.

    Where the answer is no the memory stays as it is. What it holds does not change; what of it was never
    written to is taken up by zeros.
    """
    first, end = -(-address // HUGE) * HUGE, (address + size) // HUGE * HUGE
    if sys.platform != "linux" or mmap.PAGESIZE > 4096 or end <= first:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    refused: int = madvise(first, end - first, MADV_COLLAPSE)
    return 0 if refused else end - first
