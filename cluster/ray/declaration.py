"""The application as Ray Serve's declarative interface takes it: what ``paceline up`` deploys.

Serve replaces every replica, one after the other, when ``import_path``, ``args`` or ``runtime_env`` change, those of
one deployment when its options do, and none when the number of replicas does. So settings stand with the deployment
that they concern (:mod:`cluster.ray.parts`), and so do the numbers between which replicas follow the load: where any
do, Serve asks our policy about all deployments.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cluster.autoscaling import serve_policy
from cluster.config.config import Config, max_replicas_of
from cluster.config.environment import CHECKOUT
from cluster.config.pools import Pool
from cluster.placement import APPLICATION, need, router_need
from cluster.ray.parts import options, outline

IMPORT_PATH = "cluster.serve_app:application"


def declaration(config: Config) -> dict[str, Any]:
    """An entry of ``applications`` in a ServeDeploySchema, as plain values."""
    environment = {"PYTHONPATH": str(CHECKOUT)} if config.ray.address == "local" else {}
    pools = [pool for pool in config.pools() if max_replicas_of(pool.settings)]
    described = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "runtime_env": {"env_vars": environment},
        "args": asdict(outline(config)),
        "deployments": [_deployment(config, pool) for pool in (*pools, None)],
    }
    return described | ({"autoscaling_policy": serve_policy.declared(config)} if config.autoscales else {})


def _deployment(config: Config, pool: Pool | None) -> dict[str, Any]:
    """One of workers, or that of the routers (None). Where any follows the load, all are within bounds."""
    wanted = router_need(config) if pool is None else need(pool, config)
    described = {"name": wanted.deployment} | options(config, pool, settings=True)
    if not config.autoscales:
        return described
    bound = max_replicas_of(config.router if pool is None else pool.settings)
    return described | serve_policy.options(wanted.replicas, bound, config.autoscaling)
