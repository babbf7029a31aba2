"""From a step's logits to what each session keeps: the target's draws, under either acceptance rule.

Sessions are decided together but independently. Logits that are no numbers decide nothing: the token drawn from them
would be arbitrary, so such a session gets a :class:`Fault` instead, and no other one notices. The same goes for one
whose request leaves nothing to say next. Drafts may lead to such a dead end: what is before it is committed, as plain
decoding would have, and the next step finds it.

Log-probabilities are taken from the row behind the text before a committed token, whoever proposed that text: none are
computed for sessions that do not ask, nor for refused drafts, and no logits outlive their step.

Tensor legend: R rows asked for in the step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from engine.host.upload import upload
from engine.sampling.rejection import verify_chains
from engine.sampling.sampling import drawn, token_logprobs
from engine.shaping.shaping import shaped
from speculation.acceptance import AcceptanceResult, walk
from speculation.messages import RefusalCode, Token, TokenLogprobs
from speculation.trie import VerificationTree
from target_service.sequence import BatchEntry


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
    "nothing may be said after {} tokens of text: allowed and banned tokens, min_tokens and the grammar rule out every "
    "token; loosen one of them"
)


def not_finite(verdict: Verdict) -> bool:
    """Whether a session's logits are no numbers."""
    return isinstance(verdict, Fault) and verdict.not_finite


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
    all_sound, start = all(sound), 0
    for entry in entries:
        end = start + entry.rows
        if not (all_sound or all(sound[start:end])):
            answer.append(_broken(entry))
        else:
            answer.append(_walked(entry.tree, tokens[start:end]))
        start = end
    return answer


def _walked(tree: VerificationTree | None, drawn: Sequence[Token]) -> AcceptanceResult | None:
    """What the tokens drawn on its rows make of a tree."""
    return None if tree is None else walk(tree.tokens, tree.parents, drawn)


def _drawn_here(logits_RV: Tensor, entries: Sequence[BatchEntry]) -> list[Verdict]:
    """Whatever the requests ask for."""
    answer: list[Verdict] = [None] * len(entries)
    rows = [entry.rows for entry in entries]
    shaped_RV = shaped(logits_RV, [shape for entry in entries for shape in entry.shapes()])
    coupled = [i for i, entry in enumerate(entries) if entry.tree is not None and not entry.sequence.by_rejection]
    draws = [draw for i in coupled for draw in entries[i].draws()]
    drawn_C = drawn(_rows_of(shaped_RV, rows, coupled), draws)
    sound, opens, tokens = _fetched(logits_RV, shaped_RV, drawn_C, rows)
    for i in coupled:
        answer[i] = _walked(entries[i].tree, list(islice(tokens, rows[i])))
    for i, result in _by_rejection(shaped_RV, rows, entries, sound):
        answer[i] = result
    return [
        _bounded(outcome, opened, entry) if is_sound else _broken(entry)
        for entry, outcome, is_sound, opened in zip(entries, answer, sound, opens, strict=True)
    ]


def _fetched(
    logits_RV: Tensor, shaped_RV: Tensor, drawn_C: Tensor, rows: Sequence[int]
) -> tuple[list[bool], list[list[int]], Iterator[int]]:
    """Of each entry with so many ``rows``: whether its logits are numbers, and which rows leave anything to draw.

    And what was drawn. All fetched together, so that a device is waited for once.
    """
    # The largest logit of a row is NaN if any is, and infinite if the row cannot be drawn from.
    sound_R = logits_RV.amax(-1).isfinite()
    open_R = sound_R if shaped_RV is logits_RV else shaped_RV.amax(-1).isfinite()
    fetched = iter(torch.cat((sound_R.long(), open_R.long(), drawn_C)).tolist())
    sound = [all(list(islice(fetched, count))) for count in rows]
    return sound, [list(islice(fetched, count)) for count in rows], fetched


def _bounded(outcome: Verdict, opens: Sequence[int], entry: BatchEntry) -> Verdict:
    """``outcome`` as far as there is anything to draw; a fault if there is nothing right after the text.

    Where it is cut short, the last draft before the dead end counts as the target's own token. ``opens``: which rows
    leave anything to draw.
    """
    if entry.tree is None or not isinstance(outcome, AcceptanceResult) or all(opens):
        return outcome
    rows = (0, *(i + 1 for i in outcome.kept))
    end = next((count for count, row in enumerate(rows) if not opens[row]), None)
    if end is None:
        return outcome
    if not end:
        session = entry.sequence.session
        return Fault(DEAD_END.format(session.trie.position - session.opened.prompt_length), RefusalCode.INVALID)
    return AcceptanceResult(outcome.kept[: end - 1], entry.tree.tokens[outcome.kept[end - 1]])


def _broken(entry: BatchEntry) -> Fault:
    return Fault(NOT_FINITE.format(entry.sequence.session.trie.position), not_finite=True)


def _rows_of(logits_RV: Tensor, rows: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Those of the chosen entries, of which each has so many ``rows``, without a copy if these are all or none."""
    count = sum(rows[i] for i in chosen)
    if count in (0, len(logits_RV)):
        return logits_RV[:count]
    parts = torch.split(logits_RV, list(rows))
    return torch.cat([parts[i] for i in chosen])


def _by_rejection(
    logits_RV: Tensor, rows: Sequence[int], entries: Sequence[BatchEntry], sound: Sequence[bool]
) -> Iterator[tuple[int, AcceptanceResult]]:
    """What p and q make of the ``sound`` trees that are verified by rejection, by the numbers of their entries.

    ``rows``: how many of ``logits_RV`` each entry has.
    """
    rejecting = [
        i for i, entry in enumerate(entries) if entry.sequence.by_rejection and entry.tree is not None and sound[i]
    ]
    draws = [draw for i in rejecting for draw in entries[i].draws()]
    drafts = [entries[i].drafts_with_q() for i in rejecting]
    results = verify_chains(_rows_of(logits_RV, rows, rejecting), draws, drafts) if rejecting else ()
    return zip(rejecting, results, strict=True)


def apart(logits_RV: Tensor, entries: Sequence[BatchEntry]) -> tuple[Sequence[Tensor], Tensor]:
    """The rows that tell of each entry's prompt, and the rows of all entries that are judged."""
    if not any(entry.prompt_logprob_rows for entry in entries):
        return [logits_RV[:0]] * len(entries), logits_RV
    parts = torch.split(logits_RV, [size for entry in entries for size in (len(entry.prompt_logprob_rows), entry.rows)])
    return parts[::2], torch.cat(parts[1::2])


def of_committed(
    logits_RV: Tensor, entries: Sequence[BatchEntry], decided: Sequence[Verdict]
) -> list[tuple[TokenLogprobs, ...]]:
    """For each entry what the model thought of the tokens its verdict comes to; nothing for those that do not ask."""
    if all(entry.sequence.session.opened.request_options.logprobs is None for entry in entries):
        return [()] * len(entries)
    rows: list[int] = []
    tokens: list[Token] = []
    top_logprobs: list[int] = []
    counts = [0] * len(entries)
    starts = accumulate((entry.rows for entry in entries), initial=0)
    for i, (entry, verdict, start) in enumerate(zip(entries, decided, starts, strict=False)):
        asked = entry.sequence.session.opened.request_options.logprobs
        if asked is None or entry.tree is None or not isinstance(verdict, AcceptanceResult):
            continue
        rows += (start, *(start + 1 + draft for draft in verdict.kept))
        tokens += (*(entry.tree.tokens[draft] for draft in verdict.kept), verdict.own)
        counts[i] = len(verdict.kept) + 1
        top_logprobs += [asked] * counts[i]
    if not rows:
        return [()] * len(entries)
    found = iter(token_logprobs(logits_RV[upload(rows, logits_RV.device)], tokens, top_logprobs))
    return [tuple(islice(found, count)) for count in counts]
