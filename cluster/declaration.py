"""The application as Ray Serve's declarative interface takes it: what ``paceline up`` deploys, and a RayService.

Serve replaces every replica, one after the other, when ``import_path``, ``args`` or ``runtime_env`` change. So numbers
of replicas, which change often, are kept out of ``args`` and stand beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.config import CHECKOUT, Config
from cluster.placement import APPLICATION, needs

IMPORT_PATH = "cluster.serve_app:application"


def declaration(config: Config) -> dict[str, Any]:
    """An entry of ``applications`` in a ServeDeploySchema, as plain values."""
    environment = {"PYTHONPATH": str(CHECKOUT)} if config.ray.address == "local" else {}
    return {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "runtime_env": {"env_vars": environment},
        "args": _without_replicas(config).to_mapping(),
        "deployments": [{"name": need.deployment, "num_replicas": need.replicas} for need in needs(config)],
    }


def _without_replicas(config: Config) -> Config:
    """One replica wherever there are some: which deployments there are must stay the same."""

    def one(section: Any) -> Any:
        return replace(section, replicas=min(section.replicas, 1))

    models = {}
    for name, model in config.models.items():
        drafts = {pool: one(draft) for pool, draft in model.drafts.items()}
        models[name] = replace(model, target=one(model.target), drafts=drafts)
    return replace(config, target=one(config.target), draft=one(config.draft), models=models, router=one(config.router))
