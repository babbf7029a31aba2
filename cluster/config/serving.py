"""Settings of one part, from the configuration: what a worker or a router is started with, whoever starts it.

Also whether a draft model has the tokenizer of its target, and what its workers are told if it has not: by the two
``tokenizer.json``, so of models that are folders here. What workers have in their hands when they start decides: one
that is told of a tokenizer that is its own translates nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.config import Config
from cluster.config.environment import expanded, otlp_endpoint
from cluster.config.pools import AT_DRAFTER, SHARED, DraftConfig, Pool, TargetConfig, chosen_max_threads, chosen_threads
from cluster.config.security import api_keys, identity
from cluster.config.settings import AUTO, CheckError
from speculation.events import Role
from speculation.messages import AllBut, Progress, Schedule, Source, SourceName, Sources, Speculation
from speculation.messages import Rule as AcceptanceRule

if TYPE_CHECKING:  # they bring torch
    from draft_service.service import DraftSettings
    from engine.leader import Ranks
    from engine.settings import EngineSettings
    from router.http.admission import AdmissionSettings
    from router.service import RouterSettings
    from target_service.service import MakeInTurn, TargetSettings
    from transport.tracing import TraceSettings
    from transport.worker import Door, Worker

SHARED_GPU = 0.15
"""What part of a GPU the weights and the cache of a draft model in a target's process may fill, unless its ``gpus`` say
so; the target has what is left."""
TOKENS_OF_CHOICE = 4096
"""That one API key has at once for each choice it may have: few of a long context, or many of a short one."""
READY_SECONDS = 25.0
"""How long a router waits for its first target worker before it serves HTTP without, and says why."""


def target_settings(config: Config) -> TargetSettings:
    """A target worker."""
    from speculation.sources.suffix import SuffixScope, SuffixSettings
    from target_service.scheduler import Budget
    from target_service.service import TargetSettings
    from target_service.verify_loop import TargetLimits

    target, drafting = config.target, config.speculation
    seconds, alone = target.step_ms / 1000, target.prompt_tokens
    budget = Budget(target.step_tokens, drafting.max_draft, seconds=seconds, alone=alone)
    limits = TargetLimits(
        running=target.max_running,
        waiting=target.max_waiting,
        budget=budget,
        lookup=(drafting.lookup_min, drafting.lookup_max),
        suffix=SuffixSettings(target.suffix_tokens, SuffixScope(target.suffix_scope)),
    )
    settings = _engine(target), limits, target.record, target.step_timeout, trace_settings(config)
    return TargetSettings(*settings, _listed(target.sources), config.validate)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def shared_drafter(config: Config) -> MakeInTurn | None:
    """What loads the draft model in a target's process, if it has one. ``config``: what the target is started with."""
    if config.draft.placement != SHARED or not config.drafts_with_models:
        return None
    from draft_service.service import build_in_turn

    # One process has one number of threads.
    of_gpu = config.draft.gpus or SHARED_GPU * _gpu_share(config.target)
    threads, max_threads = chosen_threads(config.target), chosen_max_threads(config.target)
    draft = replace(config.draft, threads=threads, max_threads=max_threads)
    settings = draft_settings(replace(config, draft=draft))
    settings = replace(settings, engine=replace(settings.engine, gpu_share=min(of_gpu, 1.0)))
    return lambda progress: build_in_turn(settings, progress)


def draft_settings(config: Config) -> DraftSettings:
    """A draft worker."""
    from draft_service.lookahead import LookaheadLimits
    from draft_service.service import DraftSettings
    from speculation.drafting.draft_session import DraftLimits

    draft, drafting = config.draft, config.speculation
    nodes = max(drafting.lead, DraftLimits().nodes)
    limits = DraftLimits(
        drafting.lead, nodes=nodes, children=drafting.children, width=drafting.width, bytes_a_token=drafting.push_bytes
    )
    return DraftSettings(
        engine=_engine(draft),
        limits=LookaheadLimits(sessions=draft.max_sessions, draft=limits),
        record=draft.record,
        step_timeout=draft.step_timeout,
        trace=trace_settings(config),
        target_tokenizer=draft.target_tokenizer,
        lookup=draft.second_level == "lookup",
        assistant=draft.assistant,
        eagle_format=draft.eagle_format,
        validate=config.validate,
    )


async def start_worker(
    config: Config, role: Role, door: Door, ranks: Ranks | None, progress: Progress | None = None
) -> Worker:
    """Load the model of a worker with this configuration, saying so at ``door``, and be it there.

    Raises as :func:`target_service.service.start_target` and :func:`draft_service.service.start_draft` do.
    """
    if role is Role.TARGET:
        from target_service.service import start_target

        return await start_target(target_settings(config), door, progress, ranks, shared_drafter(config))
    from draft_service.service import start_draft

    return await start_draft(draft_settings(config), door, progress, ranks)


def router_settings(config: Config, *, targets: tuple[str, ...] = (), drafts: tuple[str, ...] = ()) -> RouterSettings:
    """A router for workers at these addresses. Raises :class:`cluster.config.security.SecurityError`."""
    from router.dispatch import DispatchLimits
    from router.http.api import ApiSettings
    from router.http.prompt_recorder import RecordSettings
    from router.service import RouterSettings
    from router.sessions.choice import StandbyTargets

    folder, limit = config.router.record_prompts, config.router.record_megabytes << 20
    standby = {
        pool.model: StandbyTargets(pool.settings.replicas, pool.settings.standby)
        for pool in config.pools()
        if isinstance(pool.settings, TargetConfig) and pool.settings.standby
    }
    several = tuple(config.models) if len(config.models) > 1 else ()  # the only one is known by its targets
    return RouterSettings(
        targets=targets,
        drafts=drafts,
        host=config.router.host,
        port=config.router.port,
        tokenizer=config.router.tokenizer,
        models=sorted({pool.settings.model for pool in config.pools() if pool.role is Role.TARGET}),
        ready_timeout=READY_SECONDS,
        drain_timeout=config.router.drain_timeout,
        api=ApiSettings(
            model_name=config.router.model_name or None,
            speculation=speculation(config),
            api_keys=api_keys(config),
            admission=_admission(config),
        ),
        limits=DispatchLimits(sessions=config.router.max_sessions, standby=standby, models=several),
        identity=identity(config, "router"),
        trace=trace_settings(config),
        record=RecordSettings(Path(folder), limit) if folder else None,
    )


def trace_settings(config: Config) -> TraceSettings | None:
    """Where spans go; None: tracing is off."""
    from transport.tracing import TraceSettings

    chosen = config.tracing
    on = chosen.enabled or chosen.otlp_endpoint
    if not on:
        return None
    endpoint = chosen.otlp_endpoint or otlp_endpoint()
    return TraceSettings(endpoint, sample=chosen.sample) if endpoint else TraceSettings(sample=chosen.sample)


def _admission(config: Config) -> AdmissionSettings:
    """The allowance is that of one API key, which never takes all of a router unless told so, or of all callers."""
    from router.http.admission import AdmissionSettings
    from router.limits import Allowance

    chosen, keys = config.admission, bool(config.security.api_keys)
    sessions = max(config.router.max_sessions // 2, 1) if keys else 0
    sessions = chosen.concurrent_sessions if isinstance(chosen.concurrent_sessions, int) else sessions
    tokens = TOKENS_OF_CHOICE * sessions if keys else 0
    tokens = chosen.concurrent_tokens if isinstance(chosen.concurrent_tokens, int) else tokens
    rates = chosen.requests_per_minute, chosen.tokens_per_minute
    return AdmissionSettings(
        allowance=Allowance(*rates, chosen.concurrent_requests, sessions, tokens),
        timeout=chosen.request_timeout,
        max_timeout=chosen.max_request_timeout,
        target_timeout=chosen.target_timeout,
        cors_origins=_listed(chosen.cors_origins),
    )


def speculation(config: Config) -> Speculation:
    """What requests get that do not say otherwise. Where it is off, one that asks for it gets drafters, if any."""
    chosen = config.speculation
    unwanted: set[SourceName] = set() if chosen.lookup else {Source.LOOKUP}
    unwanted |= set() if chosen.drafters else {Source.DRAFT}
    sources: Sources = AllBut(frozenset(unwanted)) if chosen.enabled else frozenset({Source.DRAFT})
    rule, schedule = AcceptanceRule(chosen.rule), Schedule(chosen.schedule)
    return Speculation(
        enabled=chosen.enabled, max_depth=chosen.max_depth, rule=rule, schedule=schedule, sources=sources
    )


def _engine(worker: TargetConfig | DraftConfig) -> EngineSettings:
    """Where GPUs are reserved for it, a worker that may choose its device must have one: a CPU would be too slow."""
    from engine.settings import EngineSettings

    return EngineSettings(
        model=worker.model,
        dtype=worker.dtype,
        device="cuda" if worker.device == AUTO and worker.gpus else worker.device,
        quantization=worker.quantization,
        plain_cuda=worker.plain_cuda,
        threads=chosen_threads(worker),
        max_threads=chosen_max_threads(worker),
        cache_tokens=worker.cache_tokens,
        gpu_share=_gpu_share(worker),
        eagle=worker.eagle,
        eagle_away=isinstance(worker, TargetConfig) and worker.eagle_at == AT_DRAFTER,
        tensor_parallel_size=worker.tensor_parallel_size,
        join_timeout=worker.join_timeout,
        load_timeout=worker.load_timeout,
        name=worker.name,
    )


def _gpu_share(worker: TargetConfig | DraftConfig) -> float:
    return worker.gpus if 0 < worker.gpus < 1 else 1.0


def worker_config(config: Config, pool: Pool) -> Config:
    """What a worker of the pool is started with; one that translates is told into which tokens. Raises CheckError."""
    chosen = config.of_worker(pool)
    if not isinstance(pool.settings, DraftConfig) or chosen.draft.target_tokenizer:
        return chosen
    if not difference(chosen.target.model, chosen.draft.model):
        return chosen
    return replace(chosen, draft=replace(chosen.draft, target_tokenizer=chosen.target.model))


def may_draft_in_turn(config: Config) -> bool:
    """Whether there is one draft worker for one target that may as well work in its process.

    Nobody has said where it is to work, both are folders here with the same tokenizer, and nothing is wanted of the
    draft model that takes a draft worker.
    """
    draft, speculation = config.draft, config.speculation
    if config.models or config.autoscales or config.target.replicas != 1 or config.drafts != 1:
        return False
    wants_worker = draft.assistant or draft.target_tokenizer or draft.tensor_parallel_size > 1
    if draft.placement != AUTO or wants_worker or Schedule(speculation.schedule) is not Schedule.TRIE:
        return False
    theirs, ours = _vocabulary(config.target.model), _vocabulary(draft.model)
    return theirs is not None and theirs == ours


def difference(target: str, draft: str) -> str:
    """In words, how the vocabularies of two model folders differ; empty if they do not, or one is no folder here.

    They must number the same tokens the same way; padding of the embeddings does not matter. Raises CheckError.
    """
    if target == draft:
        return ""
    theirs, ours = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None or ours == theirs:
        return ""
    different = sum(ours.get(token) != theirs.get(token) for token in ours.keys() | theirs.keys())
    return f"{len(theirs)} and {len(ours)} tokens, {different} ids mean something else"


def _vocabulary(model: str) -> dict[int, str] | None:
    """Token id to token, or None where there is no tokenizer.json to tell."""
    path = expanded(model) / "tokenizer.json"
    if not path.is_file():
        return None
    import tokenizers  # 0.1 s that `paceline --help` need not spend

    try:
        known = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckError(f"{path}: cannot read the tokenizer: {' '.join(str(error).split())}") from error
    return {number: token for token, number in known.items()}
