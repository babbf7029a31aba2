"""From a step's logits to what each session keeps: the target's draws, under either acceptance rule.

Sessions are decided together but independently. Logits that are no numbers decide nothing: the token drawn from them
would be arbitrary, so such a session gets a :class:`Fault` instead, and no other one notices. The same goes for one
whose request leaves nothing to say next. Drafts may lead to such a dead end: what is before it is committed, as plain
decoding would have, and the next step finds it.

Tensor legend: R rows asked for in the step, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.rejection import verify_chains
from engine.sampling.sampling import drawn
from engine.shaping.shaping import shaped
from speculation.acceptance import AcceptanceResult, walk
from speculation.messages import RefusalCode, Token
from target_service.batch_entry import BatchEntry


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a session cannot go on."""

    why: str
    code: RefusalCode = RefusalCode.INTERNAL
    not_finite: bool = False
    """Whether its logits are no numbers; what another session computed in the same step may be to blame."""


Verdict = AcceptanceResult | Fault | None
"""None for an entry that draws nothing."""

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinite) after {} tokens; its weights or its kernels are broken"
)

DEAD_END = (
    "nothing may be said after {} tokens: allowed and banned tokens, min_tokens and the grammar rule out every token; "
    "loosen one of them"
)


def verdicts(logits_RV: Tensor, entries: Sequence[BatchEntry], drawn_R2: Tensor | None = None) -> list[Verdict]:
    """What the rows of each entry, in order, make of its tree.

    ``drawn_R2``: what the step has drawn itself (:attr:`engine.step.Engine.drawn`), if it has.
    """
    if not len(logits_RV):
        return [None] * len(entries)
    if drawn_R2 is None:
        return _drawn_here(logits_RV, entries)
    answer: list[Verdict] = []
    tokens, sound = zip(*drawn_R2.tolist(), strict=True)
    start = 0
    for entry in entries:
        end = start + entry.rows
        if not all(sound[start:end]):
            answer.append(_not_finite(entry))
        elif entry.tree is None:
            answer.append(None)
        else:
            answer.append(walk(entry.tree.tokens, entry.tree.parents, tokens[start:end]))
        start = end
    return answer


def _drawn_here(logits_RV: Tensor, entries: Sequence[BatchEntry]) -> list[Verdict]:
    """Whatever the requests ask for."""
    answer: list[Verdict] = [None] * len(entries)
    coupled = [i for i, entry in enumerate(entries) if entry.tree is not None and not entry.by_rejection]
    shaped_RV = shaped(logits_RV, [shape for entry in entries for shape in entry.shapes()])
    parts = torch.split(shaped_RV, [entry.rows for entry in entries])
    drawn_C = drawn(_joined(parts, coupled, shaped_RV), [draw for i in coupled for draw in entries[i].draws()])
    # The largest logit of a row is NaN if any is, and infinite if the row cannot be drawn from. Fetched together with
    # the draws, so that a device is waited for once.
    sound_R = logits_RV.amax(-1).isfinite()
    open_R = sound_R if shaped_RV is logits_RV else shaped_RV.amax(-1).isfinite()
    fetched = iter(torch.cat((sound_R.long(), open_R.long(), drawn_C)).tolist())
    sound = [all(list(itertools.islice(fetched, entry.rows))) for entry in entries]
    opens = [list(itertools.islice(fetched, entry.rows)) for entry in entries]
    for i in coupled:
        tree = entries[i].tree
        assert tree is not None
        answer[i] = walk(tree.tokens, tree.parents, list(itertools.islice(fetched, entries[i].rows)))
    rejecting = [i for i, entry in enumerate(entries) if entry.by_rejection and entry.tree is not None and sound[i]]
    if rejecting:
        results = _by_rejection(_joined(parts, rejecting, shaped_RV), [entries[i] for i in rejecting])
        for i, kept in zip(rejecting, results, strict=True):
            answer[i] = kept
    for i, entry in enumerate(entries):
        position, outcome = entry.sequence.session.trie.position, answer[i]
        if not sound[i]:
            answer[i] = _not_finite(entry)
        elif isinstance(outcome, AcceptanceResult) and entry.tree is not None and not all(opens[i]):
            dead_end = Fault(DEAD_END.format(position), RefusalCode.INVALID)
            answer[i] = _to_dead_end(outcome, opens[i], entry.tree.tokens) or dead_end
    return answer


def _not_finite(entry: BatchEntry) -> Fault:
    return Fault(NOT_FINITE.format(entry.sequence.session.trie.position), not_finite=True)


def _to_dead_end(outcome: AcceptanceResult, opens: Sequence[int], tokens: Sequence[Token]) -> AcceptanceResult | None:
    """``outcome`` as far as there is anything to draw; None if there is nothing right after the text.

    Where it is cut short, the last draft before the dead end counts as the target's own token. ``opens``: which rows
    leave anything to draw.
    """
    rows = (0, *(i + 1 for i in outcome.kept))
    end = next((count for count, row in enumerate(rows) if not opens[row]), None)
    if end is None:
        return outcome
    kept = outcome.kept[:end]
    return AcceptanceResult(kept[:-1], tokens[kept[-1]]) if kept else None


def _joined(parts: Sequence[Tensor], chosen: Sequence[int], logits_RV: Tensor) -> Tensor:
    """The rows of the chosen parts of ``logits_RV``, without a copy if these are all or none."""
    rows = sum(len(parts[i]) for i in chosen)
    return logits_RV[:rows] if rows in (0, len(logits_RV)) else torch.cat([parts[i] for i in chosen])


def _by_rejection(logits_RV: Tensor, entries: Sequence[BatchEntry]) -> list[AcceptanceResult]:
    """What p and q make of the trees."""
    draws = [draw for entry in entries for draw in entry.draws()]
    return verify_chains(logits_RV, draws, [entry.drafts_with_q() for entry in entries])
