"""Settings of one part, from the configuration: what a worker or a router is started with, whoever starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Config, DraftConfig, TargetConfig, chosen_threads
from cluster.security import api_keys, identity
from speculation.messages import Rule as AcceptanceRule
from speculation.messages import Schedule, Source, Speculation

if TYPE_CHECKING:  # they bring torch
    from draft_service.service import DraftSettings
    from engine.build import EngineSettings
    from router.service import RouterSettings
    from target_service.service import TargetSettings

READY_SECONDS = 25.0
"""How long a router waits for its first target worker before it gives up with a reason."""


def target_settings(config: Config) -> TargetSettings:
    """A target worker."""
    from target_service.scheduler import Budget
    from target_service.service import TargetSettings
    from target_service.verify_loop import TargetLimits

    budget = Budget(
        tokens=config.target.step_tokens,
        drafts_per_session=config.speculation.max_draft,
        seconds=config.target.step_ms / 1000,
    )
    limits = TargetLimits(running=config.target.max_running, waiting=config.target.max_waiting, budget=budget)
    return TargetSettings(_engine(config.target), limits, config.target.record, config.target.step_timeout)


def draft_settings(config: Config) -> DraftSettings:
    """A draft worker."""
    from draft_service.lookahead import LookaheadLimits
    from draft_service.service import DraftSettings
    from speculation.draft_session import DraftLimits

    speculation = config.speculation
    draft = DraftLimits(
        lead=speculation.lead,
        nodes=max(speculation.lead, DraftLimits().nodes),
        children=speculation.children,
        width=speculation.width,
        bytes_a_token=speculation.push_bytes,
    )
    limits = LookaheadLimits(sessions=config.draft.max_sessions, draft=draft)
    return DraftSettings(_engine(config.draft), limits, config.draft.record, config.draft.step_timeout)


def router_settings(config: Config, *, targets: tuple[str, ...] = (), drafts: tuple[str, ...] = ()) -> RouterSettings:
    """A router for workers at these addresses. Raises :class:`cluster.security.SecurityError`."""
    from router.api import ApiSettings
    from router.dispatch import DispatchLimits
    from router.service import RouterSettings

    return RouterSettings(
        targets=targets,
        drafts=drafts,
        host=config.router.host,
        port=config.router.port,
        tokenizer=config.router.tokenizer,
        ready_timeout=READY_SECONDS,
        drain_timeout=config.router.drain_timeout,
        api=ApiSettings(
            model_name=config.router.model_name or None,
            speculation=speculation(config),
            api_keys=api_keys(config),
        ),
        limits=DispatchLimits(sessions=config.router.max_sessions),
        identity=identity(config, "router"),
    )


def speculation(config: Config) -> Speculation:
    """What requests get that do not say otherwise."""
    chosen = config.speculation
    return Speculation(
        enabled=chosen.enabled,
        max_depth=chosen.max_depth,
        rule=AcceptanceRule(chosen.rule),
        schedule=Schedule(chosen.schedule),
        sources=frozenset(Source) if chosen.enabled and chosen.lookup else frozenset({Source.DRAFT}),
    )


def _engine(worker: TargetConfig | DraftConfig) -> EngineSettings:
    from engine.build import EngineSettings

    return EngineSettings(
        model=worker.model,
        dtype=worker.dtype,
        device=worker.device,
        quantization=worker.quantization,
        plain_cuda=worker.plain_cuda,
        threads=chosen_threads(worker),
        cache_tokens=worker.cache_tokens,
        tensor_parallel_size=worker.tensor_parallel_size,
        join_timeout=worker.join_timeout,
        name=worker.name,
    )
