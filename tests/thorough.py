"""Tests that take long and rarely fail alone: `make test-all` runs them, `make test` does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_thorough(values: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """The values of a parameter, or tuples of several's; `make test` takes the ``quick`` ones alone."""
    given = list(values)
    assert all(value in given for value in quick), f"{list(quick)} are not all among {given}"
    return [value if value in quick else pytest.param(*_each(value), marks=pytest.mark.thorough) for value in given]


def more_thorough(few: int, many: int) -> list[Any]:
    """How much of the same is tried: ``make test-all`` takes ``many`` alone, which show what the ``few`` show."""
    return [pytest.param(few, marks=pytest.mark.quick), pytest.param(many, marks=pytest.mark.thorough)]


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
