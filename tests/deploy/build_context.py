"""What an ignore file lets through to the builder of an image, as Docker documents it: the last line that fits decides.

A line fits a path whose name, or that of a folder above it, it matches; ``*`` stays within one folder, ``**`` does not.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path


def build_context(root: Path, ignored: str) -> Iterator[Path]:
    """All files below ``root`` that are let through, relative to it."""
    lines = [line.strip() for line in ignored.splitlines() if line.strip() and not line.startswith("#")]
    rules = [(line.startswith("!"), _pattern(line.removeprefix("!"))) for line in lines]
    kept = {line.removeprefix("!").partition("/")[0] for line in lines if line.startswith("!")}
    for start in sorted(root.iterdir()):
        if start.name in kept:
            yield from (path for path in _files(start, root) if _kept(path, rules))


def _files(start: Path, root: Path) -> Iterator[Path]:
    if start.is_file():
        yield start.relative_to(root)
    for folder, _, names in os.walk(start):
        yield from (Path(folder, name).relative_to(root) for name in names)


def _kept(path: Path, rules: list[tuple[bool, re.Pattern[str]]]) -> bool:
    places = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    fitting = [back for back, pattern in rules if any(pattern.fullmatch(place) for place in places)]
    return not fitting or fitting[-1]


def _pattern(line: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", line.strip("/"))
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(part) or re.escape(part) for part in parts))
