"""Every setting of Paceline, in one typed value: what exists, its default, what is allowed, and where it came from.

A value is looked for among the flags, then in the configuration file (YAML), then here. The only module that reads
settings from files; nothing is read from the environment. An unknown key is an error that names the nearest valid one.

A cluster serves one model, of the sections ``target`` and ``draft``, or those listed under ``models``: each a target
pool with any number of draft pools, for which those two sections hold the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from cluster.reading import DEFAULT_POOL, MODELS, Override, Reader, Values, document_in, in_file_names
from cluster.settings import AUTO, ConfigError, Rule, rule_in, settings_of
from cluster.settings import setting as _setting
from speculation.events import Role
from speculation.messages import Rule as AcceptanceRule
from speculation.messages import Schedule

CHECKOUT = Path(__file__).resolve().parent.parent
BUNDLED = CHECKOUT / "models"
"""Where the bundled model pair lies."""
Threads = int | Literal["auto"]


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


def _labels() -> Any:
    pair = r"[A-Za-z0-9][\w./-]*=[\w.-]*"
    about = "only on Ray nodes with these labels, besides that of gpu_class: KEY=VALUE, KEY=VALUE"
    form = "labels such as paceline.io/role=router, zone=a"
    return _setting("", about, pattern=rf"({pair}(, *{pair})*)?", form=form)


def _ranks() -> Any:
    about = "ranks, each with its own GPU where there are GPUs, that compute every step together"
    return _setting(1, about, at_least=1, at_most=64)


def _join_timeout() -> Any:
    return _setting(120.0, "seconds in which all ranks must have started", at_least=0.1, at_most=86400)


def _step_timeout() -> Any:
    about = "seconds after which a step counts as stuck, and the worker ends itself to be replaced (0: never)"
    return _setting(60.0, about, at_least=0, at_most=86400)


DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "float64", "fp64")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Target workers: they run the served model and decide every token."""

    model: str = _setting(str(BUNDLED / "target"), "model folder, or a hub id such as Org/Name")
    name: str = _setting("", "name the model is served under (default: last part of the model path)")
    replicas: int = _setting(1, "number of target workers", at_least=1, at_most=1024)
    min_replicas: int = _setting(1, "never fewer, where their number follows the load", at_least=1, at_most=1024)
    max_replicas: int = _setting(
        0, "never more; their number follows the load (0: it stays as it is)", at_least=0, at_most=1024
    )
    dtype: str = _setting("auto", "number format: bf16 where the hardware computes it, else fp32", choices=DTYPES)
    device: str = _setting("auto", "where to compute: auto, cpu, cuda, cuda:1 ...")
    quantization: str = _quantization()
    plain_cuda: bool = _plain_cuda()
    tensor_parallel_size: int = _ranks()
    join_timeout: float = _join_timeout()
    threads: Threads = _threads()
    cache_tokens: int = _setting(0, "room of the cache in tokens (0: what the free memory allows)", at_least=0)
    step_timeout: float = _step_timeout()
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
    labels: str = _labels()


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Draft workers: they run a small model ahead of the target. Without any, decoding is plain."""

    model: str = _setting(str(BUNDLED / "draft"), "model folder, or a hub id; same vocabulary as the target")
    name: str = _setting("", "name in logs (default: last part of the model path)")
    replicas: int = _setting(1, "number of draft workers", at_least=0, at_most=1024)
    min_replicas: int = _setting(0, "never fewer, where their number follows the load", at_least=0, at_most=1024)
    max_replicas: int = _setting(
        0, "never more; their number follows the load (0: it stays as it is)", at_least=0, at_most=1024
    )
    dtype: str = _setting("auto", "number format: bf16 where the hardware computes it, else fp32", choices=DTYPES)
    device: str = _setting("auto", "where to compute: auto, cpu, cuda, cuda:1 ...")
    quantization: str = _quantization()
    plain_cuda: bool = _plain_cuda()
    tensor_parallel_size: int = _ranks()
    join_timeout: float = _join_timeout()
    threads: Threads = _threads()
    cache_tokens: int = _setting(0, "room of the cache in tokens (0: what the free memory allows)", at_least=0)
    step_timeout: float = _step_timeout()
    max_sessions: int = _setting(256, "sessions one worker drafts for; more are refused", at_least=1, at_most=65536)
    record: str = _setting("", "file to record every step in, as JSON lines, for benchmarks and the simulator")
    gpus: float = _setting(0.0, "GPUs that Ray reserves for a rank of a worker", at_least=0, at_most=64)
    gpu_class: str = _setting("", "only on Ray nodes with this label paceline.io/gpu-class (production: small)")
    labels: str = _labels()


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Routers: the HTTP address, and the life of every request."""

    host: str = _setting("127.0.0.1", "interface to serve HTTP on")
    port: int = _setting(8000, "port to serve HTTP on", at_least=1, at_most=65535)
    replicas: int = _setting(1, "number of routers (one with the local backend)", at_least=1, at_most=256)
    min_replicas: int = _setting(1, "never fewer, where their number follows the load", at_least=1, at_most=256)
    max_replicas: int = _setting(
        0, "never more; their number follows the load (0: it stays as it is)", at_least=0, at_most=256
    )
    model_name: str = _setting("", "name of the model in the API (default: what its workers call it)")
    tokenizer: str = _setting("", "folder or hub id of the tokenizer (default: the target's)")
    max_sessions: int = _setting(1024, "generations at once per router; more get status 429", at_least=1)
    allow_remote: bool = _setting(False, "listen beyond loopback even where there is no authentication")
    drain_timeout: float = _setting(
        600.0, "seconds that running requests have when a router is told to stop", at_least=0, at_most=86400
    )
    labels: str = _labels()


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


TARGET_POOL = "target"
"""Name of a model's target pool."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model in the API: its target pool, and its draft pools by name."""

    target: TargetConfig = TargetConfig()
    drafts: Mapping[str, DraftConfig] = field(default_factory=lambda: {DEFAULT_POOL: DraftConfig()})


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that are alike: what is placed, scaled and replaced together."""

    role: Role
    model: str
    """Key of its model in ``models``; empty where the sections ``target`` and ``draft`` describe the only one."""
    name: str
    """Unique among the pools of the model: :data:`TARGET_POOL`, or the name of a draft pool."""
    settings: TargetConfig | DraftConfig

    @property
    def path(self) -> str:
        """Where its settings stand in the configuration, for messages: ``draft``, ``models.llama.drafts.small``."""
        if not self.model:
            return self.role.value
        within = self.name if self.role is Role.TARGET else f"drafts.{self.name}"
        return f"models.{self.model}.{within}"

    @property
    def deployment(self) -> str:
        """Its name in Ray Serve: ``DraftWorker``, ``DraftWorker-llama.small``."""
        kind = {Role.TARGET: "TargetWorker", Role.DRAFT: "DraftWorker"}[self.role]
        if not self.model:
            return kind
        model = in_file_names(self.model)
        return f"{kind}-{model}" if self.role is Role.TARGET else f"{kind}-{model}.{self.name}"

    def __str__(self) -> str:
        """For people and process titles: ``draft``, ``draft small of llama``."""
        if not self.model:
            return self.role.value
        return (
            f"{self.role} of {self.model}" if self.role is Role.TARGET else f"{self.role} {self.name} of {self.model}"
        )


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may talk to whom. ``{role}`` in a certificate's path stands for router, target or draft."""

    certificate: str = _setting(
        "", "certificate in PEM, for TLS between routers and workers; {role} stands for the role"
    )
    key: str = _setting("", "its private key in PEM")
    authority: str = _setting("", "certificates in PEM of who signs for routers and workers")
    api_keys: str = _setting("", "file with an API key a line, bare or as NAME: KEY; without it everybody may ask")


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    """When pools with ``max_replicas`` grow and shrink. On Ray only; see :mod:`cluster.autoscaling`."""

    queue_s: float = _setting(1.0, "seconds of prompts that may wait at the targets", at_least=0.001, at_most=3600)
    clear_s: float = _setting(
        30.0, "seconds in which more targets shall work off what waits too long", at_least=0.1, at_most=86400
    )
    load: float = _setting(
        0.7, "share of the targets' speed, places and cache that shall be in use at most", at_least=0.01, at_most=1
    )
    delivery: float = _setting(
        0.5, "share of the lead that targets ask for which drafters shall deliver", at_least=0.01, at_most=1
    )
    streams: int = _setting(256, "open streams that are enough for one router", at_least=1)
    margin: float = _setting(
        0.2, "share of what remains that must be to spare before a pool shrinks", at_least=0, at_most=0.9
    )
    up_s: float = _setting(3.0, "seconds that a pool must be too small before it grows", at_least=0, at_most=86400)
    down_s: float = _setting(
        120.0, "seconds that a pool must be too large before it shrinks", at_least=0, at_most=86400
    )
    pause_s: float = _setting(15.0, "seconds between two growths of a pool", at_least=0, at_most=86400)
    rest_s: float = _setting(
        120.0,
        "seconds that drafters which were of no use stay away; doubles each time in a row",
        at_least=0,
        at_most=86400,
    )
    interval_s: float = _setting(1.0, "seconds between two reports of a replica", at_least=0.1, at_most=60)
    window_s: float = _setting(10.0, "seconds over which reports are averaged", at_least=0.5, at_most=600)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    backend: str = _setting("ray", "what runs the workers: ray, or local processes", choices=("ray", "local"))
    start_timeout: float = _setting(
        600.0, "seconds in which every worker must have loaded its model", at_least=1, at_most=86400
    )
    drain_timeout: float = _setting(
        30.0,
        "seconds in which a worker that is told to stop lets its sessions move or end",
        at_least=0,
        at_most=86400,
    )
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """By name in the API. Empty: there is one, of ``target`` and ``draft``."""
    router: RouterConfig = RouterConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    ray: RayConfig = RayConfig()
    security: SecurityConfig = SecurityConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()

    @property
    def autoscales(self) -> bool:
        """Whether the number of some workers or of routers follows the load."""
        pools = [self.router, *(pool.settings for pool in self.pools())]
        return any(pool.max_replicas for pool in pools)

    @property
    def drafts(self) -> int:
        """How many draft workers to start."""
        return sum(pool.settings.replicas for pool in self.pools() if pool.role is Role.DRAFT)

    def pools(self) -> list[Pool]:
        """All pools of workers: each model's target pool, then its draft pools, if drafts are wanted at all.

        Also those with no replicas.
        """
        models = self.models or {"": ModelConfig(self.target, {DEFAULT_POOL: self.draft})}
        found = []
        for model, pools in models.items():
            found.append(Pool(Role.TARGET, model, TARGET_POOL, pools.target))
            if self.speculation.enabled:
                found += [Pool(Role.DRAFT, model, name, settings) for name, settings in pools.drafts.items()]
        return found

    def of_worker(self, pool: Pool) -> Config:
        """The configuration that a worker of the pool is started with: its own settings in ``target`` or ``draft``."""
        section = {pool.role.value: pool.settings}
        return replace(self, models={}, **section)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, Any]:
        """The same settings as plain values, as :func:`from_mapping` takes them."""
        return asdict(self)

    def to_yaml(self) -> str:
        """The same settings as a configuration file."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False)


def least(pool: TargetConfig | DraftConfig | RouterConfig) -> int:
    """How many replicas a pool begins with, and always has."""
    return pool.min_replicas if pool.max_replicas else pool.replicas


def most(pool: TargetConfig | DraftConfig | RouterConfig) -> int:
    """How many replicas a pool may come to have; 0: there is no such pool."""
    return pool.max_replicas or pool.replicas


def chosen_threads(worker: TargetConfig | DraftConfig) -> int:
    """How many threads a worker computes with; one where nobody chose for it."""
    return worker.threads if isinstance(worker.threads, int) else 1


SECTIONS: Mapping[str, type[Any]] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "router": RouterConfig,
    "speculation": SpeculationConfig,
    "ray": RayConfig,
    "security": SecurityConfig,
    "autoscaling": AutoscalingConfig,
}


def rule_of(key: str) -> Rule:
    """What is known of the setting with this dotted path."""
    return rule_in(_SETTINGS[key])


def default_of(key: str) -> object:
    """Its default."""
    return _SETTINGS[key].default


def load(path: Path | None = None, overrides: Iterable[Override] = ()) -> Config:
    """The configuration from a file (if any) with flags over it. Raises :class:`ConfigError`."""
    document = {} if path is None else document_in(path)
    return from_mapping(document, path or "", path.parent if path else Path(), overrides)


def from_mapping(
    document: Mapping[Any, object], where: object, base: Path = Path(), overrides: Iterable[Override] = ()
) -> Config:
    """The configuration from what a file holds; ``where`` is for messages, folders are meant relative to ``base``.

    Raises :class:`ConfigError`.
    """
    values, shape = _READER.read(where, document, base, overrides)
    sections = {name: kind(**_under(values, name)) for name, kind in SECTIONS.items()}
    models = {name: _model(where, name, shape[name], sections, values) for name in shape}
    if models and sections["router"].model_name:
        given = sections["router"].model_name
        raise ConfigError(
            f"{where}: router.model_name is {given!r}; leave it empty, the keys of {MODELS} are the names"
        )
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    return Config(**sections, models=models, **own)  # type: ignore[arg-type]


_SETTINGS: dict[str, Field[Any]] = {entry.name: entry for entry in settings_of(Config)}
for _name, _kind in SECTIONS.items():
    _SETTINGS |= {f"{_name}.{entry.name}": entry for entry in settings_of(_kind)}
_READER = Reader(_SETTINGS, tuple(SECTIONS))


def _under(values: Values, *path: str) -> dict[str, Any]:
    return {key[-1]: value for key, value in values.items() if key[:-1] == path}


def _model(where: object, name: str, drafts: Iterable[str], sections: Mapping[str, Any], values: Values) -> ModelConfig:
    """A model of ``models``: what is said of its pools, over the sections that hold the defaults."""
    target = replace(sections["target"], **{"name": name} | _under(values, MODELS, name, "target"))
    if target.name != name:
        raise ConfigError(f"{where}: models.{name}.target.name is {target.name!r}; the key {name!r} is the name")
    pools = {pool: replace(sections["draft"], **_under(values, MODELS, name, "drafts", pool)) for pool in drafts}
    return ModelConfig(target, pools)
