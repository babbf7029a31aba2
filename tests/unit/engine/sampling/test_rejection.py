"""Drawing from a sparse q, and verifying chains of such drafts: single cases. Statistics are in ``tests/property``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.sampling import rejection
from engine.sampling.rejection import draw_sparse, verify_chains
from engine.sampling.sampling import Draw, filtered_log_probs, sample
from speculation.acceptance import AcceptanceResult, Chosen, Draft, Sampled, walk
from speculation.messages import ANCHOR, SUPPORT_TOTAL, Sampling, Support
from speculation.noise import Stream, key

VOCABULARY = 40
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on rows this short."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def draws(count: int, sampling: Sampling = Sampling(seed=7), position: int = 50) -> list[Draw]:
    return [Draw(sampling, position + i) for i in range(count)]


def certain(*tokens: int) -> torch.Tensor:
    """Logits of a target that has no doubt."""
    return torch.full((len(tokens), VOCABULARY), -50.0).scatter(1, torch.tensor(tokens)[:, None], 50.0)


def verify_alone(rows: torch.Tensor, how: Sequence[Draw], drafts: Sequence[Draft]) -> AcceptanceResult:
    """The verdict on a single chain."""
    (outcome,) = verify_chains(rows, how, [drafts])
    return outcome


# -- the drafter's draw ------------------------------------------------------------------------------------------------


def test_drafts_at_one_position_of_different_texts_are_independent() -> None:
    rows = torch.zeros(1, 4)
    same = 0
    for position in range(400):
        (one,), (other,) = (draw_sparse(rows, [Draw(Sampling(seed=7), position, text)]) for text in (3, 5))
        same += one.token == other.token
    assert 60 < same < 140, "a quarter of them, within 4.6 standard deviations"


def test_q_is_the_filtered_distribution_cut_and_rounded() -> None:
    how = draws(5, Sampling(temperature=0.8, top_p=0.95, seed=3))
    log_p_NV = filtered_log_probs(logits(5), how)
    for log_p_V, drawn in zip(log_p_NV, draw_sparse(logits(5), how, size=6), strict=True):
        best = log_p_V.double().exp().topk(6)
        expected = dict(zip(best.indices.tolist(), (best.values / best.values.sum()).tolist(), strict=True))
        assert set(drawn.q.tokens) == {token for token, q in expected.items() if q > 0}
        for token, weight in zip(drawn.q.tokens, drawn.q.weights, strict=True):
            assert abs(weight - expected[token] * SUPPORT_TOTAL) < 1


def test_a_filter_that_leaves_one_token_makes_q_certain() -> None:
    (drawn,) = draw_sparse(logits(1), draws(1, Sampling(top_k=1)))
    assert drawn == Sampled(int(logits(1).argmax()), Support((int(logits(1).argmax()),), (SUPPORT_TOTAL,)))


def test_a_greedy_drafter_is_certain_of_its_argmax() -> None:
    drafted = draw_sparse(logits(4), draws(4, GREEDY))
    assert [draft.token for draft in drafted] == logits(4).argmax(-1).tolist()
    assert all(draft.q.weights == (SUPPORT_TOTAL,) for draft in drafted)


@pytest.mark.parametrize(
    "q",
    [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.7, 0.2, 0.1], [1 - 1e-9, 1e-9], [0.1] * 10, [0.9, 0.1 - 1e-5, 1e-5, 0.0]],
)
def test_weights_add_up_and_miss_by_less_than_one(q: list[float]) -> None:
    (weights,) = rejection._whole_weights(torch.tensor([q], dtype=torch.float64)).tolist()
    assert sum(weights) == SUPPORT_TOTAL
    assert all(abs(weight - share * SUPPORT_TOTAL) < 1 for weight, share in zip(weights, q, strict=True))
    assert weights == sorted(weights, reverse=True)


def test_the_largest_remainders_are_rounded_up() -> None:
    exact = torch.tensor([[0.7, 0.2, 0.1, 0.0]], dtype=torch.float64)  # 45875.2, 13107.2, 6553.6
    assert rejection._whole_weights(exact).tolist() == [[45875, 13107, 6554, 0]]


def test_tokens_rounded_away_are_not_in_q() -> None:
    steep = torch.tensor([[0.0, -20.0, -30.0]])
    (drawn,) = draw_sparse(steep, draws(1))
    assert drawn.q == Support((0,), (SUPPORT_TOTAL,))


def test_the_draw_has_exactly_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of the noise's upper bits once gives every token as often as its weight says."""
    q = Support((5, 2, 9), (SUPPORT_TOTAL - 4, 3, 1))
    words = iter(range(0, 2**32, 2**16))
    monkeypatch.setattr(rejection, "bits", lambda *_: next(words))
    counts = Counter(rejection._draw_from(q.tokens, q.weights, draws(1)[0]).token for _ in range(SUPPORT_TOTAL))
    assert counts == dict(zip(q.tokens, q.weights, strict=True))


def test_a_draw_depends_on_its_own_row_only() -> None:
    how = [*draws(3, Sampling(seed=1)), *draws(3, GREEDY), *draws(3, Sampling(top_k=5, seed=2))]
    together = draw_sparse(logits(9), how)
    alone = [draw_sparse(logits(9)[i : i + 1], how[i : i + 1])[0] for i in range(9)]
    assert together == alone
    assert draw_sparse(logits(0), []) == []


def test_no_two_uses_of_the_seed_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams asked for while drafting and verifying one position, a refusal and a bonus token."""
    used: list[tuple[int, int, Stream]] = []

    def spy(seed: int, position: int, stream: Stream = Stream.SAMPLE) -> int:
        used.append((seed, position, stream))
        return key(seed, position, stream)

    monkeypatch.setattr(rejection, "key", spy)
    how = draws(2)
    draw_sparse(logits(1), how[:1])
    verify_alone(certain(3, 4), how, [Chosen(3)])
    verify_alone(certain(3, 4), how, [Chosen(5)])
    assert set(used) == {(7, 50, stream) for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.RESIDUAL)}


# -- the target's verdict ----------------------------------------------------------------------------------------------


def test_without_drafts_it_is_plain_decoding() -> None:
    for position in range(20):
        how = draws(1, position=position)
        assert verify_alone(logits(1), how, []) == AcceptanceResult((), sample(logits(1), how)[0])


def test_a_drafter_that_is_the_target_is_kept_whole_and_the_bonus_token_is_the_plain_draw() -> None:
    """q holds the whole vocabulary here, so it differs from p by rounding only: these few are all kept."""
    for position in range(10):
        how = draws(5, position=position)
        outcome = verify_alone(logits(5), how, draw_sparse(logits(4), how[:4], size=VOCABULARY))
        assert outcome == AcceptanceResult((0, 1, 2, 3), sample(logits(5)[4:], how[4:])[0]), f"position {position}"


def test_a_target_without_doubt_replaces_the_first_other_token() -> None:
    drafted: list[Draft] = [Chosen(3), Sampled(4, Support((4, 5), (SUPPORT_TOTAL - 1, 1))), Chosen(9), Chosen(6)]
    assert verify_alone(certain(3, 4, 5, 6, 7), draws(5), drafted) == AcceptanceResult((0, 1), 5)


def test_greedy_is_the_coupled_rule() -> None:
    for seed in range(30):
        target, how = logits(4, seed), draws(4, GREEDY)
        drafted = draw_sparse(target[:3] + logits(3, seed + 1000, spread=0.5), draws(3, Sampling(seed=seed)))
        tokens = [draft.token for draft in drafted]
        assert verify_alone(target, how, drafted) == walk(tokens, [ANCHOR, 0, 1], sample(target, how)), f"seed {seed}"


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(top_k=3, seed=1), Sampling(top_p=0.5, seed=1)])
def test_a_refused_token_is_never_its_own_replacement(sampling: Sampling) -> None:
    refused = 0
    for seed in range(60):
        how = draws(2, sampling, position=seed)
        drafted = draw_sparse(logits(1, seed + 1000), how[:1])
        outcome = verify_alone(logits(2, seed), how, drafted)
        if not outcome.kept:
            refused += 1
            assert outcome.own != drafted[0].token, f"seed {seed}"
            assert filtered_log_probs(logits(2, seed), how)[0, outcome.own] > float("-inf")
    assert refused > 10


def test_chains_are_decided_as_if_each_were_alone() -> None:
    settings = [Sampling(seed=1), GREEDY, Sampling(temperature=0.6, top_k=9, seed=2), Sampling(top_p=0.7, seed=3)]
    lengths = [2, 3, 0, 4]
    chains: list[list[Draft]] = []
    rows: list[torch.Tensor] = []
    how: list[list[Draw]] = []
    for i, (sampling, length) in enumerate(zip(settings, lengths, strict=True)):
        target = logits(length + 1, seed=i)
        how.append(draws(length + 1, sampling, position=10 * i))
        chains.append(list(draw_sparse(target[:length] + 0.3 * logits(length, seed=99), how[-1][:length])))
        rows.append(target)
    together = verify_chains(torch.cat(rows), [draw for draw_list in how for draw in draw_list], chains)
    assert together == [verify_alone(*session) for session in zip(rows, how, chains, strict=True)]
    assert verify_chains(logits(0), [], []) == []


def test_verdicts_leave_the_logits_alone() -> None:
    target, how = logits(3), draws(3)
    verify_alone(target, how, [Chosen(1), Chosen(2)])
    assert torch.equal(target, logits(3))


def test_q_may_name_tokens_the_target_does_not_have() -> None:
    q = Support((3, VOCABULARY + 5), (1, SUPPORT_TOTAL - 1))
    assert verify_alone(certain(4, 5), draws(2), [Sampled(3, q)]) == AcceptanceResult((), 4)


def test_where_rounding_leaves_nothing_of_p_the_replacement_is_drawn_from_p() -> None:
    p = torch.tensor([[0.5 - 2**-24, 0.5, 0.0]])
    q = Support((0, 1), (SUPPORT_TOTAL // 2, SUPPORT_TOTAL // 2))
    assert torch.equal(rejection._excess(p, [Sampled(0, q)]), p)


def test_rows_must_match_the_drafts() -> None:
    with pytest.raises(AssertionError, match="one row after every draft"):
        verify_alone(logits(2), draws(2), [Chosen(1), Chosen(2)])
