"""The index finds what a plain search through all earlier places finds."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from speculation.messages import Token
from speculation.sources.lookup import COUNTED, Continuation, PromptLookup

DEPTH = 7

sequences = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
"""Few different tokens, so that contexts come back."""
wide = st.lists(st.sampled_from([0, 1, 2**31, 2**32 - 1]), max_size=40)
repeated = st.builds(lambda period, times: period * times, st.lists(st.integers(0, 2), max_size=80), st.integers(1, 3))
bounds = st.tuples(st.integers(1, 4), st.integers(0, 5)).map(lambda pair: (pair[0], sum(pair)))


def plain_search(tokens: Sequence[Token], shortest: int, longest: int) -> Continuation:
    """All places for every length, the longest length and the latest place first."""
    present = len(tokens)
    for length in range(longest, shortest - 1, -1):
        for end in range(present - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[present - length :]:
                return Continuation(follow(tokens, end), equal_before(tokens, end))
    return Continuation()


def follow(tokens: Sequence[Token], end: int) -> tuple[Token, ...]:
    """Copy one token after another; each becomes part of what is copied."""
    copied = list(tokens)
    for i in range(DEPTH):
        copied.append(copied[end + i])
    return tuple(copied[len(tokens) :])


def equal_before(tokens: Sequence[Token], end: int) -> int:
    matched = 0
    while matched < min(end, COUNTED) and tokens[end - matched - 1] == tokens[len(tokens) - matched - 1]:
        matched += 1
    return matched


@settings(max_examples=400)
@given(st.one_of(sequences, wide, repeated), bounds)
def test_after_every_token_the_lookup_finds_what_a_plain_search_finds(tokens, bound):
    shortest, longest = bound
    lookup = PromptLookup(shortest=shortest, longest=longest)
    for count, token in enumerate(tokens, start=1):
        lookup.extend([token])
        assert lookup.propose(DEPTH) == plain_search(tokens[:count], shortest, longest)


@settings(max_examples=400)
@given(st.one_of(sequences, wide, repeated), st.integers(0, 12), bounds)
def test_after_a_path_the_lookup_finds_what_it_would_find_were_the_path_committed(tokens, drafted, bound):
    shortest, longest = bound
    committed, path = tokens[: max(len(tokens) - drafted, 0)], tokens[max(len(tokens) - drafted, 0) :]
    lookup = PromptLookup(committed, shortest=shortest, longest=longest)
    assert lookup.propose_after(path, DEPTH) == plain_search(tokens, shortest, longest)
    assert lookup.propose(DEPTH) == plain_search(committed, shortest, longest)


@settings(max_examples=100)
@given(st.lists(sequences, max_size=6))
def test_indexing_in_slices_is_indexing_at_once(slices):
    lookup = PromptLookup()
    for part in slices:
        lookup.extend(part)
    whole = [token for part in slices for token in part]
    assert len(lookup) == len(whole)
    assert lookup.propose(DEPTH) == PromptLookup(whole).propose(DEPTH)
