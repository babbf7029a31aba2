"""How workers share the GPUs of this machine where the configuration says nothing of them.

Decides what part of a GPU each rank may fill (``gpus``), and with the local backend, which GPUs a worker sees. On Ray
that part is reserved, and Ray decides which. Whoever sets ``gpus`` or a device such as ``cuda:1`` anywhere has decided.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cache

from cluster.config.config import Config, max_replicas_of
from cluster.config.environment import VISIBLE_GPUS as VISIBLE
from cluster.config.environment import may_have_gpus, visible_gpu
from cluster.config.pools import SHARED, DraftConfig, Pool, TargetConfig
from cluster.config.serving import may_draft_in_turn
from cluster.console import complain
from cluster.local.threads import Unmeasured, output_of
from speculation.events import Role

COUNT_SECONDS = 60.0

TARGET_WEIGHT = 4
"""What a target gets of a GPU that it shares, when each drafter gets one."""
TARGET_MIN = 0.52
"""It gets more than half, so that Ray never puts two ranks of a worker on the same GPU."""


@cache
def here() -> int:
    """How many GPUs torch finds on this machine."""
    if not may_have_gpus():
        return 0
    try:
        return int(output_of([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], COUNT_SECONDS))
    except Unmeasured as error:
        complain(f"paceline: cannot count the GPUs ({error}); workers take what is free of the first")
        return 0


def settled(config: Config) -> Config:
    """The same configuration, with what each rank is to have of this machine's GPUs, if it runs here."""
    return divided(placed(config, here()), here()) if config.on_this_machine else config


def placed(config: Config, gpus: int) -> Config:
    """The same, with a draft model that would have to share the only GPU with its target in the target's process.

    Two processes take turns for a GPU by time slices, which costs more (benchmarks/results/2026-11-23-h100).
    """
    if gpus == 1 and _open(config.target) and _open(config.draft) and may_draft_in_turn(config):
        return replace(config, draft=replace(config.draft, placement=SHARED))
    return config


def divided(config: Config, gpus: int) -> Config:
    """The same of ``gpus`` GPUs; unchanged where somebody has decided."""
    pools = [pool for pool in config.nonempty_pools() if pool.settings.device != "cpu"]
    if not gpus or not all(_open(pool.settings) for pool in pools):
        return config
    shares = _shares(pools, gpus)
    together = any(pool.settings.tensor_parallel_size > 1 and shares[pool.role] <= 0.5 for pool in pools)
    if config.backend == "ray" and together:  # it might put two ranks of a worker on the same GPU
        return config

    def shared(pool: Pool) -> TargetConfig | DraftConfig:
        worker = pool.settings
        fixed = worker.device == "cpu" or (isinstance(worker, DraftConfig) and worker.placement == SHARED)
        return worker if fixed else replace(worker, gpus=shares[pool.role])

    return config.with_pools(shared)


class Turns:
    """Gives each worker of this machine the GPUs with the most room left."""

    def __init__(self, gpus: int) -> None:
        self._left = [1.0] * gpus

    def environment(self, worker: TargetConfig | DraftConfig) -> dict[str, str]:
        """What makes the next worker see its own only."""
        if not self._left or worker.device not in ("auto", "cuda"):
            return {}
        by_room = sorted(range(len(self._left)), key=lambda gpu: -self._left[gpu])
        chosen = sorted(by_room[: worker.tensor_parallel_size])
        for gpu in chosen:
            self._left[gpu] -= worker.gpus or 1.0
        return {VISIBLE: ",".join(visible_gpu(gpu) or str(gpu) for gpu in chosen)}


def _open(worker: TargetConfig | DraftConfig) -> bool:
    return not worker.gpus and worker.device in ("auto", "cuda")


def _shares(pools: list[Pool], gpus: int) -> dict[Role, float]:
    """Of each role's ranks. On no GPU can they add up to more than 1, wherever Ray puts them."""
    targets, drafts = (
        sum(max_replicas_of(pool.settings) * pool.settings.tensor_parallel_size for pool in pools if pool.role is role)
        for role in (Role.TARGET, Role.DRAFT)
    )
    if targets + drafts <= gpus:
        return {Role.TARGET: 1.0, Role.DRAFT: 1.0}
    of_targets = max(TARGET_WEIGHT / (TARGET_WEIGHT + drafts), TARGET_MIN) if targets else 0.0
    crowd = max(math.ceil(targets / gpus), 1)
    return {Role.TARGET: _rounded(of_targets / crowd), Role.DRAFT: _rounded((1 - of_targets) / max(drafts, 1))}


def _rounded(share: float) -> float:
    """As finely as Ray counts, never up."""
    return math.floor(share * 10_000 + 1e-6) / 10_000
