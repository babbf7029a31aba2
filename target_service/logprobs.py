"""What sessions are told of the model's own opinion: log-probabilities of their prompts and of what they commit.

Decides which rows of a step they are taken from. Drafts have no part in it: a committed token's row is the one behind
the text before it, whoever proposed that text. Nothing is computed for sessions that do not ask, nor for drafts that
were refused, and no logits outlive their step.

Tensor legend: R rows of the step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from engine.host.upload import upload
from engine.sampling.sampling import token_logprobs
from speculation.acceptance import AcceptanceResult
from speculation.messages import Token, TokenLogprobs
from target_service.batch_entry import BatchEntry
from target_service.verdicts import Verdict


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
