"""What a setting is: a field with a rule, and the checks that every value passes, wherever it comes from.

Knows no setting by name: :mod:`cluster.config.config` and :mod:`cluster.config.pools` declare them. Errors are one line
that names where the value stands, the setting, the value and what would be right.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal


class ConfigError(Exception):
    """A setting that cannot be used. One line that names it, its value and what would be right."""


AUTO: Literal["auto"] = "auto"
"""What a setting says that is to be chosen at the start."""


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """What a setting means and which values it takes."""

    about: str
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False
    """Whether a whole number may also be :data:`AUTO`."""
    pattern: str = ""
    """Regular expression that all of a text has to match."""
    form: str = ""
    """The same in words."""


def setting(default: Any, about: str, **limits: Any) -> Any:
    """A field of a section."""
    return field(default=default, metadata={"rule": SettingSpec(about, **limits)})


def settings_of(kind: type[Any]) -> Iterator[Field[Any]]:
    """The fields of a dataclass that are settings."""
    return (entry for entry in fields(kind) if "rule" in entry.metadata)


def rule_in(entry: Field[Any]) -> SettingSpec:
    """What is known of a setting."""
    rule = entry.metadata["rule"]
    assert isinstance(rule, SettingSpec)
    return rule


def checked(where: object, key: str, entry: Field[Any], value: object) -> object:
    """``value`` if the setting takes it; integers pass for floats. Raises :class:`ConfigError`."""
    rule, kind = rule_in(entry), _type_of(entry)
    if rule.auto and value == AUTO:
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (rule.choices and value not in rule.choices):
        raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {described(value)}")
    if isinstance(value, str) and rule.pattern and not re.fullmatch(rule.pattern, value):
        raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {described(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not _within(rule, value):
        raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {value}")
    return value


def _within(rule: SettingSpec, value: float) -> bool:
    """Written so that nan is not."""
    return (rule.at_least is None or value >= rule.at_least) and (rule.at_most is None or value <= rule.at_most)


def parsed(where: object, key: str, entry: Field[Any], text: str) -> object:
    """The value that the text of a flag stands for. Raises :class:`ConfigError`."""
    rule, kind = rule_in(entry), _type_of(entry)
    value: object = text
    if rule.auto and value == AUTO:
        return value
    try:
        if kind is bool:
            value = {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
        elif kind is int:
            value = int(text)
        elif kind is float:
            value = float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {text!r}") from None
    return checked(where, key, entry, value)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What may have been meant by a name that is not known."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def described(value: object) -> str:
    """A value that was not wanted, for messages."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else f"{value!r}"


def _type_of(entry: Field[Any]) -> type[object]:
    """The type of its values, apart from :data:`AUTO`."""
    return int if rule_in(entry).auto else type(entry.default)


def _wanted(kind: type[object], rule: SettingSpec) -> str:
    if rule.choices:
        return f"one of {', '.join(rule.choices)}"
    if rule.form:
        return rule.form
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    if rule.auto:
        name = f"{AUTO} or {name}"
    low, high = rule.at_least, rule.at_most
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    return name if low is None else f"{name}, at least {low}"


class CheckError(Exception):
    """Something that would fail later. One line that says what would be right."""
