"""Filters equal transformers' processors; rows do not disturb each other; candidates rank what will be drawn."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampling import noise as engine_noise
from engine.sampling import sampling
from engine.sampling.sampling import Draw, candidates, filtered_log_probs, sample
from speculation import noise
from speculation.messages import Sampling

INFINITY = float("inf")


def logits_of(rows: int, vocabulary: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.01, 0.5, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        seed=rng.randrange(-(2**63), 2**64),
    )


def by_transformers(logits_1V: torch.Tensor, setting: Sampling) -> torch.Tensor:
    if setting.greedy:
        return logits_1V.log_softmax(-1)
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(setting.temperature))])
    if setting.top_k:
        steps.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1.0:
        steps.append(TopPLogitsWarper(setting.top_p))
    if setting.min_p:
        steps.append(MinPLogitsWarper(setting.min_p))
    return steps(torch.zeros(1, 1, dtype=torch.long), logits_1V).log_softmax(-1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("vocabulary", "spread"), [(7, 1.0), (300, 3.0), (5000, 0.5)])
def test_filters_equal_the_processors(vocabulary: int, spread: float, seed: int) -> None:
    rng = random.Random(seed)
    logits_NV = logits_of(24, vocabulary, seed, spread).double()
    draws = [Draw(random_sampling(rng), rng.randrange(1000)) for _ in range(24)]
    actual_NV = filtered_log_probs(logits_NV, draws)
    for row, draw in enumerate(draws):
        expected_V = by_transformers(logits_NV[row : row + 1], draw.sampling)[0]
        assert torch.equal(actual_NV[row] > -INFINITY, expected_V > -INFINITY), draw
        torch.testing.assert_close(actual_NV[row], expected_V, atol=1e-9, rtol=1e-9)


def test_top_p_beyond_the_first_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV = logits_of(3, 500, 0, spread=0.1)
    draws = [Draw(Sampling(top_p=p), 0) for p in (0.05, 0.5, 0.999)]
    whole = filtered_log_probs(logits_NV, draws)
    monkeypatch.setattr(sampling, "NUCLEUS_GUESS", 20)
    assert torch.equal(filtered_log_probs(logits_NV, draws), whole)


def test_ties_are_kept_together() -> None:
    logits_NV = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = filtered_log_probs(logits_NV, [Draw(Sampling(top_k=2), 0)]) > -INFINITY
    assert kept.tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    logits_NV = logits_of(32, 2000, 2).to(dtype)
    draws = [Draw(random_sampling(rng), rng.randrange(50)) for _ in range(32)]
    together = filtered_log_probs(logits_NV, draws)
    drawn = sample(logits_NV, draws)
    guesses = candidates(logits_NV, draws, 3)
    for row, draw in enumerate(draws):
        alone_1V = logits_NV[row : row + 1]
        assert torch.equal(filtered_log_probs(alone_1V, [draw])[0], together[row])
        assert sample(alone_1V, [draw]) == [drawn[row]]
        (guesses_alone,) = candidates(alone_1V, [draw], 3)
        assert [guess.token for guess in guesses_alone] == [guess.token for guess in guesses[row]]
        confidences = [guess.confidence for guess in guesses[row]]
        assert [guess.confidence for guess in guesses_alone] == pytest.approx(confidences, rel=1e-5)


def test_the_draw_is_the_reference_rule() -> None:
    """argmax(log p + g), with the reference's own noise."""
    rng = random.Random(3)
    logits_NV = logits_of(40, 60, 4).double()
    draws = [Draw(random_sampling(rng), rng.randrange(10**6)) for _ in range(40)]
    log_probs = filtered_log_probs(logits_NV, draws).tolist()
    expected = []
    for draw, row in zip(draws, log_probs, strict=True):
        key = noise.key(draw.sampling.seed, draw.position)
        gain = [0.0 if draw.sampling.greedy else noise.gumbel(key, token) for token in range(60)]
        expected.append(max(range(60), key=lambda token: row[token] + gain[token]))
    assert sample(logits_NV, draws) == expected


def test_arguments_are_left_alone() -> None:
    logits_NV = logits_of(2, 50, 5)
    before = logits_NV.clone()
    draws = [Draw(Sampling(top_k=3), 1), Draw(Sampling(temperature=0.0), 1)]
    sample(logits_NV, draws)
    candidates(logits_NV, draws, 2)
    assert torch.equal(logits_NV, before)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits_NV = logits_of(50, 100, 6)
    draws = [Draw(Sampling(temperature=temperature, top_p=0.9, seed=s), s) for s in range(50)]
    assert sample(logits_NV, draws) == logits_NV.argmax(-1).tolist()
    assert not filtered_log_probs(logits_NV, draws).isnan().any()


def test_a_lone_survivor_is_drawn_whatever_its_noise() -> None:
    logits_NV = torch.zeros(4000, 3)
    logits_NV[:, 1] = 1.0
    draws = [Draw(Sampling(top_k=1, seed=seed), 0) for seed in range(4000)]
    assert sample(logits_NV, draws) == [1] * 4000


def test_greedy_candidates_are_the_most_likely_tokens() -> None:
    logits_NV = logits_of(5, 80, 7)
    for row, found in enumerate(candidates(logits_NV, [Draw(Sampling(temperature=0.0), 9)] * 5, 4)):
        probabilities, tokens = logits_NV[row].softmax(-1).topk(4)
        assert [candidate.token for candidate in found] == tokens.tolist()
        assert [candidate.confidence for candidate in found] == pytest.approx(probabilities.tolist(), rel=1e-4)


def test_the_first_candidate_is_the_drafters_own_draw() -> None:
    rng = random.Random(8)
    logits_NV = logits_of(64, 200, 8)
    draws = [Draw(random_sampling(rng), rng.randrange(100)) for _ in range(64)]
    found = candidates(logits_NV, draws, 3)
    assert [row[0].token for row in found] == sample(logits_NV, draws)
    for row, draw in zip(found, draws, strict=True):
        confidences = [candidate.confidence for candidate in row]
        assert confidences == sorted(confidences, reverse=True)
        assert all(0.0 < confidence <= 1.0 for confidence in confidences)
        assert len(row) == 3 or draw.sampling.top_k == 1 or draw.sampling.top_p < 1.0 or draw.sampling.min_p > 0.0


def test_confidence_separates_what_a_similar_target_draws() -> None:
    """Against a target whose logits differ a little, confident candidates are drawn more often than others."""
    drafter_NV = logits_of(3000, 100, 9)
    target_NV = drafter_NV + logits_of(3000, 100, 10, spread=0.5)
    draws = [Draw(Sampling(seed=seed), 7) for seed in range(3000)]
    firsts = [row[0] for row in candidates(drafter_NV, draws, 2)]
    hits = [first.token == drawn for first, drawn in zip(firsts, sample(target_NV, draws), strict=True)]
    order = sorted(range(3000), key=lambda row: firsts[row].confidence)
    thirds = [sum(hits[row] for row in order[start : start + 1000]) / 1000 for start in (0, 1000, 2000)]
    assert thirds[0] + 0.1 < thirds[1] < thirds[2]


def test_no_rows() -> None:
    empty = torch.empty(0, 10)
    assert sample(empty, []) == []
    assert candidates(empty, [], 2) == []


def test_fewer_tokens_than_candidates() -> None:
    draw = Draw(Sampling(top_k=1), 0)
    ((only,),) = candidates(torch.tensor([[0.0, 2.0, 1.0]]), [draw], 3)
    assert (only.token, only.confidence) == (1, 1.0)
    greedy = draw._replace(sampling=Sampling(temperature=0.0))
    assert len(candidates(torch.tensor([[0.0, 2.0, 1.0]]), [greedy], 9)[0]) == 3


@pytest.mark.parametrize("vocabulary", [5, 4001, 40_000])
def test_kept_noise_is_the_noise(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked before, in whatever company, and also when little is kept."""
    monkeypatch.setattr(engine_noise, "KEPT_BLOCKS", 2)
    recent = engine_noise.RecentNoise()
    rng = random.Random(vocabulary)
    for _ in range(20):
        draws = [(rng.choice([-3, 7]), rng.randrange(30)) for _ in range(rng.randint(1, 5))]
        rows_NV = recent.rows(draws, vocabulary, torch.float32, torch.device("cpu"))
        keys = [noise.key(seed, position) for seed, position in draws]
        expected_NV = sampling.gumbel(keys, vocabulary, torch.float32, "cpu")
        torch.testing.assert_close(rows_NV, expected_NV, atol=1e-6, rtol=1e-6)
    before = recent.rows([(7, 3)], vocabulary, torch.float32, torch.device("cpu"))
    assert torch.equal(recent.rows([(1, 1), (7, 3)], vocabulary, torch.float32, torch.device("cpu"))[1:], before)
    assert recent.rows([(7, 3)], vocabulary, torch.float64, torch.device("cpu")).dtype == torch.float64


def test_kept_noise_lets_go_of_what_was_hashed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_noise, "KEPT_BLOCKS", 3)
    recent = engine_noise.RecentNoise()
    for positions in ([0, 1, 2, 3, 4], [5, 6], [7]):
        recent.rows([(7, position) for position in positions], 40_000, torch.float32, torch.device("cpu"))
    held = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in recent._blocks.values()}
    assert sum(held.values()) == 3 * 40_000 * 4


@pytest.mark.parametrize(("device", "passes"), [("cpu", 4), ("meta", 1)])
def test_noise_is_hashed_at_once_where_launches_cost(device: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``meta`` stands for any device that is not a CPU."""
    words = engine_noise._words
    calls: list[int] = []

    def counted(low: torch.Tensor, high: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        calls.append(len(tokens))
        return words(low, high, tokens)

    monkeypatch.setattr(engine_noise, "_words", counted)
    assert engine_noise.gumbel([3], 100_000, torch.float32, torch.device(device)).shape == (1, 100_000)
    assert len(calls) == passes
    assert sum(calls) == 100_000
