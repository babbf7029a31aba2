"""One rank's membership of a group: how ranks find each other, and what they say to each other.

Decides the time limits of everything that waits for another rank. There can be one group in a process, because
transformers distributes a model over all ranks that torch knows.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.nn.functional import pad

from engine.settings import EngineSettings

HOST = "127.0.0.1"
"""The ranks of a group are processes of one machine."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
CONNECTING = timedelta(minutes=2)
"""How long a rank, 0 included, tries to reach the rendezvous, which listens by then."""
COMPUTING = timedelta(seconds=60)
"""How long they wait for each other for and in a step, where all take the same time."""
IDLE = timedelta(days=365)
"""How long the others wait for the next step."""
FRAME_BYTES = 1 << 14
"""What a broadcast carries; a longer message takes a second one."""
LENGTH_BYTES = 8
CHECK = b"answer"
"""What rank 0 says instead of a step, to see whether the others are there."""
GATHERED_BYTES = 1 << 20
"""Up to so many of all ranks together, parts of a sum are sent whole to every rank: one exchange instead of two."""


class RankError(Exception):
    """A group cannot go on. One line that names the rank, and why if that is known."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank other than 0 has to know before it meets the others; can be pickled."""

    rank: int
    port: int
    """Of rank 0's rendezvous."""
    settings: EngineSettings


def rendezvous(world: int, port: int | None = None) -> TCPStore:
    """Where ``world`` ranks meet, on the loopback interface: rank 0 opens it, the others give its port."""
    if port is not None:
        return TCPStore(HOST, port, world, False, CONNECTING, wait_for_workers=False)
    listener = socket.socket()  # torch itself would listen on all interfaces
    listener.bind((HOST, 0))
    number = listener.getsockname()[1]
    descriptor = listener.detach()  # the store closes it
    return TCPStore(HOST, number, world, True, CONNECTING, wait_for_workers=False, master_listen_fd=descriptor)


def joined_key(rank: int) -> str:
    """What the rendezvous store holds once ``rank`` is there."""
    return f"joined {rank}"


class Group:
    """All ``world`` ranks of one worker, seen from one of them."""

    def __init__(self, rank: int, world: int, store: Store, device: torch.device, load_timeout: float) -> None:
        """Meet the others at ``store``; every rank does so at the same time. ``device``: of any rank, such as cuda.

        ``load_timeout``: seconds from now in which all must have loaded.
        """
        self.rank = rank
        self.world = world
        self.device = _own_device(device, rank)
        self.patience = COMPUTING
        """How long a rank may keep the others waiting inside a step."""
        self._loaded_by = time.monotonic() + load_timeout
        assert not dist.is_initialized(), "there is a group in this process already"
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[variable] = LOOPBACK  # nothing here is encrypted, and a group never leaves its machine
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=self._loading)
        self._computing = dist.new_group(timeout=self.patience)
        self._idle = dist.new_group(timeout=IDLE, backend="gloo")

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape; ``part`` may be overwritten with it.

        A number's bits depend on its parts alone, not on the shape or its place in it: they are added in the order of
        ranks, in float32 at least, and rounded once. Libraries that reduce do so in an order that depends on both.
        """
        if self.world == 2:  # there is one order, and one rounding
            dist.all_reduce(part, group=self._computing)
            return part
        if part.nbytes * self.world <= GATHERED_BYTES:
            return _added(self.gather(part))
        # Every rank adds up a slice of the numbers, whichever they are. Takes the bytes of a ring: each number once
        # to whoever adds it, once from there.
        size = -(-part.numel() // self.world)
        numbers = pad(part.flatten(), (0, size * self.world - part.numel()))
        slices = torch.empty_like(numbers)
        dist.all_to_all_single(slices, numbers, group=self._computing)
        dist.all_gather_single(numbers, _added(slices.view(self.world, size).unbind()), group=self._computing)
        return numbers[: part.numel()].view_as(part)

    def gather(self, part: Tensor) -> list[Tensor]:
        """All ranks' tensors of one shape, in the order of ranks."""
        parts = part.new_empty(self.world, part.numel())
        dist.all_gather_single(parts.view(-1), part.flatten(), group=self._computing)
        return [one.view(part.shape) for one in parts]

    def all_agree(self, so: bool, patience: timedelta | None = None) -> bool:
        """Whether all ranks say so. Raises RuntimeError as :meth:`minimum` does."""
        return bool(self.minimum(int(so), patience))

    def minimum(self, value: int, patience: timedelta | None = None) -> int:
        """The smallest of all ranks' values. Raises RuntimeError if one does not come while they load, or so long."""
        values_1 = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MIN), patience or self._loading
        self._idle.allreduce([values_1], options).wait()
        return int(values_1)

    def tell(self, message: bytes, patience: timedelta | None = None) -> None:
        """Rank 0: hand ``message`` to all others, who :meth:`hear` it within :attr:`patience`, or another."""
        patience = patience or self.patience
        frame = len(message).to_bytes(LENGTH_BYTES, "little") + message
        self._broadcast(bytearray(frame[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")), patience)
        if len(frame) > FRAME_BYTES:
            self._broadcast(bytearray(frame[FRAME_BYTES:]), patience)

    def check(self) -> None:
        """Rank 0: see whether all others :meth:`hear`, who answer by themselves. Raises RuntimeError."""
        self.tell(CHECK)
        self.minimum(0, self.patience)

    def hear(self) -> bytes:
        """The others: the next message of rank 0, however long that takes."""
        while (message := self._heard()) == CHECK:
            self.meet()
        return message

    def _heard(self) -> bytes:
        frame = self._broadcast(bytearray(FRAME_BYTES), IDLE)
        end = LENGTH_BYTES + int.from_bytes(frame[:LENGTH_BYTES], "little")
        if end > FRAME_BYTES:
            frame += self._broadcast(bytearray(end - FRAME_BYTES), IDLE)
        return bytes(frame[LENGTH_BYTES:end])

    def meet(self) -> None:
        """Wait until every rank is here, which some reach later as they read their weights. Raises RuntimeError."""
        self.minimum(0)

    def leave(self) -> None:
        """End the membership. The process may join another group then."""
        dist.destroy_process_group()

    @property
    def overdue(self) -> bool:
        """Whether all should have loaded by now."""
        return time.monotonic() >= self._loaded_by

    @property
    def _loading(self) -> timedelta:
        """How long ranks wait for each other while they load; later, as long as in a step."""
        return timedelta(seconds=self._loaded_by - time.monotonic()) if not self.overdue else self.patience

    def _broadcast(self, frame: bytearray, patience: timedelta) -> bytearray:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        # The operation's own, not only that of the wait for it: where gloo misses that a rank is gone, its thread would
        # wait for as long as a group may be idle, and whoever frees the group waits for that thread.
        options.timeout = patience
        self._idle.broadcast([torch.frombuffer(frame, dtype=torch.uint8)], options).wait()
        return frame


def _added(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for other in others:
        total += other
    return total.to(first.dtype)


def _own_device(device: torch.device, rank: int) -> torch.device:
    """Where this rank computes: on the GPU of its number, or the only one that it sees."""
    if device.type != "cuda":
        return device
    index = rank % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(index)  # transformers asks there
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
