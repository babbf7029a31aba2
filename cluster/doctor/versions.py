"""Python and libraries against what Paceline asks for, and against the lock file that it is tested with."""

from __future__ import annotations

import hashlib
import platform
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cluster.config.environment import CHECKOUT
from cluster.doctor.finding import Finding, ok, problem, warning

SUBJECT = "versions"
TELLING = ("torch", "transformers", "ray", "grpcio", "protobuf", "tokenizers")
"""Packages of which another version than the locked one may change what is computed or spoken."""
SERVING = (
    "cluster",
    "draft_service",
    "engine",
    "models",
    "protos",
    "router",
    "speculation",
    "target_service",
    "transport",
)
"""Folders of what serves. What only measures, trains or tests is not everywhere: an image goes without some of it."""
CODE = frozenset({".py", ".cpp", ".h"})
DIGITS = 12


def check_python(wanted: str, found: str) -> Iterator[Finding]:
    """Whether this Python is one that Paceline runs on."""
    wrong = problem("python", f"{found}, but Paceline needs {wanted}", "install such a Python and run `make setup`")
    yield ok("python", found) if Version(found) in SpecifierSet(wanted) else wrong


def check_packages(wanted: Iterable[Requirement], installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Whether everything needed is there, in a version that is allowed."""
    fix = "run `make setup`, or pip install --no-deps -r requirements.lock -r torch.lock"
    faults = []
    for need in wanted:
        found = installed(need.name)
        if found is None:
            faults.append(problem(SUBJECT, f"{need.name} is not installed", fix))
        elif not need.specifier.contains(found, prereleases=True):
            faults.append(problem(SUBJECT, f"{need.name} is {found}, but Paceline needs {need.specifier}", fix))
    yield from faults or [ok(SUBJECT, ", ".join(f"{name} {installed(name)}" for name in TELLING))]


def check_lock(locked: Mapping[str, str], installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Whether the telling packages are those that the tests ran with; builds (``+cu126``) may differ."""
    for name in TELLING:
        found, tested = installed(name), locked.get(name)
        if found and tested and Version(found).public != Version(tested).public:
            text = f"{name} is {found}, tested is {tested}"
            yield warning(SUBJECT, text, f"pip install {name}=={tested}, or run the tests with yours")


def installed_version(name: str) -> str | None:
    """Of a package in this environment; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def code_digest(folder: Path = CHECKOUT) -> str:
    """Names the code that serves, of the Paceline in ``folder``: the version of what is installed is not told by it."""
    digest = hashlib.sha256()
    files = [file for name in SERVING for file in (folder / name).rglob("*") if file.suffix in CODE]
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:DIGITS]


def check(folder: Path = CHECKOUT) -> Iterator[Finding]:
    """All of the above, for this environment and the Paceline in ``folder``."""
    python, wanted = requirements(folder)
    yield from check_python(python, platform.python_version())
    yield from check_packages(wanted, installed_version)
    yield from check_lock(locked_versions(folder), installed_version)


def requirements(folder: Path) -> tuple[str, list[Requirement]]:
    """What Paceline asks for: of the checkout, else of the installed distribution."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        python, texts = project["requires-python"], project["dependencies"]
    except OSError:
        described = metadata.metadata("paceline")
        python, texts = described["Requires-Python"], metadata.requires("paceline") or []
    return python, [need for need in map(Requirement, texts) if need.marker is None]


def locked_versions(folder: Path) -> dict[str, str]:
    """By package; empty where there is no lock file."""
    try:
        texts = [(folder / name).read_text(encoding="utf-8") for name in ("requirements.lock", "torch.lock")]
    except OSError:
        return {}
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", "\n".join(texts), re.MULTILINE))
