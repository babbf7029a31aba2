"""Fetches models onto the volume that the nodes of a cluster share, as its Job on Kubernetes does.

    python -m cluster.fetch /models 100Gi "llama-8b=meta-llama/Llama-3.1-8B-Instruct@0e9e39f24... llama-1b=..."

A model is a hub id, best with the commit that is meant: without one it is whatever its repository holds on that day.
Decides what of a repository is fetched, in which order, and whether all of it fits before the first byte comes. What
routers read comes first, of all models, so that they need not wait for weights. A file in each folder says how far it
is, which the pods wait for.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from cluster.config.environment import COMMIT
from cluster.console import complain, first_line, say

READABLE, COMPLETE = ".tokenizer", ".complete"
"""In a model's folder once what routers read is there, and once all is."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data*", "*.ot")
COPIES = ("original/*", "consolidated*")
"""The same weights once more, in the formats of those who trained them."""
BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
DECIMAL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
"""Units of a quantity as Kubernetes writes it."""


class FetchError(Exception):
    """Models that cannot be fetched. One line."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub."""

    name: str
    """Its repository, such as Org/Name."""
    revision: str = ""
    """A commit, branch or tag; empty: its main branch as it is."""

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def pinned(self) -> bool:
        """Whether it is the same for good: a commit is named, and whole."""
        return re.fullmatch(COMMIT, self.revision) is not None


class Hub:
    """Hugging Face's, with the token in the environment that its library reads."""

    def files(self, model: HubModel) -> Mapping[str, int]:
        """Bytes of each file, by its path in the repository. Raises :class:`FetchError`."""
        from huggingface_hub import HfApi

        with _one_line(model):
            told = HfApi().model_info(model.name, revision=model.revision or None, files_metadata=True)
        return {entry.rfilename: entry.size or 0 for entry in told.siblings or []}

    def fetch(self, model: HubModel, files: Sequence[str], folder: Path) -> None:
        """Bring these files into the folder; what is there already stays. Raises :class:`FetchError`."""
        from huggingface_hub import snapshot_download

        with _one_line(model):
            revision = model.revision or None
            snapshot_download(model.name, revision=revision, local_dir=folder, allow_patterns=list(files))


@contextmanager
def _one_line(model: HubModel) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the hub, of what it speaks HTTP by, of the volume
        raise FetchError(f"{model}: {first_line(error)}") from error


def fetch_all(
    volume: Path, capacity: int, models: Mapping[str, HubModel], hub: Hub, progress: Callable[[str], None]
) -> None:
    """Fetch what is not complete yet; raises :class:`FetchError`, before anything is fetched if not all fits.

    ``capacity``: bytes that the volume was asked to have. ``models``: by folder. Each folder notes what it holds, so
    that another model or revision is refused there instead of mixed in, under pods that read it.
    """
    for name, model in models.items():
        held = _held(volume / name)
        if held not in ("", str(model)):
            raise FetchError(f"{name} holds {held}; give {model} a folder of its own")
    complete = [name for name in models if (volume / name / COMPLETE).exists()]
    missing: dict[str, Mapping[str, int]] = {}
    for name in (name for name in models if name not in complete):
        missing[name] = _without_copies(hub.files(models[name]))
    _check_room(volume, capacity, missing, complete)
    for weights, mark in ((False, READABLE), (True, COMPLETE)):
        for name, sizes in missing.items():
            model, files = models[name], [file for file in sizes if _fits(file, WEIGHTS) == weights]
            progress(f"{name}: {len(files)} files of {model}")
            hub.fetch(model, files, volume / name)
            (volume / name / mark).write_text(f"{model}\n", encoding="utf-8")


def _without_copies(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Of the files of a repository those that are read here: of the weights safetensors, else torch's.

    All, where it has neither: whoever loads them says so. In folders below there are copies for other programs.
    """
    sizes = {file: size for file, size in sizes.items() if not _fits(file, COPIES)}
    above = [file for file in sizes if "/" not in file]
    loaded = [file for file in above if fnmatch(file, "*.safetensors")]
    if not any(fnmatch(file, "model*") for file in loaded):  # but those of an adapter, for instance
        loaded += [file for file in above if fnmatch(file, "*.bin")]
    return {file: size for file, size in sizes.items() if file in loaded or not loaded or not _fits(file, WEIGHTS)}


def models_in(text: str) -> dict[str, HubModel]:
    """Models by folder, from FOLDER=HUB-ID or FOLDER=HUB-ID@COMMIT separated by spaces. Raises :class:`FetchError`."""
    found = {}
    for entry in text.split():
        folder, _, model = entry.partition("=")
        name, at, revision = model.partition("@")
        if not folder or not name or "/" in folder or folder.startswith(".") or bool(at) != bool(revision):
            raise FetchError(f"{entry!r} is not FOLDER=HUB-ID, with @COMMIT or without")
        found[folder] = HubModel(name, revision)
    return found


def _held(folder: Path) -> str:
    """What a folder was fetched from; empty where nothing is there yet, or nothing was noted."""
    marks = [folder / mark for mark in (COMPLETE, READABLE)]
    return next((text for mark in marks if mark.exists() and (text := mark.read_text(encoding="utf-8").strip())), "")


def quantity(written: str) -> float:
    """A number as Kubernetes writes it, such as 100Gi bytes or 500m CPUs. Raises :class:`FetchError`."""
    units = BINARY | DECIMAL
    unit = next((unit for unit in units if written.endswith(unit)), "")
    try:
        return float(written.removesuffix(unit)) * units.get(unit, 1)
    except ValueError as error:
        raise FetchError(f"{written!r} is no size such as 100Gi") from error


def _check_room(volume: Path, capacity: int, missing: Mapping[str, Mapping[str, int]], complete: Iterable[str]) -> None:
    sizes = {name: sum(files.values()) for name, files in missing.items()}
    sizes |= {name: _bytes_below(volume / name) for name in complete}
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())
    if sum(sizes.values()) > capacity:
        raise FetchError(f"the models take {_gib(sum(sizes.values()))} ({listed}), storage-size is {_gib(capacity)}")
    left = sum(sizes[name] - _bytes_below(volume / name) for name in missing)
    free = shutil.disk_usage(volume).free
    if left > free:
        raise FetchError(f"{_gib(left)} are still to be fetched ({listed}), {volume} has {_gib(free)} left")


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def main(arguments: Sequence[str]) -> int:
    """The command."""
    try:
        volume, capacity, models = arguments
        fetch_all(Path(volume), int(quantity(capacity)), models_in(models), Hub(), say)
    except FetchError as error:
        complain(f"cluster.fetch: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
