"""What a model thought of tokens: log-probabilities straight from its logits, before anything shapes or filters them.

Decides nothing. Large numbers of rows are reduced in parts, so that no second tensor of their size is ever made.

Tensor legend: N rows, V vocabulary, C the likeliest tokens told of, P rows of one part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.host.upload import upload
from speculation.messages import Token, TokenLogprobs

PART = 64
"""Rows reduced at once; a device is waited for once for each such part."""


def token_logprobs(logits_NV: Tensor, tokens: Sequence[Token], top_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of ``tokens[i]`` under row i, and those of the ``most[i]`` likeliest tokens there.

    Computed in float32 at least, whatever the format of the logits.
    """
    assert len(logits_NV) == len(tokens) == len(top_logprobs), "one row of logits per token"
    parts = [slice(start, start + PART) for start in range(0, len(tokens), PART)]
    return [one for part in parts for one in _part(logits_NV[part], tokens[part], top_logprobs[part])]


def _part(logits_PV: Tensor, tokens: Sequence[Token], top_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    total_P1 = logits_PV.logsumexp(-1, keepdim=True)
    chosen_P1 = logits_PV.gather(1, upload(tokens, logits_PV.device)[:, None])
    best_PC, tokens_PC = logits_PV.topk(min(max(top_logprobs), logits_PV.shape[-1]), dim=-1)
    # One tensor, to be fetched at once. In float64 token ids are exact.
    told_PX = torch.cat((chosen_P1.double(), best_PC.double()), 1) - total_P1.double()
    rows = torch.cat((told_PX, tokens_PC.double()), 1).tolist()
    best = best_PC.shape[-1]
    return [
        TokenLogprobs(row[0], tuple(map(int, row[1 + best :][:count])), tuple(row[1 : 1 + best][:count]))
        for row, count in zip(rows, top_logprobs, strict=True)
    ]
