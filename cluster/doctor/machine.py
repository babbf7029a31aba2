"""What a machine has besides GPUs: cores, ports, disk and shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.config.config import Config
from cluster.config.pools import chosen_threads
from cluster.doctor.finding import Finding, ok, problem, warning
from engine.host.memory import GIB
from transport.address import AddressError, check_free, join

SHARED_MEMORY = Path("/dev/shm")
DISK_SHARE = 0.95
"""Ray stops writing to a disk that is fuller than this."""
TIGHT_DISK = 2 * GIB
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Of a file system, in bytes."""

    total: int
    free: int


def room_of(folder: Path) -> Room | None:
    """None where there is no such file system."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Room(usage.total, usage.free)


def check_threads(config: Config, cores: int) -> Iterator[Finding]:
    """Whether workers of this machine ask for more threads than it has cores."""
    pools = [pool.settings for pool in config.pools() if pool.settings.replicas]
    asked = sum(pool.replicas * pool.tensor_parallel_size * chosen_threads(pool) for pool in pools)
    chosen = any(isinstance(pool.threads, int) for pool in pools)
    if chosen and asked > cores:
        text = f"workers here compute with {asked} threads, but there are {cores} cores"
        yield warning("cores", text, "lower target.threads or draft.threads, or leave them at auto")
    else:
        yield ok("cores", f"{cores}")


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Whether HTTP can be served where the configuration says."""
    address = join(host, port)
    try:
        check_free(address)
    except AddressError as error:
        fix = f"end what listens there, or set router.port; if it is Paceline, `paceline doctor --url http://{address}`"
        yield problem("port", str(error), fix)
    else:
        yield ok("port", f"{address} is free")


def check_disk(folder: Path, room: Room | None) -> Iterator[Finding]:
    """Whether Ray and logs have room."""
    if room is None or not room.total:
        return
    text = f"{folder} has {room.free / GIB:.1f} of {room.total / GIB:.0f} GiB free"
    if room.free < (1 - DISK_SHARE) * room.total:
        yield problem("disk", f"{text}, and Ray stops at {DISK_SHARE:.0%}", "make room, or set TMPDIR to a larger disk")
    elif room.free < TIGHT_DISK:
        yield warning("disk", text, "make room for logs and for objects that Ray spills")
    else:
        yield ok("disk", text)


def check_shared_memory(room: Room | None, object_store_mb: int) -> Iterator[Finding]:
    """Whether Ray's object store fits; where it does not, Ray falls back to the disk."""
    needed = object_store_mb * MIB
    if room is None:
        yield warning(str(SHARED_MEMORY), "is missing", "mount a tmpfs there; Ray keeps objects on disk otherwise")
    elif room.free < needed:
        text = f"has {room.free // MIB} MB free, Ray's object store takes {object_store_mb}"
        fix = (
            "give the container more (docker --shm-size, a Memory emptyDir in Kubernetes), or lower ray.object_store_mb"
        )
        yield warning(str(SHARED_MEMORY), text, fix)
    else:
        yield ok(str(SHARED_MEMORY), f"{room.free // MIB} MB free")


def check(config: Config) -> Iterator[Finding]:
    """All of the above, for a Paceline that is to run on this machine."""
    yield from check_threads(config, len(os.sched_getaffinity(0)))
    yield from check_port(config.router.host, config.router.port)
    folder = Path(tempfile.gettempdir())
    yield from check_disk(folder, room_of(folder))
    if config.backend == "ray":
        yield from check_shared_memory(room_of(SHARED_MEMORY), config.ray.object_store_mb)
