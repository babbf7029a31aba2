"""Each fault that an operator may make is refused, for its own reason and no other; planted_faults.txt lists them."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from deploy.manifests import Manifests
from deploy.validate import findings
from tests.deploy.overlays import needs_kubectl, one, rendered

pytestmark = needs_kubectl

MODEL = "llama-8b"
COMMIT = "0123456789abcdef" * 2 + "01234567"
ENTRY = re.compile(r"^(\S[^:\n]*): (.+)\n {4}(?:\[(\d+)\] )?(.+)$", re.MULTILINE)


class Fault(NamedTuple):
    what: str
    edits: str
    reason: str
    """Part of the one message, or of each, if the fault shows in several places."""
    places: int


def read_faults() -> list[Fault]:
    text = Path(__file__).with_name("planted_faults.txt").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    found = [Fault(what, edits, reason, int(places or 1)) for what, edits, places, reason in ENTRY.findall(text)]
    assert 2 * len(found) == sum(bool(line) for line in text.splitlines()), "a fault has two lines"
    return found


class Cluster:
    """An overlay that can be spoiled."""

    def __init__(self, manifests: Manifests) -> None:
        self.manifests = manifests
        self.service = service = one(manifests, "RayService", "paceline")
        ray = service["spec"]["rayClusterConfig"]
        serve = json.loads(json.dumps(yaml.safe_load(service["spec"]["serveConfigV2"])))  # nothing is said by an alias
        self.before = service["spec"]["serveConfigV2"]
        (self.application,) = serve["applications"]
        policy, args = self.application["autoscaling_policy"], self.application["args"]
        self.handles = {
            "service": service,
            "ray": ray,
            "serve": serve,
            "application": self.application,
            "deployments": self.application["deployments"],
            "args": args,
            "model": args["models"][MODEL],
            "policy": policy,
            "kwargs": policy["policy_kwargs"],
            "job": one(manifests, "Job", "paceline-models")["spec"]["template"]["spec"]["containers"][0],
            "redis": one(manifests, "StatefulSet", "paceline-redis")["spec"]["template"]["spec"],
            "route": one(manifests, "HTTPRoute", "paceline")["spec"]["rules"][0],
        }
        groups = dict(zip(("router", "small", "large"), ray["workerGroupSpecs"], strict=True))
        for name, group in ({"head": ray["headGroupSpec"]} | groups).items():
            pod = group["template"]["spec"]
            self.handles |= {name: group, f"{name}:pod": pod, f"{name}:box": pod["containers"][0]}
            self.handles[f"{name}:env"] = pod["containers"][0]["env"]

    def spoil(self, edits: str) -> None:
        for edit in re.split(r"; (?=without |\w+[:/\w-]* )", edits.replace("COMMIT", COMMIT)):
            self._edit(edit)
        if self.service["spec"]["serveConfigV2"] == self.before:
            self.service["spec"]["serveConfigV2"] = yaml.safe_dump(self.handles["serve"])

    def _edit(self, edit: str) -> None:
        name, _, rest = edit.partition(" ")
        if name in ("fixed", "renamed", "deep", "guests"):
            getattr(self, f"_{name}")(rest)
        elif name == "without":
            place, key = self._place(rest)
            if isinstance(key, dict):
                place.remove(key)
            else:
                place.pop(key)
        elif found := re.fullmatch(r"(.+?) ~ (.+) -> (.+)", edit):
            place, key = self._place(found[1])
            assert found[2] in place[key]
            place[key] = place[key].replace(found[2], found[3])
        else:
            path, how, value = re.fullmatch(r"(.+?) (\+?=) (.+)", edit).groups()  # type: ignore[union-attr]
            place, key = self._place(path)
            if how == "=":
                place[key] = yaml.safe_load(value)
            else:
                place[key].append(yaml.safe_load(value))

    def _place(self, path: str) -> tuple[Any, Any]:
        """Where something stands: what holds it, and its key there."""
        root, *keys = path.split()
        kind, _, name = root.partition("/")
        if kind == "door":
            part: Any = one(self.manifests, "NetworkPolicy", name)["spec"]["ingress"][0]
        else:
            part = one(self.manifests, kind, name) if name else self.handles[root]
        if not keys:
            return self.manifests.objects, part
        for key in keys[:-1]:
            part = part[self._key(part, key)]
        return part, self._key(part, keys[-1])

    def _key(self, part: Any, key: str) -> Any:
        if not isinstance(part, list):
            return key
        if re.fullmatch(r"-?\d+", key):
            return int(key)
        return next(place for place, entry in enumerate(part) if entry["name"].endswith(key))

    def _fixed(self, targets: str) -> None:
        """Two of everything and so many targets, whatever the load."""
        del self.application["autoscaling_policy"]
        names = [deployment["name"] for deployment in self.application["deployments"]]
        self.application["deployments"] = [{"name": name, "num_replicas": 2} for name in names]
        self.application["deployments"][0]["num_replicas"] = int(targets)

    def _renamed(self, name: str) -> None:
        """The model, in ``args`` and in ``deployments``, as one edits them."""
        models = self.handles["args"]["models"]
        models[name] = models.pop(MODEL)
        for deployment in self.application["deployments"]:
            deployment["name"] = deployment["name"].replace(MODEL, name)

    def _deep(self, levels: str) -> None:
        self.service["spec"]["serveConfigV2"] = "[" * int(levels)

    def _guests(self, said: str) -> None:
        """One more policy, that lets another namespace in to a port of a component."""
        component, _, port = said.partition(" ")
        way = {"from": [{"namespaceSelector": {}}], "ports": [yaml.safe_load(port)]}
        selector = {"matchLabels": {"app.kubernetes.io/component": component}}
        spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [way]}
        head = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "guest"}}
        self.manifests.objects.append(head | {"spec": spec})


FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_planted_fault_is_refused_for_its_own_reason(fault: Fault) -> None:
    cluster = Cluster(rendered("ha"))
    cluster.spoil(fault.edits)
    found = findings(cluster.manifests)
    assert len(found) == fault.places, "\n".join(found) or "nothing was found"
    assert all(fault.reason in finding for finding in found), "\n".join(found)
