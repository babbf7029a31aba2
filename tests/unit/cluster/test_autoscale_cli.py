"""``paceline simulate --autoscale``: mistakes are answered in one line, and table and CSV say the same."""

import csv
from pathlib import Path

import pytest

from cluster.autoscaling.traces import Arrival, read
from cluster.cli import main

RUSH = Path(__file__).parents[3] / "benchmarks" / "traces" / "rush.csv"
HEAD = "seconds,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 must name the columns seconds, prompt_tokens, output_tokens; it lacks seconds, prompt_tokens"),
        (
            "seconds,prompt_tokens\n1,2\n",
            "line 1 must name the columns seconds, prompt_tokens, output_tokens; it lacks",
        ),
        (HEAD, "has no requests"),
        (HEAD + "0,5,5\n-1,5,5\n", "line 3: seconds must be a number from 0 to 604800, got '-1'"),
        (HEAD + "7,5,5\n6,5,5\n", "line 3: seconds must be a number from 7 to 604800, got '6'"),
        (HEAD + "nan,5,5\n", "line 2: seconds must be a number from 0"),
        (HEAD + "0,0,5\n", "line 2: prompt_tokens must be a whole number from 1 to 1e+06, got '0'"),
        (HEAD + "0,5,2.5\n", "line 2: output_tokens must be a whole number from 1 to 1e+06, got '2.5'"),
        (HEAD + "0,5\n", "line 2: output_tokens must be a whole number from 1 to 1e+06, got ''"),
        (HEAD + "0,many,5\n", "line 2: prompt_tokens must be a whole number from 1 to 1e+06, got 'many'"),
        (HEAD + "0,inf,5\n", "line 2: prompt_tokens must be a whole number"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_field(text, words, tmp_path, capsys):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    assert main(["simulate", "--autoscale", str(file)]) == 2
    said = capsys.readouterr()
    assert f"--autoscale {file}: {words}" in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--autoscale", "/nowhere.csv"],
            "--autoscale /nowhere.csv: No such file or directory; give a CSV file or one of",
        ),
        (["--autoscale", "ramp", "--rtt", "5"], "--rtt belongs to a sweep, not to --autoscale"),
        (["--autoscale", "ramp", "--max-draft", "12"], "--max-draft belongs to a sweep, not to --autoscale"),
        (["--autoscale", "ramp", "--tokens", "9"], "--tokens belongs to a sweep, not to --autoscale"),
        (["--autoscale", "ramp", "--request-tokens", "9"], "--request-tokens belongs to a sweep, not to --autoscale"),
        (["--autoscale", "ramp", "--scale", "0"], "--scale 0: must be from 0.001 to 1000"),
        (["--autoscale", "ramp", "--target-start", "nan"], "--target-start nan: must be from 0 to 86400"),
        (["--autoscale", "ramp", "--set", "autoscaling.load=2"], "autoscaling.load must be a number from 0.01 to 1"),
        (["--autoscale", "ramp", "--csv", "/nowhere/x.csv"], "--csv /nowhere/x.csv: must be a file in a folder"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments, words, capsys):
    assert main(["simulate", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_columns_may_stand_in_any_order(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("output_tokens, seconds ,prompt_tokens,user\n7,0.5,3,a\n8, 1 ,4,b\n")
    assert read(file) == [Arrival(0.5, 3, 7), Arrival(1.0, 4, 8)]


def test_the_bundled_trace_is_simulated_within_the_bounds_of_the_configuration(tmp_path, capsys):
    table = tmp_path / "table.csv"
    bounds = ["--set", "target.max_replicas=2", "--set", "draft.max_replicas=2", "--set", "autoscaling.down_s=30"]
    command = ["simulate", "--autoscale", str(RUSH), "--target-start", "10", *bounds, "--csv", str(table)]
    assert main([*command, "--verify-slope", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "target 1 -> 2  " in said
    assert "draft 0 -> 1  demand: " in said
    assert "router" not in [line.split()[1] for line in said.splitlines() if " -> " in line]
    with table.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert sum(int(row["requests"]) for row in rows) == len(read(RUSH))
    assert max(float(row["targets"]) for row in rows) == 2.0
    assert float(rows[-1]["drafts"]) < 1.0


def test_a_run_of_less_than_a_second_has_a_row(tmp_path, capsys):
    trace, table = tmp_path / "trace.csv", tmp_path / "table.csv"
    trace.write_text(HEAD + "0,1,1\n")
    given = ["--set", "autoscaling.down_s=0", "--set", "target.max_replicas=2", "--csv", str(table)]
    assert main(["simulate", "--autoscale", str(trace), *given]) == 0
    assert "1 requests; seconds to the first token" in capsys.readouterr().out
    with table.open(newline="", encoding="utf-8") as stream:
        assert [row["requests"] for row in csv.DictReader(stream)] == ["1"]


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    assert main(["simulate", "--autoscale", "ramp", "--scale", "0.05", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
