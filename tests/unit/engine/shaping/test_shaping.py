"""Shaped logits equal what transformers' processors make of them, row by row, for texts that go on and for drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.shaping.shaping import NEVER, RowShaping, Shaping, shaped
from speculation.messages import Limits, Open, Sampling, SessionId, Token

VOCABULARY = 70
"""No multiple of the 32 tokens of a mask's word."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on rows this short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def opening(
    sampling: Sampling, tokens: Sequence[Token], prompt: int = 0, min_end: int = 0, stop: Sequence[Token] = ()
) -> Open:
    limits = Limits(10_000, frozenset(stop), min_end)
    return Open(SessionId(1), 1, tuple(tokens), sampling, limits, prompt=prompt)


def random_opening(rng: random.Random) -> Open:
    """Few tokens are used, so that much of what could happen does."""
    few = rng.sample(range(VOCABULARY), 8)
    text = rng.choices(few, k=rng.randint(1, 12))
    sampling = Sampling(
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        bias=tuple((token, rng.randint(-40, 40) / 4) for token in rng.sample(few, rng.choice([0, 0, 3]))),
        allowed=tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 0, 30]))),
        banned=tuple(dict.fromkeys(tuple(rng.choices(few, k=rng.randint(1, 3))) for _ in range(rng.choice([0, 0, 6])))),
    )
    stop = rng.sample(range(VOCABULARY), rng.choice([0, 0, 3]))
    return opening(sampling, text, rng.randint(1, len(text)), len(text) + rng.randint(-1, 6), stop)


def by_transformers(logits_V: torch.Tensor, opened: Open, text: Sequence[Token]) -> torch.Tensor:
    """The same by the processors, and by the definition of OpenAI's penalties, in vLLM's order."""
    sampling = opened.sampling
    steps = LogitsProcessorList()
    if sampling.bias:
        steps.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in sampling.bias]))
    steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores_V = steps(torch.tensor([text]), logits_V[None])[0]
    for token, count in Counter(text[opened.prompt or len(opened.tokens) :]).items():
        scores_V[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    last = LogitsProcessorList()
    if sampling.banned:
        last.append(NoBadWordsLogitsProcessor([list(tokens) for tokens in sampling.banned]))
    if opened.limits.stop_tokens:
        last.append(MinLengthLogitsProcessor(opened.limits.min_end, sorted(opened.limits.stop_tokens)))
    scores_V = last(torch.tensor([text]), scores_V[None])[0]
    if sampling.allowed:
        refused = [token for token in range(VOCABULARY) if token not in sampling.allowed]
        scores_V[refused] = NEVER
    return scores_V


def test_logits_equal_the_processors_while_texts_go_on() -> None:
    shaped_rows = 0
    for seed in range(25):
        rng = random.Random(seed)
        openings = [random_opening(rng) for _ in range(4)]
        texts = [list(opened.tokens) for opened in openings]
        shapings = [Shaping.of(*pair, VOCABULARY) for pair in zip(openings, texts, strict=True)]
        for step in range(4):
            rows: list[RowShaping | None] = []
            places: list[tuple[int, list[Token]]] = []
            for number in rng.choices(range(4), k=7):
                path = rng.choices(texts[number], k=rng.randint(0, 3))
                shaping = shapings[number]
                rows.append(shaping.after(path) if shaping else None)
                places.append((number, [*texts[number], *path]))
            logits_NV = logits_of(7, 100 * seed + step)
            actual_NV = shaped(logits_NV, rows)
            shaped_rows += sum(row is not None for row in rows)
            for row, (number, text) in enumerate(places):
                expected_V = by_transformers(logits_NV[row], openings[number], text)
                assert torch.equal(actual_NV[row] == NEVER, expected_V == NEVER), f"seed {seed}, {openings[number]}"
                torch.testing.assert_close(actual_NV[row], expected_V, atol=1e-9, rtol=1e-9, msg=f"seed {seed}")
            for text in texts:
                text += rng.choices(text, k=rng.randint(0, 3))
    assert shaped_rows > 400


def test_rows_that_nothing_shapes_are_the_very_same() -> None:
    logits_NV = logits_of(3, 1)
    assert shaped(logits_NV, [None] * 3) is logits_NV
    plain = opening(Sampling(temperature=0.3, top_k=4), (1, 2), stop=(3,))
    assert Shaping.of(plain, [1, 2], VOCABULARY) is None
    text = [1, 2]
    early = Shaping.of(opening(Sampling(), (1, 2), min_end=4, stop=(3,)), text, VOCABULARY)
    assert early is not None
    before = logits_NV.clone()
    one = shaped(logits_NV, [None, early.after((5,)), early.after((5, 6))])
    assert one[1, 3] == NEVER
    assert torch.equal(one[[0, 2]], logits_NV[[0, 2]])
    assert torch.equal(logits_NV, before)
    text += [8, 9]
    assert early.after(()) is None


def test_a_session_opened_again_is_shaped_as_if_it_had_never_moved() -> None:
    for seed in range(20):
        opened = random_opening(random.Random(seed))
        text = list(opened.tokens)
        begun = Shaping(replace(opened, tokens=opened.tokens[: opened.prompt]), text, VOCABULARY)
        again = Shaping(opened, text, VOCABULARY)
        first, second = (shaped(logits_of(1, seed), [RowShaping(shaping, (5, 5))]) for shaping in (begun, again))
        assert torch.equal(first, second), f"seed {seed}"


def test_what_lies_outside_the_vocabulary_shapes_nothing() -> None:
    """A drafter's vocabulary may be smaller than the target's."""
    beyond = VOCABULARY + 3
    sampling = Sampling(bias=((beyond, 2.0), (1, 2.0)), allowed=(1, 2, beyond), banned=((beyond,), (1, beyond)))
    shaping = Shaping(opening(sampling, (1,), min_end=9, stop=(beyond,)), [1], VOCABULARY)
    expected_V = torch.full((VOCABULARY,), NEVER, dtype=torch.float64)
    expected_V[[1, 2]] = logits_of(1, 3)[0, [1, 2]] + torch.tensor([2.0, 0.0], dtype=torch.float64)
    assert torch.equal(shaped(logits_of(1, 3), [shaping.after(())])[0], expected_V)


@dataclass
class Alternating:
    """A mask under which even and odd tokens take turns; after the path (9,) anything goes, after (8,) nothing."""

    told: list[Token] = field(default_factory=list)

    def advance(self, tokens: Sequence[Token]) -> None:
        self.told += tokens

    def bits(self, path: Sequence[Token]) -> torch.Tensor | None:
        if tuple(path) == (9,):
            return None
        if tuple(path) == (8,):
            return torch.zeros(3, dtype=torch.int32)
        odd = (len(self.told) + len(path)) % 2
        return torch.full((3,), -0x55555556 if odd else 0x55555555, dtype=torch.int32)


def test_a_mask_is_told_the_text_once_and_asked_about_every_path() -> None:
    mask = Alternating()
    text = [1, 2, 3]
    shaping = Shaping(opening(Sampling(), text, prompt=1), text, VOCABULARY, mask)
    for committed in ([], [4, 5], [6], []):
        text += committed
        logits_NV = logits_of(4, len(text))
        free, nothing, mine, other = shaped(logits_NV, [*map(shaping.after, [(9,), (8,), (7,), (7, 7)])])
        assert mask.told == text[1:]
        assert torch.equal(free, logits_NV[0])
        assert nothing.tolist() == [NEVER] * VOCABULARY
        odd = len(text) % 2
        assert (mine > NEVER).nonzero()[:, 0].tolist() == list(range(odd, VOCABULARY, 2))
        assert (other > NEVER).nonzero()[:, 0].tolist() == list(range(1 - odd, VOCABULARY, 2))


def test_a_text_costs_no_more_than_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand tokens are counted once, not at every step."""

    class Counted(list[Token]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            found = super().__getitem__(index)
            Counted.read += len(found) if isinstance(index, slice) else 1
            return found

    sampling = Sampling(presence_penalty=0.5, repetition_penalty=1.2, banned=((1, 2), (3, 4, 5)))
    text = Counted([7] * 10_000)
    shaping = Shaping(opening(sampling, text, prompt=5000), text, VOCABULARY)
    shaped(logits_of(1, 0), [shaping.after(())])
    Counted.read = 0
    for _ in range(10):
        text += [8, 9]
        shaped(logits_of(2, 0), [shaping.after(()), shaping.after((8, 9, 7))])
    assert Counted.read < 100
