"""How the rows of a step are drawn that holds sessions under both rules, and how what comes of it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draft_service import sequence
from draft_service.sequence import DraftBatchEntry, candidates_of
from engine.model import Model
from engine.sampling.rejection import draw_sparse
from engine.sampling.sampling import candidates
from speculation.drafting.draft_session import Candidate
from speculation.messages import Proposal, Rule, Sampling, Speculation
from tests.unit.draft_service.test_draft_faults import ROUTER, VOCABULARY, close, drafter, model, opened, settle
from tests.unit.engine.engine_models import random_tokens

__all__ = ["model"]  # a fixture

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(seed=1),
    Sampling(temperature=0.7, seed=2, top_p=0.9),
    Sampling(seed=3, top_k=20, min_p=0.01),
]
NOTHING = float("-inf")


def rule_of(entry: DraftBatchEntry) -> Rule:
    return entry.sequence.session.opened.speculation.rule


def drawn_both_ways(entries: Sequence[DraftBatchEntry], logits_RV: torch.Tensor) -> list[list[Candidate]]:
    """Every row as under the coupled rule; instead of what that finds, if anything, a draw from q under the other."""
    draws = [draw for entry in entries for draw in entry.draws()]
    most = max(entry.sequence.session.children for entry in entries)
    found = candidates(logits_RV, draws, most)
    for row, entry in enumerate(entries):
        if rule_of(entry) is Rule.REJECTION and found[row]:
            (draft,) = draw_sparse(logits_RV[[row]], [draws[row]])
            found[row] = [Candidate(draft.token, draft.confidence, draft.q)]
    return found


@pytest.mark.parametrize("rules", [[Rule.COUPLED], [Rule.REJECTION], list(Rule)], ids=["coupled", "rejection", "mixed"])
def test_each_row_is_drawn_once_by_its_own_rule(
    model: Model, monkeypatch: pytest.MonkeyPatch, rules: Sequence[Rule]
) -> None:
    worker = drafter(model)
    for number in range(16):
        speculation, sampling = Speculation(rule=rules[number % len(rules)]), SAMPLINGS[number // 2 % len(SAMPLINGS)]
        worker.receive(ROUTER, opened(number, random_tokens(5, seed=number), sampling, speculation))
    entries = worker._plan()
    assert len(entries) == sum(entry.drawn for entry in entries) == 16
    logits_RV = 3.0 * torch.randn(len(entries), VOCABULARY, generator=torch.Generator().manual_seed(7))
    logits_RV[8:10] = NOTHING  # shaping left no token
    logits_RV[2:4, 5], logits_RV[4:6, 5] = float("nan"), float("inf")  # random rows: a broken model
    logits_RV[10:12, 3:] = NOTHING
    expected = drawn_both_ways(entries, logits_RV)
    given: list[int] = []

    def counting(logits_NV: torch.Tensor, *others: Any, **named: Any) -> Any:
        given.append(len(logits_NV))
        assert logits_NV is logits_RV or len(rules) > 1, "a step of one rule needs no copy"
        return candidates(logits_NV, *others, **named)

    monkeypatch.setattr(sequence, "candidates", counting)
    assert list(map(list, candidates_of(entries, logits_RV))) == expected
    assert sum(given) == sum(rule_of(entry) is Rule.COUPLED for entry in entries)
    close(worker)


def test_a_proposal_is_made_once_with_the_time_that_drafting_it_took(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, check, made = drafter(model), Proposal.__post_init__, []

    def counting(proposal: Proposal) -> None:
        made.append(proposal)
        check(proposal)

    monkeypatch.setattr(Proposal, "__post_init__", counting)
    worker.receive(ROUTER, opened(1, (5, 6, 7)))
    sent = [message for _, message in settle(worker) if isinstance(message, Proposal)]
    assert sent == made != []
    assert all(0 < message.took_us <= worker.counters.step_microseconds for message in sent)
    close(worker)
