"""Pools of workers, and the settings of the workers in them.

They are the sections ``target`` and ``draft`` of :mod:`cluster.config.config`, and what ``models`` says of each pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cluster.config.environment import BUNDLED
from cluster.config.settings import AUTO, DEFAULT_POOL, ConfigError, in_file_names, path_setting, seconds, setting
from speculation.events import Role

NO_QUANTIZATION = "none"
QUANTIZATIONS = (NO_QUANTIZATION, "int8", "int8-dynamic", "fp8")
OWN, SHARED, CPU = "own", "shared", "cpu"
"""Where drafting takes place: on draft workers, in the process of the target, or on draft workers' CPUs."""
AT_TARGET, AT_DRAFTER = "target", "drafter"
"""Where an EAGLE-3 head drafts."""
DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32", "float64", "fp64")
MTP = "mtp"
"""In place of the folder of a target's head: a layer of its own."""
LOADED = ("model", "eagle", "assistant", "target_tokenizer")
"""Settings of a worker that name what it loads."""
TARGET_POOL = "target"
_ENTRY = r"\w[\w.]*(:\w+)?"
"""Of a draft source."""
KINDS = {Role.TARGET: "TargetWorker", Role.DRAFT: "DraftWorker"}
"""What names of deployments in Ray Serve begin with."""


def node_labels() -> Any:
    """The setting that keeps processes to some Ray nodes."""
    pair = r"[A-Za-z0-9][\w./-]*=[\w.-]*"
    about = "only on Ray nodes with these labels, besides that of gpu_class: KEY=VALUE, KEY=VALUE"
    form = "labels such as paceline.io/role=router, zone=a"
    return setting("", about, pattern=rf"({pair}(, *{pair})*)?", form=form)


def _threads(about: str) -> Any:
    return setting(AUTO, about, ge=1, le=1024, auto=True)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What all workers have in common."""

    model: str = path_setting("model folder, or a hub id such as Org/Name")
    name: str = setting("", "name in logs (default: last part of the model path)")
    replicas: int = setting(1, "number of workers", ge=1, le=1024)
    min_replicas: int = setting(1, "never fewer, where their number follows the load", ge=1, le=1024)
    max_replicas: int = setting(0, "never more; their number follows the load (0: it stays as it is)", ge=0, le=1024)
    dtype: str = setting("auto", "number format: bf16 where the hardware computes it, else fp32", choices=DTYPES)
    device: str = setting("auto", "where to compute: auto, cpu, cuda, cuda:1 ...")
    quantization: str = setting(
        NO_QUANTIZATION,
        "smaller weights: none, int8, int8-dynamic (activations too, on a CPU) or fp8 (on a GPU that has it)",
        choices=QUANTIZATIONS,
    )
    plain_cuda: bool = setting(
        False, "no kernels of our own and no CUDA graphs, on a CPU no C++: slower, to rule them out"
    )
    tensor_parallel_size: int = setting(
        1, "ranks, each with its own GPU where there are GPUs, that compute every step together", ge=1, le=64
    )
    join_timeout: float = setting(120.0, "seconds in which all ranks must have started", ge=0.1, le=86400)
    load_timeout: float = setting(
        7200.0,
        "seconds in which the model must be loaded, once its ranks have started; else the worker ends itself",
        ge=1,
        le=604800,
    )
    threads: int | Literal["auto"] = _threads(
        "CPU threads of a step (default: auto: `paceline up` divides the cores of one machine, else 1)"
    )
    max_threads: int | Literal["auto"] = _threads(
        "CPU threads of a step of many tokens, where that is measured to be faster (default: auto: all cores that "
        "`paceline up` has for one target, else as many as of others)"
    )
    cache_tokens: int = setting(0, "room of the cache in tokens (0: what the free memory allows)", ge=0)
    step_timeout: float = seconds(
        60.0,
        "seconds after which a step counts as stuck, and the worker ends itself to be replaced (0: never); a target's "
        "also at twenty times the longest that its steps lately took, or the longest and 30 s, whichever is less, ten "
        "seconds at least",
    )
    record: str = setting("", "file to record every step in, as JSON lines, for benchmarks and the simulator")
    gpus: float = setting(
        0.0,
        "GPUs of a rank of a worker: what Ray reserves, and below 1 what part of a GPU's memory it may fill; above 0, "
        "device auto is cuda",
        ge=0,
        le=64,
    )
    gpu_class: str = setting("", "only on Ray nodes with this label paceline.io/gpu-class")
    labels: str = node_labels()


@dataclass(frozen=True, slots=True)
class TargetConfig(WorkerConfig):
    """Target workers: they run the served model and decide every token."""

    model: str = path_setting(
        "model folder, or a hub id such as Org/Name", default=str(BUNDLED / "target"), called="name"
    )
    name: str = setting("", "name the model is served under (default: last part of the model path)")
    replicas: int = setting(1, "number of target workers", ge=1, le=1024)
    standby: int = setting(
        0, "targets besides, loaded and idle: they take sessions only while others are lost", ge=0, le=64
    )
    eagle: str = path_setting(
        "folder of an EAGLE-3 head for this model, or mtp: its own layer; it then drafts by itself too"
    )
    eagle_at: str = setting(
        AT_TARGET,
        "where that head drafts: target (in its process) or drafter (on draft workers, to which the target sends what "
        "the head reads of it)",
        choices=(AT_TARGET, AT_DRAFTER),
    )
    max_running: int = setting(64, "sessions computed in one step", ge=1, le=65536)
    max_waiting: int = setting(1024, "sessions queued behind them; more are refused", ge=0, le=1 << 20)
    step_tokens: int = setting(320, "most tokens computed in a step of running text", ge=2, le=1 << 20)
    prompt_tokens: int = setting(
        1024, "most tokens of prompts in a step in which no text runs, if more than step_tokens", ge=0, le=1 << 20
    )
    step_ms: float = setting(
        50.0, "milliseconds that prompts may stretch a step of running text to; twice its time is always allowed", ge=0
    )
    sources: str = setting(
        "",
        "draft sources of your own, as Python modules that register them: MODULE or MODULE:NAME, separated by commas",
        pattern=rf"({_ENTRY}(, *{_ENTRY})*)?",
        form="modules such as my_drafts or my_drafts:Again",
    )
    suffix_tokens: int = setting(
        65536, "tokens of earlier outputs kept to draft from, some 350 bytes each (0: none)", ge=0, le=1 << 22
    )
    suffix_scope: str = setting(
        "key",
        "whose earlier outputs a request drafts from: those of its API key, those of all, or none (off)",
        choices=("key", "all", "off"),
    )
    gpu_class: str = setting("", "only on Ray nodes with this label paceline.io/gpu-class (production: large)")


@dataclass(frozen=True, slots=True)
class DraftConfig(WorkerConfig):
    """Draft workers: they run a small model ahead of the target. Without any, decoding is plain."""

    model: str = path_setting(
        "model folder, or a hub id; best with the target's tokenizer", default=str(BUNDLED / "draft")
    )
    placement: str = setting(
        AUTO,
        "where to draft: own (workers of their own, ahead of the target), shared (in each target's process, in turn "
        "with it), cpu (workers of their own, on the CPU) or auto (own, but shared where `paceline up` finds that "
        "faster on one machine)",
        choices=(AUTO, OWN, SHARED, CPU),
    )
    target_tokenizer: str = path_setting(
        "folder or hub id of the target's tokenizer, if it is another (default: found out where both are folders)"
    )
    replicas: int = setting(1, "number of draft workers", ge=0, le=1024)
    min_replicas: int = setting(0, "never fewer, where their number follows the load", ge=0, le=1024)
    second_level: str = setting(
        "lookup",
        "guesses that a forward of the draft model verifies, to draft several levels at once: lookup, or none",
        choices=("lookup", "none"),
    )
    assistant: str = path_setting(
        "model folder, or a hub id, of a still smaller model that guesses so; same tokenizer as the draft model"
    )
    eagle: str = path_setting(
        "folder of an EAGLE-3 head to draft with instead of a model; `model` is then the target's, of which only "
        "tokenizer, config.json and embeddings are read"
    )
    eagle_format: str = setting(
        "bf16", "how the target sends what the head reads: bf16, or fp8 in half the bytes", choices=("bf16", "fp8")
    )
    max_sessions: int = setting(256, "sessions one worker drafts for; more are refused", ge=1, le=65536)
    gpu_class: str = setting("", "only on Ray nodes with this label paceline.io/gpu-class (production: small)")

    def beside(self, target: TargetConfig) -> DraftConfig:
        """The same for this target: with its EAGLE head instead of a model, where that is to draft away from it."""
        if self.eagle or not target.eagle or target.eagle_at != AT_DRAFTER:
            return self
        placement = OWN if self.placement == AUTO else self.placement
        return replace(self, model=target.model, eagle=target.eagle, placement=placement)

    def placed(self, where: object, path: str) -> DraftConfig:
        """The same with what follows from its placement. Raises ConfigError where that contradicts the rest."""
        at = f"{where or 'settings'}: {path}"
        if self.placement == CPU:
            if self.device not in ("auto", "cpu"):
                raise ConfigError(f"{at}.placement is cpu, but its device is {self.device}; leave one of them out")
            return replace(self, device="cpu")
        if self.placement == SHARED:
            for name in ("target_tokenizer", "assistant", "eagle"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{at}.placement is shared, which {path}.{name} cannot be used with; leave it out, or set "
                        f"{path}.placement to own"
                    )
            if self.tensor_parallel_size > 1:
                raise ConfigError(
                    f"{at}.placement is shared, so it computes on one rank, but {path}.tensor_parallel_size is "
                    f"{self.tensor_parallel_size}; leave it out, or set {path}.placement to own"
                )
        return self


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
        within = self.name if self.role is Role.TARGET else f"drafts.{self.name}"
        return f"models.{self.model}.{within}" if self.model else self.role.value

    @property
    def deployment(self) -> str:
        """Its name in Ray Serve: ``DraftWorker``, ``DraftWorker-llama.small``."""
        model = f"-{in_file_names(self.model)}" if self.model else ""
        name = f".{self.name}" if self.model and self.role is Role.DRAFT else ""
        return f"{KINDS[self.role]}{model}{name}"

    def __str__(self) -> str:
        """For people and process titles: ``draft``, ``draft small of llama``."""
        name = f" {self.name}" if self.role is Role.DRAFT else ""
        return f"{self.role}{name} of {self.model}" if self.model else self.role.value


def role_of(deployment: str) -> Role | None:
    """Whose workers a deployment in Ray Serve holds, by its name; None: nobody's, as that of the routers."""
    return next((role for role, kind in KINDS.items() if deployment.partition("-")[0] == kind), None)


def chosen_threads(worker: TargetConfig | DraftConfig) -> int:
    """How many threads a worker computes with; one where nobody chose for it."""
    return worker.threads if isinstance(worker.threads, int) else 1


def chosen_max_threads(worker: TargetConfig | DraftConfig) -> int:
    """How many threads it may compute steps of many tokens with."""
    return worker.max_threads if isinstance(worker.max_threads, int) else chosen_threads(worker)
