"""What may come in to the pods and go out of them: nothing but what a NetworkPolicy lets through.

Checked both ways. What would let strangers to a door that asks nobody who they are is refused; and so is what would
keep a pod from somebody it cannot do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from deploy.manifests import Manifests, Object, Pod, Violation, groups, selects, where

HTTP, METRICS, DASHBOARD, HTTPS, REDIS = 8000, 8080, 8265, 443, 6379
KUBERNETES = (HTTPS, 6443, 8443, 16443)
"""Where Kubernetes' API may listen."""
ANY_WORKER = 20_000
"""One of the ports that workers and Ray choose as they like."""
CLOSED = {8404: "HAProxy's statistics", 9101: "HAProxy's metrics"}
"""Ports of pods that serve HTTP, on which Serve's proxy asks nobody who they are."""
NAMES, OF_NAMES = 53, {"k8s-app": "kube-dns"}
"""Port of Kubernetes' DNS, and the label of its pods."""
NODE_LOCAL = "169.254.20.10/32"
"""Where NodeLocal DNSCache answers on every node, by default: an address of the node, so of no pod. With it, no pod is
asked for names any more."""
OF_A_NAMESPACE = "kubernetes.io/metadata.name"
EVERYBODY = frozenset({"0.0.0.0/0", "::/0"})
TO_THE_WORLD = frozenset({"LoadBalancer", "NodePort"})


def policy_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of all policies together, and of Services that lead past them."""
    denied = [entry["spec"] for entry in manifests.of("NetworkPolicy") if not entry["spec"]["podSelector"]]
    if not any(
        {"Ingress", "Egress"} == set(spec.get("policyTypes", [])) and not spec.get("ingress") for spec in denied
    ):
        yield "manifests", "there must be a NetworkPolicy that denies everything, in and out, to all pods"
    yield from _ports(manifests)
    yield from _strangers(manifests)
    yield from _services(manifests)
    yield from _names(manifests)
    yield from _ways(manifests)


def lets_out_to(manifests: Manifests, pod: Pod, endpoint: str) -> bool:
    """Whether a policy lets a pod out to a URL: a Service as ``NAME.NAMESPACE`` (``.svc...``), or a host elsewhere."""
    url = urlsplit(endpoint)
    port = url.port or (HTTPS if url.scheme == "https" else 80)
    labels = (url.hostname or "").split(".")
    namespace = labels[1] if len(labels) == 2 or labels[2:3] == ["svc"] else ""

    def leads(place: Object) -> bool:
        if not namespace:
            return "ipBlock" in place
        return "namespaceSelector" in place and selects(place["namespaceSelector"], {OF_A_NAMESPACE: namespace})

    ways = [way for way in manifests.ways_out(pod) if _covers_any(way, port)]
    return any(not place or leads(place) for way in ways for place in _places(way, "to"))


def _ports(manifests: Manifests) -> Iterator[Violation]:
    """What policies let in to is there, and not closed."""
    for policy in manifests.of("NetworkPolicy"):
        selected = manifests.selected(policy["spec"]["podSelector"])
        opened = {number for pod in selected for number in pod.ports().values()}
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                if "endPort" not in port and port["port"] not in opened:
                    yield where(policy), f"no pod that it selects has port {port['port']}"
            for number, what in CLOSED.items() if HTTP in opened else ():
                if _covers_any(rule, number):
                    yield where(policy), f"lets others see {what}, on port {number}"


def _strangers(manifests: Manifests) -> Iterator[Violation]:
    """Whoever is none of our pods comes to doors with a guard, and these are few."""
    found = set()
    for pod in manifests.pods():
        if (guarded := _guarded(pod)) is None:
            continue
        for policy, way in manifests.ways_in(pod):
            theirs = [place for place in _places(way, "from") if not _is_ours(place)]
            anybody = any(not place or place.get("ipBlock", {}).get("cidr") in EVERYBODY for place in theirs)
            who = "everybody" if anybody else "others than our pods"
            for shown in _unguarded(pod, way, {HTTP} if anybody else guarded) if theirs else ():
                found.add((where(policy), f"lets {who} in to port {shown} of {pod.where}"))
    yield from sorted(found)


def _unguarded(pod: Pod, way: Object, allowed: set[int]) -> Iterator[str]:
    """The ports of a pod, other than those allowed, that a rule opens."""
    for port in way.get("ports") or [{"port": 1, "endPort": 65535}]:
        first, last = port["port"], port.get("endPort", port["port"])
        if first != last:
            yield f"{first} to {last}"
        elif first in {*pod.ports().values()} - allowed:
            yield str(first)


def _guarded(pod: Pod) -> set[int] | None:
    """The ports of a pod of ours that may be let strangers in to; None: it is somebody else's."""
    if pod.where.startswith("RayService"):
        return {HTTP, METRICS, DASHBOARD} if pod.where.endswith(" head") else {HTTP, METRICS}
    return set() if pod.where.startswith("StatefulSet") else None


def _places(way: Object, side: str) -> list[Object]:
    """Whom a rule lets come in (``from``), or go out to (``to``); an empty one is everybody."""
    return way.get(side) or [{}]


def _is_ours(place: Object) -> bool:
    return "podSelector" in place and "namespaceSelector" not in place


def _services(manifests: Manifests) -> Iterator[Violation]:
    for service in manifests.of("Service"):
        for port in service["spec"]["ports"] if service["spec"].get("type") in TO_THE_WORLD else ():
            if port.get("targetPort", port["port"]) not in ("serve", HTTP):
                yield where(service), f"leads from outside to port {port['port']}; only HTTP may be reached"


def _names(manifests: Manifests) -> Iterator[Violation]:
    """No pod does without names."""
    for pod in manifests.pods():
        ways = manifests.ways_out(pod)
        for protocol in ("UDP", "TCP"):
            there = [way for way in ways if _covers_any(way, NAMES, protocol)]
            places = [place for way in there for place in way.get("to", [{"ipBlock": {"cidr": NODE_LOCAL}}])]
            if not any(place.get("ipBlock", {}).get("cidr") == NODE_LOCAL for place in places):
                what = f"no NetworkPolicy lets it ask NodeLocal DNSCache ({NODE_LOCAL}, {protocol} port {NAMES})"
                yield pod.where, what
            if not any("podSelector" in place and selects(place["podSelector"], OF_NAMES) for place in places):
                yield pod.where, f"no NetworkPolicy lets it ask Kubernetes' DNS ({protocol} port {NAMES})"


def _ways(manifests: Manifests) -> Iterator[Violation]:
    """Who has to reach whom."""
    for service in manifests.of("RayService"):
        head, *workers = groups(service)
        yield from _needed_from_outside(manifests, head, DASHBOARD, "KubeRay's operator")
        if service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"):
            yield from _needed_outside(manifests, head, KUBERNETES, "Kubernetes' API, which Ray's autoscaler asks")
        for pod in (head, *workers):
            if manifests.of("PodMonitor"):
                yield from _needed_from_outside(manifests, pod, METRICS, "Prometheus")
            led_to = any(pod in manifests.pods_of(service) for service in manifests.of("Service"))
            if led_to and not pod.gpus and manifests.of("HTTPRoute", "Ingress"):
                yield from _needed_from_outside(manifests, pod, HTTP, "clients")
            yield from _needed_among(manifests, pod, (head, *workers), ANY_WORKER)
        yield from _needed_among(manifests, head, manifests.redis_of(service), REDIS)
    for pod in manifests.pods():
        if pod.where.startswith("Job"):
            yield from _needed_outside(manifests, pod, (HTTPS,), "where models are")


def _needed_from_outside(manifests: Manifests, pod: Pod, port: int, who: str) -> Iterator[Violation]:
    ways = [way for _, way in manifests.ways_in(pod) if _covers_any(way, port)]
    if not any(not _is_ours(place) for way in ways for place in _places(way, "from")):
        yield pod.where, f"no NetworkPolicy lets {who} in to port {port}"


def _needed_outside(manifests: Manifests, pod: Pod, ports: Iterable[int], what: str) -> Iterator[Violation]:
    ways = [way for way in manifests.ways_out(pod) if any(_covers_any(way, port) for port in ports)]
    if not any(not _is_ours(place) for way in ways for place in _places(way, "to")):
        yield pod.where, f"no NetworkPolicy lets it out to {what} (TCP port {next(iter(ports))})"


def _needed_among(manifests: Manifests, pod: Pod, others: Iterable[Pod], port: int) -> Iterator[Violation]:
    """Whether a pod may go out to others of ours, and these let it in."""

    def lead(ways: Iterable[Object], side: str, to: Pod) -> bool:
        places = (place for way in ways if _covers_any(way, port) for place in _places(way, side))
        return any(not place or (_is_ours(place) and selects(place["podSelector"], to.labels)) for place in places)

    for other in others:
        if not lead(manifests.ways_out(pod), "to", other):
            yield pod.where, f"no NetworkPolicy lets it out to {other.where}"
        if not lead((way for _, way in manifests.ways_in(other)), "from", pod):
            yield other.where, f"no NetworkPolicy lets {pod.where} in"


def _covers_any(way: Object, number: int, protocol: str = "TCP") -> bool:
    """Whether a rule is for a port."""
    ports = way.get("ports") or [{"port": number, "protocol": protocol}]
    return any(
        port.get("protocol", "TCP") == protocol and port["port"] <= number <= port.get("endPort", port["port"])
        for port in ports
    )
