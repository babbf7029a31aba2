import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from speculation.sources import lookup as module
from speculation.sources.lookup import COUNTED, LONGEST, Continuation, PromptLookup, confidence


def words(text: str) -> list[int]:
    """One token for each character."""
    return [ord(character) for character in text]


def text(continuation: Continuation) -> str:
    return "".join(map(chr, continuation.tokens))


@pytest.mark.parametrize(
    ("tokens", "continuation", "matched"),
    [
        pytest.param("", "", 0, id="nothing to look in"),
        pytest.param("abcdef", "", 0, id="no token came back"),
        pytest.param("abcdea", "", 0, id="one equal token is too few"),
        pytest.param("abcdeab", "cde", 2, id="match at the very start"),
        pytest.param("abX.;abY:,ab", "Y:,", 2, id="the latest of equals"),
        pytest.param("cabX..abY..cab", "X..", 3, id="the longest rather than the latest"),
        pytest.param("abcXabc", "Xab", 3, id="longer than the shortest"),
        pytest.param("abababab", "aba", 6, id="overlapping itself"),
        pytest.param("xyzzz", "zzz", 2, id="a run of one token goes on"),
        pytest.param("abcabc", "abc", 3, id="runs into the present and wraps"),
    ],
)
def test_the_continuation_of_the_best_earlier_place(tokens, continuation, matched):
    proposed = PromptLookup(words(tokens)).propose(3)
    assert (text(proposed), proposed.matched) == (continuation, matched)


def test_a_period_goes_on_for_as_long_as_asked():
    assert text(PromptLookup(words("..abcabc")).propose(8)) == "abcabcab"
    assert PromptLookup(words("..abcabc")).propose(0).tokens == ()


def test_beyond_the_longest_context_the_latest_place_is_taken_and_its_match_still_counted():
    tokens = words("PabcX.....abcY.....Pabc")
    assert text(PromptLookup(tokens).propose(1)) == "X"
    proposed = PromptLookup(tokens, longest=3).propose(1)
    assert (text(proposed), proposed.matched) == ("Y", 3)
    once = list(range(100))
    assert PromptLookup(once[:30] + once[:30]).propose(1).matched == 30 > LONGEST
    assert PromptLookup(once + once).propose(1).matched == COUNTED


def test_contexts_shorter_than_the_shortest_are_not_followed():
    assert PromptLookup(words("abcXabc"), shortest=4).propose(1) == Continuation()
    assert text(PromptLookup(words("aXa"), shortest=1).propose(1)) == "X"


@pytest.mark.parametrize(
    ("tokens", "path", "continuation", "matched"),
    [
        pytest.param("abcd..xa", "b", "cd.", 2, id="the context lies on both sides"),
        pytest.param("abcd..", "zabc", "d..", 3, id="the context lies in the path"),
        pytest.param("abcd", "qr", "", 0, id="a path that never stood there"),
        pytest.param("..ab", "cab", "cab", 2, id="the place ends where the path begins"),
        pytest.param(".", "abcab", "cab", 2, id="the place lies in the path"),
        pytest.param("abX...", "abYab", "Yab", 2, id="the path is later than all that is committed"),
        pytest.param("cabX..", "abYcab", "X..", 3, id="but a longer match comes first"),
        pytest.param("ab", "cab", "cab", 2, id="what follows runs from the committed tokens into the path"),
    ],
)
def test_the_continuation_after_a_path_of_drafts(tokens, path, continuation, matched):
    lookup = PromptLookup(words(tokens))
    proposed = lookup.propose_after(words(path), 3)
    assert (text(proposed), proposed.matched) == (continuation, matched)


def test_looking_after_a_path_leaves_no_trace():
    lookup = PromptLookup(words("abcd..ab"))
    before = lookup.propose(4)
    lookup.propose_after(words("cabXab"), 4)
    assert lookup.propose(4) == before
    assert len(lookup) == 8
    lookup.extend(words("X"))
    assert lookup.propose(4) == PromptLookup(words("abcd..abX")).propose(4)


def test_confidence_grows_with_the_match_and_along_the_continuation():
    values = [confidence(matched) for matched in range(2 * COUNTED)]
    assert values == sorted(set(values))
    assert all(0 <= value < 1 for value in values)
    continuation = Continuation((7, 8, 9), matched=4)
    assert continuation.confidence == (confidence(4), confidence(5), confidence(6))


HARD = {
    "all different": lambda rng, size: list(range(size)),
    "all equal": lambda rng, size: [7] * size,
    "two tokens": lambda rng, size: [rng.randrange(2) for _ in range(size)],
    "a long period": lambda rng, size: [rng.randrange(1000) for _ in range(100)] * (size // 100),
    "many tokens": lambda rng, size: [rng.randrange(300) for _ in range(size)],
}


@pytest.mark.parametrize("kind", HARD)
def test_every_token_costs_a_bounded_number_of_steps_however_much_stands_before_it(kind):
    seed = 5
    tokens = HARD[kind](random.Random(seed), 4000)
    lookup = PromptLookup()
    extending = [lines_run(lambda token=token: lookup.extend([token])) for token in tokens]
    assert 0 < max(extending) <= 10 * (LONGEST + 1), f"seed {seed}"
    assert 0 < lines_run(lambda: lookup.propose(16)) <= 4 * (LONGEST + COUNTED + 16), f"seed {seed}"


@pytest.mark.parametrize("kind", HARD)
def test_the_index_holds_a_bounded_number_of_entries_a_token(kind):
    seed = 6
    lookup = PromptLookup(HARD[kind](random.Random(seed), 4000))
    assert len(lookup._below) + len(lookup._latest) <= LONGEST * len(lookup), f"seed {seed}"


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of the lookup module ``call`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return count
