"""How many threads ``paceline up`` gives its workers, and where the draft model works, where either is ``auto``.

On a GPU, with several workers of a kind or ranks of a worker, on other machines, with a single core, or where a number
is given for one of the two, ``threads: auto`` is 1 and ``draft.placement: auto`` is a draft worker. One target that
nobody drafts for has all cores of this machine. One target and one draft model that compute on them are measured, once,
and get the division that :mod:`cluster.local.cores` predicts to be the fastest of those that the placement leaves open;
such a target may use all cores for steps of many tokens. What was measured beside other work counts for an hour. When
they cannot be measured, the drafter gets one core and the target the others: that is never an error, and it is not
tried again for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.config.config import Config
from cluster.config.environment import cache_folder, expanded, on_cpu, replace_file
from cluster.config.pools import SHARED, DraftConfig, TargetConfig
from cluster.config.serving import may_draft_in_turn
from cluster.config.settings import AUTO
from cluster.console import complain, stages, tell
from cluster.local.cores import CoreDivision, Measured, decoded, divide, encoded, fastest, in_turn, thread_counts
from cluster.processes.child import ours, spawn
from cluster.processes.starting import openmp_environment
from engine.host.memory import control_groups

MEASURE_SECONDS = 15.0
"""How long measuring may take, loading included: it delays the first start, and gains little where cores are busy. Two
cores of an AMD EPYC with AVX2 alone take 11 s for the bundled pair and 12 for 287M parameters, 5 of them for imports;
the division without a measurement promises 0.73 of the tokens of the best one there."""

LAYOUT = 3
"""Number of the file's layout; a file with another is not read."""
MAX_ENTRIES = 32
"""Measurements kept; the oldest go first."""
FAILED_SECONDS, BESIDE_WORK_SECONDS = 86_400.0, 3600.0
"""How long nobody tries again what failed: the machine may have been busy, or the models take too long to load. And how
long step times count that others' work delayed."""
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
"""What the speed of a model depends on."""


class Unmeasured(Exception):
    """Why there are no step times, in a few words."""


def settled(config: Config) -> Config:
    """The same configuration, with numbers of threads and a placement; says which after a measurement."""
    cores = usable_cores()
    if _computes_here(config):
        threads = config.target.threads if config.drafts or _drafts_in_turn(config) else cores
        most = cores if config.target.max_threads == AUTO else config.target.max_threads
        config = replace(config, target=replace(config.target, threads=threads, max_threads=most))
    if not divisible(config, cores):
        return config
    key, failure, again = key_of(config, cores), "", ""
    measured, failed = recall(key, cores, time.time())
    fresh = measured is None and not failed
    if fresh:
        try:
            measured, alone = _measured(config, cores)
            keep(key, encoded(measured) | ({} if alone else {"beside_work": time.time()}))
            again = "" if alone else "; beside other work, so it is measured again in an hour"
        except Unmeasured as error:
            failure = str(error)
            keep(key, {"failed": time.time()})
    division = _division(config, cores, measured)
    if failure:
        doubt = f"if that is fastest could not be measured ({failure}), see --threads"
        complain(f"paceline: {cores} cores: {division}; {doubt}")
    elif fresh:
        tell(f"{cores} cores: {division}, the fastest as measured at this first start{again}")
    target, draft = replace(config.target, threads=division.target), config.draft
    draft = replace(draft, threads=division.draft) if division.draft else replace(draft, placement=SHARED)
    return replace(config, target=target, draft=draft)


def _division(config: Config, cores: int, measured: Measured | None) -> CoreDivision:
    """The fastest that the placement of the draft model leaves open. Unmeasured, a drafter has one core."""
    if _drafts_in_turn(config):
        return in_turn(cores, measured) if measured else CoreDivision(cores - 1, 0)
    if measured is None:
        return CoreDivision(cores - 1, 1)
    best = fastest(cores, measured)
    return best if best.draft or may_draft_in_turn(config) else divide(cores, measured)


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process, on the machine whose files are at ``root``, may keep busy, and so what it starts.

    Threads beyond a quota of processor time (a container's, systemd's) would only stand still together.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Whole cores that each control group which this process is in, of either version, may keep busy."""
    for folder, version in control_groups("cpu", root):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
            if quota > 0:
                yield quota // period


def divisible(config: Config, cores: int) -> bool:
    """Whether there is something to choose: one target and one draft model, on CPU cores of this machine."""
    one_draft = (config.drafts == 1 or _drafts_in_turn(config)) and _open(config.draft)
    return cores >= 2 and _computes_here(config) and one_draft


def _computes_here(config: Config) -> bool:
    """Whether there is one target, on CPU cores of this machine, and nobody has said on how many."""
    fixed = not config.models and not config.autoscales
    return config.on_this_machine and fixed and config.target.replicas == 1 and _open(config.target)


def _open(worker: TargetConfig | DraftConfig) -> bool:
    on_cores = not worker.gpus and on_cpu(worker.device) and worker.tensor_parallel_size == 1
    return on_cores and worker.threads == AUTO


def _drafts_in_turn(config: Config) -> bool:
    return config.shared_draft(config.pools()[0]) is not None


def _measured(config: Config, cores: int) -> tuple[Measured, bool]:
    """And whether no other work delayed it. Raises :class:`Unmeasured`."""
    with stages() as report:
        limit = f"{MEASURE_SECONDS:g} s at most, at the first start of a pair"
        report(f"timing both models to divide {cores} cores between them ({limit})")
        said = output_of(measuring(config, cores), MEASURE_SECONDS)
    try:
        document = json.loads(said)
        alone = document.pop("alone", True) if isinstance(document, dict) else True
        return decoded(document, cores), alone is True
    except ValueError as error:
        raise Unmeasured(str(error)) from error


def measuring(config: Config, cores: int) -> list[str]:
    """The command line of :mod:`cluster.local.core_times` for these models."""
    command = ours("cluster.local.core_times", "--exit-with", str(os.getpid()))
    for role, worker in (("target", config.target), ("draft", config.draft)):
        command += [f"--{role}", worker.model, f"--{role}-dtype", worker.dtype]
        command += [f"--{role}-quantization", worker.quantization]
    return [*command, "--threads", *map(str, thread_counts(cores))]


def output_of(command: Sequence[str], seconds: float) -> str:
    """What the command prints. It is over when this returns or raises, also on Ctrl-C. Raises :class:`Unmeasured`."""
    # Offline: to download a model is for its worker, which has the time.
    process = spawn(command, {"HF_HUB_OFFLINE": "1"} | openmp_environment())
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Unmeasured(f"not done within {seconds:g} s") from None
        finally:
            process.kill()
    if process.returncode < 0:
        raise Unmeasured(f"killed by signal {-process.returncode}")
    if process.returncode:
        raise Unmeasured((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return output


def cache_file() -> Path:
    """The user's own file of step times."""
    return cache_folder() / "paceline" / "cores.json"


def recall(key: str, cores: int, now: float) -> tuple[Measured | None, bool]:
    """What was kept under ``key``, if it is whole; else whether measuring it failed a short while before ``now``."""
    entry = _entries().get(key)
    beside_work = entry.pop("beside_work", None) if isinstance(entry, dict) else None
    if isinstance(beside_work, int | float) and not 0 <= now - beside_work < BESIDE_WORK_SECONDS:
        return None, False
    with contextlib.suppress(ValueError):
        return decoded(entry, cores), False
    since = entry.get("failed") if isinstance(entry, dict) else None
    return None, isinstance(since, int | float) and 0 <= now - since < FAILED_SECONDS


def keep(key: str, entry: dict[str, Any]) -> None:
    """Keep what was measured, encoded, or since when it is known to fail, as far as that is possible."""
    if not cache_file().is_absolute():
        return
    others = [kept for kept in _entries().items() if kept[0] != key]
    newest = dict([*others, (key, entry)][-MAX_ENTRIES:])
    with contextlib.suppress(OSError):
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        replace_file(cache_file(), json.dumps({"layout": LAYOUT, "measured": newest}, indent=1).encode())


def _entries() -> dict[str, Any]:
    """All that the file holds, unchecked."""
    try:
        document = json.loads(cache_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known = isinstance(document, dict) and document.get("layout") == LAYOUT
    entries = document.get("measured") if known else None
    return entries if isinstance(entries, dict) else {}


def key_of(config: Config, cores: int) -> str:
    """A digest of all that the step times of this configuration depend on."""
    models = [_model(worker) for worker in (config.target, config.draft)]
    parts = [*models, _cpu(), cores, importlib.metadata.version("torch"), openmp_environment()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _model(worker: TargetConfig | DraftConfig) -> list[object]:
    """A model by what its files look like from outside. One of the hub is known by its name."""
    folder = expanded(worker.model)
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)})
    looks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [worker.model, worker.dtype, worker.quantization, looks]


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
