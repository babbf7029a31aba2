"""What can go wrong in an alignment, each told in one line that names the file, the value and what would be right."""

from __future__ import annotations


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
