"""Coupled sampling draws from the target's filtered distribution: seeded statistics, and proof that they can fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch

from engine.sampling.sampling import Draw, filtered_log_probs, sample
from speculation.messages import Sampling
from tests.thorough import mostly_thorough

DRAWS = 100_000
BATCH = 20_000
ALPHA = 1e-4
"""Chance that a correct sampler fails one of these tests; the seeds are fixed, so it fails always or never."""

LOGITS = torch.tensor([1.4, 0.9, 0.5, 0.2, 0.0, -0.3, -0.8, -1.5, -2.5, -4.0], dtype=torch.float64).float()
CASES = {
    "plain": Sampling(),
    "top-k": Sampling(temperature=1.3, top_k=4),
    "top-p": Sampling(top_p=0.8),
    "min-p": Sampling(temperature=1.5, min_p=0.2),
    "all": Sampling(temperature=0.9, top_k=7, top_p=0.95, min_p=0.05),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on rows this short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def draw_many(logits_V: torch.Tensor, setting: Sampling, by_position: bool) -> torch.Tensor:
    """One token per seed at a fixed position, or per position for a fixed seed. Same logits are the same tensor."""
    drawn: list[int] = []
    for start in range(0, DRAWS, BATCH):
        draws = [
            Draw(with_seed(setting, 11 if by_position else n), n if by_position else 300)
            for n in range(start, start + BATCH)
        ]
        drawn += sample(logits_V.expand(BATCH, -1), draws)
    return torch.tensor(drawn)


def with_seed(setting: Sampling, seed: int) -> Sampling:
    return Sampling(setting.temperature, setting.top_k, setting.top_p, setting.min_p, seed)


def chi_square_p(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Probability of a fit this bad; 0 for a token drawn that never should be (Wilson and Hilferty 1931)."""
    total = sum(counts)
    statistic, cells = 0.0, 0
    for count, probability in zip(counts, probabilities, strict=True):
        if probability == 0.0:
            if count:
                return 0.0
            continue
        statistic += (count - total * probability) ** 2 / (total * probability)
        cells += 1
    freedom = cells - 1
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(normal / math.sqrt(2))


def fit(logits_V: torch.Tensor, setting: Sampling, by_position: bool) -> float:
    """How well draws from ``logits_V`` fit what ``LOGITS`` promise."""
    expected = filtered_log_probs(LOGITS.double()[None], [Draw(setting, 0)])[0].exp().tolist()
    counts = torch.bincount(draw_many(logits_V, setting, by_position), minlength=len(LOGITS)).tolist()
    return chi_square_p(counts, expected)


@pytest.mark.parametrize("case", CASES)
def test_draws_over_positions_follow_the_filtered_distribution(case: str) -> None:
    assert fit(LOGITS, CASES[case], by_position=True) > ALPHA


@pytest.mark.parametrize("case", mostly_thorough(["plain", "all"], quick=["plain"]))
def test_draws_over_seeds_follow_the_filtered_distribution(case: str) -> None:
    assert fit(LOGITS, CASES[case], by_position=False) > ALPHA


@pytest.mark.parametrize("case", ["plain", "top-k", "top-p", "min-p"])
def test_a_planted_bias_is_found(case: str) -> None:
    """One token that takes a hundredth of all draws from the others: the test above would fail."""
    biased = LOGITS.clone()
    share = float(filtered_log_probs(LOGITS[None], [Draw(CASES[case], 0)])[0, 1].exp())
    gain = math.log((share + 0.01) / (1 - share - 0.01)) - math.log(share / (1 - share))
    biased[1] += gain * CASES[case].temperature
    assert fit(biased, CASES[case], by_position=True) < ALPHA


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws fill their joint table as independent ones would."""
    probabilities = LOGITS.double().softmax(-1)
    joint = torch.outer(probabilities, probabilities).flatten().tolist()
    for by_position in (False, True):
        drawn = draw_many(LOGITS, Sampling(), by_position)
        for lag in (1, 2, 64):
            pairs = (drawn[:-lag] * len(LOGITS) + drawn[lag:])[:: lag + 1]
            counts = torch.bincount(pairs, minlength=len(joint)).tolist()
            assert chi_square_p(counts, joint) > ALPHA
