"""What the checks before a start raise."""

from __future__ import annotations


class CheckError(Exception):
    """Something that would fail later. One line that says what would be right."""
