"""``paceline simulate``: mistakes are answered at once, and the table, the CSV and the plot say the same."""

import csv
import json
import sys

import pytest

from cluster.cli import main

QUICK = ["simulate", "--tokens", "40", "--draft-length", "3"]
STEP = {"role": "target", "start": 0.0, "end": 0.03, "tokens": 1, "sessions": [{"session": 1, "feed": 1}]}
DRAFT = {"role": "draft", "start": 0.0, "end": 0.002, "tokens": 1, "sessions": [1]}
LEARNED = {**DRAFT, "learned": [{"session": 1, "outcomes": [[[0.9, 0.05], 0], [[0.4, 0.3], 1]]}]}


def rows(file):
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def written(folder, *lines, cut: str = ""):
    file = folder / "record.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    return file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rtt", "0,-5"], "--rtt '-5': must be milliseconds from 0 to"),
        (["--rtt", "1,,2"], "--rtt '': must be milliseconds"),
        (["--rtt", "nan"], "--rtt 'nan': must be milliseconds"),
        (["--schedule", "tree"], "--schedule 'tree': must be one of trie, sequential, parallel, plain"),
        (["--sessions", "1.5"], "--sessions '1.5': must be a whole number from 1"),
        (["--drafters", "0"], "--drafters '0': must be a whole number from 1"),
        (["--acceptance", "80"], "--acceptance 80: must be from 0 to 1"),
        (["--target-step-ms", "nan"], "--target-step-ms nan: must be from"),
        (["--coverage", "-1"], "--coverage -1: must be from 0 to 1"),
        (["--branching", "0.5"], "--branching 0.5: must be from 1 to 100"),
        (["--launch-ms", "-1"], "--launch-ms -1: must be from 0"),
        (["--rows", "16:6.2,32"], "--rows '32': must be rows and milliseconds, such as 16:6.2"),
        (["--rows", "16:0"], "--rows '16:0': must be rows and milliseconds"),
        (["--rows", "16:6", "--target-step-ms", "6"], "--target-step-ms and --rows say what a step takes"),
        (["--record", "/nowhere/steps.jsonl", "--shared-device"], "--shared-device belongs to a made-up set-up"),
        (["--head", "target", "--rtt", "5"], "--rtt is about draft workers: a head at the target needs none"),
        (["--head", "target", "--drafters", "2"], "--drafters is about draft workers"),
        (["--retention", "0.9"], "--retention needs --head: it is for an EAGLE-3 head"),
        (
            ["--head", "target", "--schedule", "parallel"],
            "--schedule 'parallel': must be one of trie, plain with --head",
        ),
        (["--head", "drafter", "--feature-gbit", "0"], "--feature-gbit 0: must be from 0.001"),
        (["--record", "/nowhere/steps.jsonl", "--head", "target"], "--head belongs to a made-up set-up"),
        (["--tokens", "0"], "--tokens 0: must be from 1"),
        (["--request-tokens", "1"], "--request-tokens 1: must be from 2"),
        (["--max-draft", "65"], "--max-draft 65: must be from 0 to 64"),
        (["--csv", "/nowhere/table.csv"], "--csv /nowhere/table.csv: must be a file in a folder that exists"),
        (["--rtt", "0,5", "--plot", "plot.txt"], "--plot plot.txt: must end in one of .png"),
        (["--plot", "plot.png"], "--plot needs several values of --rtt, --sessions or --drafters"),
        (["--record", "/nowhere/steps.jsonl"], "--record /nowhere/steps.jsonl: No such file"),
        (["--record", "/nowhere/steps.jsonl", "--acceptance", "0.5"], "--acceptance belongs to a made-up set-up"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, capsys):
    assert main([*QUICK, *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n", "line 1 is not one that a worker writes"),
        ("no json\n", "line 1 is not one that a worker writes"),
        (json.dumps(STEP) + "\n", "record a draft worker too"),
        (json.dumps(LEARNED) + "\n", "record a target worker too"),
        (f"{json.dumps(STEP)}\n{json.dumps(DRAFT)}\n", "no drafts that the target decided on"),
        ('{"role":"draft"}\n', "not what a worker of this version writes: KeyError: 'start'"),
    ],
)
def test_a_record_of_no_use_is_refused(text, words, tmp_path, capsys):
    file = tmp_path / "record.jsonl"
    file.write_text(text)
    assert main([*QUICK, "--record", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"--record {file}: " in said
    assert words in said
    assert said.count("\n") == 1


def test_without_matplotlib_a_plot_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr("cluster.commands.simulate.find_spec", lambda name: None)
    assert main([*QUICK, "--rtt", "0,5", "--plot", "plot.png"]) == 2
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_every_combination_once_and_plain_only_once_for_a_load(tmp_path, capsys):
    file = tmp_path / "table.csv"
    assert main([*QUICK, "--rtt", "0", "--rtt", "20,20", "--sessions", "1,2", "--csv", str(file)]) == 0
    found = [(row["schedule"], row["round trip ms"], row["sessions"]) for row in rows(file)]
    drafting = [(name, rtt, n) for n in "12" for rtt in ("0", "20") for name in ("trie", "sequential 3", "parallel 3")]
    assert sorted(found) == sorted([*drafting, ("plain", "", "1"), ("plain", "", "2")])
    said = capsys.readouterr().out
    for row in rows(file):
        assert row["tokens/s"] in said
        assert row["schedule"] != "plain" or row["speed-up"] == "1.00"


def test_figures_go_to_stdout_and_are_the_same_for_a_seed(capsys):
    def said(seed: str) -> str:
        assert main([*QUICK, "--jitter", "0.1", "--seed", seed]) == 0
        return capsys.readouterr().out

    assert said("1") == said("1")
    assert said("1") != said("2")


def test_a_longer_step_is_slower(tmp_path):
    def rate(milliseconds: str) -> float:
        file = tmp_path / "table.csv"
        arguments = ["--schedule", "plain", "--target-step-ms", milliseconds, "--csv", str(file)]
        assert main([*QUICK, *arguments]) == 0
        return float(rows(file)[0]["tokens/s"])

    assert rate("20") == pytest.approx(50.0)
    assert rate("40") == pytest.approx(25.0)


def test_how_many_workers_are_enough_is_said(capsys):
    arguments = ["--schedule", "trie", "--drafters", "1,2", "--sessions", "1,2"]
    assert main([*QUICK, *arguments]) == 0
    said = capsys.readouterr().out
    assert "trie, round trip 0 ms, 1 target, 1 session: 1 drafter (1 a target) is within 3 %" in said
    assert "trie, round trip 0 ms, 1 target, 1 drafter: throughput still grows at 2 sessions" in said


def test_a_record_is_simulated_and_its_torn_last_line_left_out(tmp_path, capsys):
    file = written(tmp_path, STEP, LEARNED, cut='{"role":"dra')
    assert main([*QUICK, "--record", str(file), "--schedule", "plain"]) == 0
    assert "33.3" in capsys.readouterr().out


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    assert main([*QUICK, "--rtt", "0,20", "--drafters", "1,2", "--sessions", "1,2", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_matplotlib_is_not_needed_for_a_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*QUICK, "--schedule", "plain"]) == 0


def pace(tmp_path, *arguments: str, schedule: str = "trie") -> float:
    file = tmp_path / "table.csv"
    flags = ["--schedule", schedule, "--target-step-ms", "6", "--draft-step-ms", "1", "--relay-ms", "0.2"]
    if "--rows" in arguments:
        flags = [flag for flag in flags if flag not in ("--target-step-ms", "6")]
    assert main(["simulate", "--tokens", "200", *flags, *arguments, "--csv", str(file)]) == 0
    (row,) = rows(file)
    return float(row["tokens/s"])


def test_what_a_gpu_adds_to_costs_slows_it_down(tmp_path, capsys):
    """A device that is shared, what the host does between steps and for sessions, and shapes."""
    plain = pace(tmp_path)
    for dearer in (["--shared-device"], ["--launch-ms", "0.5"], ["--session-ms", "1"], ["--branching", "1.5"]):
        assert pace(tmp_path, *dearer) < 0.98 * plain, dearer
    assert pace(tmp_path, "--launch-ms", "1.5", schedule="plain") == pytest.approx(1 / 0.0075, rel=0.01)
    capsys.readouterr()


def test_what_a_head_costs_slows_it_down(tmp_path, capsys):
    """Its levels before the step; elsewhere what its features take, and how it ages."""
    here, away = ["--head", "target"], ["--head", "drafter", "--rtt", "0.5"]
    assert pace(tmp_path, *here, "--draft-step-ms", "0.1") > 1.5 * pace(tmp_path, *here)
    for dearer in (["--retention", "0.5"], ["--fuse-ms", "3"], ["--feature-kb", "8000"]):
        assert pace(tmp_path, *away, *dearer) < 0.9 * pace(tmp_path, *away), dearer
    assert pace(tmp_path, *here, schedule="plain") == pytest.approx(1 / 0.006, rel=0.01)
    capsys.readouterr()


def test_steps_are_padded_to_rows(tmp_path, capsys):
    assert pace(tmp_path, "--rows", "16:5,32:6", schedule="plain") == pytest.approx(200, rel=0.01)
    crowd = pace(tmp_path, "--rows", "16:5,32:6", "--sessions", "20", schedule="plain")
    assert crowd == pytest.approx(20 / 0.006, rel=0.01)
    capsys.readouterr()
