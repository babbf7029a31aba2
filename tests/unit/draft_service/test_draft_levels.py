"""How many levels a launch has, and what it draws."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from draft_service import levels
from draft_service.levels import DraftAccount, DraftLevels, LaunchTime
from draft_service.sequence import DraftBatchEntry, DraftCounters
from engine.levels.level_memory import MAX_LEVELS
from engine.levels.level_ops import best_draws
from engine.sampling.noise import keys_at
from engine.sampling.sampling import Draw, candidates
from speculation.messages import Sampling, SessionId
from speculation.noise import splitmix64
from speculation.trie import Node
from speculation.verifying.budget import StepCost


def known(step: float, level: float) -> LaunchTime:
    time = LaunchTime()
    time.observe(1, step)
    time.observe(3, step + 2 * level)
    time.levels(None)  # of the first of some launches one level is taken
    return time


def test_a_launch_grows_from_one_level_to_what_there_is_time_for() -> None:
    time = LaunchTime()
    assert time.levels(None) == 1
    time.observe(4, 9.0)
    assert time.levels(None) == 1, "it is not known what one takes"
    time.observe(1, 1.0)
    assert time.levels(None) == MAX_LEVELS
    time.observe(2, 1.25)
    assert time.levels(10.0) == 7, "1 + 6 of a quarter of 10"
    assert time.levels(1.0) == 5, "as long again as the first one"


def test_a_level_never_counts_more_than_a_step() -> None:
    """However it was measured: a step is a level and what the host does for it. So more than one is always tried."""
    assert known(1.0, 7.0).levels(interval=4.0) == 2
    assert known(1.0, 7.0).levels(interval=100.0) == MAX_LEVELS


def test_a_launch_that_is_shorter_than_its_levels_were_thought_to_be_has_a_cost() -> None:
    """A first level takes an even share of it at least, or nothing would be known of what reading takes."""
    launches, cost = DraftLevels(), StepCost()
    account = DraftAccount(DraftCounters(), cost, launches, None)
    session = Mock(session=Mock(opened=Mock(session=SessionId(1))))
    for count, seconds in ((1, 1.0), (4, 7.0), (4, 1.5), (4, 1.5)):
        entry = DraftBatchEntry(session, [5], [-1], [Node(token=5, end=9, digest=0)], levels=count)
        account.observe([entry], 0.0, seconds, 0.0, 0.0)
    assert 0.375 <= cost(1) < 1.5


def test_launches_over_few_sessions_and_many_are_known_apart() -> None:
    launches = DraftLevels()
    launches.time_of(1).observe(1, 1.0)
    launches.time_of(30).observe(1, 9.0)
    assert launches.time_of(1).step == 1.0
    assert launches.time_of(16).step == launches.time_of(31).step == 9.0
    assert launches.time_of(8).step is None


def test_what_is_known_is_measured_again() -> None:
    time = known(1.0, 0.1)
    asked = [time.levels(None) for _ in range(2 * levels.PROBE_EVERY)]
    assert set(asked) == {1, MAX_LEVELS} and asked.count(1) == 2


@pytest.mark.parametrize("kinds", [[0.0, 0.0], [0.7, 1.0], [0.0, 0.6, 0.0, 1.4, 1e-45]])
def test_draws_are_those_of_candidates(kinds: list[float]) -> None:
    logits_MV = 4 * torch.randn(len(kinds), 500, generator=torch.Generator().manual_seed(1))
    logits_MV[-1, 3:] = float("-inf")
    settings = [Sampling(temperature=kind, seed=7 * row - 3) for row, kind in enumerate(kinds)]
    draws = [Draw(setting, 11 + row) for row, setting in enumerate(settings)]
    tiny = torch.finfo(torch.float32).tiny
    temperatures = [1.0 if setting.greedy else max(setting.temperature, tiny) for setting in settings]
    seeds = [splitmix64(setting.seed & (1 << 64) - 1) for setting in settings]
    seeds_M = torch.tensor([seed - (1 << 64) if seed >> 63 else seed for seed in seeds])
    keys_M = keys_at(seeds_M, torch.arange(11, 11 + len(kinds)))
    tokens_MC, confidence_MC, there_MC = best_draws(
        logits_MV,
        torch.tensor([[setting.greedy] for setting in settings]),
        torch.tensor(temperatures)[:, None],
        keys_M if any(kinds) else None,
        4,
    )
    for row, expected in enumerate(candidates(logits_MV, draws, 4)):
        found = [i for i in range(4) if there_MC[row, i]]
        assert [int(tokens_MC[row, i]) for i in found] == [each.token for each in expected]
        assert [float(confidence_MC[row, i]) for i in found] == pytest.approx([e.confidence for e in expected], 1e-6)
