"""Flags that take several values: repeated, separated by commas, or both."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from cluster.config.flags import BAD_INPUT
from cluster.console import CommandError

LONGEST_TRIP_MS = 60_000.0
"""A minute there and back is no network."""

Value = TypeVar("Value")


def values(args: argparse.Namespace, name: str, usual: str, parse: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of a flag, in the order given, each once; ``usual``: what it has if it was not given.

    ``parse`` raises ValueError saying what would be right. Raises :class:`cluster.console.CommandError`.
    """
    found: dict[Value, None] = {}
    for text in ",".join(getattr(args, name) or [usual]).split(","):
        try:
            found[parse(text.strip())] = None
        except ValueError as error:
            raise CommandError(f"--{name.replace('_', '-')} {text!r}: must be {error}", BAD_INPUT) from None
    return tuple(found)


def count(text: str, maximum: int) -> int:
    """A whole number from 1 to ``maximum``."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= maximum:
        raise ValueError(f"a whole number from 1 to {maximum}")
    return int(text)


def number(text: str, maximum: float, what: str = "a number") -> float:
    """One from 0 to ``maximum``; ``what`` it is called where it is not."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= maximum:
        raise ValueError(f"{what} from 0 to {maximum:g}")
    return value


def round_trip(text: str) -> float:
    """Seconds, given in milliseconds."""
    return number(text, LONGEST_TRIP_MS, "milliseconds") / 1000
