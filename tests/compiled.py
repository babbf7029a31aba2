"""Triton kernels compiled for GPUs where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def assert_compiles(program: str, cache: Path) -> None:
    """Run a program that compiles kernels where Triton's interpreter is off; ``cache``: for its output."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
