"""What a setting is: a field with a rule, the checks that every value passes, and how files and flags are read.

Knows no setting by name: :mod:`cluster.config.config` and :mod:`cluster.config.pools` declare them, and what the values
amount to. A path is where a setting stands: ``("router", "port")``, ``("models", "llama", "drafts", "small", "gpus")``.
Errors are one line that names where the value stands, the setting, the value and what would be right.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from cluster.config.environment import expanded, is_folder, pinned_folder
from cluster.console import BadInput


class ConfigError(BadInput):
    """A setting that cannot be used. One line that names it, its value and what would be right."""


class CheckError(BadInput):
    """Something that would fail later. One line that says what would be right."""


AUTO: Literal["auto"] = "auto"
"""What a setting says that is to be chosen at the start."""


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """What a setting means and which values it takes."""

    default: Any
    about: str
    ge: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False
    """Whether a whole number may also be :data:`AUTO`."""
    pattern: str = ""
    """Regular expression that all of a text has to match."""
    form: str = ""
    """The same in words."""
    path: Literal["", "folder", "file"] = ""
    """Whether a text is the path of a file, or may be that of a folder."""
    called: str = ""
    """Setting beside it that says what this is called: by default as the path does, also where that is a link."""

    @property
    def kind(self) -> type[object]:
        """What its values are."""
        return int if self.auto else type(self.default)


def setting(default: Any, about: str, **limits: Any) -> Any:
    """A field of a section."""
    return field(default=default, metadata={"setting": SettingSpec(default, about, **limits)})


def seconds(default: float, about: str) -> Any:
    """A field that is a length of time, up to a day."""
    return setting(default, about, ge=0, le=86400)


def path_setting(about: str, *, default: str = "", file: bool = False, called: str = "") -> Any:
    """A field that is the path of a file, or else may be that of a folder."""
    return setting(default, about, path="file" if file else "folder", called=called)


def settings_of(kind: type[Any]) -> dict[str, SettingSpec]:
    """The fields of a dataclass that are settings."""
    return {entry.name: entry.metadata["setting"] for entry in fields(kind) if "setting" in entry.metadata}


def checked(where: object, key: str, spec: SettingSpec, value: object) -> object:
    """``value`` if the setting takes it; integers pass for floats. Raises :class:`ConfigError`."""
    if spec.auto and value == AUTO:
        return value
    if spec.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not spec.kind or not _allowed(spec, value):
        raise ConfigError(f"{where}: {key} must be {_wanted(spec)}, got {described(value)}")
    return value


def _allowed(spec: SettingSpec, value: Any) -> bool:
    """Whether a value of the right type is; written so that nan is not."""
    if isinstance(value, str):
        fits = not spec.pattern or re.fullmatch(spec.pattern, value) is not None
        return fits and (not spec.choices or value in spec.choices)
    return (spec.ge is None or value >= spec.ge) and (spec.le is None or value <= spec.le)


_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
_READ: Mapping[type[object], Callable[[str], object]] = {
    bool: lambda text: _TRUTH[text.lower()],
    int: int,
    float: float,
    str: str,
}


def parsed(where: object, key: str, spec: SettingSpec, text: str) -> object:
    """The value that the text of a flag stands for. Raises :class:`ConfigError`."""
    try:
        value = text if spec.auto and text == AUTO else _READ[spec.kind](text)
    except (KeyError, ValueError):
        raise ConfigError(f"{where}: {key} must be {_wanted(spec)}, got {text!r}") from None
    return checked(where, key, spec, value)


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that is not known; empty where nothing is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), "")


def described(value: object) -> str:
    """A value that was not wanted, for messages."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else f"{value!r}"


def _wanted(spec: SettingSpec) -> str:
    if spec.choices:
        return f"one of {', '.join(spec.choices)}"
    if spec.form:
        return spec.form
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[spec.kind]
    if spec.auto:
        name = f"{AUTO} or {name}"
    low, high = spec.ge, spec.le
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    return name if low is None else f"{name}, at least {low}"


MODELS = "models"
"""The section that lists models by their name in the API, each with the parts ``target`` and ``drafts``."""
DEFAULT_POOL = "draft"
"""Name of a model's draft pool where none is given."""
_MODEL_NAME, _POOL_NAME = r"[A-Za-z0-9][\w.:/-]{0,127}", r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"

SettingPath = tuple[str, ...]
Sections = Mapping[SettingPath, dict[str, Any]]
"""Values by name, by where they stand together."""
PoolSections = Mapping[SettingPath, object]
"""What is said of the pools of ``models``: of each model's target, then of each of its draft pools."""


@dataclass(frozen=True, slots=True)
class Override:
    """A setting given as text on the command line; ``source`` is the flag, for messages."""

    key: str
    text: str
    source: str


def document_in(path: Path) -> Mapping[Any, object]:
    """What a file of settings holds. Raises :class:`cluster.config.settings.ConfigError`."""
    try:
        return _mapping(path, "", yaml_in(path, path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


MERGES = "tag:yaml.org,2002:merge"
"""Of the key ``<<``, which may stand more than once."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, as YAML does: else the last would hold, and the first be lost in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as it is written."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen and key.tag != MERGES:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


def yaml_in(where: object, text: str) -> Any:
    """What YAML says, as plain values. Raises :class:`cluster.config.settings.ConfigError`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ConfigError(f"{where} is not YAML that can be read: it is nested too deep") from error
    # A value such as the 32nd of a month ends in whatever the code that reads it raises.
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Knows what can be set, not what it means."""

    settings: Mapping[str, SettingSpec]
    """By dotted path; those of ``target`` and ``draft`` also describe the pools of ``models``."""
    sections: Sequence[str]

    def read(
        self, where: object, document: Mapping[Any, object], base: Path, overrides: Iterable[Override]
    ) -> tuple[Sections, PoolSections]:
        """Every setting that is given, by section, flags winning; and which pools there are. Raises ConfigError."""
        pools = _pools(where, document.get(MODELS))
        values: dict[SettingPath, tuple[Path, SettingSpec, object]] = {}
        for path, value in self._entries(where, document, pools):
            spec = self._known(where, path)
            values[path] = base, spec, checked(where, ".".join(path), spec, value)
        for override in overrides:
            path = _split(override, pools)
            spec = self._known(override.source, path)
            values[path] = Path(), spec, parsed(override.source, override.key, spec, override.text)
        sections: defaultdict[SettingPath, dict[str, Any]] = defaultdict(dict)
        for (*above, name), (start, spec, value) in values.items():
            sections[tuple(above)][name] = _located(start, spec, value)
        for (*above, _), (start, spec, value) in values.items():
            listed = above[:1] == [MODELS]  # there the keys are the names
            if spec.called and not listed and (link := _link(start, str(value))):
                section = sections[tuple(above)]
                section[spec.called] = section.get(spec.called) or link
        return sections, pools

    def _entries(
        self, where: object, document: Mapping[Any, object], pools: PoolSections
    ) -> Iterator[tuple[SettingPath, object]]:
        """Every setting that is given, by its path, unchecked."""
        for name, value in document.items():
            if name != MODELS and name not in self.sections:
                yield (str(name),) if str(name).startswith(f"{MODELS}.") else tuple(str(name).split(".")), value
                continue
            for above, section in pools.items() if name == MODELS else [((name,), value)]:
                for key, given in _mapping(where, ".".join(above), section).items():
                    yield (*above, str(key)), given

    def _known(self, where: object, path: SettingPath) -> SettingSpec:
        """The setting there. Refuses an unknown one with the nearest: by its whole path, else by its last part."""
        key = _described_by(path)
        if key in self.settings:
            return self.settings[key]
        last = nearest(key.rpartition(".")[2], [name.rpartition(".")[2] for name in self.settings])
        near = nearest(key, [*self.settings, *self.sections, MODELS])
        near = near or next((name for name in self.settings if last and name.rpartition(".")[2] == last), "")
        if near and path[0] == MODELS:
            near = ".".join((*path[:-1], near.rpartition(".")[2]))
        hint = f"did you mean {near!r}?" if near else f"sections are {', '.join(self.sections)}"
        raise ConfigError(f"{where}: unknown setting {'.'.join(path)!r}; {hint}")


def _mapping(where: object, key: str, value: object) -> Mapping[Any, object]:
    """A section as it stands in a file; one without a value is empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {f'{key} ' if key else ''}must be a mapping of settings, got {described(value)}")
    return value


def _pools(where: object, document: object) -> PoolSections:
    """The pools of all models, their names checked."""
    pools: dict[SettingPath, object] = {}
    seen: dict[str, str] = {}
    for model, parts in _mapping(where, MODELS, document).items():
        _named(where, MODELS, model, _MODEL_NAME, "letters, digits and . _ - : /")
        given = _mapping(where, f"{MODELS}.{model}", parts)
        for part in given.keys() - {"target", "drafts"}:
            hint = nearest(str(part), ("target", "drafts")) or "target"
            raise ConfigError(f"{where}: unknown setting '{MODELS}.{model}.{part}'; did you mean {hint!r}?")
        drafts = _mapping(where, f"{MODELS}.{model}.drafts", given.get("drafts", {DEFAULT_POOL: None}))
        for pool in drafts:
            _named(where, f"{MODELS}.{model}.drafts", pool, _POOL_NAME, "lower-case letters, digits and -")
        if (twin := seen.setdefault(in_file_names(model), model)) != model:
            raise ConfigError(f"{where}: models {twin!r} and {model!r} differ only in / : -; rename one of them")
        pools[MODELS, model, "target"] = given.get("target")
        pools |= {(MODELS, model, "drafts", pool): section for pool, section in drafts.items()}
    return pools


def in_file_names(model: str) -> str:
    """The name of a model without what cannot stand in the name of a file."""
    return re.sub("[/:]", "-", model)


def _named(where: object, key: str, name: object, pattern: str, form: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise ConfigError(f"{where}: {key} has a name {name!r}; a name there is made of {form}")


def _split(override: Override, pools: PoolSections) -> SettingPath:
    """The path that the key of a flag means. Names of models contain dots, so they have to be known."""
    if not override.key.startswith(f"{MODELS}."):
        return tuple(override.key.split("."))
    for above in pools:
        if override.key.startswith(prefix := ".".join((*above, ""))):
            return (*above, override.key.removeprefix(prefix))
    known = ", ".join(f"{MODELS}.{model}.target" for _, model, part, *_ in pools if part == "target") or "none"
    raise ConfigError(f"{override.source}: no pool of a model has a setting {override.key!r}; the targets are {known}")


def _described_by(path: SettingPath) -> str:
    """The key of the setting that says what is allowed at a path."""
    if len(path) < 4 or path[0] != MODELS:
        return ".".join(path)
    return f"{'target' if path[2] == 'target' else 'draft'}.{path[-1]}"


def _located(base: Path, spec: SettingSpec, value: object) -> object:
    """A path is meant relative to the file that names it, or to where the command runs; workers run elsewhere."""
    if not spec.path or not value:
        return value
    place = base / expanded(str(value))
    if spec.path == "file":
        return str(place.absolute())
    return str((place.resolve() if is_folder(place) else pinned_folder(str(value))) or value)


def _link(base: Path, path: str) -> str:
    """What a link to a folder is called; empty where there is none."""
    place = os.path.abspath(base / expanded(path))
    return os.path.basename(place) if os.path.islink(place) and os.path.isdir(place) else ""
