"""Files that are there as a whole or not at all: what a run needs to go on after whatever stops it.

A file is written beside its place, flushed to the disk and then put there. When that fails, the one before remains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from alignment.errors import DiskError, SettingsError


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill the file. Raises :class:`alignment.errors.DiskError`; ``path`` then holds what it held."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer says the second when the first happened to it
        fresh.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__
        reason = getattr(cause, "strerror", None) or next(iter(str(error).splitlines()), "")
        kept = "the last one is still there, and " if path.exists() else ""
        hint = f"{kept}the same command goes on once there is room"
        raise DiskError(f"{path}: cannot be written: {reason}; {hint}") from error


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values. Raises :class:`alignment.errors.DiskError`; the checkpoint before is then kept."""
    write_whole(path, lambda file: torch.save(state, file))


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What was written there; None if nothing was. Raises :class:`alignment.errors.SettingsError`."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch raise
        raise SettingsError(f"{path}: not a checkpoint of this program; delete it to start over") from error
    return state
