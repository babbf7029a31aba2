"""The overlays, each rendered once."""

import copy
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy.manifests import Manifests, render

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("dev-cpu", "gpu", "ha")

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed: cannot render")


@cache
def _rendered(overlay: str) -> Manifests:
    return render(KUBERNETES / "overlays" / overlay)


def rendered(overlay: str) -> Manifests:
    """A copy that a test may spoil."""
    return Manifests(copy.deepcopy(_rendered(overlay).objects))


def one(manifests: Manifests, kind: str, name: str) -> Any:
    """The object of that kind and name."""
    return next(entry for entry in manifests.of(kind) if entry["metadata"]["name"] == name)
