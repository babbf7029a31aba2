"""The guide of operations against what it speaks of: commands, settings, files, figures and alerts exist."""

import ast
import os
import re
import subprocess

import pytest
import yaml

from cluster.certificates import new_authority, now
from cluster.config.config import SETTINGS
from cluster.config.environment import CHECKOUT
from deploy.policy_rules import CLOSED
from deploy.reference_rules import SECRETS
from tests.deploy.overlays import needs_kubectl

DOCS = CHECKOUT / "docs"
PAGES = ("operations", "install", "faults", "security", "size", "upgrade", "alerts", "troubleshooting")
GUIDE = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
ALERTS = CHECKOUT / "deploy" / "monitoring" / "alerts.yaml"
NO_CLUSTER = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": ""}}],
    "current-context": "none",
}
HEADINGS = re.findall(r"^#+ (.+)$", GUIDE, re.MULTILINE)


def lines():
    """Every line of a block that is a command, without its comment."""
    for block in re.findall(r"^ *```\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))
            if words.partition(" ")[0] in CHECKED:
                yield words


def kubectl(words, made):
    """What it names is in the manifests, or made by hand first."""
    named = re.findall(r"\b(rayservice|job|namespace|secret generic)[ /](paceline[\w-]*)", words)
    for kind, name in named:
        assert ({"secret generic": "Secret"}.get(kind, kind).lower(), name) in made, (kind, name)
    for folder in re.findall(r"-[kf] (deploy/\S+)", words):
        assert (CHECKOUT / folder).exists(), folder
    verbs = re.sub(r"kubectl( -n \S+)?( --\S+)* ", "", words).split()[0]
    assert verbs in {"apply", "create", "delete", "drain", "edit", "exec", "get", "logs", "wait"}, verbs
    if secret := re.search(r"create secret (\S+ (\S+).*)", words):
        assert secret[1].strip() == SECRETS[secret[2]].command


def helm(words, _made):
    """What is installed from here is here; the operator's chart is of the version that the rules were learned from."""
    for path in re.findall(r"deploy/\S+", words):
        assert (CHECKOUT / path).exists(), path
    if "kuberay-operator" in words:
        assert "--version 1.7.0" in words
        assert "KubeRay 1.7" in (CHECKOUT / "deploy" / "ray_rules.py").read_text(encoding="utf-8")


def python(words, _made):
    """A module with a command, and the overlay that it is given."""
    _, _, module, *arguments = words.split()
    assert "__main__" in (CHECKOUT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert all((CHECKOUT / argument).is_dir() for argument in arguments)


def make(words, _made):
    """A target of the Makefile."""
    goals = [word for word in words.split()[1:] if "=" not in word]
    text = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{goal}:", text, re.MULTILINE) for goal in goals)


def copy(words, _made):
    """From where something is, to a folder that every system has, or that ``install -D`` makes."""
    command, *paths, to = (word for word in words.split("&&")[0].split() if not word.startswith("-"))
    assert paths
    assert all(list(CHECKOUT.glob(path)) for path in paths)
    assert command == "install" or os.path.dirname(to) in {"/etc", "/etc/systemd/system"}


def units(words, _made):
    """Units that there are."""
    for unit in re.findall(r"paceline-\w+@?", words):
        assert (CHECKOUT / "deploy" / "systemd" / f"{unit}.service").is_file(), unit


CHECKED = {
    "kubectl": kubectl,
    "helm": helm,
    ".venv/bin/python": python,
    "make": make,
    "cp": copy,
    "install": copy,
    "systemctl": units,
    "git": lambda *_: None,
    "paceline": lambda *_: None,  # parsed by test_docs.py
    ".venv/bin/paceline": lambda *_: None,
}


@pytest.fixture(scope="module")
def made():
    """Kinds and names of all that the manifests of the guide hold, or that is made by hand before."""
    texts = [*(CHECKOUT / "deploy" / "kubernetes").rglob("*.yaml")]
    documents = [entry for path in texts for entry in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    objects = [entry for entry in documents if isinstance(entry, dict) and "name" in entry.get("metadata", {})]
    found = {(entry["kind"].lower(), entry["metadata"]["name"]) for entry in objects}
    return found | {("secret", name) for name in SECRETS}


@pytest.mark.parametrize("words", sorted(set(lines())))
def test_a_line_of_the_guide_names_what_there_is(words, made):
    CHECKED[words.partition(" ")[0]](words, made)


def test_no_line_of_the_guide_goes_unchecked():
    """All that is in a block without a language is a command that a test knows, or goes on with one."""
    for page in ("operations", "install", "upgrade"):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for block in re.findall(r"^ *```\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                assert line.split()[0] in CHECKED, line


@needs_kubectl
@pytest.mark.parametrize("words", sorted({line for line in lines() if line.startswith("kubectl ")}))
def test_kubectl_understands_a_line_of_the_guide(words, tmp_path):
    """As far as to ask a cluster; there is none."""
    issued = new_authority(now())
    (tmp_path / "FILE").write_bytes(issued.certificate_pem + issued.key_pem)
    cluster = tmp_path / "kubeconfig"
    cluster.write_text(yaml.safe_dump(NO_CLUSTER))
    line = words.replace("FILE", str(tmp_path / "FILE")).replace(" deploy/", f" {CHECKOUT}/deploy/")
    line += " --dry-run=client -o name" if " secret " in line else ""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(cluster)}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert " refused" in done.stderr or (" create " in line and not done.returncode), done.stderr
    assert "usage" not in done.stderr


def test_every_secret_that_is_made_by_hand_has_its_line():
    for secret in SECRETS.values():
        assert secret.unless or f"create secret {secret.command}" in GUIDE, secret.about


def test_every_port_that_asks_for_no_key_is_in_the_table_of_doors():
    doors = (DOCS / "security.md").read_text(encoding="utf-8").partition("\n## A hostile client\n")[0]
    manifest = (CHECKOUT / "deploy" / "kubernetes" / "base" / "rayservice.yaml").read_text(encoding="utf-8")
    for port in {*map(str, CLOSED), *re.findall(r"name: metrics, containerPort: (\d+)", manifest)}:
        assert re.search(rf"^\| .* {port}\b", doors, re.MULTILINE), port


def test_the_guide_says_what_the_loss_of_the_head_means():
    text = " ".join(GUIDE.split())
    assert "In `gpu` the head's loss is the cluster's: after a minute without it every Ray node ends" in text


def test_the_routers_of_100_000_streams_follow_from_their_inputs():
    """Commits a second, times what a commit costs in us, by the part of a core that may be used."""
    page = (DOCS / "size.md").read_text(encoding="utf-8")
    said = r"(\d+) us of CPU with one token, (\d+) with three, (\d+) with a proposal relayed"
    ((one, three, relayed),) = re.findall(said, " ".join(page.split()))
    (drafted,) = re.findall(r"tokens/s in commits of (\d+\.\d+)", " ".join(page.split()))
    numbers = r"\| ([\d,]+) \| ([\d,]+) \| (\d+)(?: \(drafted: (\d+)\))? \|"
    rows = re.findall(rf"^\| [^|]+ \| [^|]+ \| [^|]*{numbers}", page, re.MULTILINE)
    for row, cost, tokens in zip(rows, (one, relayed, three), (1, float(drafted), 3), strict=True):
        rate, commits = (int(number.replace(",", "")) for number in row[:2])
        assert f"{rate / tokens:.3g}" == f"{commits:.3g}"
        for cores, each in ((row[2], cost), (row[3], relayed)):
            assert not cores or f"{commits * int(each) / 1e6 / 0.6:.2g}" == f"{int(cores):.2g}"


def test_limits_are_the_defaults():
    rows = re.findall(r"^\| .+? \| (\d+) \| `([\w.]+)` \|$", GUIDE, re.MULTILINE)
    assert len(rows) >= 4
    for number, key in rows:
        assert int(number) == SETTINGS[key].default, key


def test_no_table_is_torn():
    for table in re.findall(r"(?:^\|.*\n)+", GUIDE, re.MULTILINE):
        assert re.fullmatch(r"(\|-+)+\|", table.splitlines()[1]), f"has no heading: {table}"


def test_the_costs_follow_from_their_inputs():
    rows = re.findall(r"^\| [\w ]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.MULTILINE)
    assert len(rows) == 3
    for price, rate, cost in rows:
        assert f" {rate} │" in GUIDE, "the rate is one of the simulated table"
        assert f"{float(price) / (float(rate) * 3600) * 1e6:.2f}" == cost


def test_the_guide_leads_to_its_pages():
    begin = (DOCS / "operations.md").read_text(encoding="utf-8")
    assert all(f"]({page}.md)" in begin for page in PAGES[1:])


def test_files_are_there():  # links are tested for all of the documentation
    for name in re.findall(r"deploy/systemd/[\w./-]*[\w]", GUIDE):
        assert (CHECKOUT / name).exists(), name


@pytest.mark.skipif(not ALERTS.is_file(), reason="there are no alert rules yet")
def test_every_alert_has_its_section():
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    sections = {title for title in HEADINGS if title.startswith("Paceline") and " " not in title}
    assert sections == alerts


def test_what_is_said_to_be_seen_is_said_by_the_product():
    """Of what the doctor or a log is quoted with, every piece between what is filled in."""
    sources = [path for room in ("cluster", "engine", "router") for path in (CHECKOUT / room).rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    said = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("## It is not faster")[0]
    cells = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [words for cell in cells for words in re.findall("`(.+?)`", cell)]
    assert len(quoted) >= 20
    for words in quoted:
        if not words.startswith(("make ", '"')):  # commands, and what a request says
            for piece in filter(None, re.split(r"\s*(?:\.\.\.|\bN\b|\d+)[:,;]?\s*", words)):
                assert piece in said, words


def test_settings_that_are_named_exist():
    names = set(re.findall(r"`((?:target|draft|router|ray|speculation)\.\w+)", GUIDE))
    for key in names - {"router.paceline"}:  # a name in a certificate
        assert SETTINGS[key].default is not None, key
