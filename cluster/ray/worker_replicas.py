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
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.autoscaling.serve_policy import figures
from cluster.config.config import Config
from cluster.config.security import check_worker_exposure, identity
from cluster.config.serving import start_worker, worker_config
from cluster.discovery import ENDPOINT
from cluster.placement import APPLICATION, ROUTER, need
from cluster.processes.imports import import_worker, on_own_gpu
from cluster.ray.metrics import copy_metrics
from cluster.ray.parts import known
from cluster.ray.ranks import RayRanks
from router.telemetry.families import collect_certificates
from speculation.events import Role
from transport.address import join

if TYPE_CHECKING:
    from transport.tls import Identity
    from transport.worker import Door, Worker

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 2.0
"""Pause between telling routers of a worker that loads, and how long they may take to hear it."""


class ServedWorker:
    """A replica that is a target or draft worker, with a gRPC server of its own."""

    _worker: Worker
    _copying: asyncio.Task[None] | None = None

    async def __init__(self, config: Config, deployment: str) -> None:  # type: ignore[misc]  # Serve awaits it
        config = known(config)
        pool = next(pool for pool in config.pools() if pool.deployment == deployment)
        role, own, wanted = pool.role, worker_config(config, pool), need(pool, config)
        certified = identity(config, role.value)
        ranks = RayRanks(wanted) if wanted.ranks > 1 else None
        own = on_own_gpu(own, role)
        import_worker(own, role)
        from transport.worker import Door

        door = await Door.open(role.value, _listen(config), certified)
        async with _announced(door, role):
            worker = await start_worker(own, role, door, ranks)
        await self._begin(worker, config.drain_timeout, certified)

    async def _begin(self, worker: Worker, drain_timeout: float, certified: Identity | None) -> None:
        self._worker, self._drain_timeout = worker, drain_timeout
        worker.freeze_loaded()
        if certified:  # all else that there is to tell of a worker, routers tell
            collect = partial(collect_certificates, certified.certificates)
            self._copying = asyncio.create_task(copy_metrics(collect))
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
            if self._copying is not None:
                self._copying.cancel()
            await self._worker.drain(self._drain_timeout)


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


def _listen(config: Config) -> str:
    """Loopback on a local Ray, else the node's address, if the operator allows that."""
    if config.ray.address == "local":
        return "127.0.0.1:0"
    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    check_worker_exposure(host, config)
    return join(host, 0)
