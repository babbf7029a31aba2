"""What those have in common that draft in the target's own process, most of them from its hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.interface import Chunk, StepEngine
from speculation.acceptance import AcceptanceResult
from speculation.messages import Subscribe, Verification
from speculation.trie import VerificationTree
from target_service.sequence import BatchEntry, TargetSequence
from target_service.verdicts import Fault, Verdict
from transport.worker import Outgoing


class StateReader:
    """Drafts just before a step, if it does. How many positions it guesses at once is its own affair."""

    seconds = 0.0
    """What drafting took before the step at hand, if that is no part of the step."""

    def open(self, sequence: TargetSequence) -> None:
        """A session is open: draft for it from now on, if it allows that."""

    def subscribe(self, sequence: TargetSequence | None, message: Subscribe) -> Outgoing:  # noqa: ARG002
        """Send features of a session from now on, if any are made here; what is sent at once."""
        return []

    def features(self) -> Outgoing:
        """What is to be sent of the step just computed."""
        return []

    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
    ) -> None:
        """The engine has computed a step, of which nothing is committed yet: keep what is read next."""

    def draft(
        self, running: Sequence[TargetSequence], part: Sequence[TargetSequence], wanting: Sequence[TargetSequence]
    ) -> bool:
        """Read what the sessions that take ``part`` in the next step have brought, and guess for those ``wanting``.

        ``running``: all that are not preempted. False: no drafts are to be verified in the step.
        """
        raise NotImplementedError

    def settled(self, sequence: TargetSequence, tree: VerificationTree, verification: Verification) -> None:
        """A step of a session is over, in which the tree was verified."""

    def observe(self, sessions: int, tokens: int, seconds: float) -> None:
        """A step over ``sessions``, all past their prompts, brought ``tokens``, drafting included."""

    def drop(self, sequence: TargetSequence) -> None:
        """A session has ended."""

    def validate(self) -> None:
        """See :meth:`transport.worker.Machine.validate`."""


def kept_rows(
    chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
) -> Iterator[tuple[TargetSequence, list[int]]]:
    """Of each session that goes on, which tokens of the step just computed stay: never those of a refused draft."""
    first = 0
    for chunk, entry, verdict in zip(chunks, entries, decided, strict=True):
        if not isinstance(verdict, Fault):
            behind = first + entry.num_scheduled_tokens
            kept = verdict.kept if isinstance(verdict, AcceptanceResult) else ()
            yield entry.sequence, [*range(first, behind), *(behind + node for node in kept)]
        first += len(chunk.tokens)
