"""The application as Ray Serve's declarative interface takes it: what ``paceline up`` deploys, and a RayService.

Serve replaces every replica, one after the other, when ``import_path``, ``args`` or ``runtime_env`` change. So numbers
of replicas, which change often, are kept out of ``args`` and stand beside it. So do those between which they follow the
load: where any do, Serve asks our policy about all deployments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.autoscaling.serve_policy import declared, options
from cluster.config import CHECKOUT, AutoscalingConfig, Config, most
from cluster.placement import APPLICATION, ROUTER, needs

IMPORT_PATH = "cluster.serve_app:application"


def declaration(config: Config) -> dict[str, Any]:
    """An entry of ``applications`` in a ServeDeploySchema, as plain values."""
    environment = {"PYTHONPATH": str(CHECKOUT)} if config.ray.address == "local" else {}
    described = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "runtime_env": {"env_vars": environment},
        "args": _without_replicas(config).to_mapping(),
        "deployments": [{"name": need.deployment, "num_replicas": need.replicas} for need in needs(config)],
    }
    return described | _autoscaled(config) if config.autoscales else described


def _autoscaled(config: Config) -> dict[str, Any]:
    """All deployments within bounds; those of a pool that does not follow the load are one number."""
    pools = {ROUTER: config.router} | {pool.deployment: pool.settings for pool in config.pools()}
    deployments = [
        {"name": need.deployment} | options(need.replicas, most(pools[need.deployment]), config.autoscaling)
        for need in needs(config)
    ]
    return {"deployments": deployments, "autoscaling_policy": declared(config)}


def _without_replicas(config: Config) -> Config:
    """One replica wherever there are some or may be: which deployments there are must stay the same."""

    def one(section: Any) -> Any:
        default = type(section)()
        bounds = {"min_replicas": default.min_replicas, "max_replicas": default.max_replicas}
        return replace(section, replicas=min(most(section), 1), **bounds)

    models = {}
    for name, model in config.models.items():
        drafts = {pool: one(draft) for pool, draft in model.drafts.items()}
        models[name] = replace(model, target=one(model.target), drafts=drafts)
    sections = {"target": one(config.target), "draft": one(config.draft), "router": one(config.router)}
    return replace(config, **sections, models=models, autoscaling=AutoscalingConfig())
