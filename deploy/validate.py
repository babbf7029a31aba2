"""Checks an overlay before it is applied, without a cluster.

    python -m deploy.validate deploy/kubernetes/overlays/gpu
    python -m deploy.validate --production deploy/kubernetes/overlays/gpu

Renders it with the real ``kubectl kustomize`` and asks the schemas of every kind, the rules of KubeRay, Ray Serve's and
Paceline's own readers of their configuration, and whether the parts fit together. Ends with status 1 if anything was
found, one line each, and otherwise says which Secrets to make first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from cluster.console import complain, say
from deploy.manifests import Manifests, RenderError, Violation, render
from deploy.model_rules import model_findings
from deploy.pod_rules import image_findings, pod_findings
from deploy.policy_rules import policy_findings
from deploy.ray_rules import ray_findings
from deploy.reference_rules import CLAIM, MODELS, models_by_hand, reference_findings, secrets_by_hand
from deploy.schema_rules import schema_findings
from deploy.serve_rules import serve_findings

Rule = Callable[[Manifests], Iterable[Violation]]
RULES: tuple[Rule, ...] = (
    ray_findings,
    serve_findings,
    model_findings,
    pod_findings,
    policy_findings,
    reference_findings,
)
"""They may rely on the shape that the schemas have found right."""


def findings(manifests: Manifests) -> list[str]:
    """Everything that would go wrong, a line each; only what is wrong with the shapes, if something is."""
    return _lines([schema_findings], manifests) or _lines(RULES, manifests)


def _lines(rules: Iterable[Rule], manifests: Manifests) -> list[str]:
    return [f"{place}: {what}" for rule in rules for place, what in rule(manifests)]


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.validate", description="Check a kustomize overlay.")
    parser.add_argument("overlay", type=Path, help="its folder, such as deploy/kubernetes/overlays/gpu")
    parser.add_argument("--production", action="store_true", help="every image by its digest, too")
    given = parser.parse_args(arguments)
    overlay: Path = given.overlay
    try:
        manifests = render(overlay)
    except RenderError as error:
        complain(f"deploy.validate: {error}")
        return 2
    found = findings(manifests)
    if given.production and not found:
        found = _lines([image_findings], manifests)
    say("\n".join(found or _summary(overlay, manifests)))
    return 1 if found else 0


def _summary(overlay: Path, manifests: Manifests) -> list[str]:
    namespace = manifests.ray.entry["metadata"].get("namespace", "default")
    volume = f"  make first (a volume that all nodes can mount, with the models): {CLAIM} {MODELS}"
    return [
        f"{overlay}: {len(manifests.objects)} objects, nothing wrong",
        *(
            f"  make first ({secret.about}): kubectl create secret -n {namespace} {secret.command}"
            for secret in secrets_by_hand(manifests).values()
        ),
        *([volume] if models_by_hand(manifests) else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
