"""Which of the locked packages the image needs: what Paceline itself depends on, directly or not, and nothing else.

requirements.lock also pins what developing takes. torch is in neither: it has torch.lock and cuda.lock. The closure
is read from the metadata of the installed packages, so it is made in the environment that `make setup` builds, and
committed as requirements.txt:

    python -m deploy.docker.requirements > deploy/docker/requirements.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch"
BUILD = ("setuptools",)
"""Also in the image: what installs Paceline itself, offline."""
HEADER = "# Made by `python -m deploy.docker.requirements` from requirements.lock; a test checks that it is current.\n"


class NotLockedError(Exception):
    """A package is needed that requirements.lock does not pin."""


def runtime_requirements(root: Path = ROOT) -> str:
    """The file's text: pins of requirements.lock that the dependencies in pyproject.toml lead to, in its order."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = (root / "requirements.lock").read_text(encoding="utf-8")
    pins = re.finditer(r"^([\w.-]+)==.*(?:\n[ ].*)*", lock, re.MULTILINE)
    locked = {canonicalize_name(pin[1]): pin[0] for pin in pins}
    needed = closure([*project["dependencies"], *BUILD])
    missing = sorted(needed - locked.keys() - {TORCH})
    if missing:
        raise NotLockedError(f"requirements.lock does not pin {', '.join(missing)}; run `make lock`")
    return HEADER + "".join(f"{pin}\n" for name, pin in locked.items() if name in needed)


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of all packages that these lead to on this platform, extras included."""
    found: set[tuple[str, str]] = set()  # bare, and with every extra that is asked for
    waiting = [(Requirement(line), "") for line in requirements]
    while waiting:
        need, why = waiting.pop()
        if need.marker is not None and not need.marker.evaluate({"extra": why}):
            continue
        name = canonicalize_name(need.name)
        for extra in {"", *need.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                waiting += [(below, extra) for below in _requirements_of(name)]
    return {name for name, _ in found}


def _requirements_of(name: str) -> list[Requirement]:
    try:
        return [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError as error:
        raise NotLockedError(f"{name} is needed but not installed; run `make setup`") from error


if __name__ == "__main__":
    sys.stdout.write(runtime_requirements())
