"""``paceline bench``: mistakes are answered before anything is measured, and flags arrive."""

from pathlib import Path

import pytest

from benchmarks import speculation
from cluster.cli import main


@pytest.fixture
def started(monkeypatch):
    """The options of benchmarks that would have run."""
    options = []
    monkeypatch.setattr(speculation, "main", lambda given: options.append(given) or 0)
    return options


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "0"], "--prompts must be at least 1, got 0"),
        (["--bursts", "0"], "--bursts must be at least 1, got 0"),
        (["--tokens", "7"], "--tokens must be at least 8, got 7"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: no such folder"),
        (["--quick", "--out", "results"], "--out belongs to a full run"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, started, capsys):
    assert main(["bench", "speculation", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not started


def test_unknown_flags_and_benchmarks_are_refused(started, capsys):
    for arguments in (["bench", "speculation", "--promts", "3"], ["bench", "everything"], ["bench"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "did you mean --prompts?" in capsys.readouterr().err
    assert not started


def test_the_quick_run_is_smaller_unless_told_otherwise(started, tmp_path):
    pytest.importorskip("matplotlib")
    for arguments in (["--quick"], [], ["--quick", "--prompts", "40", "--json", str(tmp_path / "x.json")]):
        assert main(["bench", "speculation", *arguments]) == 0
    quick, full, told = started
    assert (quick.quick, full.quick) == (True, False)
    assert quick.prompts < full.prompts < told.prompts
    assert quick.bursts < full.bursts
    assert len(quick.plans) < len(full.plans)
    assert told.json == tmp_path / "x.json"
    assert full.out.parent == Path(speculation.__file__).parent / "results"
