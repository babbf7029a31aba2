"""Reads settings from files and flags into checked values by path, ``models`` included.

A path is where a setting stands: ``("router", "port")``, ``("models", "llama", "drafts", "small", "gpus")``. Which
settings there are, and what the values amount to, :mod:`cluster.config.config` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config.environment import expanded, is_folder, pinned_folder
from cluster.config.settings import ConfigError, checked, described, nearest, parsed

MODELS = "models"
"""The section that lists models by their name in the API, each with the parts ``target`` and ``drafts``."""
DEFAULT_POOL = "draft"
"""Name of a model's draft pool where none is given."""
_MODEL_NAME, _POOL_NAME = r"[A-Za-z0-9][\w.:/-]{0,127}", r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
_FOLDERS = (
    "target.model",
    "target.medusa",
    "target.eagle",
    "draft.model",
    "draft.target_tokenizer",
    "draft.assistant",
    "draft.eagle",
    "router.tokenizer",
)
"""Settings that may be folders."""

SettingPath = tuple[str, ...]
Values = Mapping[SettingPath, object]
Shape = Mapping[str, Sequence[str]]
"""Names of the draft pools of each model."""


@dataclass(frozen=True, slots=True)
class Override:
    """A setting given as text on the command line; ``source`` is the flag, for messages."""

    key: str
    text: str
    source: str


def document_in(path: Path) -> Mapping[Any, object]:
    """What a file of settings holds. Raises :class:`cluster.config.settings.ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    return _mapping(path, "", yaml_in(path, text))


def yaml_in(where: object, text: str) -> Any:
    """What YAML says, as plain values. Raises :class:`cluster.config.settings.ConfigError`."""
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{where} is not YAML that can be read: it is nested too deep") from error
    # A value such as the 32nd of a month ends in whatever the code that reads it raises.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


class ConfigReader:
    """Knows what can be set, not what it means."""

    def __init__(self, settings: Mapping[str, Field[Any]], sections: Sequence[str]) -> None:
        """``settings`` by dotted path; those of ``target`` and ``draft`` also describe the pools of ``models``."""
        self._settings, self._sections = settings, sections

    def read(
        self, where: object, document: Mapping[Any, object], base: Path, overrides: Iterable[Override]
    ) -> tuple[Values, Shape]:
        """Every setting that is given, flags winning. Raises :class:`cluster.config.settings.ConfigError`."""
        shape = _shape(where, document.get(MODELS))
        values = {path: _located(base, path, value) for path, value in self._flatten(where, document)}
        for override in overrides:
            path = _split(override, shape)
            value = parsed(override.source, override.key, self._known(override.source, path), override.text)
            values[path] = _located(Path(), path, value)
        return values, shape

    def _flatten(self, where: object, document: Mapping[Any, object]) -> Iterator[tuple[SettingPath, object]]:
        """Every setting that is given, by its path and checked. The shape of ``models`` is known to be right."""
        for name, value in document.items():
            if name == MODELS:
                for model, pools in _mapping(where, MODELS, value).items():
                    given = _mapping(where, MODELS, pools)
                    yield from self._flat(where, (MODELS, model, "target"), given.get("target"))
                    for pool, entry in _mapping(where, MODELS, given.get("drafts")).items():
                        yield from self._flat(where, (MODELS, model, "drafts", pool), entry)
            elif name in self._sections:
                yield from self._flat(where, (name,), value)
            else:
                path = (str(name),) if str(name).startswith(f"{MODELS}.") else tuple(str(name).split("."))
                yield path, checked(where, str(name), self._known(where, path), value)

    def _flat(self, where: object, above: SettingPath, section: object) -> Iterator[tuple[SettingPath, object]]:
        for name, value in _mapping(where, ".".join(above), section).items():
            path = (*above, str(name))
            yield path, checked(where, ".".join(path), self._known(where, path), value)

    def _known(self, where: object, path: SettingPath) -> Field[Any]:
        """The setting there. Refuses an unknown one with the nearest: by its whole path, else by its last part."""
        key = _described_by(path)
        if key in self._settings:
            return self._settings[key]
        last = nearest(key.rpartition(".")[2], [name.rpartition(".")[2] for name in self._settings])
        near = nearest(key, [*self._settings, *self._sections, MODELS])
        near = near or next((name for name in self._settings if last and name.rpartition(".")[2] == last), None)
        if near and path[0] == MODELS:
            near = ".".join((*path[:-1], near.rpartition(".")[2]))
        hint = f"did you mean {near!r}?" if near else f"sections are {', '.join(self._sections)}"
        raise ConfigError(f"{where}: unknown setting {'.'.join(path)!r}; {hint}")


def _mapping(where: object, key: str, value: object) -> Mapping[Any, object]:
    """A section as it stands in a file; one without a value is empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {f'{key} ' if key else ''}must be a mapping of settings, got {described(value)}")
    return value


def _shape(where: object, document: object) -> dict[str, tuple[str, ...]]:
    """By model, the names of its draft pools, all of them checked."""
    shape: dict[str, tuple[str, ...]] = {}
    for model, pools in _mapping(where, MODELS, document).items():
        _named(where, MODELS, model, _MODEL_NAME, "letters, digits and . _ - : /")
        given = _mapping(where, f"{MODELS}.{model}", pools)
        for part in given.keys() - {"target", "drafts"}:
            hint = nearest(str(part), ("target", "drafts")) or "target"
            raise ConfigError(f"{where}: unknown setting '{MODELS}.{model}.{part}'; did you mean {hint!r}?")
        drafts = _mapping(where, f"{MODELS}.{model}.drafts", given.get("drafts", {DEFAULT_POOL: None}))
        for pool in drafts:
            _named(where, f"{MODELS}.{model}.drafts", pool, _POOL_NAME, "lower-case letters, digits and -")
        shape[model] = tuple(drafts)
    seen: dict[str, str] = {}
    for model in shape:
        twin = seen.setdefault(in_file_names(model), model)
        if twin != model:
            raise ConfigError(f"{where}: models {twin!r} and {model!r} differ only in / : -; rename one of them")
    return shape


def in_file_names(model: str) -> str:
    """The name of a model without what cannot stand in the name of a file."""
    return re.sub("[/:]", "-", model)


def _named(where: object, key: str, name: object, pattern: str, form: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise ConfigError(f"{where}: {key} has a name {name!r}; a name there is made of {form}")


def _split(override: Override, shape: Shape) -> SettingPath:
    """The path that the key of a flag means. Names of models contain dots, so they have to be known."""
    if not override.key.startswith(f"{MODELS}."):
        return tuple(override.key.split("."))
    for model, drafts in shape.items():
        pools = [(MODELS, model, "target"), *((MODELS, model, "drafts", pool) for pool in drafts)]
        for above in pools:
            prefix = ".".join((*above, ""))
            if override.key.startswith(prefix):
                return (*above, override.key.removeprefix(prefix))
    known = ", ".join(f"{MODELS}.{model}.target" for model in shape) or "none"
    raise ConfigError(f"{override.source}: no pool of a model has a setting {override.key!r}; the targets are {known}")


def _described_by(path: SettingPath) -> str:
    """The key of the setting that says what is allowed at a path."""
    match path:
        case (_, _, "target", name) if path[0] == MODELS:
            return f"target.{name}"
        case (_, _, "drafts", _, name) if path[0] == MODELS:
            return f"draft.{name}"
        case _:
            return ".".join(path)


def _located(base: Path, path: tuple[str, ...], value: object) -> object:
    """A path is meant relative to the file that names it, or to where the command runs; workers run elsewhere."""
    if _described_by(path) in _FOLDERS and value:
        folder = base / expanded(str(value))
        if is_folder(folder):
            return str(folder.resolve())
        if snapshot := pinned_folder(str(value)):
            return str(snapshot)
    if (path[0] == "security" or path == ("router", "record_prompts")) and value:
        return str((base / expanded(str(value))).absolute())
    return value
