"""A record of every step of a worker, for benchmarks and for calibrating the simulator.

One JSON object a line. Times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Recorder:
    """Appends lines to a file; what was written survives the process."""

    def __init__(self, path: Path) -> None:
        """Starts the file anew."""
        self._file = path.open("w", buffering=1 << 16)

    def write(self, **fields: Any) -> None:
        """Add one line."""
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Hand over what is buffered; called when the worker is idle, so that no step pays for it."""
        self._file.flush()
