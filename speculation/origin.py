"""Where committed tokens came from: a draft source, or the target itself, and then why.

recovered  a draft was offered at that place and refused
bonus      drafts were offered, and all along the path were kept
target     nothing was offered: plain decoding
"""

from __future__ import annotations

from enum import StrEnum

from speculation.events import StepMetadata
from speculation.messages import Source, SourceName


class Own(StrEnum):
    """Why a token is the target's own."""

    RECOVERED = "recovered"
    BONUS = "bonus"
    TARGET = "target"


Origin = SourceName | Own
"""No draft source is called like one of :class:`Own`."""


def origins(tokens: int, accepted: int, offered: int, metadata: StepMetadata) -> tuple[Origin, ...]:
    """Of each of ``tokens`` committed at once, the first ``accepted`` of them out of ``offered`` drafts."""
    drafted: tuple[Origin, ...] = metadata.sources or (Source.DRAFT,) * accepted
    own = Own.RECOVERED if metadata.recovered else Own.BONUS if offered else Own.TARGET
    return drafted + (own,) * (tokens - accepted)


def refused(accepted: int, offered: int, metadata: StepMetadata) -> tuple[SourceName, ...]:
    """Where the drafts came from that were offered and not kept."""
    return metadata.refused or (Source.DRAFT,) * (offered - accepted)


def from_draft_models(accepted: int, offered: int, metadata: StepMetadata) -> tuple[int, int]:
    """Of the drafts accepted and of those offered, how many a draft model had made."""
    kept = metadata.sources.count(Source.DRAFT) if metadata.sources else accepted
    return kept, kept + (metadata.refused.count(Source.DRAFT) if metadata.refused else offered - accepted)
