"""Whether what sizes the pools in a Serve configuration knows the pools that ``args`` describes.

There the numbers of replicas stand beside ``args``: in ``deployments``, and for the policy that moves them in
``autoscaling_policy``. What ``args`` says of them as well goes unheard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from cluster.autoscaling.serve_policy import IMPORT_PATH, declared
from cluster.config.config import AutoscalingConfig, Config, from_mapping, max_replicas_of
from cluster.config.pools import TargetConfig
from cluster.config.settings import ConfigError, described
from cluster.placement import ROUTER
from deploy.manifests import Object

POLICY = "autoscaling_policy"
KWARGS = f"{POLICY}.policy_kwargs"
MIN_DOWN_SECONDS = 60.0
"""That routers must be too many before there are fewer. With each change Serve replaces the HAProxy of every node, and
what was replaced keeps its streams, and its memory, for up to the hard stop."""
WIDTH = 1 << 16
"""Wide enough for a line of YAML that is not to be broken."""


def scaling_faults(config: Config, application: Object) -> Iterator[str]:
    """Of the policy of an entry of ``applications``, and of what ``args`` says of numbers that follow the load."""
    yield from _unheard(config)
    yield from _hasty(application)
    yield from _standing_by(config, application)
    policy = application.get(POLICY)
    if policy is None:
        return
    yield from _unknown(POLICY, policy, ("policy_function", "policy_kwargs"))
    if policy.get("policy_function") != IMPORT_PATH:
        yield f"{POLICY}.policy_function must be {IMPORT_PATH}, got {described(policy.get('policy_function'))}"
        return
    given = policy.get("policy_kwargs", {})
    if not isinstance(given, dict):
        yield f"{KWARGS} must be a mapping, got {described(given)}"
        return
    yield from _unknown(KWARGS, given, ("pools", "settings"))
    yield from _of_pools(config, given.get("pools"))
    try:
        from_mapping({"autoscaling": given.get("settings")}, f"{KWARGS}.settings")
    except ConfigError as error:
        yield str(error)


def _unheard(config: Config) -> Iterator[str]:
    """Settings of ``args`` that nothing reads where Serve is given ``deployments`` and a policy."""
    pools = [(pool.path, pool.deployment, pool.settings.max_replicas) for pool in config.pools()]
    for path, deployment, bound in [*pools, ("router", ROUTER, config.router.max_replicas)]:
        if bound:
            yield f"{path}.max_replicas has no effect here; give {deployment} an autoscaling_config in `deployments`"
    if config.autoscaling != AutoscalingConfig():
        yield f"autoscaling has no effect here; say it in {KWARGS}.settings"


def _hasty(application: Object) -> Iterator[str]:
    """Routers that come and go with every lull."""
    scaled = {entry["name"]: entry.get("autoscaling_config") for entry in application.get("deployments", [])}
    own = scaled.get(ROUTER)
    if not own:
        return
    if POLICY in application:
        kwargs = application[POLICY].get("policy_kwargs")
        settings = kwargs.get("settings") if isinstance(kwargs, dict) else None
        said = settings.get("down_s", AutoscalingConfig().down_s) if isinstance(settings, dict) else None
        name = f"{KWARGS}.settings.down_s"
    else:
        name, said = f"{ROUTER}: downscale_delay_s", own.get("downscale_delay_s", math.inf)
    if isinstance(said, int | float) and said < MIN_DOWN_SECONDS:
        yield f"{name} is {said:g}; below {MIN_DOWN_SECONDS:g}, HAProxy is replaced on every node with every lull"


def _standing_by(config: Config, application: Object) -> Iterator[str]:
    """Routers take as many targets for idle as ``args`` says, of as many as there should be by it."""
    counts = {entry["name"]: entry.get("num_replicas") for entry in application.get("deployments", [])}
    for pool in config.pools():
        if not isinstance(pool.settings, TargetConfig) or not pool.settings.standby or pool.deployment not in counts:
            continue
        wanted, said = pool.settings.replicas + pool.settings.standby, counts[pool.deployment]
        if said != wanted:
            parts = f"{pool.path}.replicas ({pool.settings.replicas}) and standby ({pool.settings.standby}) together"
            yield f"{pool.deployment}: num_replicas is {said}; it must be {wanted}, {parts}"


def _unknown(where: str, given: Object, known: Iterable[str]) -> Iterator[str]:
    for key in given:
        if key not in known:
            yield f"{where}.{key}: there is no such setting; there are {', '.join(known)}"


def _of_pools(config: Config, listed: object) -> Iterator[str]:
    """The policy keeps a pool that it is not told of as it is."""
    pools: list[dict[str, Any]] = declared(config)["policy_kwargs"]["pools"]
    deployed = {pool.deployment for pool in config.pools() if max_replicas_of(pool.settings)}
    needed = [pool for pool in pools if pool["deployment"] in deployed]
    if (
        not isinstance(listed, list)
        or any(pool not in pools for pool in listed)
        or any(pool not in listed for pool in needed)
    ):
        written = yaml.safe_dump(needed, default_flow_style=True, sort_keys=False, width=WIDTH).strip()
        yield f"{KWARGS}.pools does not list the pools of args, which are {written}"
