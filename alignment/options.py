"""What trainings are asked for, and how they fail.

Any option that differs makes another training; numbers say what they may be. What can go wrong is told in one line that
names the file, the value and what would be right. Without torch, so that a command can offer options as flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _number(default: float, minimum: float, maximum: float, about: str) -> Any:
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum, "about": about})


def _data_tokens() -> Any:
    return _number(1_000_000, 1000, 10**10, "most tokens that are taken from the data, from all over it")


def _steps() -> Any:
    return _number(400, 1, 10**7, "steps of training, at most")


class AlignmentError(Exception):
    """An alignment cannot begin or go on."""


class DataError(AlignmentError):
    """The data cannot be used."""


class SettingsError(AlignmentError):
    """The settings cannot be used, alone or with what an earlier run left."""


class DiskError(AlignmentError):
    """A file cannot be written."""


class Interrupted(AlignmentError):
    """The run was told to stop, and can go on later."""


@dataclass(frozen=True, slots=True)
class DistillationOptions:
    """How a draft model is aligned."""

    objective: str = "forward-kl"
    """One of :data:`alignment.losses.OBJECTIVES`."""
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    """Of the target's samples, in turn."""
    samples: int = _number(200_000, 1000, 10**10, "tokens that the target writes")
    new_tokens: int = _number(128, 8, 4096, "longest continuation that it writes")
    data_tokens: int = _data_tokens()
    data_share: float = _number(0.25, 0.0, 0.9, "share of the batches that are data, not samples")
    steps: int = _steps()
    batch_tokens: int = _number(4096, 16, 1 << 22, "tokens of a step")
    sequence: int = _number(512, 16, 1 << 20, "tokens of a sequence")
    rate: float = _number(0.0, 0.0, 1.0, "peak learning rate (default: 0.2 / hidden size)")
    seed: int = _number(0, 0, 2**31, "same seed, same draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions:
    """How an EAGLE-3 head is made."""

    data_tokens: int = _data_tokens()
    steps: int = _steps()
    minutes: float = _number(0.0, 0, 10**6, "minutes in steps, at most; 0: no limit")
    batch_tokens: int = _number(2048, 16, 1 << 22, "tokens of a step")
    sequence: int = _number(256, 16, 1 << 20, "tokens of a sequence")
    rate: float = _number(3e-3, 1e-9, 1, "peak learning rate")
    seed: int = _number(0, 0, 2**31, "same seed, same head")

    depth: int = _number(5, 1, 16, "guesses in a row that are trained")
    layers: int = _number(1, 1, 16, "layers of the head")
    vocabulary: int = _number(0, 0, 1 << 24, "tokens the head knows, those that come most often; 0: all")
    farther: float = _number(0.8, 0, 1, "what a guess counts, relative to the one before it")
    start: str = ""
    """Folder of a head to begin with, whose layers and vocabulary it keeps; empty: from the target."""

    @property
    def reach(self) -> int:
        """How many tokens ahead of a text's last one is guessed."""
        return self.depth + 1
