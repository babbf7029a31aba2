"""The weights of a model folder, as far as the headers of its safetensors files tell: complete, and how large."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the name of its format. All others were stored quantised."""
LONGEST_HEADER = 100_000_000
"""Of a file, in bytes; what safetensors itself allows."""


class WeightsError(Exception):
    """Files that are missing, cut short or not what the index says. One line."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How large a model is."""

    tensors: int
    numbers: int
    """Weights stored as floating-point numbers, which loading converts to the chosen format."""
    fixed_bytes: int
    """Bytes of what keeps the format it is stored in."""

    def loaded_bytes(self, itemsize: int) -> int:
        """Once loaded in a format of ``itemsize`` bytes a number."""
        return self.numbers * itemsize + self.fixed_bytes


def read_weights(folder: Path) -> Weights | None:
    """None if the weights are in another format, or none are there; raises :class:`WeightsError`."""
    index = folder / INDEX
    if index.is_file():
        expected = _expected(index)
    elif (folder / WHOLE).is_file():
        expected = {WHOLE: set()}
    else:
        return None
    headers = {name: _header(folder / name) for name in sorted(expected)}
    for name, tensors in expected.items():
        if missing := sorted(tensors - headers[name].keys()):
            raise WeightsError(
                f"{name} lacks {len(missing)} of the tensors that {INDEX} promises, first {missing[0]!r}"
            )
    entries = [entry for header in headers.values() for entry in header.values()]
    sizes = [(entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0]) for entry in entries]
    return Weights(
        tensors=len(entries),
        numbers=sum(size // FLOATS[dtype] for dtype, size in sizes if dtype in FLOATS),
        fixed_bytes=sum(size for dtype, size in sizes if dtype not in FLOATS),
    )


def _expected(index: Path) -> dict[str, set[str]]:
    """The tensors of each file."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        expected = defaultdict(set)
        for tensor, file in places.items():
            expected[str(file)].add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from error
    return expected


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """By tensor: its format, shape and place among the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, LONGEST_HEADER):
                raise WeightsError(f"{file.name} is cut short, or no safetensors file")
            header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError as error:
        raise WeightsError(f"{file.name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file.name} cannot be read: {type(error).__name__}: {error}") from error
    if size < 8 + length + end:
        raise WeightsError(f"{file.name} is cut short: {size} bytes of {8 + length + end}")
    return header
