"""Flags that stand for settings: made from :mod:`.config`, so that help, types and messages agree with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cluster.config import speculative_config
from cluster.config.config import SECTIONS, SETTINGS, Config, load
from cluster.config.pools import SHARED
from cluster.config.settings import ConfigError, Override, nearest
from cluster.console import BAD_INPUT, BadInput, complain

AFTER_INPUT = "--after-input"
"""Flag of a router that is started before its workers are ready."""
OVERRIDES = "overrides"
"""Where a parser collects the settings, in the order of the command line."""
LONGEST_TRIP_MS = 60_000.0
"""A minute there and back is no network."""


class Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest valid name."""

    def __init__(self, **options: Any) -> None:
        """As argparse, but long flags are never abbreviated and help keeps its line breaks."""
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """One line, then out."""
        complain(f"{self.prog}: {message}; see {self.prog} --help")
        raise SystemExit(BAD_INPUT)

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """End with an error if the parser did not know some arguments."""
        if not unknown:
            return
        flag = unknown[0].partition("=")[0]
        # One that another command has is no better here.
        near = nearest(flag, [known for known in _flags(self) if known != flag])
        hint = f", did you mean {near}?" if near else ""
        self.error(f"unknown argument {flag!r}{hint}")


def flag_of(name: str) -> str:
    """What a field is called on the command line."""
    return f"--{name.replace('_', '-')}"


def add_setting(parser: argparse._ActionsContainer, flag: str, *keys: str, about: str = "") -> None:
    """A flag that sets one setting, or the same in several sections."""
    spec, default = SETTINGS[keys[0]], SETTINGS[keys[0]].default
    text = about or spec.about
    if isinstance(default, bool):
        opposite = [Override(key, "false" if default else "true", flag) for key in keys]
        parser.add_argument(flag, dest=OVERRIDES, action="append_const", const=opposite, help=text)
        return
    if default not in ("", 0) and "default" not in text:
        text += f" (default: {_short(default)})"
    kind = {int: "N", float: "X"}.get(type(default), "TEXT")
    metavar = "{" + ",".join(spec.choices) + "}" if 0 < len(spec.choices) < 4 else "auto|N" if spec.auto else kind

    def overrides(given: str) -> list[Override]:
        return [Override(key, given, flag) for key in keys]

    parser.add_argument(flag, dest=OVERRIDES, action="append", type=overrides, metavar=metavar, help=text)


def add_section(parser: argparse._ActionsContainer, section: str, *, without: Sequence[str] = ()) -> None:
    """A flag ``--field-name`` for every setting of a section."""
    for entry in fields(SECTIONS[section]):
        if entry.name not in without:
            add_setting(parser, flag_of(entry.name), f"{section}.{entry.name}")


def add_shared_draft(parser: argparse._ActionsContainer, flag: str) -> None:
    """A flag that gives a target's process a draft model of its own."""

    def overrides(given: str) -> list[Override]:
        return [Override("draft.model", given, flag), Override("draft.placement", SHARED, flag)]

    about = "draft in this process too, in turn, with this model: folder or hub id, with the target's tokenizer"
    parser.add_argument(flag, dest=OVERRIDES, action="append", type=overrides, metavar="TEXT", help=about)


def add_repeated(parser: argparse._ActionsContainer, flag: str, key: str) -> None:
    """A flag for one entry of a setting that lists several, separated by commas; may be repeated."""

    class Join(argparse.Action):
        def __call__(self, _parser: object, found: argparse.Namespace, value: object, _flag: object = None) -> None:
            given: list[list[Override]] = list(getattr(found, OVERRIDES, None) or [])
            before = [entry.text for group in given for entry in group if entry.source == flag]
            joined = Override(key, ", ".join([*before[-1:], str(value)]), flag)
            setattr(found, OVERRIDES, [*given, [joined]])

    about = f"one of {SETTINGS[key].about}; may be repeated"
    parser.add_argument(flag, dest=OVERRIDES, action=Join, metavar="TEXT", help=about)


def add_tracing(parser: argparse._ActionsContainer) -> None:
    """The flags of processes that make spans."""
    add_setting(parser, "--otlp-endpoint", "tracing.otlp_endpoint")
    add_setting(parser, "--tracing", "tracing.enabled")
    add_setting(parser, "--trace-sample", "tracing.sample")


def add_file(parser: argparse._ActionsContainer) -> None:
    """The flags that reach every setting."""
    about = "configuration file (YAML); flags win over it, but those of target and draft not over its models"
    parser.add_argument("--config", type=Path, metavar="FILE", help=about)
    about = "any setting by its path, such as target.cache_tokens=8192; see `paceline config`"
    parser.add_argument("--set", dest=OVERRIDES, action="append", type=_any_setting, metavar="KEY=VALUE", help=about)


def add_speculative_config(parser: argparse._ActionsContainer) -> None:
    """VLLM's flag for everything about drafting."""
    flag, parse = speculative_config.FLAG, speculative_config.overrides
    about = 'as vLLM takes it, such as \'{"method": "ngram", "num_speculative_tokens": 5}\''
    parser.add_argument(flag, dest=OVERRIDES, action="append", type=parse, metavar="JSON", help=about)


def add_parent(parser: argparse._ActionsContainer) -> None:
    """The flag for processes that another one supervises; see :mod:`cluster.processes.starting`."""
    parser.add_argument("--exit-with", type=int, metavar="PID", help="end when the parent process with this id ends")


def configuration(args: argparse.Namespace) -> Config:
    """What file and flags amount to. Raises :class:`cluster.config.config.ConfigError`."""
    return load(args.config, overrides_in(args))


def overrides_in(args: argparse.Namespace) -> list[Override]:
    """The settings that flags give."""
    return [override for given in getattr(args, OVERRIDES) or [] for override in given]


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    known = list(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            known += [flag for below in action.choices.values() for flag in _flags(below)]
    return known


def _any_setting(argument: str) -> list[Override]:
    key, separator, text = argument.partition("=")
    if not separator:
        raise ConfigError(f"--set: {argument!r} is not KEY=VALUE, such as router.port=8001")
    return [Override(key, text, "--set")]


def _short(default: object) -> str:
    """A default for help: bundled models by name, not by where the checkout happens to be."""
    path = Path(str(default))
    return f"the bundled {path.name} model" if path.is_absolute() else f"{default}"


Value = TypeVar("Value")


def values(args: argparse.Namespace, name: str, usual: str, parse: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of a flag, in the order given, each once; ``usual``: what it has if it was not given.

    ``parse`` raises ValueError saying what would be right. Raises :class:`cluster.console.CommandError`.
    """
    return parsed(flag_of(name), getattr(args, name) or [usual], parse)


def parsed(flag: str, given: Sequence[str], parse: Callable[[str], Value]) -> tuple[Value, ...]:
    """The values of a repeated flag, which commas separate as well; see :func:`values`."""
    found: dict[Value, None] = {}
    for text in ",".join(given).split(","):
        try:
            found[parse(text.strip())] = None
        except ValueError as error:
            raise BadInput(f"{flag} {text!r}: must be {error}") from None
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
