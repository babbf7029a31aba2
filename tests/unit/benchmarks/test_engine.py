"""``paceline bench engine``: figures from measurements made by hand, its command line, and one small run."""

import json
import os
import sys
from dataclasses import replace
from datetime import date
from statistics import mean, stdev

import pytest
import torch

from benchmarks.engine import figures
from benchmarks.engine import run as engine
from benchmarks.engine.figures import (
    ALONE,
    GOALS,
    MEAN_ANSWER,
    MEAN_PROMPT,
    MIXED,
    SHORTENED,
    TOGETHER,
    Measured,
    Memory,
    lengths,
    memory_of,
    random_prompts,
    read_rollup,
    write_model,
)
from benchmarks.engine.run import READ_BYTES, Loop
from benchmarks.engine.settings import EngineOptions
from benchmarks.engine.steps import PREFIX, TREE, chain, in_turn, many, reads
from benchmarks.harness.measure import Batch, Decoded, Run, TimedCommit
from benchmarks.harness.report import Result, against
from benchmarks.harness.transformers_baseline import ASSISTED, PLAIN, Stock
from cluster.cli import main
from engine.build import build
from engine.settings import EngineSettings

KEYS = {
    "step_over_floor",
    "verify8_over_step1",
    "batch16_over_batch1",
    "over_transformers_batch16",
    "over_transformers_batch16_mixed",
    "prefix_hit_ttft_ratio",
    "memory_overhead_mb",
}


def run(requests: int, tokens: int, first: float, seconds: float) -> Run:
    """Requests asked for at 0 whose first token comes at ``first`` and the others after ``seconds`` more, at once."""
    commits = (TimedCommit(first, 1), TimedCommit(first + seconds, tokens))
    return Run((Decoded(tuple(range(1 + tokens)), commits),) * requests, asked=0.0)


@pytest.fixture
def measured() -> Measured:
    """Three rounds on a machine that is half as fast in the second of them."""
    slow = (1.0, 2.0, 1.0)
    steps = {chain(1): 0.026, chain(8): 0.030, TREE: 0.032, many(8): 0.040}
    theirs = {chain(1): 0.050, chain(8): 0.100}
    return Measured(
        weight_bytes=500_000_000,
        read_bytes=1_000_000_000,
        reads={"slow way": [0.05 * x for x in slow], "fast way": [0.04 * x for x in slow]},
        steps={name: [seconds * x for x in slow] for name, seconds in steps.items()}
        | {PREFIX + name: [seconds * x for x in slow] for name, seconds in theirs.items()},
        runs={
            ALONE: [run(1, 40, 0.1, 1.0 * x) for x in slow],
            TOGETHER: [run(16, 40, 1.0 * x, 2.0 * x) for x in slow],
            PREFIX + ALONE: [run(1, 40, 0.1, 2.0 * x) for x in slow],
            PREFIX + TOGETHER: [run(16, 40, 1.5 * x, 6.0 * x) for x in slow],
            MIXED: [run(16, 40, 1.0 * x, 1.0 * x) for x in slow],
            PREFIX + MIXED: [run(16, 40, 1.0 * x, 5.0 * x) for x in slow],
        },
        prefixes=[(2.0, 0.1), (4.0, 0.8), (2.0, 0.16)],
        memory=Memory(1_100_000_000, 900_000_000, 500_000_000, 90_000_000, 10_000_000),
    )


def summary(measured: Measured) -> dict[str, float]:
    return against(GOALS, measured)["summary"]


def shown(measured: Measured) -> Result:
    options = EngineOptions(quick=True, hidden=256, layers=2)
    found = figures.result(options, "bfloat16", measured)
    return replace(found, day=date(2026, 1, 2), machine={"processor": "a processor"})


@pytest.fixture
def result(measured) -> Result:
    return shown(measured)


def test_every_figure_is_a_median_of_ratios_within_a_round(measured):
    assert measured.floors == pytest.approx([0.02, 0.04, 0.02])
    assert summary(measured) == pytest.approx(
        {
            "step_over_floor": 1.3,
            "verify8_over_step1": 30 / 26,
            "batch16_over_batch1": 8.0,
            "over_transformers_batch16": 2.5,
            "over_transformers_batch16_mixed": 3.0,
            "prefix_hit_ttft_ratio": 0.08,
            "memory_overhead_mb": 500.0,
        }
    )


def test_the_floor_is_that_of_the_fastest_way_to_read(measured):
    slower = replace(measured, reads={"slow way": measured.reads["slow way"]})
    assert summary(slower)["step_over_floor"] == pytest.approx(1.3 * 0.04 / 0.05)


def test_over_transformers_counts_the_prompts(measured):
    early = {**measured.runs, TOGETHER: [run(16, 40, 0.5, 2.0)] * 3, PREFIX + TOGETHER: [run(16, 40, 0.5, 4.5)] * 3}
    assert summary(replace(measured, runs=early))["over_transformers_batch16"] == pytest.approx(2.0)


def test_mixed_requests_spread_widely_and_are_the_same_in_every_run():
    drawn = lengths(1000)
    assert drawn == lengths(1000)
    for column, expected in ((0, MEAN_PROMPT / SHORTENED), (1, MEAN_ANSWER / SHORTENED)):
        tokens = [one[column] for one in drawn]
        assert min(tokens) >= 1 and max(tokens) == 256
        assert mean(tokens) == pytest.approx(expected, rel=0.1)
        assert stdev(tokens) > 0.7 * mean(tokens)


async def test_padded_texts_equal_ours_and_end_where_each_was_to_end(tmp_path):
    """In float32, with a tiny model: the padding of one contender and the retiring of the other change no token."""
    write_model(EngineOptions(hidden=256, layers=1), tmp_path / "model")
    settings = EngineSettings(str(tmp_path / "model"), device="cpu", dtype="float32", cache_tokens=4096)
    generator = torch.Generator().manual_seed(0)
    prompts = tuple(random_prompts(1, tokens, generator)[0] for tokens in (3, 11, 7))
    batch = Batch(prompts, 6, each=(6, 1, 4))
    ours = await Loop(build(settings), settings).run(batch)
    theirs = await Stock(tmp_path / "model", torch.float32).run(batch)
    assert [len(one.tokens) for one in ours.decoded] == [6, 1, 4]
    assert [one.tokens for one in ours.decoded] == [one.tokens for one in theirs.decoded]
    assert [sum(commit.tokens for commit in one.commits) for one in theirs.decoded] == [6, 1, 4]


@pytest.mark.parametrize("mode", [PLAIN, *ASSISTED], ids=str)
def test_assisted_generation_says_the_same_and_tells_when_which_tokens_came(mode, tmp_path):
    """A model that drafts for itself in float32: everything that it drafts is kept."""
    write_model(EngineOptions(hidden=256, layers=1), tmp_path / "model")
    stock = Stock(tmp_path / "model", torch.float32, tmp_path / "model")
    batch = Batch((random_prompts(1, 9, torch.Generator().manual_seed(0))[0],), 12)
    (plain,) = stock.decode(batch).decoded
    (found,) = stock.decode(batch, mode).decoded
    assert found.tokens == plain.tokens and len(found.tokens) == 12
    assert sum(commit.tokens for commit in found.commits) == 12
    assert (len(found.commits) < 12) is (mode != PLAIN)


def test_the_document_holds_the_summary_what_was_wanted_and_where_it_ran(result):
    document = json.loads(json.dumps(result.document()))
    assert set(document["summary"]) == set(document["wanted"]) == KEYS
    assert document["wanted"]["step_over_floor"] == {"at_most": 1.4}
    assert document["wanted"]["batch16_over_batch1"] == {"at_least": 5.0}
    assert document["transformers"]["step_over_floor"] == pytest.approx(2.5)
    assert document["hardware"] == {"processor": "a processor"}
    assert document["command"] == "paceline bench engine --quick --hidden 256 --layers 2 --threads 1"
    assert document["model"] == {
        "parameters": EngineOptions(hidden=256, layers=2).shape.weights_read,
        "hidden": 256,
        "layers": 2,
        "weights": "random",
    }
    assert document["step_seconds"][chain(8)] == [0.030, 0.060, 0.030]


def test_what_is_timed_takes_turns_and_the_first_round_does_not_count():
    called: list[str] = []
    seconds = in_turn({name: lambda name=name: called.append(name) for name in "abc"}, rounds=4, warm_up=1)
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 4)
    rounds = [called[start : start + 3] for start in range(0, 15, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1, "the order never changes"


def test_every_way_reads_the_whole_buffer():
    size = 1 << 16
    found = {way: float(read()) for way, read in reads(size).items()}
    of_float, of_integer = torch.ones(8, dtype=torch.uint8).view(torch.float32), 0x0101010101010101
    assert found["sum float32"] == pytest.approx(size / 4 * of_float[0].item())
    assert found["dot float32"] == pytest.approx(size / 4 * of_float[0].item() ** 2, rel=1e-3)
    total = size // 8 * of_integer
    assert int(reads(size)["sum int64"]()) == (total + 2**63) % 2**64 - 2**63
    assert found["max uint8"] == 1
    assert READ_BYTES % 8 == 0


def test_memory_of_a_process_is_read_from_its_rollup():
    text = "5581-7ffd ---p 00000000 00:00 0  [rollup]\nRss:   1200 kB\nPrivate_Clean:  0 kB\nTHPeligible:  1\n"
    assert read_rollup(text) == {"Rss": 1200 * 1024, "Private_Clean": 0}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_known_needs_are_taken_off_the_memory():
    shape = EngineOptions(hidden=256, layers=2).shape
    found = memory_of(os.getpid(), shape, item=2, slots=48, rows=3)
    assert found.weights == 2 * shape.weights_read
    layers, keys_and_values, head_size, bytes_each = 2, 2, 64, 2
    assert found.cache == layers * keys_and_values * head_size * bytes_each * 48
    assert found.overhead == found.resident - found.weights - found.cache - found.activations
    assert 0 < found.private <= found.resident


@pytest.mark.thorough
def test_a_small_run_measures_everything(monkeypatch, tmp_path, capsys):
    """The real thing with a tiny model: a worker process, transformers, and every figure."""
    for name, value in SMALL.items():
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr(figures, "SHORTENED", 40)
    file, cores = tmp_path / "figures.json", os.sched_getaffinity(0)
    assert main(["bench", "engine", "--quick", "--hidden", "256", "--layers", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert set(found["summary"]) == KEYS
    assert all(value > 0 for value in found["summary"].values())
    assert os.sched_getaffinity(0) == cores
    said = capsys.readouterr().out
    assert found["summary"]["over_transformers_batch16"] != found["summary"]["over_transformers_batch16_mixed"]
    for words in (
        "Must reach",
        "16 requests of mixed lengths",
        "A step, by its tokens",
        "transformers",
    ):
        assert words in said


SMALL = {
    "SIZES": (1, 8),
    "CONTEXT": 20,
    "PROMPT": 8,
    "NEW": 4,
    "REPEATED_PREFIX": 40,
    "CACHE_TOKENS": 4096,
    "READ_BYTES": 1 << 22,
}
