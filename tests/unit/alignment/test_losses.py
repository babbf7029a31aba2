"""What drafts are trained for: each objective is its formula, and following its gradient lowers it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from alignment.encoding import BatchesInTurn
from alignment.losses import OBJECTIVES, Acceptance, distillation_loss, log_probabilities, next_token_loss

FORMULAS = {
    "forward-kl": lambda p, q: p * math.log(p / q),
    "reverse-kl": lambda p, q: q * math.log(q / p),
    "tv": lambda p, q: abs(p - q) / 2,
}


class Fixed(nn.Module):
    """A model that says the same whatever it reads."""

    def __init__(self, logits_BTV: Tensor) -> None:
        super().__init__()
        self._logits_BTV = logits_BTV

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=self._logits_BTV)


def logits(seed: int, vocabulary: int = 7) -> Tensor:
    return torch.randn(2, 3, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_its_formula_and_so_is_its_gradient(name: str) -> None:
    log_p_NV = log_probabilities(logits(1)).double()
    raw_NV = logits(2).flatten(0, 1).requires_grad_()
    log_q_NV = torch.log_softmax(raw_NV, -1)
    values_N = OBJECTIVES[name](log_p_NV, log_q_NV)
    for n in range(len(values_N)):
        pairs = zip(log_p_NV[n].exp().tolist(), log_q_NV[n].exp().tolist(), strict=True)
        assert float(values_N[n].detach()) == pytest.approx(sum(FORMULAS[name](p, q) for p, q in pairs))
    assert torch.autograd.gradcheck(lambda raw: OBJECTIVES[name](log_p_NV, torch.log_softmax(raw, -1)), raw_NV)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_gradient_lowers_the_loss_towards_the_teacher(name: str) -> None:
    student = logits(4).float().requires_grad_()
    tokens_BT1 = torch.zeros(2, 4, dtype=torch.int64)
    loss_of = distillation_loss(Fixed(logits(3).float()), divergence=OBJECTIVES[name])
    losses = []
    for _ in range(200):
        loss = loss_of(student, tokens_BT1)
        (gradient,) = torch.autograd.grad(loss, student)
        losses.append(float(loss.detach()))
        student = (student - 0.5 * gradient).detach().requires_grad_()
    assert losses[1] < losses[0]
    assert losses[-1] < 0.7 * losses[0]


def test_total_variation_is_what_acceptance_loses() -> None:
    target, draft = logits(5).flatten(0, 1).float(), logits(6).flatten(0, 1).float()
    acceptance = Acceptance()
    acceptance.add(target, draft, torch.Generator().manual_seed(0))
    kept = 1 - OBJECTIVES["tv"](torch.log_softmax(target, -1), torch.log_softmax(draft, -1)).mean()
    assert acceptance.figures()["overlap"] == pytest.approx(float(kept), abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_coupled_acceptance_stays_below_the_optimum(seed: int) -> None:
    acceptance = Acceptance()
    target, draft = (logits(seed * 2 + n).flatten(0, 1).float().repeat(4000, 1) for n in range(2))
    acceptance.add(target, draft, torch.Generator().manual_seed(seed))
    figures = acceptance.figures()
    assert figures["overlap"] - 0.12 < figures["coupled"] < figures["overlap"] + 0.01, f"seed {seed}"


def test_padding_of_the_vocabularies_counts_for_nothing() -> None:
    teacher, student = logits(7).float(), logits(8).float()
    tokens_BT1 = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(0))
    plain = distillation_loss(Fixed(teacher), 0.1)(student, tokens_BT1)
    padded = [torch.cat([part, torch.full((2, 3, more), 9.0)], -1) for part, more in ((teacher, 2), (student, 5))]
    loss = distillation_loss(Fixed(padded[0]), 0.1, vocabulary=7)(padded[1], tokens_BT1)
    assert torch.equal(loss, plain)


def test_the_text_itself_weighs_as_much_as_is_said() -> None:
    teacher, student = logits(9).float(), logits(10).float()
    tokens_BT1 = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(1))
    alone, both = (distillation_loss(Fixed(teacher), weight)(student, tokens_BT1) for weight in (0.0, 0.3))
    assert float(both - alone) == pytest.approx(0.3 * float(next_token_loss(student, tokens_BT1)), rel=1e-5)


class Numbered:
    """Batches that say of which source and which number they are."""

    def __init__(self, source: int) -> None:
        self._source = source

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        return torch.tensor([self._source, step])


def test_sources_take_turns_evenly_and_skip_nothing() -> None:
    batches = BatchesInTurn((Numbered(0), 3), (Numbered(1), 1), (Numbered(2), 0))
    assert [batches.at(step, 1, 1).tolist() for step in range(8)] == [
        [0, 0], [0, 1], [1, 0], [0, 2], [0, 3], [0, 4], [1, 1], [0, 5],
    ]  # fmt: skip
