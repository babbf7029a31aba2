"""A router as a replica of Ray Serve, which carries HTTP to it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import ray
from ray import serve

from cluster.autoscaling.serve_policy import figures
from cluster.config.config import Config
from cluster.config.security import check_http_exposure
from cluster.config.serving import router_settings
from cluster.discovery import Handles, ServeDirectory, long_poll
from cluster.ray.cluster import serve_client
from cluster.ray.connection import check_token
from cluster.ray.metrics import copy_metrics
from cluster.ray.parts import known
from speculation.events import Role

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from router.service import Router


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
