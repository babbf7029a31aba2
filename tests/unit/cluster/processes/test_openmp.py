"""Which OpenMP runtime a worker computes with: chosen where nobody has, in force in the process, and the only one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.config import Config
from cluster.config.environment import CHECKOUT
from cluster.processes import starting
from cluster.processes.child import environment as child_environment
from cluster.ray.parts import options

MAPPED = """
import torch
torch.set_num_threads(2)
torch.rand(1 << 20).exp_()
import ctypes
symbol = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    begin, end = (int(text, 16) for text in line.split()[0].split("-"))
    if begin <= symbol < end:
        print(line.split()[-1])
"""
"""Prints the library whose threads compute what PyTorch divides among threads."""


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A runtime that is installed, in an environment where nobody has chosen."""
    for name in (starting.CHOICE, starting.PRELOAD, starting.WAITING):
        monkeypatch.delenv(name, raising=False)
    found = tmp_path / "libomp.so"
    monkeypatch.setattr(starting, "runtime", lambda: found)
    return found


def test_the_runtime_is_chosen_where_nobody_has(library):
    assert starting.openmp_environment() == {
        "PACELINE_OPENMP": "llvm",
        "LD_PRELOAD": str(library),
        "KMP_BLOCKTIME": "0",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACELINE_OPENMP", "system"),
        ("PACELINE_OPENMP", "llvm"),
        ("LD_PRELOAD", "/opt/intel/libiomp5.so"),
        ("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4:libgomp.so.1"),
    ],
)
def test_who_has_chosen_is_left_alone(library, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert starting.openmp_environment() == {}


def test_what_else_is_preloaded_and_how_long_to_wait_stay(library, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    chosen = starting.openmp_environment()
    assert chosen["LD_PRELOAD"] == f"{library} /usr/lib/libtcmalloc.so.4"
    assert chosen["KMP_BLOCKTIME"] == "200"


def test_without_the_package_nothing_is_chosen(library, monkeypatch):
    monkeypatch.setattr(starting, "runtime", lambda: None)
    assert starting.openmp_environment() == {}


def test_on_ray_workers_get_it_and_routers_do_not(library):
    config = Config()
    for pool in config.pools():
        assert preloaded(options(config, pool)) == str(library)
    assert preloaded(options(config, None)) is None


def preloaded(described) -> str | None:
    return described["ray_actor_options"]["runtime_env"]["env_vars"].get("LD_PRELOAD")


def test_a_worker_started_by_hand_begins_again_with_it_once(library, monkeypatch):
    runs = []
    monkeypatch.setattr(os, "execve", lambda *command: runs.append(command))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "cluster.cli", "worker", "target"])
    starting.begin_again()
    ((program, command, environment),) = runs
    assert (program, command) == (sys.executable, [sys.executable, "-m", "cluster.cli", "worker", "target"])
    for name in starting.openmp_environment():
        monkeypatch.setenv(name, environment[name])
    starting.begin_again()
    assert len(runs) == 1


@pytest.mark.skipif(starting.runtime() is None, reason="no such runtime is installed here")
def test_pytorch_computes_with_it():
    chosen = {**child_environment(), starting.PRELOAD: str(starting.runtime()), starting.WAITING: starting.WAITING_MS}
    done = subprocess.run(
        [sys.executable, "-c", MAPPED], cwd=CHECKOUT, env=chosen, capture_output=True, text=True, check=True
    )
    assert [Path(mapped) for mapped in done.stdout.split()] == [starting.runtime().resolve()]
