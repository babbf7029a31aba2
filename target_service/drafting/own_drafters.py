"""All that drafts in the process of a target."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.head_engine import HeadEngine
from draft_service.head_in_turn import HeadInTurn
from draft_service.in_turn import InTurn
from engine.eagle.cached import CachedHead
from engine.interface import StepEngine
from speculation.messages import Welcome
from speculation.verifying.planner import Planner
from target_service.drafting.draft_model import DraftModel
from target_service.drafting.eagle import EagleDrafter
from target_service.drafting.features import FeatureSender
from target_service.drafting.state_reader import StateReader
from target_service.sequence import TargetSequence
from target_service.step_account import TargetCounters


def own_drafters(
    engine: StepEngine,
    welcome: Welcome,
    drafter: InTurn | None,
    planner: Planner,
    counters: TargetCounters,
    adaptive: bool,
) -> list[StateReader]:
    """What the engine brings, and a draft model, whose word comes last. ``adaptive``: draft only where that pays."""
    readers: list[StateReader] = []
    head = engine.eagle
    if head is not None and head.fingerprint:
        readers.append(FeatureSender(head, counters))
    elif head is not None:
        drafting = HeadEngine(CachedHead(head, engine.cache.capacity, engine.model.context), engine.model)
        readers.append(EagleDrafter(head, HeadInTurn(drafting, welcome), planner, counters, adaptive=adaptive))
    return readers if drafter is None else [*readers, DraftModel(drafter, planner, counters, adaptive=adaptive)]


def draft_all(
    drafters: Sequence[StateReader],
    running: Sequence[TargetSequence],
    part: Sequence[TargetSequence],
    wanting: Sequence[TargetSequence],
) -> bool:
    """Have each draft (:meth:`.StateReader.draft`); False: one needs a step without drafts, of which only it learns."""
    is_plain = False
    for number, drafter in enumerate(drafters):
        if not drafter.draft(running, part, () if is_plain else wanting):
            is_plain = True
            for before in drafters[:number]:
                before.unjudged()
    return not is_plain
