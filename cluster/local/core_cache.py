"""Keeps measured step times between starts, in ``paceline/cores.json`` of the user's cache folder.

Kept is what was measured, not what was made of it, under everything that it depends on: the files and number formats
of both models, the CPU, its cores, the version of torch and the OpenMP runtime. So is that measuring failed, for a day.
Only a convenience: a file that is missing, damaged or cannot be written means measuring again, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from cluster.config.config import Config
from cluster.config.environment import cache_folder, expanded, replace_file
from cluster.config.pools import DraftConfig, TargetConfig
from cluster.local.cores import Measured, decoded, encoded
from cluster.processes.starting import openmp_environment

LAYOUT = 3
"""Number of the file's layout; a file with another is not read."""
MAX_ENTRIES = 32
"""Measurements kept; the oldest go first."""
FAILED_SECONDS = 86_400.0
"""How long nobody tries again what failed: the machine may have been busy, or the models take too long to load."""
MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
"""What the speed of a model depends on."""


class CoreCache:
    """The step times in one file."""

    def __init__(self, path: Path) -> None:
        """``path`` need not exist."""
        self.path = path

    def get(self, key: str, cores: int) -> Measured | None:
        """What was kept under ``key``, if it is whole."""
        try:
            return decoded(self._entries()[key], cores)
        except (KeyError, ValueError):
            return None

    def failed(self, key: str, now: float) -> bool:
        """Whether measuring it failed less than :data:`FAILED_SECONDS` before ``now``, in seconds since the epoch."""
        entry = self._entries().get(key)
        since = entry.get("failed") if isinstance(entry, dict) else None
        return isinstance(since, int | float) and 0 <= now - since < FAILED_SECONDS

    def put(self, key: str, measured: Measured) -> None:
        """Keep it, as far as that is possible."""
        self._put(key, encoded(measured))

    def put_failure(self, key: str, now: float) -> None:
        """Keep that measuring it has failed."""
        self._put(key, {"failed": now})

    def _put(self, key: str, entry: dict[str, Any]) -> None:
        others = [kept for kept in self._entries().items() if kept[0] != key]
        newest = [*others, (key, entry)][-MAX_ENTRIES:]
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps({"layout": LAYOUT, "measured": dict(newest)}, indent=1).encode())

    def _entries(self) -> dict[str, Any]:
        """All that the file holds, unchecked."""
        try:
            document = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict) or document.get("layout") != LAYOUT:
            return {}
        entries = document.get("measured")
        return entries if isinstance(entries, dict) else {}


def default_cache() -> CoreCache:
    """The user's own."""
    return CoreCache(cache_folder() / "paceline" / "cores.json")


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
    """The name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
