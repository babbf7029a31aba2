"""The torch noise equals the reference: bit for bit in the integers, closely in the floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import noise as torch_noise
from engine.sampling.noise import gumbel, keys_at
from speculation import noise as reference
from tests.noise_words import noise_bits

LARGEST = 200_001
SEEDS = st.one_of(st.integers(-(2**63), 2**64), st.sampled_from([0, 1, -1, 2**63, 2**64 - 1, -(2**63)]))
POSITIONS = st.one_of(st.integers(0, 2**20), st.sampled_from([0, 2**31, 2**40]))
KEYS = st.one_of(
    st.builds(reference.key, SEEDS, POSITIONS, st.sampled_from(reference.Stream)),
    st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]).map(reference.Key),
)
TOKENS = st.one_of(
    st.integers(0, LARGEST - 1),
    st.sampled_from([0, 1, torch_noise.BLOCK - 1, torch_noise.BLOCK, 2**16, 150_000, 200_000]),
)


@settings(max_examples=10, derandomize=True)
@given(st.lists(KEYS, min_size=1, max_size=2), st.lists(TOKENS, min_size=1, max_size=200))
def test_words_and_floats_equal_the_reference(keys: list[reference.Key], tokens: list[int]) -> None:
    vocabulary = max(tokens) + 1
    words = noise_bits(keys, vocabulary, "cpu")[:, tokens].tolist()
    assert words == [[reference.bits(key, token) for token in tokens] for key in keys]
    expected = torch.tensor([[reference.gumbel(key, t) for t in tokens] for key in keys], dtype=torch.float64)
    in_float64 = gumbel(keys, vocabulary, torch.float64, "cpu")[:, tokens]
    torch.testing.assert_close(in_float64, expected, atol=1e-9, rtol=1e-9)
    in_float32 = gumbel(keys, vocabulary, torch.float32, "cpu")[:, tokens].double()
    # Where u is near 1 float32 has few bits left; that noise is the lowest there is and decides nothing.
    torch.testing.assert_close(in_float32[expected > -2.0], expected[expected > -2.0], atol=5e-4, rtol=1e-5)
    torch.testing.assert_close(in_float32[expected > 0.0], expected[expected > 0.0], atol=2e-6, rtol=2e-6)
    assert bool((in_float32[expected <= -2.0] < -1.9).all())


def test_every_token_of_a_small_vocabulary() -> None:
    key = reference.key(1234, 56)
    assert noise_bits([key], 5000, "cpu")[0].tolist() == [reference.bits(key, token) for token in range(5000)]


def test_keys_as_a_tensor() -> None:
    keys = [reference.key(seed, 3) for seed in range(8)]
    signed = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])
    assert torch.equal(noise_bits(signed, 100, "cpu"), noise_bits(keys, 100, "cpu"))


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**62)), min_size=1, max_size=20))
def test_keys_made_on_a_device(draws: list[tuple[int, int]]) -> None:
    seeds = [reference.splitmix64(seed & reference.MASK64) for seed, _ in draws]
    hashed_N, positions_N = (torch.tensor([signed(n) for n in each]) for each in (seeds, [p for _, p in draws]))
    expected = [signed(reference.key(seed, position)) for seed, position in draws]
    assert keys_at(hashed_N, positions_N).tolist() == expected


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_words_stay_finite_and_ordered(dtype: torch.dtype) -> None:
    words = [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    signed = torch.tensor([[word - 2**32 if word >= 2**31 else word for word in words]], dtype=torch.int32)
    noise = torch.empty(1, len(words), dtype=dtype)
    torch_noise._to_gumbel(signed, noise)
    values = noise[0].tolist()
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(-math.log(-math.log1p(-reference.uniform(0))), abs=1e-5)
    assert all(math.isfinite(value) for value in values)
