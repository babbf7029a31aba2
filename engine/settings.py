"""What an engine is asked to be: which model, in which numbers, on what."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NONE = "none"
"""No quantisation: weights as they are."""
SNAPSHOTS = "snapshots"
"""In the cache of a hub, what holds a model's files by their commits, below a folder called as the model is."""


def misplaced(model: str) -> str:
    """Why ``model`` is neither a model folder here nor may be a hub id; empty where it is one of them."""
    folder = Path(os.path.expanduser(model))
    try:
        found, has_config, exists = folder.is_dir(), (folder / "config.json").is_file(), folder.exists()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found:
        return "" if has_config else "not a model folder, it has no config.json"
    if exists:
        return "is a file; give the folder that holds config.json and the weights"
    parts = model.split("/")
    meant_as_hub_id = len(parts) == 2 and all(parts) and model[0] not in "./~" and not Path(parts[0]).is_dir()
    return "" if meant_as_hub_id else "no such folder; give a model folder or a hub id such as Org/Name"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What to run and how."""

    model: str
    """Folder or hub id."""
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = NONE
    """One of :data:`engine.loading.quantisation.CHOICES`."""
    threads: int = 1
    """CPU threads of a step."""
    max_threads: int = 0
    """CPU threads of a step of many rows, where that is measured to be faster (0: as many as of others)."""
    plain_cuda: bool = False
    """Neither kernels of our own nor CUDA graphs."""
    cache_tokens: int = 0
    """Room of the cache in tokens; 0: what the free memory allows (:mod:`engine.loading.cache_size`)."""
    gpu_share: float = 1.0
    """What part of a GPU each rank has, where it shares one with other workers."""
    tensor_parallel_size: int = 1
    """Ranks that compute each step together."""
    eagle: str = ""
    """Folder of an EAGLE-3 head for a target to draft with, or "mtp": the target's own layer; none if empty."""
    eagle_away: bool = False
    """Whether that head drafts on draft workers, to which the target sends what it reads."""
    join_timeout: float = 120.0
    """Seconds in which all ranks must have started."""
    load_timeout: float = 7200.0
    """Seconds in which the model must be loaded, on all ranks, once these have started."""
    name: str = ""
    """Name the model is served under; default: the last part of ``model``, or of the hub id whose cache that is in."""

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        folder = Path(self.model)
        if folder.parent.name == SNAPSHOTS:
            return self.name or folder.parent.parent.name.rpartition("--")[2]
        return self.name or folder.name
