"""Reading typed values out of a JSON object; errors name the field, the value and what would be right.

Knows JSON's types and nothing of what the fields mean. ``null`` stands for an absent field, as in OpenAI's
API. A ``bool`` is never taken for a number, nor a float for an integer.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from router.errors import ApiError

D = TypeVar("D")

Refusals = Mapping[str, tuple[str, tuple[object, ...]]]
"""Known fields that are not carried out: why, and the values, besides null, that ask for nothing."""

SHOWN_CHARACTERS = 60
"""How much of a refused value a message repeats."""
SHOWN_NAME = 64
FEW_NAMES = 4


def show(value: object) -> str:
    """A JSON value as a message shows it: short, and on one line."""
    if isinstance(value, list | dict) and len(value) > SHOWN_CHARACTERS:
        return f"a JSON {'array' if isinstance(value, list) else 'object'} of {len(value)} entries"
    try:
        text = json.dumps(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    except RecursionError:
        return f"a deeply nested JSON {'array' if isinstance(value, list) else 'object'}"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def shortened(name: str) -> str:
    """The name of a field that is not known, as a message shows it."""
    return name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."


def loads(text: str) -> object:
    """The JSON in a string. Raises ValueError, also where a part of it is no text (half of a surrogate pair)."""
    try:
        value: object = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the most similar of ``names``; all names where they are few, or nothing."""
    names = sorted(names)
    close = difflib.get_close_matches(name[:SHOWN_NAME], names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {' and '.join(map(repr, names))}" if len(names) <= FEW_NAMES else ""


class Fields:
    """One JSON object. ``path`` is where it stands in the request: empty for the body itself."""

    def __init__(self, raw: Mapping[str, object], path: str = "") -> None:
        """Takes the object as ``json.loads`` gives it."""
        self.raw = raw
        self.path = path

    def where(self, name: str) -> str:
        """The full path of a field, for ``param`` and messages."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> object:
        """The raw value; None when absent or null."""
        return self.raw.get(name)

    def wrong_type(self, name: str, expected: str) -> ApiError:
        """The error for a value that is not ``expected``."""
        return ApiError(
            "invalid_type",
            f"{self.where(name)} must be {expected}, got {show(self.get(name))}",
            self.where(name),
        )

    def wrong_value(self, name: str, expected: str) -> ApiError:
        """The error for a value of the right type that is not ``expected``."""
        return ApiError(
            "invalid_value",
            f"{self.where(name)} must be {expected}, got {show(self.get(name))}",
            self.where(name),
        )

    def missing(self, name: str, expected: str) -> ApiError:
        """The error for a field that must be there."""
        return ApiError(
            "missing_required_parameter",
            f"{self.where(name)} is missing; it must be {expected}",
            self.where(name),
        )

    def integer(self, name: str, default: D, *, low: int, high: int | None = None) -> int | D:
        """An integer from ``low`` to ``high``; None: without bound."""
        value = self.get(name)
        if value is None:
            return default
        expected = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong_type(name, expected)
        if value < low or (high is not None and value > high):
            raise self.wrong_value(name, expected)
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """A finite number from ``low`` to ``high``."""
        value = self.get(name)
        if value is None:
            return default
        expected = f"a number from {low:g} to {high:g}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong_type(name, expected)
        if not low <= value <= high:  # False for NaN
            raise self.wrong_value(name, expected)
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(name, "true or false")
        return value

    def string(self, name: str, default: D) -> str | D:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong_type(name, "a string")
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """One of a few strings."""
        value = self.string(name, default)
        if value not in choices:
            raise self.wrong_value(name, f"one of {', '.join(choices)}")
        return value

    def tokens(self, name: str, vocabulary: int, most: int) -> tuple[int, ...]:
        """An array of up to ``most`` token ids of the model; none when absent."""
        value = self.get(name)
        expected = f"an array of at most {most} token ids below {vocabulary}"
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(t, int) or isinstance(t, bool) for t in value):
            raise self.wrong_type(name, expected)
        wrong = next((token for token in value if not 0 <= token < vocabulary), None)
        if len(value) > most or wrong is not None:
            raise self.wrong_value(name, expected if wrong is None else f"{expected}; there is no {show(wrong)}")
        return tuple(value)

    def strings(self, name: str, most: int, longest: int, also: str = "") -> tuple[str, ...]:
        """An array of up to ``most`` strings of 1 to ``longest`` characters; none when absent.

        ``also``: what else the field may be, for messages.
        """
        value = self.get(name)
        expected = f"{also}an array of at most {most} strings"
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong_type(name, expected)
        if len(value) > most:
            raise self.wrong_value(name, expected)
        for item in value:
            if not isinstance(item, str):
                raise self.wrong_type(name, f"{also}an array of strings")
            if not 0 < len(item) <= longest:
                raise self.wrong_value(name, f"strings of 1 to {longest} characters")
        return tuple(value)

    def nested(self, name: str) -> Fields:
        """A JSON object; an empty one when absent."""
        value = self.get(name)
        if value is None:
            return Fields({}, self.where(name))
        if not isinstance(value, dict):
            raise self.wrong_type(name, "an object")
        return Fields(value, self.where(name))

    def refuse_others(self, known: frozenset[str], refusals: Refusals | None = None) -> None:
        """Refuse every field that is neither ``known`` nor present with a value that asks for nothing."""
        refusals = refusals or {}
        for name, value in self.raw.items():
            if name in known:
                continue
            if name not in refusals:
                hint = nearest(name, known | refusals.keys())
                path = self.where(shortened(name))
                raise ApiError("unknown_parameter", f"there is no field {path!r}{hint}", path)
            reason, neutral = refusals[name]
            if value is not None and not any(_same(value, other) for other in neutral):
                message = f"{self.where(name)} is not supported: {reason}; leave it out (got {show(value)})"
                raise ApiError("unsupported_parameter", message, self.where(name))


def _same(value: object, other: object) -> bool:
    """JSON equality: 1 equals 1.0 and differs from true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
