"""What the parts of ``paceline bench drafting`` say becomes a table of what was wanted and measured."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benchmarks import drafting
from benchmarks.bench import DraftingOptions
from benchmarks.drafting import PARTS, Figure, Part, Row, Size, table
from cluster.cli import main


def judged(part: str, figures: Sequence[Row]) -> list[tuple[float, bool]]:
    (one,) = (one for one in PARTS if one.name == part)
    return [(round(figure.measured, 6), figure.reached) for figure in one.judge(figures)]


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
            {"shared": {"said": 0.9}},
            {"temperature": 0.0, "contender": "plain", "ratio_to_plain": 1.0},
            {"temperature": 0.0, "contender": name, "ratio_to_plain": 1.25},
            {"temperature": 0.8, "contender": name, "ratio_to_plain": 3.0},
        ]

    assert judged("medusa", rows("medusa alone")) == [(1.25, False)]
    assert judged("vocabularies", rows("draft, another tokenizer")) == [(1.25, True)]


def test_the_table_says_what_is_short() -> None:
    lines = table([Figure("a", 1.3, 1.5), Figure("b", 1.2, 0.2)]).splitlines()
    assert lines[2:] == ["| a | at least 1.3 | **1.50** |", "| b | at least 1.2 | 0.20 (short) |"]


def test_what_a_part_measures_is_kept_and_judged(tmp_path: Path, monkeypatch, capsys) -> None:
    async def twice(size: Size) -> AsyncIterator[Row]:
        yield {"ratio": size.rounds}

    part = Part("twice", twice, Size(2, 8, (0.0,)), None, lambda found: [Figure("twice", 2, found[0]["ratio"])])
    monkeypatch.setattr(drafting, "PARTS", (part,))
    assert drafting.main(DraftingOptions(out=tmp_path / "out")) == 0
    assert "| twice | at least 2 | **2.00** |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "figures.json").read_text())[0]["reached"]
    assert (tmp_path / "out" / "twice.jsonl").read_text() == '{"ratio": 2}\n'


def test_a_part_that_does_not_exist_is_refused(capsys) -> None:
    assert main(["bench", "drafting", "--only", "nonsense"]) == 2
    assert "--only nonsense: no such part; there are medusa, " in capsys.readouterr().err
