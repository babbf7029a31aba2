"""What may come in to the pods and go out of them: nothing but what a NetworkPolicy lets through.

Checked both ways. What would let strangers to a door that asks nobody who they are is refused; and so is what would
keep a pod from somebody it cannot do without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from deploy.manifests import Manifests, Object, Pod, Violation, selects, where

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
PEERS = {"ingress": "from", "egress": "to"}
"""Where a rule of each side of a NetworkPolicy names whom it is about."""
TO_THE_WORLD = frozenset({"LoadBalancer", "NodePort"})


def policy_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of all policies together, and of Services that lead past them."""
    to_all = [entry["spec"] for entry in manifests.of("NetworkPolicy") if not entry["spec"]["podSelector"]]
    denying = [spec for spec in to_all if {"Ingress", "Egress"} == set(spec.get("policyTypes", []))]
    if all(spec.get("ingress") for spec in denying):
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

    def leads(peer: Object) -> bool:
        if not namespace:
            return "ipBlock" in peer
        return "namespaceSelector" in peer and selects(peer["namespaceSelector"], {OF_A_NAMESPACE: namespace})

    return any(not peer or leads(peer) for peer in _peers(manifests, pod, "egress", port))


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
                if _covers(rule, number):
                    yield where(policy), f"lets others see {what}, on port {number}"


def _strangers(manifests: Manifests) -> Iterator[Violation]:
    """Whoever is none of our pods comes to doors with a guard, and these are few."""
    found = set()
    for pod in manifests.pods():
        if (guarded := _guarded(pod)) is None:
            continue
        for policy, way in manifests.ways(pod, "ingress"):
            theirs = [peer for peer in way.get("from") or [{}] if not _is_ours(peer)]
            anybody = any(not peer or peer.get("ipBlock", {}).get("cidr") in EVERYBODY for peer in theirs)
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


def _peers(manifests: Manifests, pod: Pod, side: str, *ports: int, protocol: str = "TCP") -> list[Object]:
    """Whom policies let in to one of these ports of a pod (``ingress``), or it out to; an empty one is everybody."""
    ways = [way for _, way in manifests.ways(pod, side) if any(_covers(way, port, protocol) for port in ports)]
    return [peer for way in ways for peer in way.get(PEERS[side]) or [{}]]


def _is_ours(peer: Object) -> bool:
    return "podSelector" in peer and "namespaceSelector" not in peer


def _services(manifests: Manifests) -> Iterator[Violation]:
    for service in manifests.of("Service"):
        for port in service["spec"]["ports"] if service["spec"].get("type") in TO_THE_WORLD else ():
            if port.get("targetPort", port["port"]) not in ("serve", HTTP):
                yield where(service), f"leads from outside to port {port['port']}; only HTTP may be reached"


def _names(manifests: Manifests) -> Iterator[Violation]:
    """No pod does without names."""
    for pod in manifests.pods():
        for protocol in ("UDP", "TCP"):
            peers, said = _peers(manifests, pod, "egress", NAMES, protocol=protocol), f"{protocol} port {NAMES}"
            if not any(not peer or peer.get("ipBlock", {}).get("cidr") == NODE_LOCAL for peer in peers):
                yield pod.where, f"no NetworkPolicy lets it ask NodeLocal DNSCache ({NODE_LOCAL}, {said})"
            if not any(
                not peer or ("podSelector" in peer and selects(peer["podSelector"], OF_NAMES)) for peer in peers
            ):
                yield pod.where, f"no NetworkPolicy lets it ask Kubernetes' DNS ({said})"


def _ways(manifests: Manifests) -> Iterator[Violation]:
    """Who has to reach whom."""
    ray = manifests.ray
    yield from _needed_from_outside(manifests, ray.head, DASHBOARD, "KubeRay's operator")
    if ray.autoscales:
        yield from _needed_outside(manifests, ray.head, KUBERNETES, "Kubernetes' API, which Ray's autoscaler asks")
    for pod in ray.pods:
        if manifests.of("PodMonitor"):
            yield from _needed_from_outside(manifests, pod, METRICS, "Prometheus")
        led_to = any(pod in manifests.pods_of(service) for service in manifests.of("Service"))
        if led_to and not pod.gpus and manifests.of("HTTPRoute", "Ingress"):
            yield from _needed_from_outside(manifests, pod, HTTP, "clients")
        yield from _needed_among(manifests, pod, ray.pods, ANY_WORKER)
    yield from _needed_among(manifests, ray.head, manifests.redis(), REDIS)
    for pod in manifests.pods():
        if pod.where.startswith("Job"):
            yield from _needed_outside(manifests, pod, (HTTPS,), "where models are")


def _needed_from_outside(manifests: Manifests, pod: Pod, port: int, who: str) -> Iterator[Violation]:
    if all(map(_is_ours, _peers(manifests, pod, "ingress", port))):
        yield pod.where, f"no NetworkPolicy lets {who} in to port {port}"


def _needed_outside(manifests: Manifests, pod: Pod, ports: Sequence[int], what: str) -> Iterator[Violation]:
    if all(map(_is_ours, _peers(manifests, pod, "egress", *ports))):
        yield pod.where, f"no NetworkPolicy lets it out to {what} (TCP port {ports[0]})"


def _needed_among(manifests: Manifests, pod: Pod, others: Iterable[Pod], port: int) -> Iterator[Violation]:
    """Whether a pod may go out to others of ours, and these let it in."""

    def lead(one: Pod, side: str, other: Pod) -> bool:
        peers = _peers(manifests, one, side, port)
        return any(not peer or (_is_ours(peer) and selects(peer["podSelector"], other.labels)) for peer in peers)

    for other in others:
        if not lead(pod, "egress", other):
            yield pod.where, f"no NetworkPolicy lets it out to {other.where}"
        if not lead(other, "ingress", pod):
            yield other.where, f"no NetworkPolicy lets {pod.where} in"


def _covers(way: Object, number: int, protocol: str = "TCP") -> bool:
    """Whether a rule is for a port."""
    ports = way.get("ports") or [{"port": number, "protocol": protocol}]
    return any(
        port.get("protocol", "TCP") == protocol and port["port"] <= number <= port.get("endPort", port["port"])
        for port in ports
    )
