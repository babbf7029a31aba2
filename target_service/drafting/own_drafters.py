"""What drafts in the target's own process, just before a step: by its hidden states, or a draft model in turn."""

from __future__ import annotations

from collections.abc import Sequence

from engine.eagle.cached import CachedHead
from engine.interface import Chunk, StepEngine
from speculation.drafting.heads import StateDrafts
from speculation.messages import Open, Subscribe, Verification
from speculation.trie import VerificationTree
from speculation.verifying.planner import Planner
from target_service.drafting.draft_model import Drafter, DraftModel
from target_service.drafting.eagle import EagleDrafter
from target_service.drafting.features import FeatureSender
from target_service.drafting.medusa import HeadDrafter
from target_service.drafting.state_reader import StateReader
from target_service.sequence import BatchEntry, TargetSequence
from target_service.step_account import TargetCounters
from target_service.verdicts import Verdict
from transport.worker import Outgoing


class OwnDrafters:
    """All that drafts here, for all sessions."""

    def __init__(
        self, engine: StepEngine, drafter: Drafter | None, planner: Planner, counters: TargetCounters, *, adaptive: bool
    ) -> None:
        """Those that an engine brings, and a draft model."""
        self._readers: list[StateReader] = []
        if engine.heads is not None:
            self._readers.append(HeadDrafter(engine.heads, engine.model.vocabulary))
        if engine.eagle is not None and engine.eagle.fingerprint:
            self._readers.append(FeatureSender(engine.eagle, counters))
        elif engine.eagle is not None:
            cached = CachedHead(engine.eagle, engine.cache.capacity)
            self._readers.append(EagleDrafter(cached, engine.model.vocabulary, counters, adaptive=adaptive))
        self._model = None if drafter is None else DraftModel(drafter, planner, counters)
        if self._model is not None:
            self._readers.append(self._model)

    def subscribe(self, sequence: TargetSequence | None, message: Subscribe) -> Outgoing:
        """Send features of a session from now on, if any are made here; what is sent at once."""
        return [sent for sender in self._senders for sent in sender.subscribe(sequence, message)]

    def features(self) -> Outgoing:
        """What is to be sent of the step just computed."""
        return [sent for sender in self._senders for sent in sender.taken()]

    @property
    def _senders(self) -> list[FeatureSender]:
        return [reader for reader in self._readers if isinstance(reader, FeatureSender)]

    def drafts_for(self, opened: Open) -> list[StateDrafts | None]:
        """The draft source of a session that is opened, of each that reads hidden states."""
        return [reader.drafts_for(opened) for reader in self._readers]

    def open(self, sequence: TargetSequence, drafts: Sequence[StateDrafts | None]) -> None:
        """Draft for a session from now on; ``drafts``: its sources, as :meth:`drafts_for` made them."""
        for reader, own in zip(self._readers, drafts, strict=True):
            if own is not None:
                reader.open(sequence, own)

    def draft(
        self, running: Sequence[TargetSequence], entries: Sequence[BatchEntry], drawing: Sequence[BatchEntry]
    ) -> None:
        """Propose for those of ``drawing`` that have room for drafts; ``entries``: of the whole step."""
        part = [entry.sequence for entry in entries]
        wanting = [entry.sequence for entry in drawing if entry.drafts]
        for reader in self._readers:
            reader.draft(part, wanting)
        if self._model is not None and not self._model.take_turn(running, part, wanting):
            for entry in drawing:
                entry.drafts = 0

    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
    ) -> None:
        """The engine has computed a step: keep the hidden states that are read next."""
        for reader in self._readers:
            reader.note(engine, chunks, entries, decided)

    def verified(self, sequence: TargetSequence, tree: VerificationTree, verification: Verification) -> None:
        """A step of a session is over, in which the tree was verified."""
        for reader in self._readers:
            reader.settled(sequence, tree)
        if self._model is not None:
            self._model.verified(sequence, verification)

    @property
    def seconds(self) -> float:
        """What drafting took before the step at hand, as far as that is known apart."""
        return sum(each.seconds for each in self._readers)

    def observe(self, sessions: int, tokens: int, seconds: float) -> None:
        """A step over ``sessions``, all past their prompts, brought ``tokens``, drafting included."""
        for each in self._readers:
            each.observe(sessions, tokens, seconds)

    def drop(self, sequence: TargetSequence) -> None:
        """A session has ended."""
        for each in self._readers:
            each.drop(sequence)

    def validate(self) -> None:
        """See :meth:`transport.worker.Machine.validate`."""
        for each in self._readers:
            each.validate()
