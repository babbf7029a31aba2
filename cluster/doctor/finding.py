"""What a check found: one line, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It serves, but not as it could, or not for long."""
    PROBLEM = "problem"
    """It will not serve, or not what was meant."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    subject: str
    """What was looked at, such as ``target model``."""
    text: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""

    def __str__(self) -> str:
        line = f"{self.level.value:<8} {self.subject}: {self.text}"
        return f"{line}; {self.fix}" if self.fix else line


ok, warning, problem = (partial(Finding, level) for level in Level)
