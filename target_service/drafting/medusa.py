"""Medusa heads at work: for whom they run, on which hidden states, and how what they say becomes drafts.

They run just before a step, once for all sessions in it, on the hidden state that each session's last token of the
target's own was drawn from: that of its last accepted draft, never of a refused one. A session without such a state (it
is new here, or its last step was for its prompt alone) is drafted for one step later. Their guesses are hints: no
failure of theirs ends a session.

Tensor legend: N sessions, H heads, V vocabulary, R rows of a step, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.interface import Chunk, StepEngine
from engine.medusa import MedusaHeads
from engine.sampling.sampling import candidates
from engine.shaping.shaping import RowShaping, shaped
from speculation.acceptance import AcceptanceResult
from speculation.drafting.heads import NODES, HeadGuesses, StateDrafts, likeliest
from speculation.messages import Source, Verification
from speculation.trie import VerificationTree
from target_service.drafting.state_reader import StateReader, draw_ahead
from target_service.sequence import BatchEntry, TargetSequence
from target_service.verdicts import Verdict

log = logging.getLogger(__name__)

WIDTH = 4
"""HeadGuesses that a head makes for a place; one where drafts must be chains."""


class HeadDrafter(StateReader):
    """The heads of a worker, for all its sessions."""

    def __init__(self, heads: MedusaHeads, vocabulary: int) -> None:
        """Token ids are below ``vocabulary``; rows that the heads have beyond are padding."""
        self._heads, self._vocabulary = heads, vocabulary
        self._failed = False

    def open(self, sequence: TargetSequence) -> None:
        """Draft for a session from now on, if it allows heads."""
        if sequence.session.opened.speculation.allows(Source.MEDUSA):
            sequence.medusa = StateDrafts(Source.MEDUSA, len(self._heads))
            sequence.session.draft_from(sequence.medusa)

    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
    ) -> None:
        """Keep, for each session that goes on, what its own token was drawn from in the step just computed."""
        hidden_RD = engine.hidden
        assert hidden_RD is not None
        ends = accumulate(len(chunk.rows) for chunk in chunks)
        for entry, verdict, end in zip(entries, decided, ends, strict=True):
            if entry.sequence.medusa is not None and isinstance(verdict, AcceptanceResult):
                last = verdict.kept[-1] + 1 if verdict.kept else 0
                entry.sequence.hidden_D = hidden_RD[end - entry.rows + last]

    def settled(self, sequence: TargetSequence, tree: VerificationTree, _verification: Verification) -> None:
        """A step of a session is over, in which the tree was verified."""
        if sequence.medusa is not None:
            sequence.medusa.stepped(verified=any(node.source is Source.MEDUSA for node in tree.nodes))

    def draft(
        self, _running: Sequence[TargetSequence], _part: Sequence[TargetSequence], wanting: Sequence[TargetSequence]
    ) -> bool:
        """Let the heads guess for all of those ``wanting`` that have something to read, unless theirs rest."""
        ready: list[tuple[TargetSequence, StateDrafts, Tensor]] = []
        for sequence in wanting:
            if sequence.medusa is not None and sequence.hidden_D is not None and not sequence.medusa.rests:
                ready.append((sequence, sequence.medusa, sequence.hidden_D))
            sequence.hidden_D = None
        if not ready or self._failed:
            return True
        try:
            guesses = self._guesses(
                [sequence for sequence, _, _ in ready], torch.stack([row_D for _, _, row_D in ready])
            )
        except Exception:  # such as memory that a device lacks; the text does not need them
            log.exception("Medusa heads failed; drafting goes on without them")
            self._failed = True
            return True
        for (sequence, drafts, _), places in zip(ready, guesses, strict=True):
            drafts.guess(sequence.session.trie.position, likeliest(places[: sequence.session.room], NODES))
        return True

    @torch.inference_mode()
    def _guesses(self, sessions: Sequence[TargetSequence], hidden_ND: Tensor) -> list[HeadGuesses]:
        """For each session what the heads say of the next places."""
        logits_HNV = self._heads(hidden_ND)[..., : self._vocabulary].float()
        places = len(self._heads)
        draws = [draw_ahead(sequence, place) for place in range(places) for sequence in sessions]
        shapes = [_shape(sequence, place) for place in range(places) for sequence in sessions]
        found = candidates(shaped(logits_HNV.flatten(0, 1), shapes), draws, WIDTH)
        widths = [1 if sequence.session.opened.speculation.chains else WIDTH for sequence in sessions]
        return [
            [found[place * len(sessions) + number][:width] for place in range(places)]
            for number, width in enumerate(widths)
        ]


def _shape(sequence: TargetSequence, place: int) -> RowShaping | None:
    """The first place is shaped as the target will. What comes before the others is not known.

    So they take what does not depend on it, or hardly: bias and penalties, but no grammar.
    """
    shaping = sequence.shaping
    if shaping is None or (place and shaping.mask is not None):
        return None
    return shaping.after(())
