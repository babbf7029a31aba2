"""A record of every step of a worker, for benchmarks and for calibrating the simulator.

One JSON object a line. Times are seconds of the monotonic clock, which all processes of a machine share. A record is
never worth a step: when the disk is full, or fails, recording ends and serving goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)


class RecordError(Exception):
    """A file that cannot be written. One line that says which and why."""


class Recorder:
    """Appends lines to a file; what was written survives the process."""

    def __init__(self, path: Path) -> None:
        """Starts the file anew. Raises :class:`RecordError`."""
        self._path = path
        self._file: IO[str] | None = None
        try:
            self._file = path.open("w", buffering=1 << 16)
        except OSError as error:
            raise RecordError(f"cannot record to {path}: {error.strerror}; give a file that can be written") from error

    def write(self, **fields: Any) -> None:
        """Add one line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")
        except OSError as error:
            self._end(self._file, error)

    def flush(self) -> None:
        """Hand over what is buffered; called when the worker is idle, so that no step pays for it."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._end(self._file, error)

    def _end(self, file: IO[str], error: OSError) -> None:
        log.warning("recording to %s has ended: %s", self._path, error.strerror)
        self._file = None
        with contextlib.suppress(OSError):  # closing tries once more to write what is buffered
            file.close()
