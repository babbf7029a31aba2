"""The Ray Serve application: target workers, draft workers and routers as deployments.

Serve places, restarts and drains replicas and carries HTTP to a router. Routers connect to workers directly.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from cluster.config.config import Config, from_mapping
from cluster.placement import ROUTER, living, with_routers
from cluster.ray.parts import options
from cluster.ray.replicas import RouterReplica, ServedWorker

_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    # Serve allows each replica three, unless its cluster says more, and that is to decide.
    "max_constructor_retry_count": 100_000,
    # 5 by default; the router does admission, so this must never bite.
    "max_ongoing_requests": 100_000,
}


def application(args: dict[str, Any]) -> serve.Application:
    """What a configuration describes, given as the ``args`` of a file that Serve deploys. Raises ConfigError."""
    nodes = ray.nodes() if ray.is_initialized() else []  # type: ignore[no-untyped-call]
    return build(with_routers(from_mapping(args, "args"), living(nodes)))


def build(config: Config) -> serve.Application:
    """The application, ready to be deployed."""
    handles = []
    for pool in config.nonempty_pools():
        workers = _deployment(ServedWorker, pool.deployment, options(config, pool))
        handles.append((pool.role, workers.bind(config, pool.deployment)))
    return _deployment(RouterReplica, ROUTER, options(config, None)).bind(config, handles)


def _deployment(kind: type[object], name: str, options: dict[str, Any]) -> serve.Deployment:
    decorate = serve.deployment(name=name, **options, **_OPTIONS)
    made: serve.Deployment = decorate(kind)
    return made
