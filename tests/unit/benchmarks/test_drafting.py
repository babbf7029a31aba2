"""What the parts of ``paceline bench drafting`` say becomes a table of what was wanted and measured."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from benchmarks import drafting
from benchmarks.bench import PARTS, DraftingOptions
from benchmarks.drafting import GOALS, Part, Row, Size
from benchmarks.harness.report import Goal


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

    assert judged("medusa", rows("medusa alone")) == [(1.25, False)]
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
