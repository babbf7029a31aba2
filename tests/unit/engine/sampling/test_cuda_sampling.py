"""What sampling does differently on CUDA gives the same, and a broken row disturbs no other."""

from __future__ import annotations

import math
import random
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.sampling import sampling
from engine.sampling.sampling import Draw, drawn, sample
from speculation.acceptance import AcceptanceResult
from speculation.messages import Sampling
from target_service.verdicts import Fault, verdicts


@pytest.mark.parametrize("seed", range(4))
def test_a_full_sort_ends_the_nucleus_where_sorting_in_parts_does(seed: int) -> None:
    rng = random.Random(seed)
    scores_MV = torch.randn(12, 3000, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.1, 1.0, 4.0])
    settings = [Sampling(temperature=1.0, top_p=rng.choice([0.01, 0.5, 0.9, 0.999])) for _ in range(12)]
    p_M1 = torch.tensor([setting.top_p for setting in settings], dtype=torch.float64)[:, None]
    sorted_MV = scores_MV.sort(-1, descending=True).values
    threshold_M1, _ = sampling._nucleus_end(sorted_MV, scores_MV.double().logsumexp(-1, keepdim=True), p_M1)
    assert torch.equal(threshold_M1, sampling._keep_top_p(scores_MV, settings)), f"seed {seed}"


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999, 0.9999])
def test_the_nucleus_of_float32_logits_is_that_of_exact_sums(top_p: float) -> None:
    """Over flat rows of 30,000 tokens, where sums in float32 end some of the nuclei elsewhere."""
    scores_MV = torch.randn(8, 30_000, generator=torch.Generator().manual_seed(7))
    scores_MV -= scores_MV.amax(-1, keepdim=True)
    threshold_M1 = sampling._keep_top_p(scores_MV, [Sampling(temperature=1.0, top_p=top_p)] * 8)
    elsewhere = 0
    for scores_V, threshold in zip(scores_MV, threshold_M1[:, 0].tolist(), strict=True):
        ordered = sorted(scores_V.double().tolist(), reverse=True)
        weights = [math.exp(score) for score in ordered]
        held = list(accumulate(weights))
        wanted = top_p * math.fsum(weights)
        kept = 1 + sum(above < wanted for above in held[:-1])
        assert int((scores_V >= threshold).sum()) == kept
        rough_V = torch.tensor(ordered, dtype=torch.float32).softmax(-1).cumsum(-1)
        elsewhere += 1 + int((rough_V[:-1] < top_p).sum()) != kept
    assert top_p < 0.99 or elsewhere, "the rows show no difference to float32"


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, seed=3),
        Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=4),
    ],
)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_draws_some_token_and_leaves_the_others_alone(how: Sampling, broken: float) -> None:
    logits_NV = torch.randn(6, 700, generator=torch.Generator().manual_seed(1))
    draws = [Draw(how, position) for position in range(6)]
    expected = sample(logits_NV, draws)
    logits_NV[2] = broken
    logits_NV[4, 9] = broken
    tokens = drawn(logits_NV, draws).tolist()
    assert all(0 <= token < 700 for token in tokens)
    assert [tokens[i] for i in (0, 1, 3, 5)] == [expected[i] for i in (0, 1, 3, 5)]


def entry(tokens: list[int], at: int, *, draws: bool = True) -> Any:
    """A session that offers a chain of drafts, as far as verdicts look at it."""
    tree = SimpleNamespace(tokens=tokens, parents=list(range(-1, len(tokens) - 1))) if draws else None
    return SimpleNamespace(
        rows=len(tokens) + 1 if draws else 0,
        tree=tree,
        shapes=lambda: [None] * (len(tokens) + 1) if draws else [],
        draws=lambda: [Draw(Sampling(temperature=0.0), at + i) for i in range(len(tokens) + 1)],
        sequence=SimpleNamespace(by_rejection=False, session=SimpleNamespace(trie=SimpleNamespace(position=at))),
    )


def test_what_sessions_keep_is_fetched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = torch.zeros(7, 50)
    for row, token in enumerate([4, 5, 9, 6, 7, 8, 3]):
        logits_RV[row, token] = 1.0
    logits_RV[4, 2] = float("nan")
    fetched = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: fetched.append(self.shape) or tolist(self))
    entries = [entry([4, 5, 6], 10), entry([1, 2], 20, draws=False), entry([7], 30), entry([], 40)]
    assert verdicts(logits_RV, entries) == [
        AcceptanceResult((0, 1), 9),
        None,
        Fault(
            "the model's logits are not finite (NaN or infinite) after 30 tokens; "
            "its weights or its kernels are broken",
            not_finite=True,
        ),
        AcceptanceResult((), 3),
    ]
    assert len(fetched) == 1
