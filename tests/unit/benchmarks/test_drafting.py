"""What the parts of ``paceline bench drafting`` say becomes a table of what was wanted and measured."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import drafting, remote_heads, step_costs
from benchmarks.bench import PARTS, DraftingOptions
from benchmarks.drafting import GOALS, NOT_COUNTED, REPETITION, Part, Row, Size
from benchmarks.grammar_prompts import ROWS, edits, functions, rows
from benchmarks.harness.measure import Batch, Run
from benchmarks.harness.pair import BUNDLED, EAGLE, held_out
from benchmarks.harness.report import Goal
from speculation.messages import FeatureFormat, Source


def judged(part: str, figures: Sequence[Row]) -> list[tuple[float, bool]]:
    found = [(goal, goal.ours({part: figures})) for goal in GOALS]
    return [(round(figure, 6), goal.reached(figure)) for goal, figure in found if figure is not None]


def test_a_kind_of_repetition_is_as_good_as_its_better_source_alone() -> None:
    found = [
        {"kind": kind, "temperature": 0.0, "contender": contender, "ratio_to_plain": ratio}
        for kind, ratios in (("rows", (1.0, 1.4, 1.9, 2.5)), ("edits", (1.0, 1.7, 1.2, 9.0)))
        for contender, ratio in zip(("plain", "lookup", "suffix", "both"), ratios, strict=True)
    ]
    assert judged("repetition", found) == [(1.9, True), (1.7, False)]


def test_only_the_greedy_run_of_the_contender_itself_counts() -> None:
    def rows(name: str) -> Sequence[Row]:
        return [
            {"temperature": 0.0, "contender": "plain", "ratio_to_plain": 1.0},
            {"temperature": 0.0, "contender": name, "ratio_to_plain": 1.25},
            {"temperature": 0.8, "contender": name, "ratio_to_plain": 3.0},
        ]

    assert judged("eagle", rows(drafting.REMOTE)) == [(1.25, False)]
    assert judged("vocabularies", rows("draft, another tokenizer")) == [(1.25, True)]


def test_parts_are_those_that_can_be_asked_for() -> None:
    assert tuple(part.name for part in drafting.PARTS) == PARTS


@pytest.mark.parametrize(("wanted", "reached"), [(2.0, "yes"), (3.0, "NO")])
def test_what_a_part_measures_is_kept_and_judged(wanted, reached, tmp_path: Path, monkeypatch, capsys) -> None:
    async def twice(size: Size) -> AsyncIterator[Sequence[Row]]:
        yield [{"ratio": float(size.rounds)}]

    goal = Goal("twice", "twice over once", wanted, False, lambda found: found["twice"][0]["ratio"])
    monkeypatch.setattr(drafting, "PARTS", (Part("twice", twice, Size(2, 8, (0.0,))),))
    monkeypatch.setattr(drafting, "GOALS", (goal,))
    assert drafting.main(DraftingOptions(out=tmp_path / "out")) == 0
    assert '{"ratio": 2.0}' in capsys.readouterr().out
    page = (tmp_path / "out" / "README.md").read_text()
    assert f"| twice over once | at least {wanted:g} | 2.00 | {reached} |" in page
    written = json.loads((tmp_path / "out" / "drafting.json").read_text())
    assert (written["summary"], written["parts"]) == ({"twice": 2.0}, {"twice": [{"ratio": 2.0}]})


def test_nobody_drafts_from_the_grammar_nor_from_what_others_said() -> None:
    drafting = {name: one.sources for name, one in REPETITION.items() if one.enabled}
    assert drafting == {
        "lookup": {Source.LOOKUP},
        "suffix": {Source.SUFFIX},
        "both": {Source.LOOKUP, Source.SUFFIX},
    }
    assert {name for name, one in REPETITION.items() if one.remember} == {"suffix", "both"}


def test_requests_of_a_kind_are_alike_and_ask_for_different_things() -> None:
    for requests in (rows(), edits(), functions()):
        assert len(requests) > NOT_COUNTED
        assert len({request.prompt for request in requests}) == len(requests)
    assert len({request.grammar for request in (*rows(), *edits())}) == len(rows()) + len(edits())
    for request in rows():
        labels = re.findall(r"^\d+,([a-z-]+),", request.prompt, re.MULTILINE)
        assert len(labels) == ROWS
        assert all(label.split("-")[1] in request.grammar for label in labels)


OPTIONS = Namespace(prompts=1, tokens=16, step=30.0, row=0.3, forward=1.25, format=FeatureFormat.FP8)


def test_ways_to_draft_are_compared_in_chains(capsys: pytest.CaptureFixture[str]) -> None:
    remote_heads.replay_all(Namespace(**{**vars(OPTIONS), "tokens": 24, "chains": 3}))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert [row["way"] for row in rows][:2] == ["draft model", "eagle"]
    assert len(rows) == 2 + len(FeatureFormat)
    for row in rows:
        reached = row["steps_reaching_place"]
        assert 1.0 <= row["tokens_per_step"] <= 4.0 and len(reached) == 3
        assert reached == sorted(reached, reverse=True)


async def test_a_row_says_how_many_rounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take_no_turns(*_: object) -> dict[str, list[Run]]:
        return {}

    monkeypatch.setattr(drafting, "take_turns", take_no_turns)
    monkeypatch.setattr(drafting, "rows", lambda _, exact: [{"contender": "plain"}])
    batches = [Batch(((1, 2),), 8)] * len(rows())
    found = await drafting.compared({}, batches, 0, skip=NOT_COUNTED, kind="rows")
    assert found == [{"kind": "rows", "rounds": 6, "contender": "plain"}]


@pytest.mark.parametrize("way", [remote_heads.LOCAL, "eagle remote", "draft model"])
def test_a_way_gives_the_same_in_made_up_time_again(way: str) -> None:
    first, again = (remote_heads.measure(way, 5.0, OPTIONS) for _ in range(2))
    assert first == again
    reached = first["steps_reaching_place"]
    assert isinstance(reached, list) and reached == sorted(reached, reverse=True)
    assert first["steps"] == pytest.approx(16 / first["tokens_per_step"], rel=0.01)


def test_a_drafter_that_is_timed_says_of_its_last_drafting_what_it_said_before() -> None:
    """The loop takes that off its step; all that it ever drafted would be more than the step."""
    real = SimpleNamespace(seconds=0.25, draft=lambda: "drafted")
    timed = step_costs.DraftingTime(real)
    assert [timed.draft() for _ in range(2)] == ["drafted"] * 2
    assert timed.seconds == 0.25
    assert 0 < timed.at_work < 0.25


def test_every_loop_verifies_the_same_drafts() -> None:
    loops = step_costs.costed_loops(BUNDLED, EAGLE)
    rows = step_costs.measure(loops, iter(held_out(2)), sessions=2, rounds=1, tokens=24)
    assert [row["drafting"] for row in rows] == list(loops)
    assert len({row["steps"] for row in rows}) == 1
    for row in rows:
        low, high = row["interval"]
        assert low <= row["ratio_to_none"] <= high
