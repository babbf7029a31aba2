"""Folders as people name them: ``~`` for a home, and names that no folder has."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str) -> Path:
    """With the home folder that ``~`` stands for; as it is written where nobody has such a home."""
    return Path(os.path.expanduser(path))


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; where the name is too long for one, or cannot be looked up, there is none."""
    return os.path.isdir(path)
