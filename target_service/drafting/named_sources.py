"""Draft sources that an operator names: imported when a target starts, never because of a request.

``MODULE`` is imported and registers what it has (:mod:`speculation.sources.registry`); of ``MODULE:NAME`` the class or
function ``NAME`` is registered, under the name in its attribute ``source``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

from speculation.sources.registry import SourceError, register, registered


def load_sources(named: Iterable[str]) -> None:
    """Import and register them. Raises :class:`speculation.sources.registry.SourceError`, one line."""
    for entry in named:
        module_name, _, maker_name = entry.partition(":")
        before, fresh = registered(), module_name not in sys.modules
        module = _imported(module_name, entry)
        if maker_name:
            maker = getattr(module, maker_name, None)
            name = getattr(maker, "source", None)
            if not callable(maker) or not isinstance(name, str):
                raise SourceError(
                    f"draft source {entry!r}: {module_name} has no class or function {maker_name!r} with a name in its "
                    "attribute 'source'"
                )
            register(name, maker)
        elif fresh and registered() == before:
            raise SourceError(f"draft source {entry!r}: the module registers none; see speculation/sources/registry.py")


def _imported(module: str, entry: str) -> object:
    if not all(part.isidentifier() for part in module.split(".")):
        raise SourceError(f"draft source {entry!r} is not MODULE or MODULE:NAME, such as my_drafts:Again")
    try:
        return importlib.import_module(module)
    except SourceError:
        raise
    except Exception as error:  # whatever a module may raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SourceError(
            f"draft source {entry!r} cannot be imported ({why}); a module must be installed, or in a folder that "
            "PYTHONPATH names"
        ) from error
