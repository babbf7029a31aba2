"""What an answer says of speculation, in JSON; docs/api.md explains it ("What was drafted")."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from router.answers.choice_reader import TextChunk
from router.generation import Passed
from router.text.tokenizer import Tokenizer
from speculation.events import Origin, Own
from speculation.messages import Source, SourceName

Json = dict[str, Any]
DIGITS = 6
"""Of seconds: microseconds are what workers tell."""


def commit_body(chunk: TextChunk, tokenizer: Tokenizer) -> Json:
    """What a chunk says of its commit."""
    body: Json = {
        "accepted": chunk.accepted,
        "offered": chunk.offered,
        "tokens": chunk.tokens,
        "position": chunk.position,
        "pieces": [
            {"text": piece.text, "drafted": piece.drafted, "source": str(piece.origin)} for piece in chunk.pieces
        ],
    }
    if chunk.details is not None:
        end = chunk.details.at
        body["step"] = {
            "start": round(end - chunk.took, DIGITS),
            "end": round(end, DIGITS),
            "waited": round(chunk.waited, DIGITS),
        }
        body["proposals"] = [_proposal(passed, tokenizer) for passed in chunk.details.passed]
    return body


def _proposal(passed: Passed, tokenizer: Tokenizer) -> Json:
    proposal = passed.proposal
    return {
        "source": proposal.source.value,
        "start": round(passed.at - proposal.took_us / 1e6, DIGITS),
        "end": round(passed.at, DIGITS),
        "anchor": proposal.anchor_position,
        "after": passed.after,
        "tokens": [
            {"id": token, "text": tokenizer.decode([token]), "number": number}
            for token, number in zip(proposal.tokens, passed.numbers, strict=True)
        ],
        "parents": list(proposal.parents),
        "confidence": [round(value, 3) for value in proposal.confidence],
    }


@dataclass(slots=True)
class Statistics:
    """What became of drafts in one request: counts over all chunks of all its choices."""

    steps: int = 0
    drafts: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    came: Counter[Origin] = field(default_factory=Counter)
    refused: Counter[SourceName] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    """By how many drafts were kept: how many of the steps that verified some."""
    reopened: dict[int, int] = field(default_factory=dict)
    targets: dict[int, str] = field(default_factory=dict)
    drafters: dict[int, str] = field(default_factory=dict)
    """By choice: where it was last."""

    def add(self, chunk: TextChunk) -> None:
        """Count a chunk."""
        if not chunk.tokens:
            return
        self.steps += 1
        self.came.update(chunk.origins)
        self.waits += chunk.waited > 0
        self.wait_seconds += chunk.waited
        if chunk.refused:
            self.refused.update(chunk.refused)
        if chunk.offered:
            self.drafts += 1
            self.kept[chunk.accepted] += 1
        if chunk.details is not None:
            self.reopened[chunk.index] = chunk.details.reopened
            self.targets[chunk.index] = chunk.details.target
            if chunk.details.draft is not None:
                self.drafters[chunk.index] = chunk.details.draft

    @property
    def accepted(self) -> Counter[SourceName]:
        """Drafts that were kept, by their source."""
        return Counter({origin: count for origin, count in self.came.items() if not isinstance(origin, Own)})

    def usage(self) -> Json:
        """``completion_tokens_details``: drafts of all sources, and, by OpenAI's names, those of the prediction."""
        accepted = self.accepted
        return {
            "accepted_draft_tokens": accepted.total(),
            "rejected_draft_tokens": self.refused.total(),
            "accepted_prediction_tokens": accepted[Source.PREDICTION],
            "rejected_prediction_tokens": self.refused[Source.PREDICTION],
        }

    def summary(self) -> Json:
        """All of it."""
        accepted = self.accepted
        drafted = accepted | self.refused
        seen = [*(source for source in Source if source in drafted), *sorted(drafted.keys() - set(Source))]
        return {
            "steps": self.steps,
            "waits": self.waits,
            "wait_seconds": round(self.wait_seconds, DIGITS),
            "by_source": {
                str(source): {
                    "accepted": accepted[source],
                    "offered": accepted[source] + self.refused[source],
                }
                for source in seen
            },
            "own": {own.value: self.came[own] for own in Own},
            "by_position": self._by_position(),
            "mean_acceptance_length": 1 + accepted.total() / self.drafts if self.drafts else None,
            "reopened": sum(self.reopened.values()),
            "target": sorted(set(self.targets.values())),
            "draft": sorted(set(self.drafters.values())),
        }

    def _by_position(self) -> list[float]:
        """Of the steps that verified drafts, the share that kept at least one, at least two, and so on."""
        longest = max(self.kept, default=0)
        return [
            round(sum(steps for kept, steps in self.kept.items() if kept >= place) / self.drafts, 4)
            for place in range(1, longest + 1)
        ]
