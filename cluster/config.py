"""Every setting of Paceline, in one typed value: what exists, its default, what is allowed, and where it came from.

A value is looked for among the flags, then in the configuration file (YAML), then here. The only module that reads
settings from files; nothing is read from the environment. An unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from speculation.messages import Rule as AcceptanceRule
from speculation.messages import Schedule

CHECKOUT = Path(__file__).resolve().parent.parent
BUNDLED = CHECKOUT / "models"
"""Where the bundled model pair lies."""


class ConfigError(Exception):
    """A setting that cannot be used. One line that names it, its value and what would be right."""


AUTO: Literal["auto"] = "auto"
"""What a setting says that is to be chosen at the start."""
Threads = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting means and which values it takes."""

    about: str
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    auto: bool = False
    """Whether a whole number may also be :data:`AUTO`."""


def _setting(default: Any, about: str, **limits: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(about, **limits)})


def _threads() -> Any:
    about = "CPU threads of a step (default: auto: `paceline up` divides the cores of one machine, else 1)"
    return _setting(AUTO, about, at_least=1, at_most=1024, auto=True)


def _quantization() -> Any:
    about = (
        "smaller weights: none, int8, int8-dynamic (activations too: fastest on a CPU) or fp8 (on a GPU that has it)"
    )
    return _setting(NO_QUANTIZATION, about, choices=QUANTIZATIONS)


def _plain_cuda() -> Any:
    return _setting(False, "on CUDA, neither attention over pages nor CUDA graphs: slower, to rule them out")


NO_QUANTIZATION = "none"
QUANTIZATIONS = (NO_QUANTIZATION, "int8", "int8-dynamic", "fp8")


def _ranks() -> Any:
    about = "ranks, each with its own GPU where there are GPUs, that compute every step together"
    return _setting(1, about, at_least=1, at_most=64)


def _join_timeout() -> Any:
    return _setting(120.0, "seconds in which all ranks must have started", at_least=0.1, at_most=86400)


DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "float64", "fp64")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Target workers: they run the served model and decide every token."""

    model: str = _setting(str(BUNDLED / "target"), "model folder, or a hub id such as Org/Name")
    name: str = _setting("", "name the model is served under (default: last part of the model path)")
    replicas: int = _setting(1, "number of target workers", at_least=1, at_most=1024)
    dtype: str = _setting("auto", "number format: bf16 where the hardware computes it, else fp32", choices=DTYPES)
    device: str = _setting("auto", "where to compute: auto, cpu, cuda, cuda:1 ...")
    quantization: str = _quantization()
    plain_cuda: bool = _plain_cuda()
    tensor_parallel_size: int = _ranks()
    join_timeout: float = _join_timeout()
    threads: Threads = _threads()
    cache_tokens: int = _setting(0, "room of the cache in tokens (0: what the free memory allows)", at_least=0)
    max_running: int = _setting(64, "sessions computed in one step", at_least=1, at_most=65536)
    max_waiting: int = _setting(1024, "sessions queued behind them; more are refused", at_least=0, at_most=1 << 20)
    step_tokens: int = _setting(320, "most tokens computed in one step", at_least=2, at_most=1 << 20)
    step_ms: float = _setting(
        50.0,
        "milliseconds that prompts may stretch a step of running text to; twice its time is always allowed",
        at_least=0,
    )
    record: str = _setting("", "file to record every step in, as JSON lines, for benchmarks and the simulator")
    gpus: float = _setting(0.0, "GPUs that Ray reserves for a rank of a worker", at_least=0, at_most=64)
    gpu_class: str = _setting("", "only on Ray nodes with this label paceline.io/gpu-class (production: large)")


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Draft workers: they run a small model ahead of the target. Without any, decoding is plain."""

    model: str = _setting(str(BUNDLED / "draft"), "model folder, or a hub id; same vocabulary as the target")
    name: str = _setting("", "name in logs (default: last part of the model path)")
    replicas: int = _setting(1, "number of draft workers", at_least=0, at_most=1024)
    dtype: str = _setting("auto", "number format: bf16 where the hardware computes it, else fp32", choices=DTYPES)
    device: str = _setting("auto", "where to compute: auto, cpu, cuda, cuda:1 ...")
    quantization: str = _quantization()
    plain_cuda: bool = _plain_cuda()
    tensor_parallel_size: int = _ranks()
    join_timeout: float = _join_timeout()
    threads: Threads = _threads()
    cache_tokens: int = _setting(0, "room of the cache in tokens (0: what the free memory allows)", at_least=0)
    max_sessions: int = _setting(256, "sessions one worker drafts for; more are refused", at_least=1, at_most=65536)
    record: str = _setting("", "file to record every step in, as JSON lines, for benchmarks and the simulator")
    gpus: float = _setting(0.0, "GPUs that Ray reserves for a rank of a worker", at_least=0, at_most=64)
    gpu_class: str = _setting("", "only on Ray nodes with this label paceline.io/gpu-class (production: small)")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Routers: the HTTP address, and the life of every request."""

    host: str = _setting("127.0.0.1", "interface to serve HTTP on")
    port: int = _setting(8000, "port to serve HTTP on", at_least=1, at_most=65535)
    replicas: int = _setting(1, "number of routers (one with the local backend)", at_least=1, at_most=256)
    model_name: str = _setting("", "name of the model in the API (default: what its workers call it)")
    tokenizer: str = _setting("", "folder or hub id of the tokenizer (default: the target's)")
    max_sessions: int = _setting(1024, "generations at once per router; more get status 429", at_least=1)
    allow_remote: bool = _setting(False, "listen beyond loopback, although there is no authentication")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How drafting goes, unless a request says otherwise. Only the rule bears on the text, and not on its law."""

    enabled: bool = _setting(True, "start draft workers and use what they propose")
    rule: str = _setting(
        "coupled",
        "what keeps a draft token: coupled (one text for a seed, whatever is drafted) or rejection (the textbook rule)",
        choices=tuple(AcceptanceRule),
    )
    schedule: str = _setting(
        "trie",
        "when to draft: trie (ahead, along likely outcomes); sequential and parallel are baselines for comparison",
        choices=tuple(Schedule),
    )
    lookup: bool = _setting(True, "also propose what followed the same words before (prompt lookup); needs no worker")
    max_depth: int = _setting(16, "longest path of drafts verified in one step", at_least=1, at_most=64)
    max_draft: int = _setting(12, "most draft tokens verified for a session in one step", at_least=1, at_most=64)
    lead: int = _setting(48, "how many tokens a drafter may run ahead", at_least=1, at_most=256)
    push_bytes: float = _setting(
        58.0, "bytes of drafts pushed to a target for each committed token (coupled rule)", at_least=16, at_most=4096
    )
    children: int = _setting(3, "alternatives drafted at one place", at_least=1, at_most=8)
    width: int = _setting(4, "most places of a session that a drafter goes on from in one step", at_least=1, at_most=64)


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray cluster that the ray backend uses."""

    address: str = _setting("local", "local: start Ray on this machine; auto or HOST:PORT: a running cluster")
    num_cpus: int = _setting(16, "logical CPUs of a local Ray; not a limit on computing", at_least=2, at_most=1024)
    cpus_per_worker: float = _setting(0.1, "logical CPUs that Ray reserves for a worker", at_least=0, at_most=1024)
    placement_timeout: float = _setting(20.0, "seconds in which Ray must find room for every worker", at_least=1)
    object_store_mb: int = _setting(80, "object store of a local Ray, in MB (tokens never pass it)", at_least=76)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    backend: str = _setting("ray", "what runs the workers: ray, or local processes", choices=("ray", "local"))
    start_timeout: float = _setting(
        600.0, "seconds in which every worker must have loaded its model", at_least=1, at_most=86400
    )
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    router: RouterConfig = RouterConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    ray: RayConfig = RayConfig()

    @property
    def drafts(self) -> int:
        """How many draft workers to start."""
        return self.draft.replicas if self.speculation.enabled else 0

    def to_yaml(self) -> str:
        """The same settings as a configuration file."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


def chosen_threads(worker: TargetConfig | DraftConfig) -> int:
    """How many threads a worker computes with; one where nobody chose for it."""
    return worker.threads if isinstance(worker.threads, int) else 1


SECTIONS: Mapping[str, type[Any]] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "router": RouterConfig,
    "speculation": SpeculationConfig,
    "ray": RayConfig,
}


@dataclass(frozen=True, slots=True)
class Override:
    """A setting given as text on the command line; ``source`` is the flag, for messages."""

    key: str
    text: str
    source: str


def rule_of(key: str) -> Rule:
    """What is known of the setting with this dotted path."""
    return _rule(_SETTINGS[key])


def default_of(key: str) -> object:
    """Its default."""
    return _SETTINGS[key].default


def load(path: Path | None = None, overrides: Iterable[Override] = ()) -> Config:
    """The configuration from a file (if any) with flags over it. Raises :class:`ConfigError`."""
    values: dict[str, object] = {}
    if path is not None:
        values |= {key: _located(path.parent, key, value) for key, value in _flatten(path, _read(path))}
    for override in overrides:
        _known(override.source, override.key)
        values[override.key] = _located(Path(), override.key, _parsed(override))
    sections = {name: kind(**_under(values, f"{name}.")) for name, kind in SECTIONS.items()}
    return Config(**sections, **{key: value for key, value in values.items() if "." not in key})  # type: ignore[arg-type]


def _own_fields(kind: type[Any], prefix: str = "") -> dict[str, Field[Any]]:
    return {f"{prefix}{entry.name}": entry for entry in fields(kind) if "rule" in entry.metadata}


_SETTINGS: dict[str, Field[Any]] = _own_fields(Config)
for _name, _kind in SECTIONS.items():
    _SETTINGS |= _own_fields(_kind, f"{_name}.")


def _rule(entry: Field[Any]) -> Rule:
    rule = entry.metadata["rule"]
    assert isinstance(rule, Rule)
    return rule


def _type_of(entry: Field[Any]) -> type[object]:
    """The type of its values, apart from :data:`AUTO`."""
    return int if _rule(entry).auto else type(entry.default)


def _under(values: Mapping[str, object], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _read(path: Path) -> Mapping[object, object]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, got {_described(document)}")
    return document


def _flatten(path: Path, document: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    """Settings of a file by dotted path, each checked."""
    for name, value in document.items():
        if name not in SECTIONS:
            yield str(name), _checked(path, str(name), value)
        elif isinstance(value, dict):
            for inner, entry in value.items():
                yield f"{name}.{inner}", _checked(path, f"{name}.{inner}", entry)
        elif value is not None:
            raise ConfigError(f"{path}: {name} must be a mapping of settings, got {_described(value)}")


def _known(where: object, key: str) -> None:
    """Refuse an unknown key with the nearest valid one: by its whole path, else by its last part."""
    if key in _SETTINGS:
        return
    near = difflib.get_close_matches(key, [*_SETTINGS, *SECTIONS], n=1, cutoff=0.6)
    if not near:
        last = difflib.get_close_matches(key.rpartition(".")[2], [name.rpartition(".")[2] for name in _SETTINGS], n=1)
        near = [name for name in _SETTINGS if last and name.rpartition(".")[2] == last[0]][:1]
    hint = f"did you mean {near[0]!r}?" if near else f"sections are {', '.join(SECTIONS)}"
    raise ConfigError(f"{where}: unknown setting {key!r}; {hint}")


def _checked(where: object, key: str, value: object) -> object:
    """``value`` if the setting takes it; integers pass for floats."""
    _known(where, key)
    entry = _SETTINGS[key]
    rule = _rule(entry)
    if rule.auto and value == AUTO:
        return value
    kind = _type_of(entry)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {_described(value)}")
    if rule.choices and value not in rule.choices:
        raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {_described(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = rule.at_least, rule.at_most
        # Written so that nan is refused as well.
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise ConfigError(f"{where}: {key} must be {_wanted(kind, rule)}, got {value}")
    return value


def _parsed(override: Override) -> object:
    """The value that the text of a flag stands for."""
    entry = _SETTINGS[override.key]
    kind = _type_of(entry)
    value: object = override.text
    if _rule(entry).auto and value == AUTO:
        return value
    try:
        if kind is bool:
            value = {"true": True, "yes": True, "false": False, "no": False}[override.text.lower()]
        elif kind is int:
            value = int(override.text)
        elif kind is float:
            value = float(override.text)
    except (KeyError, ValueError):
        wanted = _wanted(kind, _rule(entry))
        raise ConfigError(f"{override.source}: {override.key} must be {wanted}, got {override.text!r}") from None
    return _checked(override.source, override.key, value)


def _located(base: Path, key: str, value: object) -> object:
    """A folder is meant relative to the file that names it, or to where the command runs; workers run elsewhere."""
    if key in ("target.model", "draft.model", "router.tokenizer") and value:
        folder = base / Path(str(value)).expanduser()
        if folder.is_dir():
            return str(folder.resolve())
    return value


def _wanted(kind: type[object], rule: Rule) -> str:
    if rule.choices:
        return f"one of {', '.join(rule.choices)}"
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    if rule.auto:
        name = f"{AUTO} or {name}"
    low, high = rule.at_least, rule.at_most
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    return name if low is None else f"{name}, at least {low}"


def _described(value: object) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else f"{value!r}"
