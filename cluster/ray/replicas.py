"""Routers and workers as replicas of Ray Serve, and their metrics, told through Ray.

Serve carries HTTP to routers. Tokens do not pass through it: every worker runs its own gRPC server and publishes its
address as replica metadata. The replica of a worker with several ranks is rank 0, and starts the others.

Behind Serve's proxy ``/metrics`` is that of any one router, so in a cluster Prometheus reads them from Ray's endpoint
on each node, under ``ray_<name>``, with the labels ``deployment``, ``replica`` and ``application`` that Serve adds.
Each sample, those of counters and histograms too, is told as a Ray gauge with the value it has here: a gauge is the one
kind that can be set, so nothing drifts when a copy is late, and names and labels come out as they are. Prometheus
computes rates and quantiles from names, labels and values; the declared type does not matter to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from prometheus_client import Metric
from ray import serve
from ray.serve import metrics

from cluster.autoscaling.serve_policy import PERIOD_SECONDS, figures
from cluster.config.config import Config
from cluster.config.security import check_http_exposure, check_worker_exposure, identity
from cluster.config.serving import router_settings, start_worker, worker_config
from cluster.discovery import ENDPOINT, Handles, ServeDirectory, long_poll
from cluster.placement import APPLICATION, ROUTER, need
from cluster.processes.imports import import_worker, on_own_gpu
from cluster.ray.cluster import serve_client
from cluster.ray.connection import check_token
from cluster.ray.parts import known
from cluster.ray.ranks import RayRanks
from router.telemetry.families import collect_certificates
from speculation.events import Role
from transport.address import join

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from router.service import Router
    from transport.tls import Identity
    from transport.worker import Door, Worker

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 2.0
"""Pause between telling routers of a worker that loads, and how long they may take to hear it."""


@serve.ingress()
class RouterReplica:
    """A router behind Serve's HTTP proxy."""

    _router: Router

    async def __init__(self, config: Config, workers: Handles) -> None:  # type: ignore[misc]  # Serve awaits it
        config = known(config)
        await asyncio.to_thread(_check_doors, config)
        from router.service import Router, freeze_loaded  # takes a second, which whoever deploys this need not wait

        settings = router_settings(config)
        self._router = Router(settings)
        for source in {settings.tokenizer or model for model in settings.models or ()}:
            await self._router.tokenizers.read(source)
        self._models = tuple(dict.fromkeys(pool.model for pool in config.pools()))
        self._directory = ServeDirectory(workers, partial(long_poll, asyncio.get_running_loop()))
        self._directory.start(self._router.dispatcher.pool.set_workers)
        self._router.read_tokenizers()
        self._copying = asyncio.create_task(copy_metrics(self._router.dispatcher.metrics.collect))
        freeze_loaded()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller learns of its streams; see :mod:`cluster.autoscaling.serve_policy`."""
        reports = [figures(self._router.dispatcher.demand(model), model) for model in self._models]
        return {name: value for report in reports for name, value in report.items()}

    async def announced(self, role: str, address: str) -> None:
        """A worker that loads says where it listens: Serve lists it once it has loaded."""
        self._directory.announced(Role(role), address)

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._router.app()

    async def __del__(self) -> None:
        """Serve's call at a graceful end, after running requests have ended."""
        if hasattr(self, "_directory"):
            self._router.dispatcher.draining = True
            self._directory.close()
            self._copying.cancel()
            await self._router.close()


def _check_doors(config: Config) -> None:
    """Whether HTTP may be served where Serve does so, and this Ray cluster be served from.

    ``paceline up`` asks both before it deploys. A RayService is deployed by nobody who asks, says where HTTP is served
    beside our configuration, and need not say in there that there is a cluster.
    """
    check_http_exposure(config, serve_client().http_config.host or "localhost")
    hosts = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    check_token(config, ray.get_runtime_context().gcs_address, hosts)


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


async def copy_metrics(collect: Callable[[], Iterable[Metric]]) -> None:
    """Tell Ray every sample as it is now, again and again until cancelled. Must run in a Ray worker.

    Ray forgets a series some seconds after it was told the last time. ``collect`` tells all families as of now.
    """
    gauges: dict[str, metrics.Gauge] = {}
    while True:
        try:
            for family in collect():
                for sample in family.samples:
                    if sample.name not in gauges:
                        about, keys = family.documentation, tuple(sample.labels)
                        # Ray declares a tuple of one key; it takes any number.
                        gauges[sample.name] = metrics.Gauge(sample.name, about, tag_keys=keys)  # type: ignore[arg-type]
                    gauges[sample.name].set(sample.value, tags=sample.labels)
        except Exception:  # metrics must never take a router down
            log.exception("metrics could not be copied to Ray")
        await asyncio.sleep(PERIOD_SECONDS)
