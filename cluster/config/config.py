"""Every setting of Paceline, in one typed value: what exists, its default, what is allowed, and where it came from.

A value is looked for among the flags, then in the configuration file (YAML), then here. The only module that reads
settings from files; nothing is read from the environment. An unknown key is an error that names the nearest valid one.

A cluster serves one model, of the sections ``target`` and ``draft``, or those listed under ``models``: each a target
pool with any number of draft pools, for which those two sections hold the defaults; see :mod:`cluster.config.pools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from cluster.config.pools import (
    AT_DRAFTER,
    AT_TARGET,
    LOADED,
    MTP,
    OWN,
    SHARED,
    TARGET_POOL,
    DraftConfig,
    ModelConfig,
    Pool,
    TargetConfig,
    node_labels,
)
from cluster.config.settings import (
    AUTO,
    DEFAULT_POOL,
    MODELS,
    ConfigError,
    ConfigReader,
    Override,
    Sections,
    SettingPath,
    SettingSpec,
    document_in,
    path_setting,
    seconds,
    setting,
    settings_of,
)
from speculation.events import Role
from speculation.messages import Rule as AcceptanceRule
from speculation.messages import Schedule


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Routers: the HTTP address, and the life of every request."""

    host: str = setting("127.0.0.1", "interface to serve HTTP on")
    port: int = setting(8000, "port to serve HTTP on", ge=1, le=65535)
    replicas: int | Literal["auto"] = setting(
        AUTO, "number of routers (auto: two where two nodes may hold one, else one)", ge=1, le=256, auto=True
    )
    min_replicas: int = setting(1, "never fewer, where their number follows the load", ge=1, le=256)
    max_replicas: int = setting(0, "never more; their number follows the load (0: it stays as it is)", ge=0, le=256)
    model_name: str = setting("", "name of the model in the API (default: what its workers call it)")
    tokenizer: str = path_setting(
        "folder or hub id of the tokenizer (default: that of target.model, as configured here)"
    )
    max_sessions: int = setting(1024, "generations at once per router; more get status 429", ge=1)
    allow_remote: bool = setting(False, "listen beyond loopback even where there is no authentication")
    drain_timeout: float = seconds(600.0, "seconds that running requests have when a router is told to stop")
    record_prompts: str = path_setting(
        "folder that prompts are recorded in, for `paceline align`; a request may opt out by store (default: none)",
        file=True,
    )
    record_megabytes: int = setting(1024, "recorded prompts that are kept; the oldest go", ge=1, le=1 << 20)
    labels: str = node_labels()


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How drafting goes, unless a request says otherwise. Only the rule bears on the text, and not on its law."""

    enabled: bool = setting(True, "start draft workers and use what they propose")
    rule: str = setting(
        "coupled",
        "what keeps a draft token: coupled (one text for a seed, whatever is drafted) or rejection (the textbook rule)",
        choices=tuple(AcceptanceRule),
    )
    schedule: str = setting(
        "trie",
        "when to draft: trie (ahead, along likely outcomes); sequential and parallel are baselines for comparison",
        choices=tuple(Schedule),
    )
    drafters: bool = setting(True, "draft with a model, on draft workers; without, sources at the target draft alone")
    lookup: bool = setting(True, "also propose what followed the same words before (prompt lookup); needs no worker")
    lookup_min: int = setting(2, "equal tokens below which lookup follows no earlier place", ge=1, le=64)
    lookup_max: int = setting(8, "equal tokens beyond which it follows the latest place", ge=1, le=64)
    max_depth: int = setting(32, "longest path of drafts verified in one step", ge=1, le=64)
    max_draft: int = setting(12, "most draft tokens verified for a session in one step", ge=1, le=64)
    lead: int = setting(48, "how many tokens a drafter may run ahead", ge=1, le=256)
    push_bytes: float = setting(
        58.0, "bytes of drafts pushed to a target for each committed token (coupled rule)", ge=16, le=4096
    )
    children: int = setting(3, "alternatives drafted at one place", ge=1, le=8)
    width: int = setting(4, "most places of a session that a drafter goes on from in one step", ge=1, le=64)


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray cluster that the ray backend uses."""

    address: str = setting("local", "local: start Ray on this machine; auto or HOST:PORT: a running cluster")
    num_cpus: int = setting(16, "logical CPUs of a local Ray; not a limit on computing", ge=2, le=1024)
    cpus_per_worker: float = setting(0.1, "logical CPUs that Ray reserves for a worker", ge=0, le=1024)
    placement_timeout: float = setting(20.0, "seconds in which Ray must find room for every worker", ge=1, le=86400)
    object_store_mb: int = setting(80, "object store of a local Ray, in MB (tokens never pass it)", ge=76)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may talk to whom. ``{role}`` in a certificate's path stands for router, target or draft."""

    certificate: str = path_setting(
        "certificate in PEM, for TLS between routers and workers; {role} stands for the role", file=True
    )
    key: str = path_setting("its private key in PEM", file=True)
    authority: str = path_setting("certificates in PEM of who signs for routers and workers", file=True)
    api_keys: str = path_setting(
        "file with an API key a line, bare or as NAME: KEY; without it everybody may ask", file=True
    )


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    """When pools with ``max_replicas`` grow and shrink. On Ray only; see :mod:`cluster.autoscaling`."""

    queue_s: float = setting(1.0, "seconds of prompts that may wait at the targets", ge=0.001, le=3600)
    clear_s: float = setting(30.0, "seconds in which more targets shall work off what waits too long", ge=0.1, le=86400)
    load: float = setting(
        0.7, "share of the targets' speed, places and cache that shall be in use at most", ge=0.01, le=1
    )
    delivery: float = setting(0.5, "share of the lead that targets ask for which drafters shall deliver", ge=0.01, le=1)
    streams: int = setting(256, "open streams that are enough for one router", ge=1)
    margin: float = setting(0.2, "share of what remains that must be to spare before a pool shrinks", ge=0, le=0.9)
    up_s: float = seconds(3.0, "seconds a pool must be too small before it grows")
    down_s: float = seconds(120.0, "seconds a pool must be too large before it shrinks")
    pause_s: float = seconds(15.0, "seconds between two growths of a pool")
    rest_s: float = seconds(120.0, "seconds that drafters which were of no use stay away; doubles each time in a row")
    interval_s: float = setting(1.0, "seconds between two reports of a replica", ge=0.1, le=60)
    window_s: float = setting(10.0, "seconds over which reports are averaged", ge=0.5, le=600)


def _share(what: str, chosen: str) -> Any:
    about = f"{what} under way at once per router (0: no limit; auto: with API keys {chosen}, else no limit)"
    return setting(AUTO, about, ge=0, auto=True)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """What a router lets in. Limits hold for every API key that has none of its own; without keys, for all together."""

    requests_per_minute: int = setting(0, "requests a minute per router (0: no limit)", ge=0)
    tokens_per_minute: int = setting(0, "tokens a minute, prompts and generated, per router (0: none)", ge=0)
    concurrent_requests: int = setting(0, "requests under way at once per router (0: no limit)", ge=0)
    concurrent_sessions: int | Literal["auto"] = _share("choices of requests", "half of router.max_sessions")
    concurrent_tokens: int | Literal["auto"] = _share("tokens of requests", "4,096 for each of these choices")
    request_timeout: float = seconds(0.0, "seconds that a request has if it asks for none (0: as many as it takes)")
    max_request_timeout: float = seconds(0.0, "seconds that none goes beyond (0: no limit)")
    target_timeout: float = seconds(
        0.0, "seconds that a request waits while its model has no target (0: its own timeout; if none, 30, then 120)"
    )
    cors_origins: str = setting(
        "",
        "web origins whose pages may use the API, separated by commas, or *",
        pattern=r"(\*|https?://[^\s,/]+(, *https?://[^\s,/]+)*)?",
        form="* or origins such as https://app.example.org, http://localhost:3000",
    )


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """OpenTelemetry spans of requests, in routers and workers. Off by default."""

    enabled: bool = setting(False, "send spans to where OTEL_EXPORTER_OTLP_ENDPOINT says")
    otlp_endpoint: str = setting(
        "",
        "send spans there, by OTLP over gRPC, such as http://localhost:4317",
        pattern=r"(https?://[^\s/]+/?)?",
        form="an address such as http://localhost:4317",
    )
    sample: float = setting(1.0, "share of requests traced, of those that no caller traces", ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    backend: str = setting("ray", "what runs the workers: ray, or local processes", choices=("ray", "local"))
    start_timeout: float = setting(600.0, "seconds in which every worker must have loaded its model", ge=1, le=86400)
    drain_timeout: float = seconds(30.0, "seconds in which a worker that is told to stop lets its sessions move or end")
    validate: bool = setting(
        False, "have workers check their own books whenever they are idle, and end where they are wrong; for debugging"
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
    admission: AdmissionConfig = AdmissionConfig()
    tracing: TracingConfig = TracingConfig()

    @property
    def autoscales(self) -> bool:
        """Whether the number of some workers or of routers follows the load."""
        return any(pool.max_replicas for pool in (self.router, *(pool.settings for pool in self.pools())))

    @property
    def on_this_machine(self) -> bool:
        """Whether everything runs here: as plain processes, or on a Ray of its own."""
        return self.backend == "local" or self.ray.address == "local"

    @property
    def drafts(self) -> int:
        """How many draft workers there may come to be."""
        return sum(max_replicas_of(pool.settings) for pool in self.pools() if pool.role is Role.DRAFT)

    def pools(self) -> list[Pool]:
        """Each model's target pool, then its draft pools if drafts are wanted at all; also those with no replicas."""
        found = []
        for model, pools in self._models().items():
            found.append(Pool(Role.TARGET, model, TARGET_POOL, pools.target))
            own = {name: draft for name, draft in pools.drafts.items() if draft.placement != SHARED}
            if self.drafts_with_models:
                found += [Pool(Role.DRAFT, model, name, draft) for name, draft in own.items()]
        return found

    def nonempty_pools(self) -> list[Pool]:
        """Those of :meth:`pools` that have replicas, or may come to have some."""
        return [pool for pool in self.pools() if max_replicas_of(pool.settings)]

    @property
    def drafts_with_models(self) -> bool:
        """Whether draft models are wanted at all."""
        return self.speculation.enabled and self.speculation.drafters

    def shared_draft(self, pool: Pool) -> DraftConfig | None:
        """The draft model that works in the processes of this target pool, if one does."""
        return next((draft for _, draft in self._shared(pool)), None)

    def loaded(self, pool: Pool) -> Iterator[tuple[str, str]]:
        """All that a worker of this pool loads: the setting that names it, and the folder or hub id."""
        for name in LOADED:
            said = getattr(pool.settings, name, "")
            if said and (said != MTP or pool.role is Role.DRAFT):
                yield f"{pool.path}.{name}", said
        for name, draft in self._shared(pool):
            yield f"{Pool(Role.DRAFT, pool.model, name, draft).path}.model", draft.model

    def read_by_routers(self) -> Iterator[tuple[str, str]]:
        """The same for all that a router reads tokenizers from."""
        targets = [pool for pool in self.pools() if pool.role is Role.TARGET]
        if self.router.tokenizer:
            yield "router.tokenizer", self.router.tokenizer
        if not self.router.tokenizer or len(targets) > 1:  # it need not be that of all models
            yield from ((f"{pool.path}.model", pool.settings.model) for pool in targets)

    def _shared(self, pool: Pool) -> Iterator[tuple[str, DraftConfig]]:
        """The same as :meth:`shared_draft` with its name."""
        if pool.role is Role.TARGET and self.drafts_with_models:
            drafts = self._models()[pool.model].drafts.items()
            yield from [(name, draft) for name, draft in drafts if draft.placement == SHARED][:1]

    def of_worker(self, pool: Pool) -> Config:
        """The configuration that a worker of the pool is started with: its own settings in ``target`` or ``draft``.

        Those of the draft model in a target's process are in ``draft`` as well, those of a draft worker's targets in
        ``target``: it may read all this from a file, where what it drafts with may follow from them.
        """
        if pool.role is Role.TARGET:
            draft = self.shared_draft(pool) or replace(self.draft, placement=OWN)
            return replace(self, models={}, target=pool.settings, draft=draft)  # type: ignore[arg-type]
        target = self._models()[pool.model].target
        return replace(self, models={}, target=target, draft=pool.settings)  # type: ignore[arg-type]

    def with_pools(self, change: Callable[[Pool], Any]) -> Config:
        """The same with what this makes of the settings of each pool, also of those that are not wanted."""
        models = {}
        for name, model in self._models().items():
            drafts = {pool: change(Pool(Role.DRAFT, name, pool, draft)) for pool, draft in model.drafts.items()}
            models[name] = ModelConfig(change(Pool(Role.TARGET, name, TARGET_POOL, model.target)), drafts)
        if self.models:
            return replace(self, models=models)
        return replace(self, target=models[""].target, draft=models[""].drafts[DEFAULT_POOL])

    def _models(self) -> Mapping[str, ModelConfig]:
        return self.models or {"": ModelConfig(self.target, {DEFAULT_POOL: self.draft})}

    def to_yaml(self) -> str:
        """As a configuration file."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


def min_replicas_of(pool: TargetConfig | DraftConfig | RouterConfig) -> int:
    """How many replicas a pool begins with, and always has."""
    return pool.min_replicas if pool.max_replicas else max_replicas_of(pool)


def max_replicas_of(pool: TargetConfig | DraftConfig | RouterConfig) -> int:
    """How many replicas a pool may come to have; 0: there is no such pool. One for `auto`; see `cluster.placement`."""
    standby = pool.standby if isinstance(pool, TargetConfig) else 0
    return pool.max_replicas or (1 if pool.replicas == AUTO else pool.replicas) + standby


SECTIONS: Mapping[str, type[Any]] = {
    entry.name: type(entry.default) for entry in fields(Config) if is_dataclass(entry.default)
}
SETTINGS: Mapping[str, SettingSpec] = settings_of(Config) | {
    f"{section}.{name}": spec for section, kind in SECTIONS.items() for name, spec in settings_of(kind).items()
}
"""Every setting by its dotted path; those of ``target`` and ``draft`` also describe the pools of ``models``."""
_READER = ConfigReader(SETTINGS, tuple(SECTIONS))


def load(path: Path | None = None, overrides: Iterable[Override] = ()) -> Config:
    """The configuration from a file (if any) with flags over it. Raises :class:`ConfigError`."""
    document = {} if path is None else document_in(path)
    return from_mapping(document, path or "", path.parent if path else Path(), overrides)


def from_mapping(
    document: Mapping[Any, object], where: object, base: Path = Path(), overrides: Iterable[Override] = ()
) -> Config:
    """What a file's mapping amounts to. ``where`` is for messages, ``base`` for relative paths. Raises ConfigError."""
    given, pools = _READER.read(where, document, base, overrides)
    sections = {name: kind(**given[name,]) for name, kind in SECTIONS.items()}
    models = {name: _model(where, name, pools, sections, given) for _, name, part, *_ in pools if part == "target"}
    if not models:  # else each pool takes the section as it is given, and what follows from its own target
        _check_head_of(sections["target"], where, "target")
        sections["draft"] = sections["draft"].beside(sections["target"]).placed(where, "draft")
    if models and (named := sections["router"].model_name):
        raise ConfigError(
            f"{where}: router.model_name is {named!r}; leave it empty, the keys of {MODELS} are the names"
        )
    shortest, longest = sections["speculation"].lookup_min, sections["speculation"].lookup_max
    if shortest > longest:
        bound = f"it must be at most speculation.lookup_max ({longest})"
        raise ConfigError(f"{where or 'settings'}: speculation.lookup_min is {shortest}; {bound}")
    return Config(**sections, models=models, **given[()])


def _model(
    where: object, name: str, pools: Iterable[SettingPath], sections: Mapping[str, Any], given: Sections
) -> ModelConfig:
    """A model of ``models``: what is said of its pools, over the sections that hold the defaults."""
    target = replace(sections["target"], **{"name": name} | given[MODELS, name, "target"])
    if target.name != name:
        raise ConfigError(f"{where}: models.{name}.target.name is {target.name!r}; the key {name!r} is the name")
    if "eagle_at" in given[MODELS, name, "target"]:
        _check_head_of(target, where, f"models.{name}.target")
    elif not target.eagle:  # what the section says of heads is nothing of a model without one
        target = replace(target, eagle_at=AT_TARGET)
    own = [path for path in pools if path[1:-1] == (name, "drafts")]
    drafts = {path[-1]: replace(sections["draft"], **given[path]) for path in own}
    shared = sum(draft.placement == SHARED for draft in drafts.values())
    if shared > 1:
        raise ConfigError(f"{where}: models.{name} has {shared} draft pools with placement shared; a target has one")
    above = f"models.{name}.drafts"
    placed = {pool: draft.beside(target).placed(where, f"{above}.{pool}") for pool, draft in drafts.items()}
    return ModelConfig(target, placed)


def _check_head_of(target: TargetConfig, where: object, path: str) -> None:
    if target.eagle_at == AT_DRAFTER and not target.eagle:
        raise ConfigError(
            f"{where or 'settings'}: {path}.eagle_at is {AT_DRAFTER}, but there is no head; give its folder in "
            f"{path}.eagle (--draft-eagle), or leave it out"
        )
