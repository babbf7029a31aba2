"""Whether what objects say of each other holds: names that exist, selectors that select, budgets that can be kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.manifests import Manifests, Object, Pod, Violation, host_in, selects, where
from deploy.policy_rules import HTTP


@dataclass(frozen=True, slots=True)
class ByHand:
    """A Secret that the operator of the cluster makes, because it must not stand in a file here."""

    about: str
    command: str
    """What makes it, after ``kubectl create secret``."""
    unless: str = ""
    """The kind of the objects that make it where there are some."""


def _certificate(role: str) -> ByHand:
    files = {"tls.crt": f"{role}.crt", "tls.key": f"{role}.key", "ca.crt": "ca.crt"}
    given = " ".join(f"--from-file={name}=DIR/{file}" for name, file in files.items())
    about = f"the certificate of {'Redis' if role == 'redis' else f'{role}s'}, from `paceline certs DIR`"
    return ByHand(about, f"generic paceline-{role}-tls {given}", unless="Certificate")


SECRETS: Mapping[str, ByHand] = {
    **{f"paceline-{role}-tls": _certificate(role) for role in ("router", "target", "draft", "redis")},
    "paceline-ray-auth": ByHand(
        "the token of Ray", "generic paceline-ray-auth --from-literal=auth_token=$(openssl rand -hex 32)"
    ),
    "paceline-api-keys": ByHand("API keys, one a line", "generic paceline-api-keys --from-file=keys=FILE"),
    "paceline-redis": ByHand(
        "the password of Redis", "generic paceline-redis --from-literal=password=$(openssl rand -hex 32)"
    ),
    "paceline-huggingface": ByHand(
        "the token of an account that may have the models, if they are gated as Meta's are",
        "generic paceline-huggingface --from-literal=token=TOKEN",
    ),
    "paceline-registry": ByHand(
        "the login at the registry of the image",
        "docker-registry paceline-registry --docker-server=HOST --docker-username=NAME --docker-password=TOKEN",
    ),
    "paceline-http-tls": ByHand("the certificate of the host name", "tls paceline-http-tls --cert=FILE --key=FILE"),
}
CLAIM, MODELS = "PersistentVolumeClaim", "paceline-models"
"""Where models lie; made by hand where no Job fills it."""
GIVEN = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
"""In every namespace."""
READY = "/ready"
"""What a router says of itself."""
HOST = "kubernetes.io/hostname"
COMPONENT, SURVIVING = "app.kubernetes.io/component", ("router", "target")
"""Label that says what runs in a pod, and what streams need one of."""
ENFORCED = "pod-security.kubernetes.io/enforce"
OPERATORS_PATHS = ("/metrics", "/cluster")
"""What routers tell of themselves."""
OF_A_CLUSTER = "ray.io/cluster"
"""Label by which KubeRay tells the pods of the cluster that serves from those of the one that is to replace it."""


def reference_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of all objects together."""
    known = _known(manifests)
    for place, kind, name in sorted(references(manifests)):
        if (kind, name) not in known:
            hint = "; a Secret to make by hand is listed in deploy/reference_rules.py" if kind == "Secret" else ""
            yield place, f"there is no {kind} {name}{hint}"
    for pod in manifests.pods():
        yield from _of_pod(pod, manifests)
    for entry in manifests.objects:
        yield from ((where(entry), what) for what in _of_object(entry, manifests))
    yield from _selectors(manifests)
    yield from _apart(manifests)
    yield from _entrance(manifests)


def secrets_by_hand(manifests: Manifests) -> dict[str, ByHand]:
    """Those that have to be there before the manifests are applied."""
    used = {name for _, kind, name in references(manifests) if kind == "Secret"}
    return {name: secret for name, secret in _secrets(manifests).items() if name in used}


def models_by_hand(manifests: Manifests) -> bool:
    """Whether the volume of models is mounted, and nothing here makes or fills it."""
    made = manifests.of("Job") or MODELS in manifests.names(CLAIM)
    return not made and any((kind, name) == (CLAIM, MODELS) for _, kind, name in references(manifests))


def _secrets(manifests: Manifests) -> dict[str, ByHand]:
    return {name: secret for name, secret in SECRETS.items() if not (secret.unless and manifests.of(secret.unless))}


def references(manifests: Manifests) -> set[tuple[str, str, str]]:
    """Every mention of another object: where it is made, the kind, the name."""
    accounts = {
        (pod.where, "ServiceAccount", pod.spec.get("serviceAccountName", "default")) for pod in manifests.pods()
    }
    return accounts | {(where(entry), *named) for entry in manifests.objects for named in _mentioned(entry)}


def _mentioned(part: object) -> Iterator[tuple[str, str]]:
    """Objects that any part of a manifest names, by the keys that Kubernetes and our operators use for it."""
    if isinstance(part, list):
        for entry in part:
            yield from _mentioned(entry)
    if not isinstance(part, dict):
        return
    for key, value in part.items():
        match key, value:
            case ("secretKeyRef" | "secretRef", {"name": str(name)}) | ("secretName", str(name)):
                yield "Secret", name
            case ("configMapKeyRef" | "configMapRef" | "configMap", {"name": str(name)}):
                yield "ConfigMap", name
            case ("persistentVolumeClaim", {"claimName": str(name)}):
                yield "PersistentVolumeClaim", name
            case ("issuerRef" | "roleRef", {"name": str(name), "kind": str(kind)}):
                yield kind, name
            case ("imagePullSecrets", list(secrets)):
                yield from (("Secret", secret["name"]) for secret in secrets)
            case ("backendRefs" | "subjects", list(named)):
                yield from ((one.get("kind", "Service"), one["name"]) for one in named)
            case ("service" | "endpointPickerRef", {"name": str(name)}):
                yield "Service", name
            case ("redisAddress", str(address)):
                yield "Service", host_in(address)
        yield from _mentioned(value)


def _known(manifests: Manifests) -> set[tuple[str, str]]:
    """What there is, will be made by an operator, or is made by hand."""
    found = {(entry["kind"], entry["metadata"]["name"]) for entry in manifests.objects} | GIVEN
    found |= {("Secret", certificate["spec"]["secretName"]) for certificate in manifests.of("Certificate")}
    found |= {("Service", manifests.ray.serve_service)}
    found |= {(CLAIM, MODELS)} if models_by_hand(manifests) else set()
    return found | {("Secret", name) for name in _secrets(manifests)}


def _of_object(entry: Object, manifests: Manifests) -> Iterator[str]:
    """What one object says that cannot hold, by its kind."""
    spec = entry.get("spec", {})
    match entry["kind"]:
        case "Certificate":  # unless it is told, cert-manager does one thing or the other, by its version
            if spec.get("isCA") and spec.get("privateKey", {}).get("rotationPolicy") != "Never":
                yield "privateKey.rotationPolicy of an authority must be Never"
        case "Namespace":  # it refuses pods that our rules would
            if entry["metadata"].get("labels", {}).get(ENFORCED) != "restricted":
                yield f"the label {ENFORCED} must be restricted"
        case "PersistentVolumeClaim":
            if "ReadWriteMany" not in spec["accessModes"]:
                yield "accessModes must have ReadWriteMany, for pods of several machines"
        case "PodDisruptionBudget":
            # Kubernetes cannot count a RayCluster's pods as replicas: only a number that must stay has an effect.
            stay, pods = spec.get("minAvailable"), manifests.selected(spec.get("selector", {}))
            if not isinstance(stay, int):
                yield "minAvailable must be a whole number: Ray's pods have no controller that can be asked"
            elif stay >= (fewest := sum(pod.at_least for pod in pods)):
                yield f"minAvailable is {stay} of {fewest} pods, so a machine could never be drained"
        case _:
            yield from _of_doors(entry, manifests)


def _of_doors(entry: Object, manifests: Manifests) -> Iterator[str]:
    """The same of what names ports and paths."""
    spec = entry.get("spec", {})
    match entry["kind"]:
        case "PodMonitor":
            ports = [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
            for pod in manifests.selected(spec["selector"]):
                yield from (f"{pod.where} has no port {port}" for port in ports if port not in pod.ports())
        case "InferencePool":
            numbers = [port["number"] for port in spec["targetPorts"]]
            yield from (f"HTTP is on port {HTTP}, got {number}" for number in numbers if number != HTTP)
        case "HTTPRoute":
            for rule in spec["rules"]:
                yield from _of_route(rule)
        case "Ingress":
            for rule in spec["rules"]:
                yield from _for_operators([(path["pathType"], path["path"]) for path in rule["http"]["paths"]])


def _of_route(rule: Object) -> Iterator[str]:
    """Where clients are led, and what of it they may reach."""
    numbers = [backend.get("port", HTTP) for backend in rule["backendRefs"]]
    yield from (f"HTTP is on port {HTTP}, got {number}" for number in numbers if number != HTTP)
    if rule.get("timeouts", {}).get("request") != "0s":
        yield 'timeouts.request must be "0s", or the gateway cuts streams'
    wanted = [match.get("path", {}) for match in rule.get("matches", [{}])]
    yield from _for_operators([(path.get("type", "PathPrefix"), path.get("value", "/")) for path in wanted])


def _for_operators(paths: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What routers tell of themselves must not be among what comes through, by how a path is to match and the path."""
    for own in OPERATORS_PATHS:
        if any(own == path or (how != "Exact" and f"{own}/".startswith(f"{path.rstrip('/')}/")) for how, path in paths):
            yield f"{own} is for operators, and comes through here"


def _of_pod(pod: Pod, manifests: Manifests) -> Iterator[Violation]:
    """Volumes that it mounts, and what it is spread over."""
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
    for entry in manifests.of("StatefulSet"):
        if where(entry) == pod.where:  # it makes volumes for its pods
            volumes |= {claim["metadata"]["name"] for claim in entry["spec"].get("volumeClaimTemplates", [])}
    for container in pod.containers():
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{pod.where} {container['name']}", f"there is no volume {mount['name']} to mount"
    for spread in pod.spec.get("topologySpreadConstraints", []):
        place = f"its spread over {spread['topologyKey']}"
        if not selects(spread.get("labelSelector", {}), pod.labels):
            yield pod.where, f"{place} does not select the pod itself"
        strict = spread["whenUnsatisfiable"] == "DoNotSchedule"
        if strict and spread.get("nodeTaintsPolicy") != "Honor":
            yield pod.where, f"{place} counts nodes that the pod cannot go to; set nodeTaintsPolicy: Honor"
        if strict and OF_A_CLUSTER not in spread.get("matchLabelKeys", []):
            yield pod.where, f"{place} counts pods of other clusters; set matchLabelKeys: [{OF_A_CLUSTER}]"


def _selectors(manifests: Manifests) -> Iterator[Violation]:
    for entry in manifests.of("NetworkPolicy", "PodMonitor", "PodDisruptionBudget", "InferencePool", "Service"):
        part = "podSelector" if entry["kind"] == "NetworkPolicy" else "selector"
        selector = entry["spec"].get(part, {})
        if not manifests.selected({"matchLabels": selector} if entry["kind"] == "Service" else selector):
            yield where(entry, part), "selects no pod"


def _apart(manifests: Manifests) -> Iterator[Violation]:
    """Whether one machine could take all pods of a kind that is to outlive a machine, or the head and its state."""
    minding = {
        pod.where: f"whose loss {where(budget)} is against"
        for budget in manifests.of("PodDisruptionBudget")
        for pod in manifests.selected(budget["spec"].get("selector", {}))
    }
    ray = manifests.ray
    for pod in ray.workers:
        if ray.state and pod.labels.get(COMPONENT) in SURVIVING:
            minding.setdefault(pod.where, "which Ray's head would survive")
        if pod.where in minding and not _on_two_machines(pod):
            yield pod.where, f"all of its pods may come to one machine, {minding[pod.where]}"
    for pod in manifests.redis():
        affinity = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        shunned = [one.get("labelSelector", {}) for one in terms if one["topologyKey"] == HOST]
        if not any(selects(selector, ray.head.labels) for selector in shunned):
            yield pod.where, "may come to the machine of Ray's head, whose state it keeps"


def _on_two_machines(pod: Pod) -> bool:
    spreads = [one for one in pod.spec.get("topologySpreadConstraints", []) if one["topologyKey"] == HOST]
    return any(one["whenUnsatisfiable"] == "DoNotSchedule" and one.get("minDomains", 1) > 1 for one in spreads)


def _entrance(manifests: Manifests) -> Iterator[Violation]:
    """HTTP enters by pods that compute nothing, once they can serve: what enters by a pod ends with it."""
    every = manifests.ray.serve_service
    for route in manifests.of("HTTPRoute", "Ingress"):
        if ("Service", every) in _mentioned(route):
            yield where(route), f"{every} leads clients into every pod; lead them to a Service of routers"
    for service in manifests.of("Service"):
        leads = any(port.get("targetPort") in ("serve", HTTP) for port in service["spec"]["ports"])
        for pod in manifests.pods_of(service) if leads else []:
            if pod.gpus:
                yield where(service), f"leads clients into {pod.where}, which computes"
            elif pod.main.get("readinessProbe", {}).get("httpGet", {}).get("path") != READY:
                yield pod.where, f"must be ready by {READY}: {service['metadata']['name']} leads clients in"
