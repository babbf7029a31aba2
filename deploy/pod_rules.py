"""What a pod may do: as little as it needs. These are ours; the namespace enforces most of them again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploy.manifests import GPU, Manifests, Object, Pod, Violation, mount_of, where

DIGEST = "@sha256:[0-9a-f]{64}$"
PROBE = "engine.host.live_gpus"
_PROBED = re.compile(rf"(^|&& ?)(exec )?python3?( -S)? -m {re.escape(PROBE)}$")


def pod_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of every pod, every container, and the container of Ray's autoscaler, which KubeRay adds."""
    for pod in manifests.pods():
        yield from ((pod.where, what) for what in _of_pod(pod))
        for container in pod.containers():
            place = f"{pod.where} {container['name']}"
            yield from ((place, what) for what in _of_container(container))
    if (ray := manifests.ray).autoscales:
        for what in [*_of_security(ray.autoscaler.get("securityContext", {})), *_of_resources(ray.autoscaler)]:
            yield where(ray.entry, "autoscaler"), what


def image_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of images that may be others tomorrow: a version is a name that its owner can give again, a digest is not.

    That of our own image also settles what it was built from.
    """
    for pod in manifests.pods():
        for container in pod.containers():
            if not re.search(DIGEST, container["image"]):
                what = f"the image {container['image']!r} may be another one tomorrow; name it by digest, @sha256:..."
                yield f"{pod.where} {container['name']}", what


def _of_pod(pod: Pod) -> Iterator[str]:
    security = pod.spec.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield "securityContext must set runAsNonRoot: true and runAsUser to a number above 0"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext.seccompProfile.type must be RuntimeDefault"
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false: nothing here talks to the Kubernetes API"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(key):
            yield f"{key} must not be set"
    on_gpu = pod.gpus > 0
    if on_gpu and not _PROBED.search(" ".join(pod.main.get("livenessProbe", {}).get("exec", {}).get("command", []))):
        yield f"its livenessProbe must run {PROBE}, or a GPU that is gone leaves a pod that serves nothing"
    affinity = pod.spec.get("affinity", {}).get("nodeAffinity", {})
    if on_gpu and not (pod.spec.get("nodeSelector") or affinity.get("requiredDuringSchedulingIgnoredDuringExecution")):
        yield "takes any machine with a GPU, small or large; choose some by their label"
    for volume in pod.spec.get("volumes", []):
        if "hostPath" in volume:
            yield f"volume {volume['name']} is a hostPath; use a volume of the cluster"


def _of_container(container: Object) -> Iterator[str]:
    yield from _of_security(container.get("securityContext", {}))
    yield from _of_resources(container)
    for variable in container.get("env", []):
        shown = f"$({variable['name']})" in " ".join([*container.get("command", []), *container.get("args", [])])
        if shown and "secretKeyRef" in variable.get("valueFrom", {}):
            yield f"{variable['name']} is a secret, and arguments are seen by every process; read it from a file"
    image = container["image"]
    if not re.search(rf":[\w.-]+$|{DIGEST}", image) or image.endswith(":latest"):
        yield f"the image {image!r} needs a version or a digest, and not latest"
    if container["name"].startswith("ray-") and mount_of(container, "/tmp/ray") is None:
        yield "Ray writes to /tmp and the root file system is read-only; mount an emptyDir there"


def _of_security(security: Object) -> Iterator[str]:
    if security.get("privileged"):
        yield "privileged must not be set"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "securityContext.allowPrivilegeEscalation must be false"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "securityContext.readOnlyRootFilesystem must be true"
    capabilities = security.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield "securityContext.capabilities must drop [ALL] and add none"


def _of_resources(container: Object) -> Iterator[str]:
    """CPUs are not limited: a thread that is held back stalls everybody who waits for the same step."""
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if not requests.get("cpu") or not requests.get("memory"):
        yield "resources.requests must name cpu and memory"
    if limits.get("memory") != requests.get("memory"):
        yield f"resources.limits.memory must be what is requested, got {limits.get('memory')}"
    if limits.get(GPU) != requests.get(GPU):
        yield f"resources.limits must name as many {GPU} as requests, got {limits.get(GPU)}"
