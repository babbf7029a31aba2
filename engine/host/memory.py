"""How much memory this process may still use.

On a CPU that is what the machine has left, and no more than what is left to each control group the process is in
(containers, systemd), of either version. Knows nothing of what the memory is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _MappedFiles:
    """Where a version of control groups keeps its figures."""

    limit: str
    used: str
    cache: str
    """The entry of ``memory.stat`` for file contents that are dropped when memory is short; they count as used."""


V1 = _MappedFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _MappedFiles("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of one GPU, in bytes."""

    total: int
    free: int
    own: int
    """What this process holds."""


def gpu_memory(device: torch.device) -> GpuMemory:
    """How the memory of a GPU is used now."""
    # Torch keeps what it no longer uses, such as the memory of weights that quantised ones have replaced.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_reserved(device))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory left to this process on the machine whose file system is at ``root``, in bytes."""
    left = [_left_in_group(folder, files) for folder, files in _groups(root)]
    return max(0, min([_left_on_machine(root), *(bytes_ for bytes_ in left if bytes_ is not None)]))


def _left_on_machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _groups(root: Path) -> Iterator[tuple[Path, _MappedFiles]]:
    """The folders of all groups that this process is in, as far as they can be seen from here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "sys/fs/cgroup/memory", V1) if controllers else (root / "sys/fs/cgroup", V2)
        yield base, files
        folder = base
        for name in Path(path.lstrip("/")).parts:
            folder /= name
            yield folder, files


def _left_in_group(folder: Path, files: _MappedFiles) -> int | None:
    """None: no limit, or none to be seen."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get(files.cache, 0))
