"""From a step's logits to what each session keeps: the target's draws, under either acceptance rule.

Sessions are decided together but independently. Logits that are no numbers decide nothing: the token drawn from them
would be arbitrary, so such a session gets a :class:`Fault` instead, and no other one notices.

Tensor legend: R rows asked for in the step, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.rejection import verify_chains
from engine.sampling import sample
from speculation.acceptance import Walk, walk
from target_service.piece import Piece


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a session cannot go on."""

    why: str


Verdict = Walk | Fault | None
"""None for a piece that draws nothing."""

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinite) after {} tokens; its weights or its kernels are broken"
)


def verdicts(logits_RV: Tensor, pieces: Sequence[Piece]) -> list[Verdict]:
    """What the rows of each piece, in order, make of its offer."""
    answer: list[Verdict] = [None] * len(pieces)
    coupled: list[int] = []
    rejecting: list[int] = []
    parts = torch.split(logits_RV, [piece.rows for piece in pieces])
    # The largest logit of a row is NaN if any is, and infinite if the row cannot be drawn from.
    sound = iter(logits_RV.amax(-1).isfinite().tolist() if len(logits_RV) else ())
    for i, piece in enumerate(pieces):
        if not all(list(itertools.islice(sound, piece.rows))):
            answer[i] = Fault(NOT_FINITE.format(piece.held.session.trie.position))
        elif piece.offer is not None:
            (rejecting if piece.by_rejection else coupled).append(i)
    for chosen, decide in ((coupled, _by_coupling), (rejecting, _by_rejection)):
        if chosen:
            rows = [parts[i] for i in chosen]
            chosen_RV = logits_RV if sum(map(len, rows)) == len(logits_RV) else torch.cat(rows)
            for i, kept in zip(chosen, decide(chosen_RV, [pieces[i] for i in chosen]), strict=True):
                answer[i] = kept
    return answer


def _by_coupling(logits_RV: Tensor, pieces: Sequence[Piece]) -> list[Walk]:
    """What the target's own draws make of the offers, whatever was drafted."""
    drawn = iter(sample(logits_RV, [draw for piece in pieces for draw in piece.draws()]))
    walks: list[Walk] = []
    for piece in pieces:
        assert piece.offer is not None
        walks.append(walk(piece.offer.tokens, piece.offer.parents, list(itertools.islice(drawn, piece.rows))))
    return walks


def _by_rejection(logits_RV: Tensor, pieces: Sequence[Piece]) -> list[Walk]:
    """What p and q make of the offers."""
    draws = [draw for piece in pieces for draw in piece.draws()]
    return verify_chains(logits_RV, draws, [piece.drafted() for piece in pieces])
