"""What each part of the application has to know of the configuration, so that a change replaces only whom it concerns.

When the ``args`` of an application change, Serve replaces all its replicas; when the options of one deployment do, only
those of that one. So what ``paceline up`` deploys has in its ``args`` no more than which deployments there are
(:func:`outline`), and each replica finds its settings (:func:`part`) in its environment (:func:`known`). Where Serve is
given all settings in ``args``, as by a RayService, those hold. Numbers of replicas stand with the options as well, and
where any follow the load, so do the bounds within which Serve asks our policy about all deployments
(:func:`declaration`): no replica is replaced when those change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from cluster.autoscaling import serve_policy
from cluster.config.config import Config, from_mapping, max_replicas_of
from cluster.config.environment import CHECKOUT, VISIBLE_GPUS, variable
from cluster.config.environment import REPLICA_SETTINGS as SETTINGS
from cluster.config.pools import DraftConfig, Pool, TargetConfig, chosen_threads
from cluster.placement import APPLICATION, need, router_need
from cluster.processes.starting import NICENESS, openmp_environment

IMPORT_PATH = "cluster.serve_app:application"
STOP_SECONDS = 5.0
"""What a replica needs to end once it has drained."""
LOCAL_DRAIN_SECONDS = 10.0
"""How long the requests of a router on this machine may go on when it is to end."""
ROUTER_SURGE = 25
"""Percent of the routers, one at least, that are started before those they replace stop: one alone leaves no gap.
Workers need the GPUs of those they replace."""
PROXY_SETTINGS = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.ray.proxy.middleware"}
"""What the environment of Serve's proxies has to say for them to answer while no router can."""
ROUTER_CHOICE = "cluster.ray.proxy.RouterChoice"
"""What tells them whether there is a router."""


def outline(config: Config) -> Config:
    """Which deployments there are, and nothing else."""
    chosen, default = config.speculation, Config()
    speculation = replace(default.speculation, enabled=chosen.enabled, drafters=chosen.drafters)
    pools, ray = _with_pools(config, _default), replace(default.ray, address=config.ray.address)
    return Config(target=pools.target, draft=pools.draft, models=pools.models, speculation=speculation, ray=ray)


def part(config: Config, own: Pool | None) -> Config:
    """What the replicas of a pool depend on, or the routers (None).

    Of other pools those are their targets' models and names: drafters draft for these, routers speak of them. A draft
    model in a target's process is a part of that target.
    """

    def seen(pool: Pool) -> Any:
        if own is not None and pool.deployment == own.deployment:
            return replace(pool.settings, standby=0) if isinstance(pool.settings, TargetConfig) else pool.settings
        if own is not None and pool.settings is config.shared_draft(own):
            return pool.settings
        if isinstance(pool.settings, TargetConfig) and (own is None or own.model == pool.model):
            standby = pool.settings.standby if own is None else 0
            return replace(_default(pool), model=pool.settings.model, name=pool.settings.name, standby=standby)
        return _default(pool)

    made, none = _with_pools(config, seen), Config()
    made = replace(made, autoscaling=none.autoscaling, start_timeout=none.start_timeout)
    if own is None:
        return replace(made, router=_one(config.router, max_replicas_of(config.router)), validate=none.validate)
    # Of the routers' settings, workers heed whether they may listen beyond loopback.
    router = replace(none.router, allow_remote=config.router.allow_remote)
    return replace(made, router=router, admission=none.admission)


def known(config: Config) -> Config:
    """The settings of the replica that calls this: those in its environment, else ``config``, which Serve was given."""
    settings = variable(SETTINGS)
    return from_mapping(json.loads(settings), SETTINGS) if settings else config


def all_settings(application: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``args`` of an entry of ``applications`` that hold all settings; None where replicas have them."""
    actors = [entry.get("ray_actor_options") or {} for entry in application.get("deployments") or []]
    environments = [(actor.get("runtime_env") or {}).get("env_vars") or {} for actor in actors]
    return None if any(SETTINGS in environment for environment in environments) else application.get("args")


def replicas_in(application: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The numbers of replicas that Serve is told, by deployment, as a pool's own settings would say them."""
    found = {}
    for entry in application.get("deployments") or []:
        count, bounds = entry.get("num_replicas"), entry.get("autoscaling_config")
        if isinstance(count, int):
            found[entry["name"]] = {"replicas": count, "max_replicas": 0}
        elif isinstance(bounds, Mapping):
            least, most = int(bounds.get("min_replicas", 1)), int(bounds.get("max_replicas") or 1)
            found[entry["name"]] = {"min_replicas": least, "max_replicas": most}
    return found


def with_replicas(config: Config, counts: Mapping[str, Mapping[str, int]]) -> Config:
    """The same where Serve was told these numbers of replicas beside it: see :func:`replicas_in`."""

    def told(settings: Any, deployment: str) -> Any:
        if deployment not in counts:
            return settings
        standby = {"standby": 0} if isinstance(settings, TargetConfig) else {}  # they are among these
        return replace(settings, **counts[deployment], **standby)

    made = config.with_pools(lambda pool: told(pool.settings, pool.deployment))
    return replace(made, router=told(config.router, router_need(config).deployment))


def declaration(config: Config) -> dict[str, Any]:
    """What ``paceline up`` deploys: an entry of ``applications`` in a ServeDeploySchema, as plain values."""
    described = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "runtime_env": {"env_vars": importable(config)},
        "args": asdict(outline(config)),
        "deployments": [_declared(config, pool) for pool in (*config.nonempty_pools(), None)],
    }
    return described | ({"autoscaling_policy": serve_policy.declared(config)} if config.autoscales else {})


def _declared(config: Config, pool: Pool | None) -> dict[str, Any]:
    """One of workers, or that of the routers (None). Where any follows the load, all are within bounds."""
    wanted = router_need(config) if pool is None else need(pool, config)
    described = {"name": wanted.deployment} | options(config, pool, settings=True)
    if not config.autoscales:
        return described
    bound = max_replicas_of(config.router if pool is None else pool.settings)
    return described | serve_policy.options(wanted.replicas, bound, config.autoscaling)


def options(config: Config, pool: Pool | None, *, settings: bool = False) -> dict[str, Any]:
    """How Serve starts and ends a pool's replicas, or routers (None). ``settings``: with theirs as environment."""
    local = config.ray.address == "local"
    threads = chosen_threads(pool.settings) if pool else 1
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **NICENESS, **importable(config)}
    if settings:
        environment[SETTINGS] = json.dumps(asdict(part(config, pool)))
    if pool is not None:
        environment |= openmp_environment()
        if not (local or pool.settings.gpus or pool.settings.device.startswith("cuda")):
            environment[VISIBLE_GPUS] = ""  # Ray shows all GPUs of a node to those that reserve none
        drain = {"graceful_shutdown_timeout_s": config.drain_timeout + STOP_SECONDS}
        return need(pool, config).deployment_options(environment) | drain
    # Its requests are streams of minutes, which a replacement must not cut.
    drain = {"graceful_shutdown_timeout_s": LOCAL_DRAIN_SECONDS if local else config.router.drain_timeout}
    # HAProxy chooses by itself, and Serve refuses a class beside it; whether other clusters have it is not known here.
    told = local and variable("RAY_SERVE_ENABLE_HA_PROXY") != "1"
    choice = {"request_router_config": {"request_router_class": ROUTER_CHOICE}} if told else {}
    return router_need(config).deployment_options(environment) | drain | choice | {"max_surge_percent": ROUTER_SURGE}


def importable(config: Config) -> dict[str, str]:
    """What makes Paceline importable on a Ray of our own; the nodes of a cluster have it installed."""
    return {"PYTHONPATH": str(CHECKOUT)} if config.ray.address == "local" else {}


def _default(pool: Pool) -> Any:
    """The settings of a pool of which nothing is said; the target of one of several models has the model's name."""
    if isinstance(pool.settings, DraftConfig):
        return DraftConfig(placement=pool.settings.placement)
    return TargetConfig(name=pool.model)


def _one(settings: Any, replicas: int) -> Any:
    """One replica where there are some or may be: their number stands beside, since it changes often."""
    default = type(settings)()
    bounds = {"min_replicas": default.min_replicas, "max_replicas": default.max_replicas}
    return replace(settings, replicas=min(replicas, 1), **bounds)


def _with_pools(config: Config, changed: Callable[[Pool], Any]) -> Config:
    """The same with other settings of each pool, and one replica wherever there are some or may be."""

    def change(pool: Pool) -> Any:
        settings = changed(pool)
        if isinstance(settings, TargetConfig) and settings.standby:  # routers: it is of all of them that some stand by
            return replace(settings, replicas=pool.settings.replicas)
        return _one(settings, max_replicas_of(pool.settings))

    made = config.with_pools(change)
    return replace(made, target=TargetConfig(), draft=DraftConfig()) if config.models else made
