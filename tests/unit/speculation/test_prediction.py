"""A caller's prediction as a draft source: where it is followed, left and rejoined."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest

from speculation.sources import lookup, prediction
from speculation.sources.lookup import COUNTED, confidence
from speculation.sources.prediction import REPLACED, SOLID, TRUSTED, PredictionSource

PROMPT = [1, 2, 3]


def words(text: str) -> list[int]:
    """One token for each character."""
    return [ord(character) for character in text]


def after(predicted: str, text: str, depth: int = 4) -> tuple[str, int]:
    """What is proposed once ``text`` is committed, and how many tokens before it agree."""
    source = PredictionSource(words(predicted), len(PROMPT))
    source.extend(PROMPT)
    source.extend(words(text))
    found = source.propose(depth)
    return "".join(map(chr, found.tokens)), found.matched


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("predicted", "text", "proposed", "matched"),
    [
        pytest.param(ALPHABET, "", "abcd", TRUSTED, id="from the start"),
        pytest.param(ALPHABET, "abc", "defg", TRUSTED + 3, id="followed"),
        pytest.param(ALPHABET, ALPHABET, "", TRUSTED + 26, id="at its end nothing is left"),
        pytest.param(ALPHABET, "abcX", "efgh", REPLACED, id="one token replaced, perhaps"),
        pytest.param(ALPHABET, "abcXef", "ghij", REPLACED + 2, id="one token replaced, indeed"),
        pytest.param(ALPHABET, "abcXY", "", 0, id="lost"),
        pytest.param(ALPHABET, "abcXYdef", "ghij", 2 + 1, id="rejoined after an insertion"),
        pytest.param(ALPHABET, "abcijk", "lmno", 2 + 1, id="rejoined after something was left out"),
        pytest.param("abcdefg1234567abcdefg89", "abcdefg12XYcd", "efg8", 2, id="the nearest place after, not before"),
        pytest.param("1ab2.3ab4.5cab6.", "XYZ__cab", "6.", 3, id="the longest agreement, not the nearest"),
        pytest.param("one two three", "one two three. two", " thr", 4, id="before the place, if nowhere after it"),
        pytest.param("", "abc", "", 0, id="nothing expected"),
    ],
)
def test_where_the_text_is(predicted: str, text: str, proposed: str, matched: int) -> None:
    assert after(predicted, text) == (proposed, matched)


def test_agreement_counts_no_further_than_confidence_grows() -> None:
    assert after(ALPHABET * 9, ALPHABET * 8)[1] == COUNTED


def test_a_guess_that_one_token_was_replaced_takes_a_long_agreement_first() -> None:
    assert after(ALPHABET, "abcXYef", 2) == ("gh", 2)
    assert after(ALPHABET, "abcXYefZ", 2) == ("", 0)
    rejoined = "abcXY" + ALPHABET[4 : 4 + SOLID]
    assert after(ALPHABET, rejoined + "Z", 2)[0] == ALPHABET[4 + SOLID + 1 :][:2]


def test_a_place_found_by_accident_does_not_make_forget_where_the_text_was_left() -> None:
    predicted = "abcdefgh" + "12345" + "--QR--" + "12377"
    # After "abcdefgh" comes new text with "QR" in it, then what the prediction goes on with: not its later likeness.
    assert after(predicted, "abcdefgh" + "xxQRxx" + "12", 3) == ("345", 2)


@pytest.mark.parametrize("step", [1, 7])
def test_reopened_in_the_middle_it_is_where_it_was(step: int) -> None:
    seed = 3
    rng = random.Random(seed)
    predicted = [rng.randrange(30) for _ in range(200)]
    text = [token if rng.random() < 0.9 else rng.randrange(30) for token in predicted]
    running = PredictionSource(predicted, len(PROMPT))
    running.extend(PROMPT)
    for start in range(0, len(text), step):
        running.extend(text[start : start + step])
        opened_again = PredictionSource(predicted, len(PROMPT))
        opened_again.extend([*PROMPT, *text[: start + step]])
        assert opened_again.propose(9) == running.propose(9), f"seed {seed}, after {start + step}"


def test_edits_cost_few_tokens_each() -> None:
    """Of a text that replaces, inserts and leaves out now and then, nearly all is proposed in time."""
    seed = 4
    rng = random.Random(seed)
    predicted = [rng.randrange(300) for _ in range(2000)]
    text: list[int] = []
    edits = 0
    for token in predicted:
        edit = rng.random()
        edits += edit < 0.06
        text += [] if edit < 0.02 else [999] if edit < 0.04 else [999, 998, token] if edit < 0.06 else [token]
    source = PredictionSource(predicted, 0)
    missed = wrong = 0
    for token in text:
        proposed = source.propose(1).tokens
        missed += proposed != (token,)
        wrong += bool(proposed) and proposed != (token,)
        source.extend([token])
    assert missed < 3.5 * edits, f"seed {seed}: {missed} for {edits} edits of {len(text)} tokens"
    assert wrong < 1.5 * edits, f"seed {seed}: {wrong}"


HARD = {
    "all equal": lambda rng, size: [7] * size,
    "two tokens": lambda rng, size: [rng.randrange(2) for _ in range(size)],
    "a long period": lambda rng, size: [rng.randrange(9) for _ in range(100)] * (size // 100),
}


@pytest.mark.parametrize("kind", HARD)
def test_every_token_costs_a_bounded_number_of_steps_however_long_the_prediction_is(kind: str) -> None:
    seed = 5
    rng = random.Random(seed)
    source = PredictionSource(HARD[kind](rng, 4000), 0)
    max_lines = max(lines_run(lambda: source.extend([rng.choice((0, 1, 7))])) for _ in range(400))
    assert 0 < max_lines < 800, f"seed {seed}"
    assert lines_run(lambda: source.propose(16)) < 10


def test_confidence_is_that_of_an_equal_match() -> None:
    source = PredictionSource(words("abc"), 0)
    assert source.propose(2).confidence == (confidence(TRUSTED), confidence(TRUSTED + 1))


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of the two modules ``call`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object):
        nonlocal count
        if frame.f_code.co_filename not in (prediction.__file__, lookup.__file__):
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
