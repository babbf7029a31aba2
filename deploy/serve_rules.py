"""Whether Ray Serve takes its configuration, and all of it: what it does not know it ignores."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config.settings import ConfigError, yaml_in
from cluster.ray.parts import IMPORT_PATH
from deploy.application_rules import application_faults
from deploy.manifests import Manifests, Object, Violation, groups, where


def serve_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of the Serve configuration of every RayService, down to Paceline's own below ``args``."""
    for service in manifests.of("RayService"):
        place = where(service, "serveConfigV2")
        try:
            document = yaml_in("it", service["spec"].get("serveConfigV2", ""))
        except ConfigError as error:
            yield place, str(error)
            continue
        if not isinstance(document, dict):
            yield place, "must be a mapping"
            continue
        faults = [*_schema_faults(document)]
        yield from ((place, what) for what in faults or _of_serve(document, service))
        for application in [] if faults else document["applications"]:
            for what in application_faults(application, service, manifests):
                yield f"{place} {application['name']}", what


def _schema_faults(document: Object) -> Iterator[str]:
    try:
        ServeDeploySchema.model_validate(document, extra="forbid")
    except ValidationError as error:
        for entry in error.errors():
            unknown = entry["type"] == "extra_forbidden"  # which Serve would ignore
            place = ".".join(str(part) for part in entry["loc"] if not (unknown and isinstance(part, int)))
            yield f"{place}: {'Ray Serve has no such setting' if unknown else entry['msg']}"


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
        ports = {entry.get("name"): entry["containerPort"] for entry in group.main.get("ports", [])}
        if ports.get("serve") != port:
            yield f"http_options.port is {port}, but {group.group_name} calls {ports.get('serve')} its port serve"
    paths = [application["import_path"] for application in document["applications"]]
    if paths != [IMPORT_PATH]:
        yield f"applications must be one with import_path {IMPORT_PATH}, got {', '.join(paths) or 'none'}"
