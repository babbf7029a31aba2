import math

import pytest

from speculation import noise


def test_reference_vectors_do_not_change():
    # A change here changes every seeded text ever produced.
    assert noise.splitmix64(0) == 0xE220A8397B1DCDAF  # first output of the published generator for state 0
    assert noise.key(1, 2) != noise.key(2, 1)
    words = [
        noise.bits(noise.key(seed, position), token)
        for seed in (0, 2**64 - 1)
        for position in (0, 7)
        for token in (0, 4095)
    ]
    assert words == REFERENCE_WORDS


REFERENCE_WORDS = [0x7EE4B470, 0x2662EDBE, 0x13D66FD5, 0x29EE046, 0x124B5408, 0x7A3DC474, 0x1BA4844, 0x39144F4]


def test_negative_seeds_are_taken_modulo_two_to_the_64():
    assert noise.key(-1, 3) == noise.key(2**64 - 1, 3)


def test_streams_are_independent():
    assert len({noise.key(5, 9, stream) for stream in noise.Stream}) == len(noise.Stream)


def test_uniform_stays_inside_the_open_interval():
    assert 0.0 < noise.uniform(0) < noise.uniform(noise.MASK32) < 1.0


def test_bits_are_uniform_and_uncorrelated_between_neighbours():
    words = [
        noise.bits(noise.key(seed, position), token)
        for seed in range(8)
        for position in range(64)
        for token in range(64)
    ]
    n = len(words)
    for bit in range(32):
        ones = sum(word >> bit & 1 for word in words)
        assert abs(ones - n / 2) < 5 * math.sqrt(n) / 2, f"bit {bit} is biased"
    for step in (1, 64, 64 * 64):  # next token, next position, next seed
        agree = sum(((a ^ b).bit_count()) for a, b in zip(words, words[step:], strict=False))
        bits = 32 * (n - step)
        assert abs(agree - bits / 2) < 5 * math.sqrt(bits) / 2, f"correlated at distance {step}"


def test_gumbel_has_the_mean_and_variance_of_a_standard_gumbel():
    draws = [noise.gumbel(noise.key(11, position), token) for position in range(300) for token in range(100)]
    mean = sum(draws) / len(draws)
    variance = sum((x - mean) ** 2 for x in draws) / len(draws)
    assert mean == pytest.approx(0.5772, abs=0.03)
    assert variance == pytest.approx(math.pi**2 / 6, rel=0.05)
