"""Commands from outside the product are found: by entry points where it is installed, by their list in a checkout."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from benchmarks.commands import COMMANDS
from cluster import cli, plugins
from cluster.checkout import CHECKOUT


def test_the_entry_points_are_those_that_a_checkout_lists() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = {name: module.__name__ for name, module in COMMANDS.items()}
    assert project["entry-points"][plugins.GROUP] == listed


class Entry:
    name = "measure"

    def load(self) -> object:
        return "a module"


def test_entry_points_are_taken_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry()] if group == plugins.GROUP else [])
    assert plugins.commands() == {"measure": "a module"}


def test_a_checkout_that_is_not_installed_has_them_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    assert plugins.commands() == COMMANDS


def test_without_either_the_product_has_its_own_commands(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    monkeypatch.setattr(plugins, "OF_A_CHECKOUT", "nowhere.commands")
    assert plugins.commands() == {}
    assert cli.main(["bench"]) == 2
    assert "unknown command 'bench'" in capsys.readouterr().err


def test_a_command_of_ours_looks_for_no_others() -> None:
    """Workers start without reading what is installed, or importing what measures."""
    program = (
        "import sys\nfrom cluster import cli, plugins\n"
        "plugins.commands = lambda: sys.exit('looked for')\n"
        "try:\n    cli.main(['config', '--help'])\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'benchmarks']\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=CHECKOUT, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_help_names_them(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n    {name} " in said for name in (*cli.COMMANDS, *COMMANDS))
