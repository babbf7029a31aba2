"""A benchmark as a command: its flags, and the module that measures, imported only when it does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.options import BadInput, Options, add_flags
from cluster.config.environment import is_folder
from cluster.config.flags import Parser
from cluster.console import FAILED, CommandError

ENDED = {"router.generation": "GenerationError"}
"""By module, what ends a run early."""
REFUSED = {"router.text.tokenizer": "TokenizerError", "engine.model": "ModelError"}
"""And what is wrong with a model that was given."""
RESULTS = Path(__file__).parent.parent / "results"


class BenchError(Exception):
    """A benchmark cannot go on. Why, in one line."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One of ``paceline bench``."""

    about: str
    details: str
    options: type[Options]
    module: str
    """Its function ``main`` measures and reports; it returns the exit code."""
    main: str = "main"
    what: str = "benchmark"

    def add(self, parser: Parser) -> None:
        """Its flags."""
        add_flags(parser, self.options)

    def read(self, args: argparse.Namespace) -> Options:
        """Its options, checked. Raises :class:`cluster.console.CommandError`."""
        return self.options.read(args)

    def run(self, args: argparse.Namespace) -> int:
        """Measure and report. Raises :class:`cluster.console.CommandError`."""
        # What would only fail when all is measured is refused before anything is.
        _check_files(getattr(args, "json", None), getattr(args, "out", None))
        folder = self.options.FOLDER
        if folder is not None:
            if args.out and args.quick:
                raise BadInput("--out belongs to a full run; with --quick, use --json")
            args.out = args.out or dated(folder)
        options = self.read(args)
        measure: Callable[[Any], int] = getattr(import_module(self.module), self.main)
        try:
            return measure(options)
        except Exception as error:
            if isinstance(error, _loaded(REFUSED)):
                raise BadInput(str(error)) from error
            if not isinstance(error, (BenchError, OSError, *_loaded(ENDED))):
                raise
            raise CommandError(f"the {self.what} ended early: {error or 'a worker did not answer'}", FAILED) from error


def dated(suffix: str) -> Path:
    """The usual folder of a run of today."""
    return RESULTS / f"{datetime.now(UTC).date().isoformat()}{suffix}"


def _loaded(errors: Mapping[str, str]) -> tuple[type[Exception], ...]:
    """Only a benchmark that has imported their modules can end so."""
    return tuple(getattr(sys.modules[module], name) for module, name in errors.items() if module in sys.modules)


def _check_files(json: Path | None, out: Path | None) -> None:
    if json and not is_folder(json.absolute().parent):
        raise BadInput(f"--json {json}: no such folder")
    if json and is_folder(json):
        raise BadInput(f"--json {json}: a folder, not a file")
    if out:
        place = out.absolute()
        nearest = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if not is_folder(nearest):
            raise BadInput(f"--out {out}: {nearest} is not a folder")
