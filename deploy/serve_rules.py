"""Whether Ray Serve takes its configuration, all of it, and Paceline what it is told in there.

What Serve does not know it ignores. Also whether the worker groups can hold, equip and scale what follows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.autoscaling.serve_policy import IMPORT_PATH as POLICY_PATH
from cluster.autoscaling.serve_policy import declared
from cluster.config.config import AutoscalingConfig, Config, from_mapping
from cluster.config.environment import BUNDLED
from cluster.config.pools import TargetConfig, role_of
from cluster.config.security import SecurityError, check_worker_exposure
from cluster.config.settings import ConfigError, described, yaml_in
from cluster.placement import ROUTER as ROUTER_DEPLOYMENT
from cluster.placement import ClusterNode, Need, lacking, needs, with_routers
from cluster.ray.parts import IMPORT_PATH
from deploy.manifests import Manifests, Object, Pod, RayService, Violation, environment_of, mount_of, requested, where
from deploy.model_rules import LIST, fetching
from deploy.policy_rules import lets_out_to
from deploy.ray_rules import DRAIN, HARD_STOP, number
from router.http.auth import PICKER_PATH
from speculation.events import Role

ROUTER = "router"
START_SECONDS = 120.0
"""Of Ray's drain, for a replacement to start. Serve stops a replica on a node that drains as soon as the time that is
left is what the replica may take to end, whether another has started or not."""
SCRAPER, METRICS = "metrics-data-source", "/metrics"
"""Plugin by which llm-d-router's picker reads metrics, and the path that it reads unless it is told another."""
POLICY = "autoscaling_policy"
KWARGS = f"{POLICY}.policy_kwargs"
MIN_DOWN_SECONDS = 60.0
"""That routers must be too many before there are fewer. With each change Serve replaces the HAProxy of every node, and
what was replaced keeps its streams, and its memory, for up to the hard stop."""
Bounds = tuple[int, int | None]
"""The fewest replicas that Serve may leave of a deployment, and the most that it may start, if it says."""
WIDTH = 1 << 16
"""Wide enough for a line of YAML that is not to be broken."""


def serve_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of the RayService's configuration of Serve, down to Paceline's own below ``args``."""
    place = where(manifests.ray.entry, "serveConfigV2")
    try:
        document = yaml_in("it", manifests.ray.entry["spec"].get("serveConfigV2", ""))
    except ConfigError as error:
        yield place, str(error)
        return
    if not isinstance(document, dict):
        yield place, "must be a mapping"
        return
    faults = [*_schema_faults(document)]
    yield from ((place, what) for what in faults or _of_serve(document, manifests.ray))
    for application in [] if faults else document["applications"]:
        yield from ((f"{place} {application['name']}", what) for what in _of_application(application, manifests))


def _schema_faults(document: Object) -> Iterator[str]:
    try:
        ServeDeploySchema.model_validate(document, extra="forbid")
    except ValidationError as error:
        for entry in error.errors():
            unknown = entry["type"] == "extra_forbidden"  # which Serve would ignore
            place = ".".join(str(part) for part in entry["loc"] if not (unknown and isinstance(part, int)))
            yield f"{place}: {'Ray Serve has no such setting' if unknown else entry['msg']}"


def _of_serve(document: Object, ray: RayService) -> Iterator[str]:
    if document.get("proxy_location", "EveryNode") != "EveryNode":
        yield f"proxy_location is {document['proxy_location']}; without EveryNode workers never get ready"
    http = document.get("http_options", {})
    if http.get("host") != "0.0.0.0":
        yield "http_options.host must be 0.0.0.0, or nothing outside the pod reaches it"
    if http.get("request_timeout_s") is not None:
        yield "http_options.request_timeout_s cuts streams that run; leave it out"
    port = http.get("port", 8000)
    for group in ray.pods:
        ports = {entry.get("name"): entry["containerPort"] for entry in group.main.get("ports", [])}
        if ports.get("serve") != port:
            yield f"http_options.port is {port}, but {group.group_name} calls {ports.get('serve')} its port serve"
    paths = [application["import_path"] for application in document["applications"]]
    if paths != [IMPORT_PATH]:
        yield f"applications must be one with import_path {IMPORT_PATH}, got {', '.join(paths) or 'none'}"


def _of_application(application: Object, manifests: Manifests) -> Iterator[str]:
    """Of one entry of ``applications`` that Serve takes: its ``args``, and how many replicas ``deployments`` says."""
    try:
        config = from_mapping(application.get("args", {}), "args")
    except ConfigError as error:
        yield str(error)
        return
    ray = manifests.ray
    yield from _of_config(config)
    yield from _of_proxies(config, ray)
    yield from _of_tracing(config, manifests)
    if config.security.api_keys:
        yield from _of_picker(manifests)
    yield from _of_scaling(config, application)
    nodes = _nodes(ray)
    config = with_routers(config, nodes)
    counts, names = _replicas(application), [need.deployment for need in needs(config)]
    wanted = [replace(need, replicas=counts.get(need.deployment, (0, 0))[1] or need.replicas) for need in needs(config)]
    faults = [
        f"deployments: there is none called {name!r}; there are {', '.join(names)}"
        for name in counts
        if name not in names
    ]
    faults += filter(None, [lacking(wanted, nodes)])
    if faults:
        yield from faults
        return
    for what in [*_of_files(config, ROUTER, ray.head, manifests)][:1]:
        yield f"{ray.head.group_name}: {what}; from there the doctor meets workers as a router does"
    for need in wanted:
        for group in _fitting(need, ray):
            for what in _of_equipment(config, role_of(need.deployment) or ROUTER, group, manifests):
                yield f"{group.group_name}: {what}"
    if ray.state:
        yield from _of_survival(counts, wanted, ray)
    yield from _of_models(config, wanted, manifests)


def _replicas(application: Object) -> dict[str, Bounds]:
    """By deployment."""
    found = {}
    for entry in application.get("deployments", []):
        count, bounds = entry.get("num_replicas"), entry.get("autoscaling_config") or {}
        scaled = int(bounds.get("min_replicas", 1)), bounds.get("max_replicas")
        found[entry["name"]] = (count, count) if isinstance(count, int) else scaled
    return found


def _of_config(config: Config) -> Iterator[str]:
    if config.ray.address != "auto":
        yield f"ray.address must be auto, the cluster around it, got {config.ray.address!r}"
    try:
        check_worker_exposure("0.0.0.0", config)
    except SecurityError as error:
        yield f"workers cannot listen: {error}"
    if not (config.security.api_keys or config.router.allow_remote):
        yield "security.api_keys is empty, so whoever reaches the address may use it; or say router.allow_remote"


def _of_proxies(config: Config, ray: RayService) -> Iterator[str]:
    """Every node has an HAProxy; one that was replaced must keep its streams for as long as a router does."""
    for group in ray.pods:
        stop = number(group.main, HARD_STOP)
        if not stop >= config.router.drain_timeout:
            below = f"below router.drain_timeout ({config.router.drain_timeout:g})"
            what = f"{HARD_STOP} is {stop:g}; {below} HAProxy cuts streams whenever routers come or go"
            yield f"{group.group_name}: {what}"


def _of_tracing(config: Config, manifests: Manifests) -> Iterator[str]:
    """Everything is denied but what policies let out."""
    endpoint = config.tracing.otlp_endpoint
    for pod in manifests.ray.workers if endpoint else ():
        if not lets_out_to(manifests, pod, endpoint):
            yield f"tracing.otlp_endpoint is {endpoint}, but no NetworkPolicy lets {pod.where} out there"


def _of_picker(manifests: Manifests) -> Iterator[str]:
    """Endpoint pickers present no key."""
    for entry in manifests.of("ConfigMap"):
        for name, text in entry.get("data", {}).items():
            for plugin in yaml.safe_load(text).get("plugins", []) if "EndpointPickerConfig" in text else []:
                path = plugin.get("parameters", {}).get("path", METRICS)
                if plugin.get("type") == SCRAPER and path != PICKER_PATH:
                    yield f"{where(entry, name)}: {path} wants a key; have it read {PICKER_PATH}"


def _of_equipment(config: Config, role: str, group: Pod, manifests: Manifests) -> Iterator[str]:
    """What the pods of a group need that may run this role: files, the certificate of the role, and time to end."""
    keys = config.security.api_keys
    drain = config.router.drain_timeout if role == ROUTER else config.drain_timeout
    if drain + START_SECONDS > (said := number(group.main, DRAIN)):
        name = "router.drain_timeout" if role == ROUTER else "drain_timeout"
        more = f"without {START_SECONDS:g} more the replica ends before another has started"
        yield f"{name} is {drain:g}, but Ray drains for {said:g}; {more}"
    if role == ROUTER and keys and mount_of(group.main, keys) is None:
        yield f"security.api_keys is {keys}, but nothing is mounted there"
    yield from _of_files(config, role, group, manifests)


def _of_files(config: Config, role: str, group: Pod, manifests: Manifests) -> Iterator[str]:
    """What the pods of a group need to be known to the others by this role."""
    security, container = config.security, group.main
    files = {"certificate": security.certificate, "key": security.key, "authority": security.authority}
    for name, path in files.items():
        if path and mount_of(container, path) is None:
            yield f"security.{name} is {path}, but nothing is mounted there"
    mount = mount_of(container, security.certificate) if security.certificate else None
    volumes = {volume["name"]: volume for volume in group.spec.get("volumes", [])}
    secret = volumes.get(mount["name"], {}).get("secret", {}).get("secretName") if mount else None
    for certificate in manifests.of("Certificate"):
        names = certificate["spec"].get("dnsNames", [])
        if certificate["spec"]["secretName"] == secret and f"{role}.paceline" not in names:
            yield f"may run a {role}, but mounts the certificate of {', '.join(names)}"


def _of_models(config: Config, wanted: Iterable[Need], manifests: Manifests) -> Iterator[str]:
    """Models lie in the image or on a mounted volume; if a Job fills that, it has to fetch them."""
    listed = " ".join(environment_of(pod.main)[LIST] for pod in fetching(manifests))
    fetched = {f"/models/{entry.partition('=')[0]}" for entry in listed.split()}
    for (setting, model), deployments in _read(config).items():
        if model.startswith(str(BUNDLED)):
            continue
        said = f"{setting} is {model}"
        if not model.startswith("/"):
            yield f"{said}; workers have no network: give a folder, such as /models/NAME"
            continue
        placed = [group for need in wanted if need.deployment in deployments for group in _fitting(need, manifests.ray)]
        blind = [group.group_name for group in placed if mount_of(group.main, model) is None]
        if blind:
            yield f"{said}, but {' and '.join(blind)} mount nothing there"
        elif fetched and model not in fetched:
            yield f"{said}, but `models` fetches only {', '.join(sorted(fetched))}"


def _read(config: Config) -> Mapping[tuple[str, str], set[str]]:
    """By setting, and the folder or hub id that it names: the deployments whose pods read that."""
    readers: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for pool in config.pools():
        for named in config.loaded(pool):
            readers[named].add(pool.deployment)
    for named in config.read_by_routers():
        readers[named].add(ROUTER_DEPLOYMENT)
    return readers


def _of_survival(counts: Mapping[str, Bounds], wanted: Iterable[Need], ray: RayService) -> Iterator[str]:
    """Where Ray's head outlives its machine, so do clients' streams: routers and targets are on two."""
    for need in wanted:
        if role_of(need.deployment) is Role.DRAFT:
            continue
        if (count := counts.get(need.deployment, (need.replicas, 0))[0]) < 2:
            yield f"{need.deployment}: there may be {count} alone; with 2 the loss of one machine is survived"
        for group in _fitting(need, ray) if need.gpus else ():
            if 2 * need.gpus * need.ranks <= group.gpus:
                held = f"its {group.gpus:g} GPUs hold two of {need.deployment}"
                yield f"{group.group_name}: {held}; one machine may take both"


def _nodes(ray: RayService) -> list[ClusterNode]:
    """The Ray nodes that may come to be: with an autoscaler, as many of each group as it may start."""
    found = []
    for group in ray.workers:
        # KubeRay tells Ray whole CPUs, rounded up.
        cpus = math.ceil(requested(group.main, "cpu"))
        count = group.ray.get("maxReplicas" if ray.autoscales else "replicas", 1)
        found += [ClusterNode(cpus, group.gpus, group.ray.get("labels", {}))] * count
    return found


def _fitting(need: Need, ray: RayService) -> list[Pod]:
    """The worker groups where Ray may put it: those with its labels, and GPUs if it needs some."""
    return [
        group
        for group in ray.workers
        if need.labels.items() <= group.ray.get("labels", {}).items() and group.gpus >= need.gpus * need.ranks
    ]


def _of_scaling(config: Config, application: Object) -> Iterator[str]:
    """Whether what sizes the pools knows the pools that ``args`` describes.

    Numbers of replicas stand beside ``args``: in ``deployments``, and for the policy that moves them in
    ``autoscaling_policy``. What ``args`` says of them as well goes unheard.
    """
    yield from _unheard(config)
    yield from _hasty(application)
    yield from _standing_by(config, application)
    if (policy := application.get(POLICY)) is None:
        return
    yield from _unknown(POLICY, policy, ("policy_function", "policy_kwargs"))
    if policy.get("policy_function") != POLICY_PATH:
        yield f"{POLICY}.policy_function must be {POLICY_PATH}, got {described(policy.get('policy_function'))}"
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
    for path, deployment, bound in [*pools, ("router", ROUTER_DEPLOYMENT, config.router.max_replicas)]:
        if bound:
            yield f"{path}.max_replicas has no effect here; give {deployment} an autoscaling_config in `deployments`"
    if config.autoscaling != AutoscalingConfig():
        yield f"autoscaling has no effect here; say it in {KWARGS}.settings"


def _hasty(application: Object) -> Iterator[str]:
    """Routers that come and go with every lull."""
    scaled = {entry["name"]: entry.get("autoscaling_config") for entry in application.get("deployments", [])}
    own = scaled.get(ROUTER_DEPLOYMENT)
    if not own:
        return
    name, said = f"{ROUTER_DEPLOYMENT}: downscale_delay_s", own.get("downscale_delay_s", math.inf)
    if POLICY in application:
        kwargs = application[POLICY].get("policy_kwargs")
        settings = kwargs.get("settings") if isinstance(kwargs, dict) else None
        name = f"{KWARGS}.settings.down_s"
        said = settings.get("down_s", AutoscalingConfig().down_s) if isinstance(settings, dict) else None
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
    deployed = {pool.deployment for pool in config.nonempty_pools()}
    needed = [pool for pool in pools if pool["deployment"] in deployed]
    if not (isinstance(listed, list) and all(one in pools for one in listed) and all(one in listed for one in needed)):
        written = yaml.safe_dump(needed, default_flow_style=True, sort_keys=False, width=WIDTH).strip()
        yield f"{KWARGS}.pools does not list the pools of args, which are {written}"
