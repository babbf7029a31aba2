"""The store of earlier outputs: what it finds, against plain search; what it holds, exactly; never across scopes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from speculation.messages import Token
from speculation.sources import suffix
from speculation.sources.suffix import CONTEXTS, COUNTED, PLACES, SHORTEST, SuffixLookup, SuffixStore

SEEDS = range(12)


def filled(*texts: Sequence[Token], scope: str = "", capacity: int = 4096) -> SuffixStore:
    store = SuffixStore(capacity)
    for text in texts:
        store.record(scope, text, 0)
        finish(store)
    return store


def finish(store: SuffixStore) -> None:
    while not store.idle:
        store.work(1000)
    store.validate()


def words(rng: random.Random, length: int, letters: int = 4) -> list[Token]:
    """Text in which short contexts come again and again, and long ones now and then."""
    phrases = [[rng.randrange(letters) for _ in range(6)] for _ in range(3)]
    text: list[Token] = []
    while len(text) < length:
        text += rng.choice(phrases) if rng.random() < 0.6 else [rng.randrange(letters)]
    return text[:length]


def equal_before(text: Sequence[Token], end: int, recent: Sequence[Token]) -> int:
    max_equal = min(end, len(recent), COUNTED)
    return next((i for i in range(max_equal) if text[end - 1 - i] != recent[-1 - i]), max_equal)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_followed_the_longest_equal_context_is_found(seed: int) -> None:
    rng = random.Random(seed)
    texts = [words(rng, rng.randint(SHORTEST, 40), letters=12) for _ in range(PLACES)]
    store = filled(*texts)
    for _ in range(60):
        source = rng.choice(texts)
        cut = rng.randint(1, len(source))
        recent = [*words(rng, 5, 12), *source[max(cut - rng.randint(1, 20), 0) : cut]]
        best = max(equal_before(text, end, recent) for text in texts for end in range(len(text)))
        found = store.follow("", recent, 5)
        if best < min(CONTEXTS):
            assert found.tokens == (), f"seed {seed}"
            continue
        ends = [(text, end) for text in texts for end in range(len(text)) if equal_before(text, end, recent) == best]
        assert found.tokens in [tuple(text[end : end + 5][: len(found.tokens)]) for text, end in ends], f"seed {seed}"
        assert len(found.confidence) == len(found.tokens) > 0
        assert all(0.0 < sure < 1.0 for sure in found.confidence)


def test_the_way_of_the_most_is_followed_with_the_confidence_of_their_share() -> None:
    context = [9, 8, 7, 6, 5]
    texts = [[*context, 1, 2, 3], [*context, 1, 2, 4, 4], [*context, 1, 5, 5], [*context, 6, 6]]
    found = filled(*texts).follow("", context, 8)
    assert found.tokens[:2] == (1, 2)
    assert found.confidence[0] > found.confidence[1]
    alone = filled(texts[0]).follow("", context, 8)
    assert alone.tokens == (1, 2, 3)
    assert alone.confidence[0] > found.confidence[0]


def test_a_text_said_again_counts_again_and_is_held_once() -> None:
    context, one, other = [9, 8, 7, 6], [1, 1], [2, 2]
    store = filled([*context, *one], [*context, *one, *one], [*context, *other], [*context, *other], [*context, *other])
    assert store.held == 6 + 8 + 6
    assert store.follow("", context, 2).tokens == (2, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_held_is_bounded_and_known_at_every_moment(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([40, 200, 700])
    store, max_held = SuffixStore(capacity), 0
    for _ in range(150):
        if rng.random() < 0.5:
            text = words(rng, rng.randint(0, 60))
            store.record(rng.choice("abc"), text, rng.randint(0, len(text)))
        store.work(rng.choice([1, 3, 20, 200]))
        store.validate()
        max_held = max(max_held, store.held)
        assert store.held <= capacity, f"seed {seed}"
        store.used([rng.randint(1, 40)])
        store.follow(rng.choice("abc"), words(rng, 8), 4)
    assert max_held > capacity / 2, "else the bound was never near"
    assert store.counters.forgotten > 0


def test_work_is_what_it_is_told_to_be() -> None:
    store = SuffixStore(10_000)
    store.record("", list(range(2000)), 0)
    store.work(1)
    for done in range(0, 2000, 50):
        assert store.counters.indexed == done
        store.work(50)
    assert store.idle
    assert store.counters.indexed == 2000


def test_a_text_is_hashed_once_however_many_make_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(*[range(first, first + 10) for first in range(300)], capacity=4000)
    hashed: list[int] = []

    def counted(what: tuple[str, Sequence[Token]]) -> int:
        hashed.append(len(what[1]))
        return hash(what)

    monkeypatch.setattr(suffix, "hash", counted, raising=False)
    store.record("", range(1000), 0)
    finish(store)
    assert store.counters.forgotten >= 1000
    assert sum(size > max(CONTEXTS) for size in hashed) == 1


def test_what_was_of_use_stays_the_longest() -> None:
    rng = random.Random(5)
    texts = [[rng.randrange(1000) for _ in range(20)] for _ in range(3)]
    store = filled(*texts, capacity=80)  # room for three
    session = SuffixLookup(store, "")
    session.extend(texts[0][:10])
    assert session.propose(4).tokens == tuple(texts[0][10:14])
    session.extend(texts[0][10:11])
    store.record("", [rng.randrange(1000) for _ in range(20)], 0)
    finish(store)
    assert store.follow("", texts[0][:10], 1).tokens
    assert not store.follow("", texts[1][:10], 1).tokens, "not the oldest, but the one that was not used the longest"
    assert store.follow("", texts[2][:10], 1).tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_scopes_never_see_each_others_tokens(seed: int) -> None:
    """Each scope writes in an alphabet of its own, with the same contexts before: what it finds betrays whose it is."""
    rng = random.Random(seed)
    store = SuffixStore(600)
    shared = words(rng, 12)
    for _ in range(120):
        number = rng.randrange(3)
        own = [100 * (number + 1) + token for token in words(rng, 10)]
        store.record(str(number), [*shared, *own], 0)
        store.work(rng.choice([10, 60]))
        asking = rng.randrange(4)
        said = store.follow(str(asking), shared, 6).tokens
        assert {token // 100 for token in said} <= {asking + 1}, f"seed {seed}"
        assert not said or asking != 3
    store.validate()


def test_the_end_of_the_prompt_leads_to_the_beginning_of_the_answer() -> None:
    prompt, answer = list(range(100, 200)), [1, 2, 3, 4, 5]
    store = SuffixStore(4000)
    store.record("", [*prompt, *answer], len(prompt))
    finish(store)
    assert store.held == COUNTED + len(answer)
    session = SuffixLookup(store, "")
    session.extend(prompt)
    assert session.propose(16).tokens == tuple(answer)
    assert not store.follow("", prompt[:50], 4).tokens, "no more of the prompt is kept"


def test_short_answers_are_not_kept() -> None:
    assert filled([1] * (SHORTEST - 1)).held == 0
    store = SuffixStore(4000)
    store.record("", [7] * 50, 50 - SHORTEST + 1)
    assert store.idle
