"""Whether Ray Serve and Paceline take the application's configuration, and whether the worker groups can hold it."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import BUNDLED, Config, from_mapping
from cluster.placement import Need, Node, lacking, needs
from cluster.security import SecurityError, check_worker_exposure
from cluster.settings import ConfigError
from deploy.manifests import Finding, Manifests, Object, group_name, groups, mount_of, where
from deploy.pod_rules import GPU
from deploy.ray_rules import drain_seconds

APPLICATION = "cluster.serve_app:application"
ROUTER = "router"
FETCHED = "MODELS"
"""Environment variable of the Job that fetches models: FOLDER=HUB-ID, separated by spaces."""


def serve_findings(manifests: Manifests) -> Iterator[Finding]:
    """Of the Serve configuration of every RayService, down to Paceline's own below ``args``."""
    for service in manifests.of("RayService"):
        place = where(service, "serveConfigV2")
        try:
            document = yaml.safe_load(service["spec"].get("serveConfigV2", ""))
        except yaml.YAMLError as error:
            yield Finding(place, f"is not YAML: {' '.join(str(error).split())}")
            continue
        if not isinstance(document, dict):
            yield Finding(place, "must be a mapping")
            continue
        faults = [*_schema_faults(document), *_unknown_keys(document, ServeDeploySchema)]
        yield from (Finding(place, what) for what in faults or _of_serve(document, service))
        if not faults:
            yield from (Finding(f"{place} args", what) for what in _of_arguments(document, service, manifests))


def _schema_faults(document: Object) -> Iterator[str]:
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        for entry in error.errors():
            yield f"{'.'.join(str(part) for part in entry['loc'])}: {entry['msg']}"


def _unknown_keys(document: Object, model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Keys that the model does not have: Serve ignores them."""
    known = {field.alias or name: field.annotation for name, field in model.model_fields.items()} | {
        name: field.annotation for name, field in model.model_fields.items()
    }
    for key, value in document.items():
        if key not in known:
            yield f"{above}{key}: Ray Serve has no such setting"
            continue
        inner = _model_in(known[key])
        for entry in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(entry, dict):
                yield from _unknown_keys(entry, inner, f"{above}{key}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone, optionally or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)


def _of_serve(document: Object, service: Object) -> Iterator[str]:
    if document.get("proxy_location", "EveryNode") != "EveryNode":
        yield f"proxy_location is {document['proxy_location']}; without EveryNode workers never get ready"
    http = document.get("http_options", {})
    if http.get("host") != "0.0.0.0":
        yield "http_options.host must be 0.0.0.0, or nothing outside the pod reaches it"
    if http.get("request_timeout_s") is not None:
        yield "http_options.request_timeout_s cuts streams that run; leave it out"
    port = http.get("port", 8000)
    for group in groups(service):
        ports = {entry.get("name"): entry["containerPort"] for entry in _container(group).get("ports", [])}
        if ports.get("serve") != port:
            yield f"http_options.port is {port}, but {group_name(group)} calls {ports.get('serve')} its port serve"
    paths = [application["import_path"] for application in document["applications"]]
    if paths != [APPLICATION]:
        yield f"applications must be one with import_path {APPLICATION}, got {', '.join(paths) or 'none'}"


def _of_arguments(document: Object, service: Object, manifests: Manifests) -> Iterator[str]:
    """Of what Paceline itself is told."""
    for application in document["applications"]:
        try:
            config = from_mapping(application.get("args", {}), "args")
        except ConfigError as error:
            yield str(error).removeprefix("args: ")
            continue
        yield from _of_config(config)
        wanted, faults = _wanted(config, application)
        why = lacking(wanted, _nodes(service))
        faults += [why] if why else []
        yield from faults
        if faults:
            continue
        for need in wanted:
            role = _role(need, config)
            for group in _fitting(need, service):
                container, name = _container(group), group_name(group)
                drain = drain_seconds(container)
                if role == ROUTER and config.router.drain_timeout > drain:
                    yield f"{name}: router.drain_timeout is {config.router.drain_timeout:g}, but Ray drains for {drain:g}"
                yield from (f"{name}: {what}" for what in _of_files(config, role, container))
                yield from (f"{name}: {what}" for what in _of_certificate(config, role, group, manifests))
        yield from _of_models(config, service, manifests)


def _wanted(config: Config, application: Object) -> tuple[list[Need], list[str]]:
    """What all replicas ask for, as many as ``deployments`` says, and what that says of deployments there are not."""
    counts = {entry["name"]: entry.get("num_replicas") for entry in application.get("deployments", [])}
    names = [need.deployment for need in needs(config)]
    faults = [
        f"deployments: there is none called {name!r}; there are {', '.join(names)}"
        for name in counts
        if name not in names
    ]
    found = [
        replace(need, replicas=count) if isinstance(count := counts.get(need.deployment), int) else need
        for need in needs(config)
    ]
    return found, faults


def _of_config(config: Config) -> Iterator[str]:
    if config.ray.address != "auto":
        yield f"ray.address must be auto, the cluster around it, got {config.ray.address!r}"
    try:
        check_worker_exposure("0.0.0.0", config)
    except SecurityError:
        yield "without security.certificate, key and authority workers refuse to listen; or say router.allow_remote"
    if not (config.security.api_keys or config.router.allow_remote):
        yield "security.api_keys is empty, so whoever reaches the address may use it; or say router.allow_remote"


def _of_files(config: Config, role: str, container: Object) -> Iterator[str]:
    """Every file of ``security`` that this role reads has to be mounted."""
    security = config.security
    named = {"certificate": security.certificate, "key": security.key, "authority": security.authority}
    if role == ROUTER:
        named["api_keys"] = security.api_keys
    for name, path in named.items():
        if path and mount_of(container, path) is None:
            yield f"security.{name} is {path}, but nothing is mounted there"


def _of_certificate(config: Config, role: str, group: Object, manifests: Manifests) -> Iterator[str]:
    """A worker shows a certificate that names its role, and a group mounts only one."""
    mount = config.security.certificate and mount_of(_container(group), config.security.certificate)
    if not mount:
        return
    volumes = {volume["name"]: volume for volume in group["template"]["spec"].get("volumes", [])}
    secret = volumes.get(mount["name"], {}).get("secret", {}).get("secretName")
    for certificate in manifests.of("Certificate"):
        names = certificate["spec"].get("dnsNames", [])
        if certificate["spec"]["secretName"] == secret and f"{role}.paceline" not in names:
            yield f"may run a {role}, but mounts the certificate of {', '.join(names)}"


def _of_models(config: Config, service: Object, manifests: Manifests) -> Iterator[str]:
    """Models lie in the image or on a mounted volume; if a Job fills that, it has to fetch them."""
    fetched = _fetched(manifests)
    for pool in config.pools():
        model = pool.settings.model
        if model.startswith(str(BUNDLED)):
            continue
        if not model.startswith("/"):
            yield f"{pool.path}.model is {model!r}; workers have no network: give a folder, such as /models/NAME"
            continue
        need = next((need for need in needs(config) if need.deployment == pool.deployment), None)
        for group in _fitting(need, service) if need else []:
            if mount_of(_container(group), model) is None:
                yield f"{pool.path}.model is {model}, but {group_name(group)} mounts nothing there"
            elif fetched and model not in fetched:
                yield f"{pool.path}.model is {model}, but `models` fetches only {', '.join(sorted(fetched))}"


def _fetched(manifests: Manifests) -> set[str]:
    """The folders that Jobs fill."""
    found = set()
    for job in manifests.of("Job"):
        for container in job["spec"]["template"]["spec"]["containers"]:
            listed = next((entry["value"] for entry in container.get("env", []) if entry["name"] == FETCHED), "")
            found |= {f"/models/{entry.partition('=')[0]}" for entry in listed.split()}
    return found


def _nodes(service: Object) -> list[Node]:
    """The Ray nodes that may come to be: with an autoscaler, as many of each group as it may start."""
    scaled = service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling")
    found = []
    for group in groups(service)[1:]:
        requests = _container(group).get("resources", {}).get("requests", {})
        count = group.get("maxReplicas" if scaled else "replicas", 1)
        node = Node(float(_whole_cpus(requests.get("cpu", "0"))), float(requests.get(GPU, 0)), group.get("labels", {}))
        found += [node] * count
    return found


def _whole_cpus(quantity: str | int | float) -> int:
    """KubeRay tells Ray whole CPUs, rounded up."""
    text = str(quantity)
    thousandths = int(text.removesuffix("m")) if text.endswith("m") else round(float(text) * 1000)
    return -(-thousandths // 1000)


def _fitting(need: Need, service: Object) -> list[Object]:
    """The worker groups where Ray may put it: those with its labels, and GPUs if it needs some."""
    return [
        group
        for group in groups(service)[1:]
        if need.labels.items() <= group.get("labels", {}).items()
        and float(_container(group).get("resources", {}).get("requests", {}).get(GPU, 0)) >= need.gpus * need.ranks
    ]


def _role(need: Need, config: Config) -> str:
    roles: Mapping[str, str] = {pool.deployment: pool.role.value for pool in config.pools()}
    return roles.get(need.deployment, ROUTER)


def _container(group: Object) -> Object:
    """Ray's own."""
    found: Object = group["template"]["spec"]["containers"][0]
    return found
