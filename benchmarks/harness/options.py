"""A benchmark as a command: how large a run is, where its results go, and the module that measures.

Each setting is declared once, as a field that is also a flag. The module is imported only when it measures, so that a
mistake on the command line is answered at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from cluster.config.environment import is_folder
from cluster.config.flags import Parser, flag_of, parsed
from cluster.console import FAILED, BadInput, CommandError

RESULTS = Path(__file__).parent.parent / "results"
METAVARS = {int: "N", float: "N", str: "TEXT", type(None): "FILE", tuple: "NAME"}
PLACES = ("json", "out")


class BenchError(Exception):
    """A benchmark cannot go on. Why, in one line."""


def flag(default: Any, about: str, **how: Any) -> Any:
    """A field that is a flag of the field's name, of the type of its default.

    Keyword arguments: ``least`` and ``most`` (bounds), ``positive`` (above 0 and finite), ``quick`` (the default of a
    quick run), ``kind`` (of a number that may be left out: the default is None), ``name`` (of the flag), ``choices``,
    ``metavar``, ``group`` (of the help text); of one that is repeated ``parse`` (makes a value of a text, or raises
    ValueError saying what would be right) and ``whole`` (commas separate nothing).
    """
    return field(default=default, metadata={"about": about, **how})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every run is told. A benchmark adds its own.

    Of these, ``json`` is a flag where it is not declared anew, the others where they are.
    """

    BENCH: ClassVar[str]
    ABOUT: ClassVar[str]
    DETAILS: ClassVar[str]
    MODULE: ClassVar[str]
    """Whose function ``main`` measures and reports; it takes the options and returns the exit code."""
    FOLDER: ClassVar[str | None] = None
    """Where a run writes that is not told where, behind the date, below ``benchmarks/results``; None: nowhere."""
    quick: bool = False
    json: Path | None = flag(None, "write the figures there too")
    out: Path | None = None

    def checked(self) -> Self:
        """With what follows from several; refuses what only they, or this machine, can refuse. Raises CommandError."""
        return self

    @property
    def command(self) -> str:
        """What measures the same again."""
        words = ["paceline", "bench", self.BENCH]
        for one in flags(type(self)):
            value = getattr(self, one.name)
            # What is empty, or 0, by default need not be said.
            if one.name not in PLACES and (value or value != one.default):
                words += [_name(one)] if value is True else [_name(one), _word(value)]
        return shlex.join(words)

    @classmethod
    def add(cls, parser: Parser) -> None:
        """Its flags; a repeated one takes several names at a time, too, separated by commas."""
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        for one in flags(cls):
            how, default = one.metadata, one.default
            title = how.get("group", "")
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            assert default is not MISSING
            about, kind = how["about"], how.get("kind", type(default))
            if kind is bool:
                groups[title].add_argument(_name(one), dest=one.name, action="store_true", help=about)
                continue
            if kind in (int, float, str) and default is not None and "default" not in about:
                quick = f"; quick: {_word(how['quick'])}" if "quick" in how else ""
                about = f"{about} (default: {_word(default)}{quick})"
            groups[title].add_argument(
                _name(one),
                dest=one.name,
                default=[] if kind is tuple else None if "quick" in how else default,
                action="append" if kind is tuple else "store",
                type={type(None): Path, tuple: str}.get(kind, kind),
                choices=how.get("choices"),
                metavar=None if "choices" in how else how.get("metavar", METAVARS[kind]),
                help=about,
            )

    @classmethod
    def read(cls, args: argparse.Namespace) -> Self:
        """What the flags amount to, checked. Raises :class:`cluster.console.CommandError`."""
        return cls(**{one.name: _checked(one, args) for one in flags(cls) if hasattr(args, one.name)}).checked()


def run(options: type[Options], args: argparse.Namespace, what: str = "benchmark") -> int:
    """Measure and report. Raises :class:`cluster.console.CommandError`."""
    # What would only fail when all is measured is refused before anything is.
    _check_files(getattr(args, "json", None), getattr(args, "out", None))
    if options.FOLDER is not None:
        if args.out and args.quick:
            raise BadInput("--out belongs to a full run; with --quick, use --json")
        args.out = args.out or RESULTS / f"{datetime.now(UTC).date().isoformat()}{options.FOLDER}"
    given = options.read(args)
    try:
        with _interrupted_by_signals():
            code: int = import_module(options.MODULE).main(given)
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}  # by name: not all benchmarks can import all of these
        if kinds & {"TokenizerError", "ModelError"}:
            raise BadInput(str(error)) from error
        if not kinds & {"BenchError", "OSError", "GenerationError"}:
            raise
        raise CommandError(f"the {what} ended early: {error or 'a worker did not answer'}", FAILED) from error
    return code


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP are Ctrl-C: what a benchmark has stopped or keeps busy is to be let go, too."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # below nohup, SIGHUP is ignored
                before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for taken, handler in before.items():
            signal.signal(taken, handler)


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


def flags(options: type[Options]) -> list[Field[Any]]:
    """Fields that are flags, in the order of a help text."""
    return sorted((one for one in fields(options) if one.metadata), key=lambda one: one.name in PLACES)


def between(name: str, value: float, least: float | None, most: float | None, why: str = "") -> None:
    """Refuse what is out of bounds. Raises :class:`cluster.console.CommandError`."""
    if (least is None or least <= value) and (most is None or value <= most):
        return
    wanted = f"{_word(least)} to {_word(most)}" if most is not None else f"at least {_word(least)}"
    raise BadInput(f"{name} must be {wanted}{why}, got {_word(value)}")


HIDDEN, LAYERS, GROUP = 256, 6, 64
"""Of the bundled target, which a benchmark stretches: its sizes, and those of the heads that share one for keys."""


def check_stretched(hidden: int, layers: int) -> None:
    """Refuse what the bundled target cannot be stretched to. Raises :class:`cluster.console.CommandError`."""
    if hidden < HIDDEN or hidden % GROUP:
        raise BadInput(f"--hidden must be a multiple of {GROUP} and at least {HIDDEN}, got {hidden}")
    between("--layers", layers, LAYERS, None)


def known(flag_name: str, given: Sequence[str], names: Iterable[str], kind: str) -> None:
    """Refuse a name that there is not. Raises :class:`cluster.console.CommandError`."""
    for name in given:
        if name not in names:
            raise BadInput(f"{flag_name} {name}: no such {kind}; there are {', '.join(names)}")


def _checked(one: Field[Any], args: argparse.Namespace) -> Any:
    how, value = one.metadata, getattr(args, one.name)
    if value is None or value == []:
        return how["quick"] if "quick" in how and args.quick else one.default
    if isinstance(value, list):
        return tuple(value) if "whole" in how else parsed(_name(one), value, how.get("parse", str))
    if "positive" in how and not 0 < value < float("inf"):
        raise BadInput(f"{_name(one)} must be above 0, got {value:g}")
    if "least" in how or "most" in how:
        between(_name(one), value, how.get("least"), how.get("most"))
    return value


def _name(one: Field[Any]) -> str:
    return str(one.metadata.get("name", flag_of(one.name)))


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
