"""The guide of operations against what it speaks of: commands, settings, files, figures and alerts exist."""

import re
import shlex

import pytest
import yaml

from cluster.cli import COMMANDS, _parsers, from_outside
from cluster.config.config import default_of
from cluster.config.environment import CHECKOUT
from deploy.reference_rules import SECRETS

DOCS = CHECKOUT / "docs"
PAGES = ("operations", "install", "size", "upgrade", "alerts", "troubleshooting")
GUIDE = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
ALERTS = CHECKOUT / "deploy" / "monitoring" / "alerts.yaml"
KNOWN = COMMANDS | from_outside()
HEADINGS = re.findall(r"^#+ (.+)$", GUIDE, re.MULTILINE)


def commands():
    """Every Paceline command in a block, with its continuation lines joined and without its comment."""
    for block in re.findall(r"^ *```\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"^\s*(?:\$ )?paceline (\w.*)", line):
                yield shlex.split(match[1], comments=True)


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_a_command_is_one_that_our_parser_takes(arguments):
    assert arguments[0] in KNOWN
    _parsers(KNOWN)[0].parse_args(arguments)


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
    goals = words.split()[1:]
    text = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{goal}:", text, re.MULTILINE) for goal in goals)


def copy(words, _made):
    """From where something is."""
    sources = [word for word in words.split("&&")[0].split() if word.startswith("deploy/")]
    assert sources
    assert all(list(CHECKOUT.glob(source)) for source in sources)


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
    "systemctl": units,
    "git": lambda *_: None,
    "paceline": lambda *_: None,  # parsed above
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


def test_there_are_commands():
    assert {arguments[0] for arguments in commands()} >= {"doctor", "up", "down", "simulate", "worker"}


def test_limits_are_the_defaults():
    rows = re.findall(r"^\| .+? \| (\d+) \| `([\w.]+)` \|$", GUIDE, re.MULTILINE)
    assert len(rows) >= 4
    for number, key in rows:
        assert int(number) == default_of(key), key


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


def test_settings_that_are_named_exist():
    names = set(re.findall(r"`((?:target|draft|router|ray|speculation)\.\w+)", GUIDE))
    for key in names - {"router.paceline"}:  # a name in a certificate
        assert default_of(key) is not None, key
