"""The Ray Serve application: target workers, draft workers and routers as deployments.

Serve places, restarts and drains replicas and carries HTTP to a router. Tokens do not pass through it: every worker
runs its own gRPC server, publishes its address as replica metadata, and routers connect to it directly. The replica of
a worker with several ranks is rank 0, and starts the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.autoscaling.serve_policy import figures
from cluster.config.config import Config, from_mapping, max_replicas_of
from cluster.config.pools import Pool
from cluster.config.security import check_http_exposure, check_worker_exposure, identity
from cluster.config.serving import draft_settings, router_settings, shared_drafter, target_settings
from cluster.config.vocabularies import worker_config
from cluster.discovery import ENDPOINT, Handles, serve_directory
from cluster.placement import ROUTER, need
from cluster.processes.imports import worker_imports
from cluster.ray.metrics import RayExporter
from cluster.ray.parts import known, options
from cluster.ray.ranks import RayRanks
from router.http.api import build_app
from router.http.prompt_recorder import PromptRecorder
from router.service import dispatcher
from router.text.tokenizers import Tokenizers
from speculation.events import Role
from transport.address import join
from transport.tracing import Tracing

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from transport.worker import Worker

log = logging.getLogger(__name__)

_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "max_constructor_retry_count": 3,
    # 5 by default; the router does admission, so this must never bite.
    "max_ongoing_requests": 100_000,
}


class _WorkerReplica:
    """A replica that is a worker with a gRPC server of its own."""

    _worker: Worker

    async def _begin(self, worker: Worker, drain_timeout: float) -> None:
        self._worker, self._drain_timeout = worker, drain_timeout
        worker.freeze_loaded()
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
            await self._worker.drain(self._drain_timeout)


class TargetWorker(_WorkerReplica):
    """A target worker."""

    async def __init__(self, config: Config, deployment: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the model and listen."""
        config, pool = _settings(config, deployment)
        own, certified, ranks = config.of_worker(pool), identity(config, "target"), _ranks(config, pool)
        with worker_imports(own, Role.TARGET):
            from target_service.service import start_target

        drafter = shared_drafter(own)
        worker = await start_target(
            target_settings(own), _listen(config), ranks=ranks, identity=certified, make_drafter=drafter
        )
        await self._begin(worker, config.drain_timeout)


class DraftWorker(_WorkerReplica):
    """A draft worker."""

    async def __init__(self, config: Config, deployment: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Load the model and listen."""
        config, pool = _settings(config, deployment)
        own, certified = worker_config(config, pool), identity(config, "draft")
        with worker_imports(own, Role.DRAFT):
            from draft_service.service import start_draft

        settings = draft_settings(own)
        worker = await start_draft(settings, _listen(config), ranks=_ranks(config, pool), identity=certified)
        await self._begin(worker, config.drain_timeout)


@serve.ingress()
class RouterReplica:
    """A router behind Serve's HTTP proxy."""

    async def __init__(self, config: Config, workers: Handles) -> None:  # type: ignore[misc]  # Serve awaits it
        """Read the tokenizers and begin to look for workers."""
        config = known(config)
        await asyncio.to_thread(_check_http, config)
        settings = router_settings(config)
        self._settings = settings.api
        self._tokenizers = Tokenizers(settings.tokenizer, settings.models)
        for source in {settings.tokenizer or model for model in settings.models or ()}:
            await self._tokenizers.read(source)
        self._tracing = Tracing.to(settings.trace, "router") if settings.trace else None
        self._recorder = PromptRecorder(settings.record) if settings.record else None
        self._dispatcher = dispatcher(settings.limits, settings.identity, self._tracing)
        self._models = tuple(dict.fromkeys(pool.model for pool in config.pools()))
        self._directory = serve_directory(workers)
        self._directory.start(self._dispatcher.pool.set_workers)
        self._exporter = RayExporter(self._dispatcher.metrics.collect)
        self._exporter.start()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller learns of its streams; see :mod:`cluster.autoscaling.serve_policy`."""
        reports = [figures(self._dispatcher.demand(model), model) for model in self._models]
        return {name: value for report in reports for name, value in report.items()}

    def __serve_build_asgi_app__(self) -> Starlette:
        """The OpenAI-compatible API."""
        serving = self._dispatcher
        return build_app(serving, self._tokenizers, self._settings, serving.metrics, self._tracing, self._recorder)

    async def __del__(self) -> None:
        """Serve's call at a graceful end, after running requests have ended."""
        if hasattr(self, "_directory"):
            self._dispatcher.draining = True
            self._directory.close()
            await self._exporter.close()
            await self._dispatcher.pool.close()
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.close)
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)


def application(args: dict[str, Any]) -> serve.Application:
    """The application that a configuration describes, given as a mapping: ``args`` where Serve deploys from a file.

    Raises :class:`cluster.config.settings.ConfigError`.
    """
    return build(from_mapping(args, "args"))


def build(config: Config) -> serve.Application:
    """The application, ready to be deployed."""
    kinds: dict[Role, Any] = {Role.TARGET: TargetWorker, Role.DRAFT: DraftWorker}
    handles = []
    for pool in config.pools():
        if max_replicas_of(pool.settings):
            workers = _deployment(kinds[pool.role], pool.deployment, options(config, pool))
            handles.append((pool.role, workers.bind(config, pool.deployment)))
    return _deployment(RouterReplica, ROUTER, options(config, None)).bind(config, handles)


def _deployment(kind: type[object], name: str, options: dict[str, Any]) -> serve.Deployment:
    decorate = serve.deployment(name=name, **options, **_OPTIONS)
    made: serve.Deployment = decorate(kind)
    return made


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


def _check_http(config: Config) -> None:
    """Whether HTTP may be served where Serve does so, which in a RayService is not said in our configuration."""
    if config.ray.address == "local":
        return
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    check_http_exposure(config, client.http_config.host or "localhost")
