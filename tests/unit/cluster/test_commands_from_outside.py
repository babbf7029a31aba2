"""Commands from outside the product are found: by entry points, or by pyproject.toml in a checkout."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import bench
from benchmarks.fit import command
from cluster import cli
from cluster.config.environment import CHECKOUT


class Entry:
    name = "measure"

    def load(self) -> object:
        return "a module"


def test_entry_points_are_taken_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [Entry()] if group == cli.GROUP else [])
    assert cli.from_outside() == {"measure": "a module"}


def test_a_checkout_that_is_not_installed_has_them_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert cli.from_outside() == {"bench": bench, "fit": command}


def test_without_either_the_product_has_its_own_commands(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.from_outside() == {}
    assert cli.main(["bench"]) == 2
    assert "unknown command 'bench'" in capsys.readouterr().err


def test_a_command_of_ours_looks_for_no_others() -> None:
    """Workers start without reading what is installed, or importing what measures."""
    program = (
        "import sys\nfrom cluster import cli\n"
        "cli.from_outside = lambda: sys.exit('looked for')\n"
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
    assert all(f"\n    {name} " in said for name in (*cli.COMMANDS, "bench", "fit"))
