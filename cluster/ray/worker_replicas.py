"""Target and draft workers as replicas of Ray Serve.

Tokens do not pass through Serve: every worker runs its own gRPC server and publishes its address as replica metadata.
The replica of a worker with several ranks is rank 0, and starts the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.autoscaling.serve_policy import figures
from cluster.config.config import Config
from cluster.config.pools import Pool
from cluster.config.security import check_worker_exposure, identity
from cluster.config.serving import draft_settings, shared_drafter, target_settings, worker_config
from cluster.discovery import ENDPOINT
from cluster.placement import APPLICATION, ROUTER, need
from cluster.processes.imports import worker_imports
from cluster.ray.metrics import RayExporter
from cluster.ray.parts import known
from cluster.ray.ranks import RayRanks
from router.telemetry.metrics import collect_certificates
from speculation.events import Role
from transport.address import join

if TYPE_CHECKING:
    from transport.tls import Identity
    from transport.worker import Door, Worker

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 2.0
"""Pause between telling routers of a worker that loads, and how long they may take to hear it."""


class _WorkerReplica:
    """A replica that is a worker with a gRPC server of its own."""

    _worker: Worker
    _exporter: RayExporter | None = None

    async def _begin(self, worker: Worker, drain_timeout: float, certified: Identity | None) -> None:
        self._worker, self._drain_timeout = worker, drain_timeout
        worker.freeze_loaded()
        if certified:  # all else that there is to tell of a worker, routers tell
            self._exporter = RayExporter(lambda: collect_certificates(certified.certificates))
            self._exporter.start()
        self._watch = asyncio.create_task(self._exit_on_failure())

    async def _exit_on_failure(self) -> None:
        """A worker that cannot compute ends its process: routers notice at once, and Serve starts another."""
        try:
            await self._worker.wait()
        except Exception:
            log.exception("the worker failed; its process ends")
            os._exit(1)

    def record_replica_metadata(self) -> dict[str, str]:
        """What routers learn of this replica through the controller."""
        return {ENDPOINT: self._worker.address}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller learns of its work; see :mod:`cluster.autoscaling.serve_policy`."""
        return figures(self._worker.demand)

    async def endpoint(self) -> str:
        """The same for who asks."""
        return self._worker.address

    async def __del__(self) -> None:
        """Serve's call at a graceful end: routers are told, and move the sessions elsewhere before it."""
        if hasattr(self, "_worker"):
            self._watch.cancel()
            if self._exporter is not None:
                await self._exporter.close()
            await self._worker.drain(self._drain_timeout)


class TargetWorker(_WorkerReplica):
    """A target worker."""

    async def __init__(self, config: Config, deployment: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the model and listen."""
        config, pool = _settings(config, deployment)
        own, certified, ranks = config.of_worker(pool), identity(config, "target"), _ranks(config, pool)
        with worker_imports(own, Role.TARGET):
            from target_service.service import start_target
            from transport.worker import Door

        drafter = shared_drafter(own)
        door = await Door.open(Role.TARGET.value, _listen(config), certified)
        async with _announced(door, Role.TARGET):
            worker = await start_target(target_settings(own), door, ranks=ranks, make_drafter=drafter)
        await self._begin(worker, config.drain_timeout, certified)


class DraftWorker(_WorkerReplica):
    """A draft worker."""

    async def __init__(self, config: Config, deployment: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the model and listen."""
        config, pool = _settings(config, deployment)
        own, certified = worker_config(config, pool), identity(config, "draft")
        with worker_imports(own, Role.DRAFT):
            from draft_service.service import start_draft
            from transport.worker import Door

        door = await Door.open(Role.DRAFT.value, _listen(config), certified)
        async with _announced(door, Role.DRAFT):
            worker = await start_draft(draft_settings(own), door, ranks=_ranks(config, pool))
        await self._begin(worker, config.drain_timeout, certified)


@asynccontextmanager
async def _announced(door: Door, role: Role) -> AsyncIterator[None]:
    """Tell routers of the door while the block runs, again and again: there may be others by then."""

    async def announce() -> None:
        routers: Any = None
        while True:
            with suppress(Exception):  # there is no router yet, or one of an older release
                routers = routers or serve.get_deployment_handle(ROUTER, APPLICATION)
                heard = routers.broadcast("announced", role.value, door.server.address)
                await heard.results_async(timeout_s=ANNOUNCE_SECONDS)
            await asyncio.sleep(ANNOUNCE_SECONDS)

    announcing = asyncio.create_task(announce())
    try:
        yield
    finally:
        announcing.cancel()


def _settings(config: Config, deployment: str) -> tuple[Config, Pool]:
    """Of the worker that calls this, and the pool it belongs to."""
    config = known(config)
    return config, next(pool for pool in config.pools() if pool.deployment == deployment)


def _ranks(config: Config, pool: Pool) -> RayRanks | None:
    """What starts the other ranks of the replica that calls this, if it has some."""
    wanted = need(pool, config)
    return RayRanks(wanted) if wanted.ranks > 1 else None


def _listen(config: Config) -> str:
    """Loopback on a local Ray, else the node's address, if the operator allows that."""
    if config.ray.address == "local":
        return "127.0.0.1:0"
    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    check_worker_exposure(host, config)
    return join(host, 0)
