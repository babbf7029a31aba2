"""From logits to tokens: filters, the coupled draw, a drafter's candidates, and what the model thought of tokens.

Decides the distribution a token is drawn from and draws it with the noise of :mod:`speculation.noise`. The logits have
been through :mod:`engine.shaping.shaping`: a token whose logit is -inf is never drawn. Every row has its own settings,
and its outcome does not depend on the other rows of the call. Knows nothing about drafts, trees or acceptance: the
target samples as if there were none. On CUDA nothing here waits for the device but the functions that return what is no
tensor, each once.

Plain draws need of their request a temperature and a key, which may travel with the rows of a step: then they are
recorded with the forward, by the same operations, so that the choice is the same.

Tensor legend: N or R rows, V vocabulary, M rows that need a filter, C the most likely tokens looked at, P rows of
one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.host.upload import upload
from engine.sampling.noise import RecentNoise, gumbel, keys_at, splitmix64
from speculation.drafting.draft_session import Candidate
from speculation.messages import Sampling, Token, TokenLogprobs
from speculation.noise import MASK64

NUCLEUS_GUESS = 128
"""Tokens sorted first for top-p; a row whose first tokens hold less than the wanted mass is sorted further."""

NUCLEUS_GROWTH = 8
"""How many times further."""

RIVALS = 4
"""Tokens beyond the candidates asked for that share in the confidence."""

_recent_noise = RecentNoise()

PART = 64
"""Rows reduced at once; a device is waited for once for each such part."""

DRAWN_ROWS = 64
"""Rows of the largest steps that draw: noise for more would take memory that few steps need."""

TINY = torch.finfo(torch.float32).tiny

DRAW_FIELDS = 3
"""Numbers of a row: temperature as the bits of a float32, 0 for greedy; low and high word of the key."""


class Draw(NamedTuple):
    """How, and for which position of its sequence, one row's token is drawn."""

    sampling: Sampling
    position: int
    text: int = 0
    """Digest of the text before it, for draws that are independent where texts differ."""


def filtered_log_probs(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Log-probabilities after temperature, top-k, top-p and min-p (in this order), ``[N, V]``; -inf where excluded.

    A greedy row has no filters and temperature 1: its log-probabilities are the model's own. Tokens that tie with the
    last one a filter keeps are kept too, so the outcome does not depend on how a sort orders equals.
    """
    return _filtered_scores(logits_NV, draws).log_softmax(-1)


def sample(logits_NV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The coupled draw of every row: ``argmax(log p + g)``, at temperature 0 ``argmax(log p)``."""
    tokens: list[int] = drawn(logits_NV, draws).tolist()
    return tokens


def drawn(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """What :func:`sample` returns, left on its device: int64 ``[N]``.

    A row that holds NaN, or nothing but -inf, draws some token; the other rows do not notice.
    """
    return _perturbed(logits_NV, draws).argmax(-1)


def candidates(logits_NV: Tensor, draws: Sequence[Draw], k: int) -> list[list[Candidate]]:
    """The ``k`` tokens each row most likely draws, best first; fewer, or none, where filters and shaping leave fewer.

    ``logits_NV`` are a drafter's. Greedy: its most likely tokens, with their probability as confidence. Otherwise the
    best under the noise the target will use: a candidate wins unless the target's log-probabilities differ from the
    drafter's by more than the gap to its rivals, so the confidence is a softmax over the best perturbed scores
    (the ``k`` and a few rivals). It ranks and lies in (0, 1]; calibrate it against what is accepted.
    """
    if not draws:
        return []
    perturbed_NV = _perturbed(logits_NV, draws)
    best_NC, tokens_NC = perturbed_NV.topk(min(k + RIVALS, perturbed_NV.shape[-1]), dim=-1)
    confidence_NC = best_NC.softmax(-1)
    greedy_M = _rows(draws, [draw.sampling.greedy for draw in draws], logits_NV.device)
    if greedy_M is not None:
        mass_M1 = perturbed_NV[greedy_M].logsumexp(-1, keepdim=True)
        confidence_NC[greedy_M] = (best_NC[greedy_M] - mass_M1).exp()
    confidence_NC = confidence_NC.clamp(torch.finfo(confidence_NC.dtype).tiny, 1.0)
    # One tensor, to be fetched at once. In float64 token ids are exact.
    found_N3C = torch.stack((tokens_NC.double(), confidence_NC.double(), best_NC.double()), 1)[..., :k]
    return [
        [
            Candidate(int(token), confidence)
            for token, confidence, score in zip(*row, strict=True)
            if score > float("-inf")
        ]
        for row in found_N3C.tolist()
    ]


def _perturbed(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Scores whose argmax is the draw: log p up to a constant per row, plus the noise unless greedy."""
    scores_NV = _filtered_scores(logits_NV, draws)
    random_M = _rows(draws, [not draw.sampling.greedy for draw in draws], logits_NV.device)
    if random_M is None:
        return scores_NV
    drawn = [(draw.sampling.seed, draw.position) for draw in draws if not draw.sampling.greedy]
    noise_MV = _recent_noise.rows(drawn, scores_NV.shape[-1], scores_NV.dtype, scores_NV.device)
    if len(noise_MV) == len(draws):
        return scores_NV + noise_MV
    return scores_NV.index_add(0, random_M, noise_MV)


def _rows(draws: Sequence[Draw], chosen: Sequence[bool], device: torch.device) -> Tensor | None:
    """Indices of the chosen rows; None when there are none, which skips their filter."""
    if not any(chosen):
        return None
    return upload([row for row in range(len(draws)) if chosen[row]], device)


def _filtered_scores(logits_NV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """``filtered_log_probs`` without the normalisation."""
    assert logits_NV.dim() == 2 and len(logits_NV) == len(draws), "one row of logits per draw"
    device = logits_NV.device
    settings = [draw.sampling for draw in draws]
    random_M = _rows(draws, [not setting.greedy for setting in settings], device)
    if random_M is None:
        return logits_NV
    # Subtracting the maximum first keeps the likely tokens exact at low temperatures.
    tiny = torch.finfo(logits_NV.dtype).tiny
    temperatures = [1.0 if setting.greedy else max(setting.temperature, tiny) for setting in settings]
    scores_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    scores_NV /= _column(temperatures, logits_NV)
    for wanted, keep in (
        ([setting.top_k > 0 for setting in settings], _keep_top_k),
        ([setting.top_p < 1.0 for setting in settings], _keep_top_p),
        ([setting.min_p > 0.0 for setting in settings], _keep_min_p),
    ):
        applies = [want and not setting.greedy for want, setting in zip(wanted, settings, strict=True)]
        rows_M = _rows(draws, applies, device)
        if rows_M is not None:
            scores_MV = scores_NV[rows_M] if len(rows_M) < len(draws) else scores_NV
            threshold_M1 = keep(scores_MV, list(compress(settings, applies)))
            scores_NV[rows_M] = scores_MV.masked_fill(scores_MV < threshold_M1, float("-inf"))
    return scores_NV


def _keep_top_k(scores_MV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """The lowest score that top-k keeps, ``[M, 1]``."""
    ranks = [min(setting.top_k, scores_MV.shape[-1]) for setting in settings]
    best_MC = scores_MV.topk(max(ranks), dim=-1).values
    return best_MC.gather(1, upload(ranks, scores_MV.device)[:, None] - 1)


def _keep_top_p(scores_MV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """The lowest score that top-p keeps, ``[M, 1]``: a token stays while those above it hold less than p."""
    # In float64: sums of float32 end a wide nucleus elsewhere on another device, which adds in another order.
    p_M1 = upload([setting.top_p for setting in settings], scores_MV.device, torch.float64)[:, None]
    # Normalised over the whole row, not over the part sorted: a row's outcome must not depend on its neighbours.
    mass_M1 = scores_MV.double().logsumexp(-1, keepdim=True)
    if scores_MV.device.type == "cuda":
        # To ask how far to sort would be to wait for the device, and sorting everything takes it little time.
        return _nucleus_end(scores_MV.sort(-1, descending=True).values, mass_M1, p_M1)[0]
    threshold_M1 = torch.empty_like(mass_M1, dtype=scores_MV.dtype)
    vocabulary = scores_MV.shape[-1]
    open_M = torch.arange(len(scores_MV), device=scores_MV.device)
    survivors = [setting.top_k or vocabulary for setting in settings]
    sorted_first = min(NUCLEUS_GUESS, max(survivors))
    while len(open_M):
        count = min(sorted_first, vocabulary)
        best_MC = scores_MV[open_M].topk(count, dim=-1).values
        threshold_M1[open_M], sorted_M1 = _nucleus_end(best_MC, mass_M1[open_M], p_M1[open_M])
        if count == vocabulary:
            break
        open_M = open_M[(sorted_M1 < p_M1[open_M])[:, 0]]
        sorted_first *= NUCLEUS_GROWTH
    return threshold_M1


def _nucleus_end(best_MC: Tensor, mass_M1: Tensor, p_M1: Tensor) -> tuple[Tensor, Tensor]:
    """The last of the best scores that top-p keeps, and the probability that all of them hold, ``[M, 1]`` each.

    ``mass_M1``, ``p_M1`` and the probability are in float64.
    """
    through_MC = (best_MC - mass_M1).exp().cumsum(-1)  # in float64, as the mass is
    above_MC = through_MC.roll(1, dims=-1)
    above_MC[:, 0] = 0.0
    kept_M1 = (above_MC < p_M1).sum(-1, keepdim=True)
    return best_MC.gather(1, kept_M1 - 1), through_MC[:, -1:]


def _keep_min_p(scores_MV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """The lowest score that min-p keeps, ``[M, 1]``: min_p times the likeliest token's probability."""
    min_p_M1 = _column([setting.min_p for setting in settings], scores_MV)
    return scores_MV.amax(-1, keepdim=True) + min_p_M1.log()


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(values, like.device, like.dtype)[:, None]


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


def is_plain(sampling: Sampling) -> bool:
    """Whether a draw takes no more than a temperature."""
    return sampling.greedy or (sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0)


def draw_numbers(draws: Sequence[Draw]) -> NDArray[np.int32]:
    """What rows need to be drawn, int32 ``[3, R]``: zeros for greedy ones, if all are."""
    numbers = np.zeros((DRAW_FIELDS, len(draws)), np.int32)
    temperatures = [draw.sampling.temperature for draw in draws]
    if not any(temperatures):
        return numbers
    # Above 0 they stay so, however small.
    numbers[0] = np.array([t and max(t, TINY) for t in temperatures], np.float32).view(np.int32)
    seeds_R = np.array([draw.sampling.seed & MASK64 for draw in draws], np.uint64).view(np.int64)
    keys_R = keys_at(splitmix64(seeds_R), np.array([draw.position for draw in draws], np.int64))
    numbers[1:] = keys_R.view(np.int32).reshape(-1, 2).T
    return numbers


def drawn_in_step(logits_RV: Tensor, numbers_3R: Tensor, *, noise: bool) -> Tensor:
    """The token drawn on each row, and whether all its logits are numbers, int32 ``[R, 2]``.

    ``logits_RV`` are float32; ``noise``: whether any row may be drawn at a temperature above 0.
    """
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    if noise:
        temperature_R1 = numbers_3R[0].view(torch.float32)[:, None]
        greedy_R1 = temperature_R1 == 0.0
        keys_R = numbers_3R[1:].t().contiguous().view(torch.int64)[:, 0]
        scores_RV = (logits_RV - largest_R1).div_(temperature_R1.masked_fill(greedy_R1, 1.0))
        noise_RV = gumbel(keys_R, logits_RV.shape[-1], logits_RV.dtype, logits_RV.device)
        scores_RV += noise_RV.masked_fill_(greedy_R1, 0.0)
    else:
        scores_RV = logits_RV
    return torch.cat((scores_RV.argmax(-1, keepdim=True), largest_R1.isfinite()), -1).int()
