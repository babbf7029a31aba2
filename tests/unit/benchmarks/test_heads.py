"""What is measured of heads outside of serving runs to its end, on a few tokens of the bundled models."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from benchmarks import heads, remote_heads, step_costs
from benchmarks.harness.pair import BUNDLED, EAGLE, HEADS, held_out
from speculation.messages import FeatureFormat

OPTIONS = Namespace(prompts=1, tokens=16, step=30.0, row=0.3, forward=1.25, format=FeatureFormat.FP8)


def test_ways_to_draft_are_compared_in_chains(capsys: pytest.CaptureFixture[str]) -> None:
    heads.main(prompts=1, tokens=24, depth=3)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["way"] for row in rows][:3] == ["draft model", "medusa", "eagle"]
    for row in rows:
        reached = row["steps_reaching_place"]
        assert 1.0 <= row["tokens_per_step"] <= 4.0 and len(reached) == 3
        assert reached == sorted(reached, reverse=True)


@pytest.mark.parametrize("way", [*remote_heads.HERE, "eagle remote", "draft model"])
def test_a_way_gives_the_same_in_made_up_time_again(way: str) -> None:
    first, again = (remote_heads.measure(way, 5.0, OPTIONS) for _ in range(2))
    assert first == again
    reached = first["steps_reaching_place"]
    assert isinstance(reached, list) and reached == sorted(reached, reverse=True)
    assert first["steps"] == pytest.approx(16 / first["tokens_per_step"], rel=0.01)


def test_every_loop_verifies_the_same_drafts() -> None:
    loops = step_costs.costed_loops(BUNDLED, EAGLE, HEADS)
    rows = step_costs.measure(loops, iter(held_out(2)), sessions=2, rounds=1, tokens=24)
    assert [row["drafting"] for row in rows] == list(loops)
    assert len({row["steps"] for row in rows}) == 1
    for row in rows:
        low, high = row["interval"]
        assert low <= row["ratio_to_none"] <= high
