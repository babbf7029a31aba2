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
from engine.sampling import drawn
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
    if not len(logits_RV):
        return answer
    coupled = [i for i, piece in enumerate(pieces) if piece.offer is not None and not piece.by_rejection]
    parts = torch.split(logits_RV, [piece.rows for piece in pieces])
    drawn_C = drawn(_joined(parts, coupled, logits_RV), [draw for i in coupled for draw in pieces[i].draws()])
    # The largest logit of a row is NaN if any is, and infinite if the row cannot be drawn from. Fetched together with
    # the draws, so that a device is waited for once.
    sound_R = logits_RV.amax(-1).isfinite()
    fetched = iter(torch.cat((sound_R.long(), drawn_C)).tolist())
    sound = [all(list(itertools.islice(fetched, piece.rows))) for piece in pieces]
    for i in coupled:
        offer = pieces[i].offer
        assert offer is not None
        answer[i] = walk(offer.tokens, offer.parents, list(itertools.islice(fetched, pieces[i].rows)))
    rejecting = [i for i, piece in enumerate(pieces) if piece.by_rejection and piece.offer is not None and sound[i]]
    if rejecting:
        walks = _by_rejection(_joined(parts, rejecting, logits_RV), [pieces[i] for i in rejecting])
        for i, kept in zip(rejecting, walks, strict=True):
            answer[i] = kept
    for i, piece in enumerate(pieces):
        if not sound[i]:
            answer[i] = Fault(NOT_FINITE.format(piece.held.session.trie.position))
    return answer


def _joined(parts: Sequence[Tensor], chosen: Sequence[int], logits_RV: Tensor) -> Tensor:
    """The rows of the chosen parts of ``logits_RV``, without a copy if these are all or none."""
    rows = sum(len(parts[i]) for i in chosen)
    return logits_RV[:rows] if rows in (0, len(logits_RV)) else torch.cat([parts[i] for i in chosen])


def _by_rejection(logits_RV: Tensor, pieces: Sequence[Piece]) -> list[Walk]:
    """What p and q make of the offers."""
    draws = [draw for piece in pieces for draw in piece.draws()]
    return verify_chains(logits_RV, draws, [piece.drafted() for piece in pieces])
