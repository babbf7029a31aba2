"""Commands from outside the product: modules with ``add`` and ``run``, as those of :mod:`cluster.cli` are.

They are found by the entry points of what is installed. A checkout that is not installed has none; there the commands
of its benchmarks are taken from the module that lists them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

GROUP = "paceline.commands"
OF_A_CHECKOUT = "benchmarks.commands"


def commands() -> dict[str, ModuleType]:
    """By name; none where there is neither an entry point nor a checkout."""
    if found := entry_points(group=GROUP):
        return {entry.name: entry.load() for entry in found}
    try:
        listed: dict[str, ModuleType] = import_module(OF_A_CHECKOUT).COMMANDS
    except ModuleNotFoundError as error:
        if error.name is not None and OF_A_CHECKOUT.startswith(error.name):
            return {}
        raise
    return listed
