"""The commands that this package adds to ``paceline``: its entry points, by name, for a checkout without them."""

from __future__ import annotations

from benchmarks import bench
from benchmarks.fit import command as fit

COMMANDS = {"bench": bench, "fit": fit}
