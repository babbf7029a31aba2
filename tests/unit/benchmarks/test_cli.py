"""``paceline bench``: mistakes are answered before anything is measured, and flags arrive."""

import asyncio
from pathlib import Path

import pytest

from benchmarks import drafting
from benchmarks.harness.options import RESULTS
from benchmarks.harness.processes import WorkerPlan, running
from benchmarks.speculation import run as speculation
from cluster.cli import main
from cluster.config.environment import CHECKOUT
from speculation.events import Role


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
        (["--tokens", "39"], "--tokens must be at least 40, got 39"),
        (["--json", "/nowhere/figures.json"], "--json /nowhere/figures.json: no such folder"),
        (["--json", "/"], "--json /: a folder, not a file"),
        (["--out", __file__], f"--out {__file__}: {__file__} is not a folder"),
        (["--out", f"{__file__}/below/it"], f"{__file__} is not a folder"),
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


def test_a_flag_of_another_benchmark_is_not_suggested_to_who_gave_it(started, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "drafting", "--bursts", "2"])
    assert "unknown argument '--bursts'" in (said := capsys.readouterr().err)
    assert "did you mean --bursts" not in said


def test_a_quick_run_of_the_ways_to_draft_writes_where_it_is_told(monkeypatch, tmp_path):
    asked = []

    async def nothing(size):
        asked.append(size)
        yield {"ratio": 1.0}

    sizes = drafting.Size(4, 8, (0.0,)), drafting.Size(2, 8, (0.0,))
    parts = drafting.Part("one", nothing, *sizes), drafting.Part("left out", nothing, sizes[0])
    monkeypatch.setattr(drafting, "PARTS", parts)
    file = tmp_path / "figures.json"
    assert main(["bench", "drafting", "--quick", "--json", str(file)]) == 0
    assert '"one"' in file.read_text() and "left out" not in file.read_text()
    assert main(["bench", "drafting", "--quick"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert asked == [sizes[1]] * 2


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
    assert full.out.parent == RESULTS == CHECKOUT / "benchmarks" / "results"


def test_workers_compute_on_cpus_unless_their_plan_says_otherwise(monkeypatch):
    """What they are compared with does, also on a machine that has a GPU."""
    commands = []

    async def started(*command, **_):
        commands.append(command)
        raise OSError("not here")

    async def start(*flags):
        async with running(WorkerPlan(Role.TARGET, Path("m"), 0, Path("r"), flags)):
            pass

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    for flags, device in (((), "cpu"), (("--device", "cuda"), "cuda")):
        with pytest.raises(OSError, match="not here"):
            asyncio.run(start(*flags))
        last = len(commands[-1]) - commands[-1][::-1].index("--device")
        assert commands[-1][last] == device
