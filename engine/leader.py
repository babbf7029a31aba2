"""Rank 0's hold on the others: it starts them, tells them each step, and ends with them.

Decides what the loss of a rank means. While the group loads, rank 0 fails with the reason; later its process ends, as
a group that lacks a rank can compute nothing. How a rank is started and what ends a worker is up to :class:`Ranks`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from engine.forward import StepInput
from engine.model import ModelError
from engine.parallel.group import Group, RankError, RankTask, joined_key, rendezvous
from engine.settings import EngineSettings

POLL_SECONDS = 0.02
TELLING_SECONDS = 2.0
"""How long an error of rank 0 waits for the news that a rank was lost, which would explain it."""
STOPPING_SECONDS = 5.0
"""How long ranks get to end by themselves."""
FAILING_SECONDS = 10.0
"""How long rank 0 gets to fail by itself when a rank was lost while loading; it may hang instead."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank that ended before it should."""

    rank: int
    reason: str
    refused: bool = False
    """Whether it found the model, not itself, to blame."""

    def error(self, world: int) -> Exception:
        """As rank 0 raises it."""
        kind = ModelError if self.refused else RankError
        return kind(f"rank {self.rank} of {world}: {self.reason}")


class Ranks(Protocol):
    """All ranks but 0, wherever they run. Each calls :func:`engine.build.serve_rank` with its task."""

    own_gpus: bool
    """Whether each rank sees no GPUs but its own, instead of all those of the machine."""

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Start them, from a thread that lasts as long as they do. Raises OSError."""

    def wait(self) -> Loss:
        """Block until one has ended, for whatever reason."""

    def about(self, rank: int) -> str:
        """What can be said of a rank that does not answer."""

    def stop(self, seconds: float) -> None:
        """Let them end by themselves for so long, then end them. Harmless when done twice."""

    def end_worker(self, loss: Loss, reason: str) -> None:
        """End the process of rank 0 at once, for what it computes may never come to an end; say the reason."""


class Leader:
    """The other ranks of a group, as rank 0 sees them."""

    def __init__(self, settings: EngineSettings, ranks: Ranks, device: torch.device) -> None:
        """Nothing is started yet. ``device``: of any rank, such as cuda."""
        self._settings = settings
        self._ranks = ranks
        self._world = settings.tensor_parallel_size
        self._device = device
        self._group: Group | None = None
        self._loss: Loss | None = None
        self._lost = threading.Event()
        self._over = threading.Event()
        self._loading = True
        self._broken = False

    @contextmanager
    def loading(self) -> Iterator[Group]:
        """Start the ranks and meet them; the block loads the model, as they do meanwhile.

        If it raises, or a rank is lost, all ranks are ended. Raises :class:`RankError`, or a rank's ModelError.
        """
        try:
            self._group = self._assembled()
            yield self._group
            self._group.meet()
        except BaseException as error:
            explained = isinstance(error, RankError) or not isinstance(error, Exception)
            loss = None if explained else self._lost_within(TELLING_SECONDS) or self._late(error)
            self._broken = True
            self.stop()
            if loss is None:
                raise
            raise loss from error
        self._loading = False

    def all_agree(self, so: bool) -> bool:
        """Whether all ranks say so, which say it at the same time."""
        assert self._group is not None, "there are no ranks yet"
        return self._group.all_agree(so)

    @contextmanager
    def step(self, inputs: StepInput) -> Iterator[None]:
        """Have the others compute ``inputs``; the block computes the same here.

        Raises :class:`RankError` if a rank does not answer. After this or any other error there is no further step:
        nobody knows how far the others have come.
        """
        with self._together() as group:
            group.tell(inputs.encoded())
            yield

    def check(self) -> None:
        """While nothing is computed, raise :class:`RankError` if a rank does not answer; no step comes after that."""
        with self._together() as group:
            group.check()

    @contextmanager
    def _together(self) -> Iterator[Group]:
        """The block does what the others do as well."""
        if self._broken or self._group is None:
            raise RankError("the ranks are out of step since an earlier error; the worker has to be started again")
        started = time.monotonic()
        try:
            yield self._group
        except BaseException as error:
            self._broken = True
            waited = time.monotonic() - started
            # Normally the process ends meanwhile, and says which rank is the reason.
            if (loss := self._lost_within(TELLING_SECONDS)) is not None:
                raise loss from error
            if waited >= self._group.patience.total_seconds():
                raise RankError(
                    f"no answer within {waited:.0f} s from one of: {self._about(range(1, self._world))}"
                ) from error
            raise

    def stop(self) -> None:
        """End all ranks. Not while a step is computed; harmless when done twice."""
        if self._over.is_set():
            return
        self._over.set()
        if self._group is None:
            self._ranks.stop(0.0)
            return
        if not self._broken and not self._lost.is_set():
            with suppress(RuntimeError):  # a rank is lost just now
                self._group.tell(b"", timedelta(seconds=STOPPING_SECONDS))
                self._ranks.stop(STOPPING_SECONDS)
        self._ranks.stop(0.0)
        self._group.leave()

    def _assembled(self) -> Group:
        """All ranks, met; raises :class:`RankError` naming those that do not come in time."""
        seconds = self._settings.join_timeout
        store = rendezvous(self._world)
        others = range(1, self._world)
        tasks = [RankTask(rank, store.port, self._settings) for rank in others]
        started = threading.Event()
        threading.Thread(target=self._keep, args=(tasks, started), daemon=True, name="ranks").start()
        started.wait()
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in others if not store.check([joined_key(rank)])]:
            if (loss := self._lost_within(POLL_SECONDS)) is not None:
                raise loss
            if time.monotonic() > deadline:
                about = self._about(missing)
                raise RankError(f"not all {self._world} ranks joined within {seconds:g} s (join_timeout): {about}")
        return Group(0, self._world, store, self._device, self._settings.load_timeout)

    def _late(self, error: BaseException) -> RankError | None:
        """That not all have loaded in time, if that is why a wait for them failed."""
        waited = any(isinstance(one, RuntimeError) for one in (error, error.__cause__))  # in a self-test, too
        if self._group is None or not self._group.overdue or not waited:
            return None
        within = f"{self._settings.load_timeout:g} s (load_timeout)"
        return RankError(
            f"not all {self._world} ranks have loaded within {within}: {self._about(range(1, self._world))}"
        )

    def _lost_within(self, seconds: float) -> Exception | None:
        """The loss of a rank as an error, if there is one by then."""
        return self._loss.error(self._world) if self._lost.wait(seconds) and self._loss else None

    def _about(self, ranks: Sequence[int]) -> str:
        return "; ".join(f"rank {rank} {self._ranks.about(rank)}" for rank in ranks)

    def _keep(self, tasks: Sequence[RankTask], started: threading.Event) -> None:
        """The thread that starts the ranks and outlives them."""
        try:
            self._ranks.start(tasks)
            started.set()
            loss = self._ranks.wait()
        except OSError as error:
            loss = Loss(tasks[0].rank, f"cannot be started: {error}")
        started.set()
        if self._over.is_set():
            return
        self._loss = loss
        self._lost.set()
        if self._loading and self._over.wait(FAILING_SECONDS):
            return
        self._ranks.end_worker(loss, str(loss.error(self._world)))
