"""Decides which test files `-k` can leave unread, so that a few tests are ready without importing all the others.

What `-k` is compared with (paths, names of tests, ids of parameters, markers) is written in the test's file or in a
module of this repository that it imports. A file is left unread only where neither says the words asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from _pytest.mark.expression import Expression

ROOT = Path(__file__).parent.parent
IMPORTS = re.compile(r"^ *(?:from ([\w.]+) import (?:\(([^)]*)\)|(.*))|import (.*))$", re.MULTILINE)
WORDS = re.compile(r"[a-z_]+")


def may_match(expression: str, file: Path) -> bool:
    """Whether a test of this file may be one that ``-k expression`` asks for; yes, where that cannot be told."""
    if not expression or re.search(r"\bnot\b|\\\\", expression):
        return True
    try:
        return Expression.compile(expression).evaluate(lambda name, **_: all(says(file, word) for word in words(name)))
    except SyntaxError:
        return True  # pytest tells what is wrong with it


@cache
def words(name: str) -> list[str]:
    """What must be written somewhere for ``name`` to be part of an id. Numbers may come from anywhere."""
    return [word for part in WORDS.findall(name.lower()) if (word := part.strip("_"))]


def says(file: Path, word: str) -> bool:
    """Whether a file, or what it imports of this repository, has the word in its path or text."""
    return any(word in text(path) for path in closure(file))


@cache
def closure(file: Path) -> frozenset[Path]:
    """The file and the modules of this repository that it imports, directly and through others."""
    found, left = {file}, [file]
    while left:
        new = set(imported(left.pop())) - found
        found |= new
        left += new
    return frozenset(found)


@cache
def imported(file: Path) -> list[Path]:
    """The modules of this repository that a file imports anywhere."""
    return [path for name in _names(file) if (path := _path(name)) is not None]


def _names(file: Path) -> Iterator[str]:
    for origin, several, single, plain in IMPORTS.findall(file.read_text()):
        names = [name.strip().split(" ")[0] for name in (several + single + plain).split(",")]
        yield from [origin, *(f"{origin}.{name}" for name in names)] if origin else names


@cache
def _path(module: str) -> Path | None:
    place = ROOT.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def text(file: Path) -> str:
    """A file's path in the repository and what is written in it, in lower case."""
    return f"{file.relative_to(ROOT)}\n{file.read_text()}".lower()


def in_one_process(expression: str, arguments: Iterable[str]) -> bool:
    """Whether so few tests are asked for that a second process would only import everything once more."""
    return bool(expression) or all(argument.split("::")[0].endswith(".py") for argument in arguments)
