"""What those have in common that draft in the target's own process, most of them from its hidden states.

Tensor legend: N rows, T tokens of a step, A auxiliary states of a token, D hidden size of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.eagle.head import EagleHead
from engine.host.upload import upload
from engine.interface import Chunk, StepEngine
from speculation.acceptance import AcceptanceResult
from speculation.messages import Subscribe, Verification
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

    def unjudged(self) -> None:
        """Another has decided that no drafts are verified in the step at hand."""

    def settled(self, sequence: TargetSequence, verification: Verification) -> None:
        """A step has committed tokens of a session."""

    def observe(self, sessions: int, tokens: int, seconds: float) -> None:
        """A step over ``sessions``, all past their prompts, brought ``tokens``, drafting included."""

    def drop(self, sequence: TargetSequence) -> None:
        """A session has ended."""

    def validate(self) -> None:
        """See :meth:`transport.worker.Machine.validate`."""


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


def fused_states(
    head: EagleHead,
    engine: StepEngine,
    kept: Iterable[tuple[TargetSequence, Sequence[int]]],
    known: Callable[[TargetSequence, int], int | None],
) -> Iterator[tuple[TargetSequence, int, Tensor]]:
    """Of sessions with rows that stay, the position of the first and what the head reads of each, ``[N, D]``.

    ``known(sequence, count)``: how many of the ``count`` rows from its cache's end on to leave out; None: all. To be
    read in inference mode.
    """
    aux_TA = engine.aux
    assert aux_TA is not None
    wanted: list[int] = []
    found: list[tuple[TargetSequence, int, int]] = []
    for sequence, rows in kept:
        left_out = known(sequence, len(rows))
        if left_out is not None and (fresh := rows[left_out:]):
            wanted += fresh
            found.append((sequence, sequence.cached.length + left_out, len(fresh)))
    if wanted:
        kept_NA = aux_TA if len(wanted) == len(aux_TA) else aux_TA[upload(wanted, aux_TA.device)]
        states_ND = kept_NA if engine.fuses else head.fuse(kept_NA)
        parts = torch.split(states_ND, [count for *_, count in found])
        for (sequence, position, _), part_ND in zip(found, parts, strict=True):
            # A view would keep the states of the whole step.
            yield sequence, position, part_ND.clone() if len(found) > 1 else part_ND
