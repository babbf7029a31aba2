"""The guide of operations against what it speaks of: commands, settings, files, figures and alerts exist."""

import re
import shlex

import pytest
import yaml

from cluster.cli import COMMANDS, _parsers, from_outside
from cluster.config.config import default_of
from cluster.config.environment import CHECKOUT

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
