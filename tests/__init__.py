"""Tests. Without a GPU, Triton's kernels are interpreted, which has to be said before anything imports Triton."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # torch would know too, and takes its time to be imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
