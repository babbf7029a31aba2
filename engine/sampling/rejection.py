"""The rejection rule on tensors: a drafter's draw from a small q, and the target's verdict on chains of such drafts.

Decides how p and q come out of logits, which :mod:`engine.shaping.shaping` has shaped, and which noise stream each draw
uses; what is kept, and from which distribution a refused token is replaced, is the law of
:mod:`speculation.acceptance`. Knows nothing about sessions, tries or caches.

One noise stream per use, keyed by (seed, position of the token): DRAFT for the draft token, ACCEPT for the coin,
RESIDUAL for the replacement, SAMPLE for the bonus token (which is the draw of plain decoding). A position's coin and
replacement are used at most once in a session, when the position is decided. DRAFT is keyed by the text before the
token besides: how soon a drafter goes on after a refusal depends on what it had drafted on the refused branch, so a
draft at the same position must owe nothing to that.

Tensor legend: N rows of a drafter, R rows of the target, M refused rows, V vocabulary, C the tokens kept in q.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.host.upload import upload
from engine.sampling.noise import gumbel
from engine.sampling.sampling import Draw, drawn, filtered_log_probs
from speculation.acceptance import AcceptanceResult, Draft, Sampled, keep_chain
from speculation.messages import SUPPORT_TOTAL, Support, Token
from speculation.noise import Key, Stream, bits, key, uniform

SUPPORT_SIZE = 16
"""Tokens kept in q. Truncation costs acceptance, never exactness; each token kept is some five bytes on the wire."""


def draw_sparse(logits_NV: Tensor, draws: Sequence[Draw], size: int = SUPPORT_SIZE) -> list[Sampled]:
    """Draw one draft token per row from the ``size`` likeliest tokens, and say from which distribution exactly.

    ``logits_NV`` are a drafter's, ``draws[i].position`` the position of the token drawn. q is the filtered
    distribution cut to its likeliest tokens, renormalised and rounded to whole weights. Greedy rows: all on the argmax.
    """
    if not draws:
        return []
    q_NV = _probabilities(logits_NV, draws)
    best_NC, tokens_NC = q_NV.topk(min(size, q_NV.shape[-1]), dim=-1)
    # Fetched together: a device is waited for once.
    all_tokens, all_weights = torch.stack((tokens_NC, _whole_weights(best_NC))).tolist()
    rows = zip(draws, all_tokens, all_weights, strict=True)
    return [_draw_from(tokens, weights, draw) for draw, tokens, weights in rows]


def verify_chains(
    logits_RV: Tensor, draws: Sequence[Draw], chains: Sequence[Sequence[Draft]]
) -> list[AcceptanceResult]:
    """Decide which drafts of every session's chain are kept, and draw the target's own token after them.

    Each chain has one row more than drafts, chain after chain: row i of a chain is the target's after i of its drafts,
    and ``draws`` says how and for which position that row's token is drawn. Rows after a refusal are not looked at.
    """
    starts = [0, *accumulate(len(chain) + 1 for chain in chains)]
    assert len(logits_RV) == len(draws) == starts.pop(), "one row after every draft and one before the first"
    if not chains:
        return []
    p_RV = _probabilities(logits_RV, draws)
    drafted = [token for chain in chains for token in (*(draft.token for draft in chain), 0)]
    drafted_R1 = upload(drafted, p_RV.device)[:, None]
    p_R: list[float] = p_RV.gather(1, drafted_R1)[:, 0].tolist()
    kept: list[int] = []
    refusals: list[tuple[int, Draft]] = []
    bonuses: list[int] = []
    for start, chain in zip(starts, chains, strict=True):
        end = start + len(chain)
        count = keep_chain(chain, p_R[start:end], map(_coin, draws[start:end]))
        kept.append(count)
        if count < len(chain):
            refusals.append((start + count, chain[count]))
        else:
            bonuses.append(end)
    decided = [row for row, _ in refusals] + bonuses
    samples = drawn(logits_RV[upload(bonuses, logits_RV.device)], [draws[row] for row in bonuses])
    tokens_M = torch.cat((_replacements(p_RV, draws, refusals), samples))
    own: dict[int, Token] = dict(zip(decided, tokens_M.tolist(), strict=True))
    return [
        AcceptanceResult(tuple(range(count)), own[start + count]) for start, count in zip(starts, kept, strict=True)
    ]


def _probabilities(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The distribution each row's token is drawn from, ``[N, V]``; greedy rows have it all on the argmax."""
    p_NV = filtered_log_probs(logits_NV, draws).exp_()
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.greedy]
    if greedy:
        greedy_M = upload(greedy, p_NV.device)
        best_M1 = logits_NV[greedy_M].argmax(-1, keepdim=True)
        p_NV[greedy_M] = torch.zeros_like(p_NV[greedy_M]).scatter_(1, best_M1, 1.0)
    return p_NV


def _whole_weights(q_NC: Tensor) -> Tensor:
    """Whole numbers in proportion to each row, adding up to SUPPORT_TOTAL (largest remainders), int64 ``[N, C]``.

    The error is below one weight. Rows are sorted falling, so among equal remainders the likelier token gains.
    """
    exact_NC = q_NC.double()
    exact_NC = exact_NC / exact_NC.sum(-1, keepdim=True) * SUPPORT_TOTAL
    weights_NC = exact_NC.floor()
    missing_N1 = SUPPORT_TOTAL - weights_NC.sum(-1, keepdim=True)
    by_remainder_NC = (exact_NC - weights_NC).argsort(dim=-1, descending=True, stable=True)
    rank_NC = by_remainder_NC.argsort(dim=-1)
    return (weights_NC + (rank_NC < missing_N1)).long()


def _draw_from(tokens: Sequence[Token], weights: Sequence[int], draw: Draw) -> Sampled:
    """A token with probability ``weight / SUPPORT_TOTAL``, to the last bit; those rounded away are left out of q."""
    kept = [(token, weight) for token, weight in zip(tokens, weights, strict=True) if weight]
    q = Support(tuple(token for token, _ in kept), tuple(weight for _, weight in kept))
    point = bits(key(draw.sampling.seed ^ draw.text, draw.position, Stream.DRAFT), 0) * SUPPORT_TOTAL >> 32
    return Sampled(next(token for token, end in zip(q.tokens, accumulate(q.weights), strict=True) if point < end), q)


def _coin(draw: Draw) -> float:
    return uniform(bits(_key(draw, Stream.ACCEPT), 0))


def _key(draw: Draw, stream: Stream) -> Key:
    return key(draw.sampling.seed, draw.position, stream)


def _replacements(p_RV: Tensor, draws: Sequence[Draw], refusals: Sequence[tuple[int, Draft]]) -> Tensor:
    """A token drawn from the residual of each refused draft, int64 ``[M]``."""
    if not refusals:
        return upload([], p_RV.device)
    rows = [row for row, _ in refusals]
    excess_MV = _excess(p_RV[upload(rows, p_RV.device)], [draft for _, draft in refusals])
    keys = [_key(draws[row], Stream.RESIDUAL) for row in rows]
    noise_MV = gumbel(keys, excess_MV.shape[-1], excess_MV.dtype, excess_MV.device)
    return (excess_MV.log_() + noise_MV).argmax(-1)


def _excess(p_MV: Tensor, drafts: Sequence[Draft]) -> Tensor:
    """:func:`speculation.acceptance.residual` of every row, not normalised, ``[M, V]``.

    Where rounding leaves nothing of p the row is p itself. It cannot matter: p and q are then equal but for rounding,
    and a draft is refused there with a probability that is itself a rounding error.
    """
    # Tokens beyond the target's vocabulary have no p, hence no excess.
    places = [
        (row, token, weight / SUPPORT_TOTAL)
        for row, draft in enumerate(drafts)
        for token, weight in zip(draft.q.tokens, draft.q.weights, strict=True)
        if token < p_MV.shape[-1]
    ]
    rows, tokens, q = zip(*places, strict=True)
    excess_MV = p_MV.clone()
    device = p_MV.device
    excess_MV[upload(rows, device), upload(tokens, device)] -= upload(q, device, p_MV.dtype)
    excess_MV.clamp_(min=0.0)
    return torch.where((excess_MV > 0.0).any(-1, keepdim=True), excess_MV, p_MV)
