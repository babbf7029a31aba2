"""The ranks of a tensor-parallel replica as Ray actors, each in a bundle of the replica's placement group.

Ray ends them when the replica's process ends, which owns them, and Serve then starts the whole group again.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.console import FAILED
from cluster.placement import Need

if TYPE_CHECKING:
    from engine.leader import Loss
    from engine.parallel.group import RankTask

log = logging.getLogger(__name__)


class _RankActor:
    def pid(self) -> int:
        """Answers as soon as the process runs."""
        return os.getpid()

    def serve(self, task: RankTask) -> Loss | None:
        """Be this rank; None when rank 0 has ended the group."""
        from engine.build import serve_rank
        from engine.leader import Loss
        from engine.model import ModelError

        try:
            serve_rank(task)
        except ModelError as error:
            return Loss(task.rank, str(error), refused=True)
        except Exception as error:  # the process boundary: rank 0 has to know, whatever it was
            log.exception("rank %d failed", task.rank)
            return Loss(task.rank, f"{type(error).__name__}: {' '.join(str(error).split())}")
        return None


@dataclass(frozen=True, slots=True)
class _RayRank:
    actor: Any
    pid: concurrent.futures.Future[int]
    served: concurrent.futures.Future[Loss | None]
    """Fails with Ray's error when the process dies."""


class RayRanks:
    """All ranks of one replica but its own. Implements :class:`engine.leader.Ranks`."""

    def __init__(self, need: Need) -> None:
        """To be called in the replica. ``need``: what its placement group was made for."""
        self.own_gpus = need.gpus > 0
        self._need = need
        group = get_current_placement_group()
        assert group is not None, "the replica was deployed without room for its ranks"
        self._bundles = group
        self._ranks: dict[int, _RayRank] = {}

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Have Ray start them all. Raises OSError."""
        options = {"num_cpus": self._need.cpus, "num_gpus": self._need.gpus, "max_restarts": 0}
        for task in tasks:
            place = PlacementGroupSchedulingStrategy(self._bundles, task.rank)
            try:
                actor: Any = ray.remote(_RankActor).options(scheduling_strategy=place, **options).remote()
                pid = actor.pid.remote()
                served = actor.serve.options(name=f"paceline:{self._need.name}:rank {task.rank}").remote(task)
            except (ray.exceptions.RayError, ValueError) as error:
                raise OSError(f"Ray cannot start rank {task.rank}: {error}") from error
            self._ranks[task.rank] = _RayRank(actor, pid.future(), served.future())

    def wait(self) -> Loss:
        """Block until one has ended."""
        from engine.leader import Loss

        served = {rank.served: number for number, rank in self._ranks.items()}
        ended = next(iter(concurrent.futures.wait(served, return_when=concurrent.futures.FIRST_COMPLETED).done))
        loss = None if ended.exception() else ended.result()
        return loss or Loss(served[ended], self.about(served[ended]))

    def about(self, rank: int) -> str:
        """How it ended, or whether Ray has started it."""
        known = self._ranks.get(rank)
        if known is None:
            return "was not started"
        if not known.pid.done():
            return "waits for Ray to start its process"
        if known.pid.exception() is not None:
            return "died before it ran; Ray's logs may say why"
        process = f"process {known.pid.result()}"
        if not known.served.done():
            return f"runs as {process}; Ray's logs may say more"
        if known.served.exception() is not None:
            return f"{process} died; Ray's logs may say why"
        loss = known.served.result()
        return loss.reason if loss else "ended"

    def stop(self, seconds: float) -> None:
        """Let them end by themselves for so long, then have Ray kill their processes."""
        concurrent.futures.wait([rank.served for rank in self._ranks.values()], seconds)
        for rank in self._ranks.values():
            ray.kill(rank.actor)

    def end_worker(self, loss: Loss, reason: str) -> None:
        """End the replica at once, with one line of the reason; the rank's own log has the rest."""
        del loss
        log.error("the replica ends, it has lost a rank: %s", reason)
        os._exit(FAILED)
