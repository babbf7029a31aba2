"""The rejection rule on tensors equals the law, and what it commits has the target's distribution.

The first part ties every verdict to the pure functions of :mod:`speculation.acceptance`, computed with fractions and
the reference noise. The second is statistical, through everything that runs in production: q drawn and rounded, coins,
replacements, bonus tokens, filters, temperatures.

Each statistical test decodes two tokens in 60,000 sessions and compares the frequency of every first token, every
second token and every pair with its probability. A frequency may be off by 4 standard deviations, which a correct
program exceeds in one of 16,000 cells. A token of probability 0.25 that is committed 0.01 too often is 5.7 off, so
it is found with probability 0.95 (0.98 for 0.2, 0.8 for 0.5). Seeds are fixed: a test passes always or never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling import rejection
from engine.sampling.rejection import draw_sparse, verify_chains
from engine.sampling.sampling import Draw, filtered_log_probs, sample
from speculation import noise as reference
from speculation.acceptance import AcceptanceResult, Chosen, Draft, Sampled, keep_chain, residual
from speculation.messages import SUPPORT_TOTAL, Sampling, Support
from speculation.noise import Stream
from tests.thorough import more_thorough


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on rows this short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- tied to the law ---------------------------------------------------------------------------------------------------


@st.composite
def supports(draw: st.DrawFn, vocabulary: int) -> Support:
    """Few or all tokens, with weights from next to nothing to nearly all."""
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=vocabulary, unique=True))
    cuts = st.integers(1, SUPPORT_TOTAL - 1)
    inner = sorted(draw(st.lists(cuts, min_size=len(tokens) - 1, max_size=len(tokens) - 1, unique=True)))
    ends = zip([0, *inner], [*inner, SUPPORT_TOTAL], strict=True)
    return Support(tuple(tokens), tuple(end - start for start, end in ends))


@st.composite
def verifications(draw: st.DrawFn) -> tuple[Tensor, list[Draw], list[Draft]]:
    """A target's rows, some of them the very q that the draft came from, and a chain drawn or chosen."""
    vocabulary = draw(st.integers(2, 6))
    drafts: list[Draft] = []
    rows: list[list[float]] = []
    score = st.floats(-8, 8, width=32)
    for _ in range(draw(st.integers(0, 3))):
        q = draw(supports(vocabulary))
        token = draw(st.sampled_from(q.tokens))
        drafts.append(Sampled(token, q) if draw(st.booleans()) else Chosen(token))
        if draw(st.booleans()):
            weights = dict(zip(q.tokens, q.weights, strict=True))
            rows.append([math.log(weights.get(v, 1e-9)) for v in range(vocabulary)])
        else:
            rows.append(draw(st.lists(score, min_size=vocabulary, max_size=vocabulary)))
    rows.append(draw(st.lists(score, min_size=vocabulary, max_size=vocabulary)))
    temperature = draw(st.sampled_from([0.0, 0.7, 1.0, 1.5]))
    sampling = Sampling(
        temperature, draw(st.integers(0, 3)), draw(st.sampled_from([1.0, 0.8])), seed=draw(st.integers())
    )
    position = draw(st.integers(0, 1000))
    draws = [Draw(sampling, position + i) for i in range(len(rows))]
    # In double precision no two perturbed scores are close enough for rounding to choose between them.
    return torch.tensor(rows, dtype=torch.float64), draws, drafts


def law_of(logits_V: Tensor, draw: Draw) -> list[float]:
    """p as the law takes it."""
    if draw.sampling.greedy:
        best = int(logits_V.argmax())
        return [float(token == best) for token in range(len(logits_V))]
    return filtered_log_probs(logits_V[None], [draw])[0].exp().tolist()


def coin(draw: Draw) -> Fraction:
    word = reference.bits(reference.key(draw.sampling.seed, draw.position, Stream.ACCEPT), 0)
    return Fraction(2 * word + 1, 2**33)


def gumbel_draw(probabilities: Sequence[Fraction], draw: Draw, stream: Stream) -> int:
    key = reference.key(draw.sampling.seed, draw.position, stream)
    noise = (0.0 if stream is Stream.SAMPLE and draw.sampling.greedy else reference.gumbel(key, v) for v in range(999))
    scores = [math.log(p) + g if p else -math.inf for p, g in zip(probabilities, noise, strict=False)]
    return scores.index(max(scores))


def verdict(logits_RV: Tensor, draws: Sequence[Draw], drafts: Sequence[Draft]) -> AcceptanceResult:
    """What the law says, in exact arithmetic but for logarithms."""
    laws = [[Fraction(p) for p in law_of(row, draw)] for row, draw in zip(logits_RV, draws, strict=True)]
    p = [law[draft.token] for law, draft in zip(laws, drafts, strict=False)]
    kept = keep_chain(drafts, p, map(coin, draws[: len(drafts)]))
    if kept == len(drafts):
        return AcceptanceResult(tuple(range(kept)), gumbel_draw(laws[kept], draws[kept], Stream.SAMPLE))
    own = gumbel_draw(residual(laws[kept], drafts[kept].q), draws[kept], Stream.RESIDUAL)
    return AcceptanceResult(tuple(range(kept)), own)


@settings(max_examples=300, derandomize=True)
@given(verifications())
def test_verdicts_are_those_of_the_law(case: tuple[Tensor, list[Draw], list[Draft]]) -> None:
    logits_RV, draws, drafts = case
    assert verify_chains(logits_RV, draws, [drafts]) == [verdict(*case)]


@settings(max_examples=150, derandomize=True)
@given(verifications(), st.sampled_from([torch.float32, torch.float64]))
def test_the_residual_is_that_of_the_law(case: tuple[Tensor, list[Draw], list[Draft]], dtype: torch.dtype) -> None:
    logits_RV, draws, drafts = case
    p_RV = rejection._probabilities(logits_RV.to(dtype), draws)
    for p_V, draft in zip(p_RV, drafts, strict=False):
        excess_V = rejection._excess(p_V[None], [draft])[0].double()
        expected = torch.tensor(residual(p_V.tolist(), draft.q), dtype=torch.float64)
        torch.testing.assert_close(excess_V / excess_V.sum(), expected, atol=1e-6, rtol=1e-6)


# -- statistics --------------------------------------------------------------------------------------------------------

SESSIONS = 60_000
"""So many show a hundredth of all tokens in the place of others."""
FEW = 15_000
"""So many show what is planted here, and about two hundredths."""
TOKENS = 6
LARGEST_DEVIATION = 4.0
POSITION = 100
"""Of the first token decoded."""

_generator = torch.Generator().manual_seed(20_221_130)
TARGET = torch.randn(TOKENS + 1, TOKENS, generator=_generator) * 0.7
"""Logits after each token; the last row: after the prompt."""
OTHER = torch.randn(TOKENS + 1, TOKENS, generator=_generator)

Drafting = Callable[[Tensor, Sequence[Draw]], Sequence[Draft]]


def sampled(logits_NV: Tensor, draws: Sequence[Draw]) -> Sequence[Draft]:
    return draw_sparse(logits_NV, draws)


def sampled_from_two(logits_NV: Tensor, draws: Sequence[Draw]) -> Sequence[Draft]:
    return draw_sparse(logits_NV, draws, size=2)


def chosen(logits_NV: Tensor, draws: Sequence[Draw]) -> Sequence[Draft]:
    return [Chosen(token) for token in logits_NV.argmax(-1).tolist()]


def alternating(logits_NV: Tensor, draws: Sequence[Draw]) -> Sequence[Draft]:
    """Chosen before every other position, in every other session."""
    both = zip(draws, draw_sparse(logits_NV, draws), chosen(logits_NV, draws), strict=True)
    return [drawn if (draw.position + draw.sampling.seed) % 2 else picked for draw, drawn, picked in both]


@lru_cache(maxsize=1)
def seeded(samplings: Sequence[Sampling], sessions: int) -> list[list[Draw]]:
    """The draws of every session at the first three positions; most cases have the same."""
    own = [replace(samplings[i % len(samplings)], seed=i) for i in range(sessions)]
    return [[Draw(sampling, POSITION + ahead) for sampling in own] for ahead in range(3)]


def decode(
    drafter: Tensor, samplings: Sequence[Sampling], drafting: Drafting, sessions: int = FEW
) -> tuple[Tensor, float]:
    """The first two tokens of every session, ``[sessions, 2]``, and the mean number of drafts kept of two."""
    drawn_at = seeded(tuple(samplings), sessions)
    first = drafting(drafter[TOKENS].expand(sessions, -1), drawn_at[0])
    second = drafting(drafter[[draft.token for draft in first]], drawn_at[1])
    after = torch.tensor([(TOKENS, one.token, two.token) for one, two in zip(first, second, strict=True)])
    draws = [draw for session in zip(*drawn_at, strict=True) for draw in session]
    walks = verify_chains(TARGET[after.flatten()], draws, list(zip(first, second, strict=True)))
    texts = [
        [*(draft.token for draft in chain[: len(walk.kept)]), walk.own]
        for chain, walk in zip(zip(first, second, strict=True), walks, strict=True)
    ]
    short = [i for i, text in enumerate(texts) if len(text) == 1]
    if short:
        following = sample(TARGET[[texts[i][0] for i in short]], [drawn_at[1][i] for i in short])
        for i, token in zip(short, following, strict=True):
            texts[i].append(token)
    return torch.tensor([text[:2] for text in texts]), sum(len(walk.kept) for walk in walks) / sessions


def promised(samplings: Sequence[Sampling]) -> Tensor:
    """The joint distribution of the first two tokens under plain decoding, ``[TOKENS, TOKENS]``."""
    joint = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    for sampling in samplings:
        rows = [law_of(logits_V.double(), Draw(sampling, 0)) for logits_V in TARGET]
        laws = torch.tensor(rows, dtype=torch.float64)
        joint += laws[TOKENS][:, None] * laws[:TOKENS] / len(samplings)
    return joint


def deviation(texts: Tensor, joint: Tensor) -> float:
    """The largest distance, in standard deviations, of a frequency from its probability; infinite for a text that
    plain decoding cannot give."""
    counts = torch.bincount(texts[:, 0] * TOKENS + texts[:, 1], minlength=TOKENS**2).view(TOKENS, TOKENS).double()
    if bool((counts[joint == 0] > 0).any()):
        return math.inf
    seen = torch.cat([counts.flatten(), counts.sum(0), counts.sum(1)])
    p = torch.cat([joint.flatten(), joint.sum(0), joint.sum(1)])
    usual = (p * len(texts) > 25) & (p < 1)  # a rarer cell is not normally distributed
    distance = (seen - len(texts) * p).abs() / (len(texts) * p * (1 - p)).sqrt()
    return float(distance[usual].max())


PLAIN = [Sampling()]
CASES: dict[str, tuple[Tensor, list[Sampling], Drafting, tuple[float, float]]] = {
    "all kept": (TARGET, PLAIN, sampled, (1.99, 2.0)),
    "nearly all refused": (-4 * TARGET, PLAIN, sampled, (0.0, 0.3)),
    "some kept": (TARGET + 0.5 * OTHER, PLAIN, sampled, (1.0, 1.9)),
    "q of two tokens": (TARGET + 0.5 * OTHER, PLAIN, sampled_from_two, (0.3, 1.5)),
    "chosen": (TARGET, PLAIN, chosen, (0.2, 1.0)),
    "chosen and sampled": (TARGET + 0.5 * OTHER, PLAIN, alternating, (0.3, 1.5)),
    "temperatures": (
        TARGET + 0.5 * OTHER,
        [Sampling(temperature=0.5), Sampling(temperature=0.0), Sampling(temperature=1.6)],
        sampled,
        (0.5, 1.9),
    ),
    "top-k": (TARGET + 0.5 * OTHER, [Sampling(top_k=3)], sampled, (0.5, 1.9)),
    "top-p": (TARGET + 0.5 * OTHER, [Sampling(temperature=0.8, top_p=0.75)], sampled, (0.3, 1.9)),
    "min-p": (TARGET + 0.5 * OTHER, [Sampling(temperature=1.2, min_p=0.3)], sampled, (0.5, 1.9)),
}


@cache
def decoded(case: str, sessions: int) -> tuple[Tensor, float]:
    """What :func:`decode` says of a case with nothing planted."""
    drafter, samplings, drafting, _ = CASES[case]
    return decode(drafter, samplings, drafting, sessions)


@pytest.mark.parametrize("sessions", more_thorough(FEW, SESSIONS))
@pytest.mark.parametrize("case", CASES)
def test_committed_tokens_have_the_targets_distribution(case: str, sessions: int) -> None:
    _, samplings, _, (min_kept, max_kept) = CASES[case]
    texts, kept = decoded(case, sessions)
    assert min_kept <= kept <= max_kept, "the case is not what its name says"
    assert deviation(texts, promised(samplings)) < LARGEST_DEVIATION


@pytest.mark.thorough
def test_a_hundredth_moved_from_one_token_to_another_is_found() -> None:
    texts, _ = decoded("some kept", SESSIONS)
    joint = promised(PLAIN)
    gains, loses = joint.sum(1).argsort(descending=True)[1:3].tolist()
    moved = joint.clone()
    moved[gains] *= 1 + 0.01 / float(joint[gains].sum())
    moved[loses] *= 1 - 0.01 / float(joint[loses].sum())
    assert deviation(texts, joint) < LARGEST_DEVIATION < deviation(texts, moved)


def test_replacing_from_p_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_excess", lambda p_MV, drafts: p_MV.clone())
    texts, _ = decode(TARGET + 0.5 * OTHER, PLAIN, sampled)
    assert deviation(texts, promised(PLAIN)) > LARGEST_DEVIATION


def test_a_coin_that_is_the_drafters_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def coin(draw: Draw) -> float:
        return reference.uniform(reference.bits(rejection._key(draw, Stream.DRAFT), 0))

    monkeypatch.setattr(rejection, "_coin", coin)
    texts, _ = decode(TARGET + 0.5 * OTHER, PLAIN, sampled)
    assert deviation(texts, promised(PLAIN)) > LARGEST_DEVIATION


def test_chosen_tokens_passed_off_as_sampled_are_found() -> None:
    def dishonest(logits_NV: Tensor, draws: Sequence[Draw]) -> Sequence[Draft]:
        return [Sampled(draft.q.tokens[0], draft.q) for draft in draw_sparse(logits_NV, draws)]

    texts, _ = decode(TARGET + 0.5 * OTHER, PLAIN, dishonest)
    assert deviation(texts, promised(PLAIN)) > LARGEST_DEVIATION
