"""What a step may take, by those before it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from cluster.config.pools import TargetConfig
from cluster.config.settings import settings_of
from engine.cache.kv_cache import KVCache
from engine.step import Engine
from speculation.verifying.planner import Planner
from target_service.sequence import BatchEntry
from target_service.step_account import (
    STUCK_BEYOND,
    STUCK_SECONDS,
    STUCK_TIMES,
    LongestStep,
    StepAccount,
    TargetCounters,
    time_steps,
)
from tests.structure import ROOT
from tests.unit.engine.engine_models import load_tiny
from transport.tracing import SequenceTimings


def test_nothing_is_said_of_steps_before_one_was_measured() -> None:
    longest = LongestStep()
    assert longest.max_seconds(1) is None
    longest.observe(1, 0.01)
    assert longest.max_seconds(1) == STUCK_SECONDS


def test_a_larger_step_may_take_longer_in_proportion_until_one_was_measured() -> None:
    longest = LongestStep()
    longest.observe(1, 0.8)
    assert longest.max_seconds(1) == STUCK_TIMES * 0.8
    assert longest.max_seconds(1024) == 0.8 * 1024 + STUCK_BEYOND
    longest.observe(1024, 1.25)
    assert longest.max_seconds(1024) == STUCK_TIMES * 1.25
    assert longest.max_seconds(1) == STUCK_TIMES * 0.8
    longest.observe(40, 0.6)  # a smaller step than it takes no longer
    assert longest.max_seconds(33) == longest.max_seconds(1) == STUCK_TIMES * 0.6


def test_where_steps_take_seconds_one_that_hangs_is_not_waited_for_all_the_longer() -> None:
    longest = LongestStep()
    longest.observe(1, 4.0)
    assert longest.max_seconds(1) == 4.0 + STUCK_BEYOND


def test_the_page_and_the_setting_say_when_a_step_is_stuck() -> None:
    assert (STUCK_TIMES, STUCK_BEYOND, STUCK_SECONDS) == (20.0, 30.0, 10.0)
    page = (ROOT / "docs" / "upgrade.md").read_text(encoding="utf-8")
    for text in (" ".join(page.split()), settings_of(TargetConfig)["step_timeout"].about):
        assert re.search(
            r"twenty times the longest .*, or the longest and 30 s, whichever is less, (and )?ten seconds at", text
        )


def test_what_steps_took_at_load_bounds_the_first_that_is_asked_for() -> None:
    account = StepAccount(TargetCounters(), Planner(), None, {1: 2.0})
    entry = SimpleNamespace(tokens=1, sequence=SimpleNamespace(timings=SequenceTimings(0.0)))
    account.resume(1.0, [cast(BatchEntry, entry)])
    with account.forward():
        assert account.max_seconds == 2.0 + STUCK_BEYOND
    assert account.max_seconds is None


def test_one_long_step_is_forgotten() -> None:
    longest = LongestStep()
    longest.observe(8, 30.0)
    for _ in range(1000):
        longest.observe(8, 1.0)
    assert longest.max_seconds(8) == STUCK_TIMES * 1.0


def test_steps_are_timed_at_load_and_leave_nothing(tmp_path: Path) -> None:
    model = load_tiny("llama", tmp_path, by_rows=False)
    engine = Engine(model, KVCache(model.layers, 40, block=model.block, dtype=model.dtype, device="cpu"))
    seconds = time_steps(engine)
    assert list(seconds) == [1, 4, 16] and all(taken > 0.0 for taken in seconds.values())
    assert engine.cache.free_tokens == engine.cache.capacity
    engine.cache.validate()
