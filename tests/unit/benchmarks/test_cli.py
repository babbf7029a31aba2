"""``paceline bench``: mistakes are answered before anything is measured, and flags arrive."""

import asyncio
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import drafting
from benchmarks.harness import options
from benchmarks.harness.options import GROUP, HIDDEN, LAYERS, RESULTS
from benchmarks.harness.processes import WorkerPlan, running
from cluster.cli import main
from cluster.config.environment import CHECKOUT
from speculation.events import Role
from tests.bundled import MODELS


@pytest.fixture
def started(monkeypatch):
    """The options of benchmarks that would have run."""
    given = []
    module = SimpleNamespace(main=lambda one: given.append(one) or 0)
    monkeypatch.setattr(options, "import_module", lambda _: module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return given


SERVE = "bench serve --url http://127.0.0.1:8000"
GPU = "bench gpu --device cpu"
EAGLE = str(MODELS / "eagle")
NOWHERE = "--json /nowhere/figures.json: no such folder"
MISTAKES = [
    ("bench speculation --prompts 0", "--prompts must be at least 1, got 0"),
    ("bench speculation --tokens 39", "--tokens must be at least 40, got 39"),
    ("bench speculation --json /nowhere/figures.json", NOWHERE),
    ("bench speculation --json /", "--json /: a folder, not a file"),
    (f"bench speculation --out {__file__}", f"--out {__file__}: {__file__} is not a folder"),
    (f"bench speculation --out {__file__}/below/it", f"{__file__} is not a folder"),
    ("bench speculation --quick --out results", "--out belongs to a full run"),
    ("bench drafting --only nonsense", "--only nonsense: no such part; there are eagle, "),
    ("bench drafting --device cuda", "part eagle alone is measured on a GPU; add --only eagle"),
    ("bench engine --hidden 100", "--hidden must be a multiple of 256, got 100"),
    ("bench engine --hidden 0", "--hidden must be a multiple of 256, got 0"),
    ("bench engine --threads 0", "--threads must be 1 to"),
    ("bench engine --threads 100000", "the cores usable here, got 100000"),
    ("bench scale --streams 64,0", "--streams '0': must be a whole number from 1 to 16384"),
    ("bench scale --tokens fast", "--tokens 'fast': must be a whole number from 1 to 1000000"),
    ("bench scale --seconds 0", "--seconds must be 0.5 to 600, got 0"),
    ("bench chaos --hang 0", "--hang must be above 0, got 0"),
    ("bench chaos --streams 33", "--streams must be 1 to 32, got 33"),
    ("bench soak --minutes nan", "--minutes must be above 0, got nan"),
    ("bench soak --tokens 801", "--tokens must be 8 to 800, got 801"),
    ("bench gpu", "torch finds none here; --device cpu"),
    ("bench gpu --stage floor,stps", "--stage stps: no such stage; there are floor, steps, draft, exact, prompt, "),
    ("bench gpu --shape 9B", "--shape 9B: no such shape; there are 8B, 1B, tiny"),
    (f"{GPU} --shape 8B", "--shape 8B: no such shape; there are tiny"),
    (f"{GPU} --placements owm", "--placements owm: no such placement; there are shared, own, cpu"),
    (f"{GPU} --drafters rigth", "--drafters rigth: no such drafter; there are right, wrong, dead"),
    (f"{GPU} --streams 1.5", "--streams '1.5': must be a whole number from 1 to 64"),
    (f"{GPU} --temperatures nan", "--temperatures 'nan': must be a number from 0 to 2"),
    (f"{GPU} --agreement 1.2", "--agreement must be 0 to 1, got 1.2"),
    (f"{GPU} --rounds 13", "--rounds must be 1 to 12, got 13"),
    (f"{GPU} --hidden 1000", "--hidden must be a multiple of 64 and at least 256, got 1000"),
    (f"{GPU} --layers 5", "--layers must be at least 6, got 5"),
    ("bench speculation --quick --hidden 1000", "--hidden must be a multiple of 64 and at least 256, got 1000"),
    ("bench speculation --quick --hidden 192", "--hidden must be a multiple of 64 and at least 256, got 192"),
    ("bench speculation --quick --layers 3", "--layers must be at least 6, got 3"),
    (f"{GPU} --records /nowhere", "--records /nowhere: no such folder"),
    ("bench serve --url localhost:8000", "--url localhost:8000: not an address such as http://127.0.0.1:8000"),
    ("bench serve --url ftp://a", "--url ftp://a: not an address"),
    ("bench serve --url http://a:99999", "--url http://a:99999: not an address"),
    ("bench serve --url http://[::1", "--url http://[::1: not an address"),
    ("bench serve --url 'http://a b'", "not an address"),
    ("bench serve --url http://a/v1?x=1", "not an address"),
    ("bench serve --url http://me:secret@a", "--url: must not contain a password"),
    (f"{SERVE} --url http://127.0.0.1:8000", "is there twice"),
    ("bench serve --url 'a plain=http://a'", "must not end with ' plain'"),
    ("bench serve --rate inf", "--rate must be 0.001 to 100000, got inf"),
    ("bench serve --rate 1 --concurrency 2", "--concurrency: not allowed with --rate"),
    ("bench serve --concurrency 0", "--concurrency must be 1 to 4096, got 0"),
    ("bench serve --rounds 9 --requests 8", "--rounds must be 1 to 8, got 9"),
    ("bench serve --temperature nan", "--temperature must be 0 to 100, got nan"),
    ("bench serve --extra-body {", "--extra-body {: not JSON"),
    ("bench serve --extra-body []", "must be an object"),
    ("""bench serve --extra-body '{"a": NaN}'""", "not JSON"),
    ("""bench serve --extra-body '{"stream": false}'""", "leave out stream and n"),
    ("""bench serve --extra-body '{"n": 2}'""", "leave out stream and n"),
    ("bench serve --extra-body other={}", "there is no such contender, only 127.0.0.1:8000"),
    ("bench serve --extra-body {} --extra-body {}", "given twice for 127.0.0.1:8000"),
    ("bench serve --api-key-env NO_SUCH_KEY", "--api-key-env NO_SUCH_KEY: there is no such variable"),
    ("bench serve --process first", "--process first: must be the id of a process on this machine"),
    ("bench serve --process 0", "--process 0: is of this command's own process group"),
    ("fit --source crystal-ball", "--source 'crystal-ball': must be one of none, lookup, eagle, suffix"),
    ("fit --source eagle", "--source eagle: give the folder of the head with --eagle DIR"),
    ("fit --eagle-at drafter", "--eagle-at drafter: give the folder of the head with --eagle DIR"),
    ("fit --eagle /nowhere/head", "--eagle /nowhere/head: not a folder of an EAGLE-3 head"),
    (f"fit --eagle {EAGLE} --source lookup", "--source has lookup; add eagle, or leave --eagle out"),
    (f"fit --eagle {EAGLE} --eagle-at drafter --source eagle", "with --eagle DIR and --eagle-at target"),
    ("fit --eagle /nowhere/head --eagle-at drafter", "--eagle /nowhere/head: not a folder of an EAGLE-3"),
    (f"fit --source none --target {MODELS / 'target'}", "nothing to compare: give a --draft, or --source"),
    ("fit --round-trip 0,-5", "--round-trip '-5': must be milliseconds from 0 to"),
    ("fit --sessions 1,65", "--sessions '65': must be a whole number from 1 to 64"),
    ("fit --temperature nan", "--temperature must be 0 to 100, got nan"),
    ("fit --target /nowhere/model", "--target /nowhere/model: no such folder"),
    ("fit --draft /nowhere/model", "--draft /nowhere/model: no such folder"),
    ("fit --draft Org/a --draft Org/a", "--draft Org/a is given 2 times"),
    ("fit --prompts /nowhere/prompts.txt", "--prompts /nowhere/prompts.txt: No such file"),
    ("fit --out /nowhere/fit", "--out /nowhere/fit: must be a folder in one that exists"),
    (f"fit --out {__file__}", f"--out {__file__}: {__file__} is not a folder"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES)
def test_a_mistake_is_answered_in_one_line(command, words, started, capsys):
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr()
    assert words in said.err and "secret" not in said.err
    assert (said.err.count("\n"), said.out) == (1, "")
    assert not started


def test_the_bundled_target_can_be_stretched_to_what_is_not_refused():
    shape = json.loads((MODELS / "target" / "config.json").read_text())
    groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
    assert (shape["hidden_size"], shape["num_hidden_layers"]) == (HIDDEN, LAYERS)
    assert shape["head_dim"] * groups == GROUP


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
        yield [{"ratio": 1.0}]

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


@pytest.mark.parametrize(
    "command",
    [
        "bench scale --only 'with features' --features 8",
        "bench gpu --device cpu --agreement 0 --records 'a folder'",
        "bench soak --seed 3 --minutes 0.5",
    ],
)
def test_the_command_that_results_name_asks_for_the_same_again(command, started, tmp_path, monkeypatch):
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert main(shlex.split(started[0].command)[1:]) == 0
    assert started[0] == started[1]


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
