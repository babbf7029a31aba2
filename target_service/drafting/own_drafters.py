"""What drafts in the target's own process, just before a step: Medusa heads, a draft model in turn, or neither."""

from __future__ import annotations

from collections.abc import Sequence

from engine.interface import Chunk, StepEngine
from speculation.drafting.medusa import MedusaDrafts
from speculation.messages import Open, Verification
from speculation.trie import VerificationTree
from target_service.batch_entry import BatchEntry
from target_service.drafting.draft_model import DraftModel
from target_service.drafting.medusa import HeadDrafter
from target_service.sequence import TargetSequence
from target_service.verdicts import Verdict


class OwnDrafters:
    """All that drafts here, for all sessions."""

    def __init__(self, heads: HeadDrafter | None, model: DraftModel | None) -> None:
        """None of either: there is none."""
        self._heads, self._model = heads, model

    def drafts_for(self, opened: Open) -> MedusaDrafts | None:
        """The draft source that the heads have for a session that is opened, if any."""
        return None if self._heads is None else self._heads.drafts_for(opened)

    def draft(
        self, running: Sequence[TargetSequence], entries: Sequence[BatchEntry], drawing: Sequence[BatchEntry]
    ) -> None:
        """Propose for those of ``drawing`` that have room for drafts; ``entries``: of the whole step."""
        wanting = [entry.sequence for entry in drawing if entry.drafts]
        if self._heads is not None:
            self._heads.draft(wanting)
        if self._model is not None and not self._model.draft(running, [entry.sequence for entry in entries], wanting):
            for entry in drawing:
                entry.drafts = 0

    def note(
        self,
        engine: StepEngine,
        chunks: Sequence[Chunk],
        entries: Sequence[BatchEntry],
        decided: Sequence[Verdict],
    ) -> None:
        """The engine has computed a step: keep the hidden states that the heads read next."""
        if self._heads is not None:
            self._heads.note(engine.hidden, chunks, entries, decided)

    def verified(self, sequence: TargetSequence, tree: VerificationTree, verification: Verification) -> None:
        """A step of a session is over, in which the tree was verified."""
        if self._heads is not None:
            self._heads.settled(sequence, tree)
        if self._model is not None:
            self._model.verified(sequence, verification)

    def drop(self, sequence: TargetSequence) -> None:
        """A session has ended."""
        if self._model is not None:
            self._model.drop(sequence)

    def validate(self) -> None:
        """See :meth:`transport.worker.Machine.validate`."""
        if self._model is not None:
            self._model.validate()
