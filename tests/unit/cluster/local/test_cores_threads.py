"""When cores are measured, what is kept of it, and that no failure of it is an error."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.config import environment
from cluster.config.config import Config, Override, load
from cluster.config.environment import CHECKOUT
from cluster.config.pools import chosen_max_threads, chosen_threads
from cluster.local import threads
from cluster.local.cores import DRAFTS, StepTimes, decoded, encoded
from cluster.local.threads import (
    Unmeasured,
    cache_file,
    divisible,
    keep,
    key_of,
    measuring,
    output_of,
    recall,
    settled,
    usable_cores,
)
from tests.cluster.processes import running
from tests.stack import MODELS

MEASURED = {count: StepTimes(dict.fromkeys(DRAFTS, 30.0 / count), 1.0) for count in (1, 2)}
"""A target that two cores make twice as fast: sharing them pays."""


def configured(**settings: str) -> Config:
    """Drafting on a worker of its own, unless said otherwise."""
    settings = {"target_device": "cpu", "draft_device": "cpu", "draft_placement": "own"} | settings
    return load(None, [Override(key.replace("_", ".", 1), text, "--set") for key, text in settings.items()])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The file of the test, and two cores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    return cache_file()


def measured_by(monkeypatch, program: str, seconds: float = 20.0) -> list[str]:
    """Have this Python program measure; returns the command."""
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(threads, "measuring", lambda *_: command)
    monkeypatch.setattr(threads, "MEASURE_SECONDS", seconds)
    return command


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "cores", "wanted"),
    [
        ({}, 2, True),
        ({}, 64, True),
        ({}, 1, False),
        ({"backend": "local"}, 2, True),
        ({"target_replicas": "2"}, 2, False),
        ({"draft_replicas": "2"}, 2, False),
        ({"draft_replicas": "0"}, 2, False),
        ({"draft_placement": "auto"}, 2, True),
        ({"draft_placement": "shared"}, 2, True),
        ({"draft_placement": "shared", "speculation_enabled": "false"}, 2, False),
        ({"draft_placement": "shared", "target_threads": "1"}, 2, False),
        ({"speculation_enabled": "false"}, 2, False),
        ({"target_threads": "1"}, 2, False),
        ({"draft_threads": "2"}, 2, False),
        ({"target_threads": "auto", "draft_threads": "auto"}, 2, True),
        ({"target_device": "cuda:1"}, 2, False),
        ({"draft_gpus": "0.5"}, 2, False),
        ({"ray_address": "10.0.0.1:6379"}, 2, False),
        ({"ray_address": "auto", "backend": "local"}, 2, True),
    ],
)
def test_what_is_measured(settings, cores, wanted):
    config = configured(**settings)
    assert divisible(config, cores) == wanted


@pytest.mark.thorough
def test_one_target_may_use_all_cores_for_large_steps():
    """With drafts or without; not beside others, and not where somebody has said how many."""
    for settings, number in (({}, 2), ({"speculation_enabled": "false"}, 2), ({"target_threads": "1"}, 1)):
        assert chosen_max_threads(settled(configured(**settings)).target) == number
    assert chosen_max_threads(settled(configured(target_replicas="2")).target) == 1
    assert chosen_max_threads(settled(configured(target_max_threads="5")).target) == 5


def test_a_target_that_nobody_drafts_for_has_all_cores():
    for alone in ({"speculation_enabled": "false"}, {"draft_replicas": "0"}):
        assert chosen_threads(settled(configured(**alone)).target) == 2
        assert chosen_threads(settled(configured(**alone, target_threads="1")).target) == 1
        assert chosen_threads(settled(configured(**alone, target_replicas="2")).target) == 1


def test_what_is_not_measured_has_the_threads_it_was_given_else_one():
    config = settled(configured(target_replicas="2", target_threads="3"))
    assert (chosen_threads(config.target), chosen_threads(config.draft)) == (3, 1)


def test_a_device_that_may_be_a_gpu_is_left_alone(tmp_path, monkeypatch):
    config = configured(target_device="auto")
    monkeypatch.setattr(environment, "GPU_DEVICES", (tmp_path,))
    assert not divisible(config, 2)
    monkeypatch.setattr(environment, "GPU_DEVICES", (tmp_path / "none",))
    assert divisible(config, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
def test_cores_are_those_of_the_affinity_mask():
    one = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); import cluster.local.threads as t; print(t.usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/../not/here\n", {"cpu.max": "450000 100000\n"}, 4),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "800000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "9900000 100000\n"}, 64),
        ("4:cpu,cpuacct:/j\n0::/\n", {"cpu/j/cpu.cfs_quota_us": "300000\n", "cpu/j/cpu.cfs_period_us": "100000\n"}, 3),
        ("4:cpu:/j\n", {"cpu/j/cpu.cfs_quota_us": "-1\n", "cpu/j/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_a_quota_of_a_control_group_counts_as_its_whole_cores(groups, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for path, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{path}": files[path] for path in files}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert usable_cores(tmp_path) == cores


# -- how it ends -------------------------------------------------------------------------------------------------------


def test_the_first_start_measures_and_the_second_remembers(monkeypatch, capsys, cache):
    measured_by(monkeypatch, f"print({json.dumps(encoded(MEASURED))!r})")
    first = settled(configured())
    assert (first.target.threads, first.draft.threads) == (2, 2)
    line = capsys.readouterr().out
    how = "2 for the target, 2 for the drafter, which both share"
    assert line == f"2 cores: {how}, the fastest as measured at this first start\n"
    measured_by(monkeypatch, "raise SystemExit('not again')")
    assert settled(configured()) == first
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in cache.parent.iterdir()] == ["cores.json"]


def test_what_other_work_delayed_counts_for_an_hour(monkeypatch, capsys):
    measured_by(monkeypatch, f"print({json.dumps({**encoded(MEASURED), 'alone': False})!r})")
    first = settled(configured())
    assert (first.target.threads, first.draft.threads) == (2, 2)
    assert capsys.readouterr().out.endswith("; beside other work, so it is measured again in an hour\n")
    measured_by(monkeypatch, f"print({json.dumps({**encoded(DEAR), 'alone': True})!r})")
    assert settled(configured()) == first
    monkeypatch.setattr(threads, "BESIDE_WORK_SECONDS", 0.0)
    second = settled(configured())
    assert (second.target.threads, second.draft.threads) == (1, 1)
    assert capsys.readouterr().out.endswith("as measured at this first start\n")
    assert settled(configured()) == second
    assert capsys.readouterr() == ("", "")


def test_a_target_that_drafts_in_turn_gets_the_cores_that_pay(monkeypatch, capsys, cache):
    measured_by(monkeypatch, f"print({json.dumps(encoded(MEASURED))!r})")
    assert chosen_threads(settled(configured(draft_placement="shared")).target) == 2
    how = "2 for the target and its draft model, which take turns"
    assert capsys.readouterr().out == f"2 cores: {how}, the fastest as measured at this first start\n"


DEAR = {1: StepTimes(dict.fromkeys(DRAFTS, 30.0), 5.0), 2: StepTimes(dict.fromkeys(DRAFTS, 28.0), 4.0)}
"""A draft model that takes as long for its drafts as the target for their verification."""


@pytest.mark.parametrize(
    ("settings", "measured", "placement", "numbers"),
    [
        ({}, MEASURED, "shared", (2, 1)),
        ({}, DEAR, "auto", (1, 1)),
        ({"draft_placement": "own"}, MEASURED, "own", (2, 2)),
        ({"draft_placement": "cpu"}, MEASURED, "cpu", (2, 2)),
        ({"draft_assistant": str(MODELS / "draft")}, MEASURED, "auto", (2, 2)),
        ({"draft_model": str(MODELS / "draft_other")}, MEASURED, "auto", (2, 2)),
        ({"draft_target_tokenizer": str(MODELS / "target")}, MEASURED, "auto", (2, 2)),
        ({"speculation_schedule": "sequential"}, MEASURED, "auto", (2, 2)),
    ],
)
def test_the_draft_model_works_where_that_is_fastest_and_possible(monkeypatch, settings, measured, placement, numbers):
    measured_by(monkeypatch, f"print({json.dumps(encoded(measured))!r})")
    config = settled(configured(**{"draft_placement": "auto"} | settings))
    assert (config.draft.placement, config.drafts) == (placement, int(placement != "shared"))
    assert (chosen_threads(config.target), chosen_threads(config.draft)) == numbers


def test_unmeasured_a_draft_model_has_a_worker_of_its_own(monkeypatch):
    measured_by(monkeypatch, "raise SystemExit('busy')")
    config = settled(configured(draft_placement="auto"))
    assert (config.draft.placement, config.drafts) == ("auto", 1)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("import sys; print('a line', file=sys.stderr); sys.exit('/m: cannot load')", "/m: cannot load"),
        ("raise MemoryError('no room')", "MemoryError: no room"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("print('{}')", "no step times with [1, 2] threads"),
        ("print('[1]')", "not step times: "),
        ("pass", "Expecting value"),
        ("import time; time.sleep(60)", "not done within 1 s"),
    ],
)
def test_a_measurement_that_fails_is_one_line_and_a_core_each_and_remembered(monkeypatch, capsys, cache, program, why):
    measured_by(monkeypatch, program, 1.0 if "sleep" in program else 20.0)
    config = settled(configured())
    assert (chosen_threads(config.target), chosen_threads(config.draft)) == (1, 1)
    said = capsys.readouterr()
    assert said.out == ""
    how = "1 for the target, 1 for the drafter"
    assert said.err.startswith(f"paceline: 2 cores: {how}; if that is fastest could not be measured ({why}")
    assert said.err.endswith("), see --threads\n")
    assert said.err.count("\n") == 1
    measured_by(monkeypatch, f"print({json.dumps(encoded(MEASURED))!r})")
    assert settled(configured()) == config
    assert capsys.readouterr() == ("", "")


def test_of_many_cores_an_unmeasured_drafter_gets_one(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    measured_by(monkeypatch, "raise SystemExit('busy')")
    config = settled(configured())
    assert (config.target.threads, config.draft.threads) == (7, 1)
    assert settled(configured(draft_placement="shared")).target.threads == 7


def test_a_failed_measurement_is_tried_again_after_a_day_or_when_the_machine_changed(monkeypatch, capsys):
    measured_by(monkeypatch, "raise SystemExit('busy')")
    settled(configured())
    measured_by(monkeypatch, f"print({json.dumps(encoded(MEASURED))!r})")
    with monkeypatch.context() as changed:
        changed.setattr(threads, "_cpu", lambda: "another CPU")
        assert settled(configured()).target.threads == 2
    assert settled(configured()).target.threads == 1
    monkeypatch.setattr(threads, "FAILED_SECONDS", 0.0)
    assert settled(configured()).target.threads == 2


def test_nothing_is_left_of_a_measurement_that_takes_too_long():
    before = psutil.Process().children(recursive=True)
    with pytest.raises(Unmeasured):
        output_of([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_measuring_process_ends_with_its_parent(number):
    """Interrupted, the parent ends it; killed, the kernel does."""
    program = "exit_with(int(sys.argv[1])); time.sleep(60)"
    inner = f"import sys, time; from cluster.processes.starting import exit_with; {program}"
    command = f"[sys.executable, '-c', {inner!r}, str(os.getpid())]"
    outer = f"import os, sys; from cluster.local.threads import output_of; output_of({command}, 60)"
    parent = subprocess.Popen([sys.executable, "-c", outer], cwd=CHECKOUT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not (found := psutil.Process(parent.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.send_signal(number)
        assert parent.wait(10) != 0
        assert not running(found, 10)
    finally:
        parent.kill()
        parent.wait()


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "7",
        "[" * 100_000,
        '{"layout": 3}',
        '{"layout": 3, "measured": 7}',
        '{"layout": 3, "measured": {"key": 7}}',
        '{"layout": 3, "measured": {"key": {"failed": "yesterday"}}}',
        '{"layout": 0, "measured": {}}',
        "\x00\xff",
    ],
)
def test_a_damaged_cache_is_replaced(cache, content):
    cache.parent.mkdir(parents=True)
    cache.write_text(content, encoding="latin-1")
    assert recall("key", 2, 0.0) == (None, False)
    keep("key", encoded(MEASURED))
    assert recall("key", 2, 0.0) == (MEASURED, False)
    assert recall("other", 2, 0.0) == recall("key", 3, 0.0) == (None, False)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured_by(monkeypatch, f"print({json.dumps(encoded(MEASURED))!r})")
    assert settled(configured()).target.threads == 2
    assert capsys.readouterr().err == ""


def test_a_relative_cache_folder_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_file()) == "/home/someone/.cache/paceline/cores.json"


def test_the_oldest_measurements_are_forgotten(cache, monkeypatch):
    monkeypatch.setattr(threads, "MAX_ENTRIES", 2)
    for key in ("a", "b", "a", "c"):
        keep(key, encoded(MEASURED))
    assert [key for key in "abc" if recall(key, 2, 0.0)[0]] == ["a", "c"]


def test_the_key_follows_what_the_times_depend_on(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "draft", folder)
    config = configured(draft_model=str(folder))
    target, draft = config.target, config.draft
    key = key_of(config, 2)
    assert key_of(replace(config, router=replace(config.router, port=9000)), 2) == key
    others = [
        key_of(config, 3),
        key_of(replace(config, draft=replace(draft, dtype="fp32")), 2),
        key_of(replace(config, draft=replace(draft, quantization="int8")), 2),
        key_of(replace(config, target=replace(target, model="Org/Name")), 2),
    ]
    os.utime(folder / "model.safetensors", (1, 1))
    others.append(key_of(config, 2))
    (folder / "config.json").write_text("{}")
    others.append(key_of(config, 2))
    assert len({key, *others}) == 7


# -- the real thing ----------------------------------------------------------------------------------------------------


def test_the_bundled_pair_is_measured():
    said = json.loads(output_of(measuring(configured(), 2), 600))
    assert said.pop("alone") in (True, False)
    times = decoded(said, 2)
    assert set(times) == {1, 2}
    assert all(step > 0 for found in times.values() for step in (found.draft, *found.target.values()))


def test_models_are_measured_as_they_will_be_quantised():
    command = measuring(configured(target_quantization="int8", draft_quantization="int8-dynamic"), 2)
    assert command[command.index("--target-quantization") + 1] == "int8"
    assert command[command.index("--draft-quantization") + 1] == "int8-dynamic"


def test_a_model_that_cannot_be_loaded_is_told(tmp_path):
    with pytest.raises(Unmeasured, match="no such folder"):
        output_of(measuring(configured(target_model=str(tmp_path / "none")), 2), 600)


def test_where_nobody_has_a_home_nothing_is_kept(monkeypatch, tmp_path):
    """As with a user's id that the machine does not know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    keep("key", encoded(MEASURED))
    assert recall("key", 2, 0.0) == (None, False)
    assert not [*tmp_path.iterdir()]
