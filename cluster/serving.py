"""Settings of one part, from the configuration: what a worker or a router is started with, whoever starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Config, DraftConfig, TargetConfig

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

    budget = Budget(drafts_per_session=config.speculation.max_draft)
    limits = TargetLimits(running=config.target.max_running, waiting=config.target.max_waiting, budget=budget)
    return TargetSettings(_engine(config.target), limits)


def draft_settings(config: Config) -> DraftSettings:
    """A draft worker."""
    from draft_service.lookahead import LookaheadLimits
    from draft_service.service import DraftSettings
    from speculation.draft_session import DraftLimits

    lead = config.speculation.lead
    draft = DraftLimits(lead=lead, nodes=max(lead, DraftLimits().nodes))
    return DraftSettings(_engine(config.draft), LookaheadLimits(sessions=config.draft.max_sessions, draft=draft))


def router_settings(config: Config, *, targets: tuple[str, ...] = (), drafts: tuple[str, ...] = ()) -> RouterSettings:
    """A router for workers at these addresses."""
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
        api=ApiSettings(model_name=config.router.model_name or None),
        limits=DispatchLimits(sessions=config.router.max_sessions),
    )


def _engine(worker: TargetConfig | DraftConfig) -> EngineSettings:
    from engine.build import EngineSettings

    return EngineSettings(
        model=worker.model,
        dtype=worker.dtype,
        device=worker.device,
        threads=worker.threads,
        cache_tokens=worker.cache_tokens,
        name=worker.name,
    )
