"""The own tokens of a text that grows spell what is committed, whatever was drafted of it, and cost little work."""

from __future__ import annotations

import re
from random import Random

import pytest

from draft_service.tokenizer import SharedVocabulary
from draft_service.translation import LOOKBACK, OwnText
from speculation.messages import Token
from tests.other_tokenizers import OWN, TEXTS, shared

PARTS = [
    *TEXTS[:3],
    "日本",
    "🙂",
    "👩‍👩‍👧",
    "é",
    "  \n",
    " ",
    "\n\n",
    "1234",
    "</s>",
    "<turn>",
    "=" * 40,
    "Ünïcödé ",
    "x",
]


def committed(rng: Random, vocabulary: SharedVocabulary, parts: int) -> list[Token]:
    """A target's text: also cut where no tokenizer would, with special tokens and bytes that are no characters."""
    target = vocabulary.target
    tokens: list[Token] = []
    for _ in range(parts):
        fate = rng.random()
        if fate < 0.1:
            tokens.append(rng.choice(list(target.special)))
        elif fate < 0.2:
            tokens += [rng.randrange(target.size) for _ in range(rng.randrange(4))]
        elif fate < 0.4:
            tokens += [target.by_bytes[bytes([byte])] for byte in rng.choice(PARTS).encode()]
        else:
            tokens += target.encode(rng.choice(PARTS))[0]
    return tokens


def grow(rng: Random, vocabulary: SharedVocabulary, tokens: list[Token], followed: float) -> OwnText:
    """Commit ``tokens`` a few at a time, of which some were drafted, checking each time."""
    text = OwnText(vocabulary, known := tokens[:1])
    while len(known) < len(tokens):
        before = len(known)
        known += tokens[before : before + rng.randint(1, 6)]
        drafted = 0
        while before + drafted < len(known) and rng.random() < followed:
            if known[before + drafted] not in vocabulary.own_of or not (drafted or text.complete):
                break
            drafted += 1
        text.follow(drafted)
        old = list(text.tokens)
        if before + drafted < len(known) or rng.random() < 0.2:
            unchanged = text.settle()
            assert text.tokens[:unchanged] == old[:unchanged]
            assert text.tokens[unchanged : unchanged + 1] != old[unchanged : unchanged + 1] or unchanged == len(old)
        check(vocabulary, known, text)
    return text


def check(vocabulary: SharedVocabulary, known: list[Token], text: OwnText) -> None:
    fresh = OwnText(vocabulary, known)
    assert text.complete == fresh.complete
    if text.complete:
        assert spelt(vocabulary, text) == spelt(vocabulary, fresh)


def spelt(vocabulary: SharedVocabulary, text: OwnText) -> str:
    """What the own tokens say, special ones in brackets; however many bytes there are that are no characters."""
    own = vocabulary.own
    pieces = [b"[%d]" % token if (piece := own.bytes_of[token]) is None else piece for token in text.tokens]
    said = re.sub("\ufffd+", "\ufffd", b"".join(pieces).decode(errors="replace"))
    # What a tokenizer puts before a text is there once a text has been encoded from its beginning.
    return re.sub(r"(^|\]) +", r"\1", said) if own.prefixes else said


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("seed", range(30))
def test_the_own_tokens_spell_the_text_however_it_came(kind: str, seed: int):
    rng, vocabulary = Random(f"{kind} {seed}"), shared(kind)
    grow(rng, vocabulary, committed(rng, vocabulary, 12), followed=rng.choice([0.0, 0.5, 0.9]))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_nothing_is_lost_of_any_bytes(kind: str):
    """Where there are tokens for single bytes, what is not sound is spelt as well, as long as it may become so."""
    vocabulary = shared(kind)
    raw = "日本語 🙂 naïve".encode()
    tokens = [vocabulary.target.by_bytes[bytes([byte])] for byte in raw]
    text = OwnText(vocabulary, known := tokens[:1])
    for end in range(2, len(tokens) + 1):
        known.append(tokens[end - 1])
        text.follow(0)
        text.settle()
        assert text.complete
        said = b"".join(vocabulary.own.bytes_of[token] or b"" for token in text.tokens)
        assert said.removeprefix(b" ") == raw[:end]


def test_without_tokens_for_bytes_it_waits_for_the_rest_of_a_character():
    vocabulary = shared("without bytes")
    tokens = [vocabulary.target.by_bytes[bytes([byte])] for byte in "a日".encode()]
    text = OwnText(vocabulary, known := tokens[:1])
    waits = []
    for token in tokens[1:]:
        known.append(token)
        text.settle()
        waits.append(not text.complete)
    assert waits == [True, True, False]


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("followed", [0.0, 0.6])
def test_the_work_does_not_grow_with_the_text(kind: str, followed: float):
    """Each committed token is encoded once, and at most a few own tokens again each time that drafts are left."""
    rng, vocabulary = Random(5), shared(kind)
    tokens = vocabulary.target.encode("".join(rng.choice(TEXTS) for _ in range(40)))[0]
    text = OwnText(vocabulary, known := tokens[:1])
    settled = 0
    while len(known) < len(tokens):
        before = len(known)
        known += tokens[before : before + 4]
        drafted = 0
        while (
            before + drafted < len(known) and known[before + drafted] in vocabulary.own_of and rng.random() < followed
        ):
            drafted += 1
        text.follow(drafted)
        if before + drafted < len(known):
            text.settle()
            settled += 1
    # A boundary inside a character is no place to begin, so the first of those encoded again may be a little earlier.
    assert text.encoded <= len(text.tokens) + settled * (LOOKBACK + 8)
    assert len(text.tokens) > 1000


@pytest.mark.parametrize("kind", OWN)
def test_plain_text_is_cut_as_if_it_had_been_encoded_at_once(kind: str):
    rng, vocabulary = Random(7), shared(kind)
    tokens = vocabulary.target.encode("".join(TEXTS[:3]))[0]
    text = OwnText(vocabulary, known := tokens[:1])
    while len(known) < len(tokens):
        before = len(known)
        known += tokens[before : before + rng.randint(1, 5)]
        drafted = 0
        while before + drafted < len(known) - 1 and known[before + drafted] in vocabulary.own_of:
            drafted += 1
        text.follow(drafted)
        text.settle()
        assert text.tokens == OwnText(vocabulary, list(known)).tokens
