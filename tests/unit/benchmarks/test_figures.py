"""Rows, ratios, the summary and how they are shown, from runs and rows made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from benchmarks.harness.measure import Decoded, Run, TimedCommit
from benchmarks.harness.pair import Pair
from benchmarks.harness.report import Result, against, goals_table
from benchmarks.speculation import run as report
from benchmarks.speculation.figures import (
    ASSISTED,
    GOALS,
    OURS,
    PARALLEL,
    PLAIN,
    SEQUENTIAL,
    Depth,
    MeasuredRuns,
    PairResult,
    Profile,
    Row,
    WorkerLog,
    acceptance_by_depth,
    efficiency,
    offered,
    profile,
    ratio,
    read_log,
    rows,
    verify_seconds,
)
from benchmarks.speculation.settings import (
    BATCH_16,
    DEAD,
    FAR,
    FULL,
    NEAR,
    QUICK,
    TRANSFORMERS,
    WRONG,
    WRONG_COLD,
    ComparisonSetting,
    SpeculationOptions,
)
from cluster.config.environment import CHECKOUT
from transport.client import Traffic


def step(start: float, end: float, forward: float, offered: int = 0, accepted: int = 0, depths=()) -> dict:
    session = {"offered": offered, "accepted": accepted, "depths": list(depths)}
    return {"start": start, "end": end, "forward": forward, "sessions": [session]}


def target_line(start: float, end: float, **session: object) -> str:
    known = {"session": 1, "position": 9, "feed": 1, "offered": 0, "accepted": 0, "committed": 1, "depths": []}
    sessions = [{**known, **session, "kept": []}]
    return json.dumps({"role": "target", "start": start, "end": end, "forward": 0.5, "tokens": 1, "sessions": sessions})


def test_records_are_read(tmp_path):
    target, draft = tmp_path / "target.jsonl", tmp_path / "draft.jsonl"
    lines = [
        target_line(1.0, 2.0, offered=3, accepted=2, depths=[1, 1, 2]),
        json.dumps({"role": "target", "wait": [2.0, 2.25]}),
        target_line(2.25, 3.0),
    ]
    target.write_text("\n".join(lines) + "\n")
    drafted = {"role": "draft", "start": 1.5, "end": 1.75, "forward": 0.2, "tokens": 2, "sessions": [1], "proposed": 1}
    draft.write_text(json.dumps(drafted) + "\n")
    log = read_log([target, draft, tmp_path / "never-started.jsonl"])
    assert log == WorkerLog((json.loads(lines[0]), json.loads(lines[2])), ((2.0, 2.25),), ((1.5, 1.75),))
    assert offered(log.steps[0]) == 3


def test_a_line_cut_short_ends_its_file(tmp_path):
    file = tmp_path / "target.jsonl"
    file.write_text(target_line(1.0, 2.0) + "\n" + target_line(2.0, 3.0)[:20])
    assert [one["end"] for one in read_log([file]).steps] == [2.0]


def test_a_step_belongs_to_the_run_it_ended_in():
    log = WorkerLog((step(0, 1, 1), step(1, 2, 1), step(2, 3, 1), step(3, 4, 1)), ((1, 1.5), (3, 3.5)), ((0, 9),))
    part = log.during(1.0, 3.0)
    assert [one["end"] for one in part.steps] == [2, 3]
    assert part.waits == ((1, 1.5),)
    assert part.drafting == ((0, 9),)


def test_a_target_that_only_verifies_has_efficiency_one():
    steps = [step(0, 0.25, 0.25, offered=4), step(0.25, 0.5, 0.25, offered=4)]
    assert efficiency(steps, verify_seconds(steps), 0.5) == 1.0


def test_efficiency_is_pace_over_tokens_a_step_by_the_time_of_that_step():
    # Three steps of 2 drafts take 10, 14 and 12 ms, one of none 6 ms; the run takes 60 ms and commits 9 tokens.
    steps = [
        step(0.000, 0.012, 0.010, 2, 2),
        step(0.012, 0.028, 0.014, 2, 1),
        step(0.030, 0.044, 0.012, 2, 2),
        step(0.050, 0.060, 0.006),
    ]
    seconds = verify_seconds(steps)
    assert seconds == pytest.approx({0: 0.006, 2: 0.012})
    tokens, wall = sum(one["sessions"][0]["accepted"] + 1 for one in steps), 0.060
    mean_verify = (3 * 0.012 + 0.006) / 4
    assert efficiency(steps, seconds, wall) == pytest.approx((tokens / wall) / ((tokens / 4) / mean_verify))
    assert efficiency(steps, seconds, wall) == pytest.approx(0.7)


def test_the_size_of_a_step_counts_and_not_its_own_time():
    # One slow step among the pool of its size costs only its share, wherever it fell.
    pool = verify_seconds([step(0, 1, 0.1, 3), step(1, 2, 0.3, 3)])
    assert efficiency([step(0, 1, 0.3, 3)], pool, 1.0) == pytest.approx(0.2)


def test_the_parts_of_a_profile_add_up_to_wall_time():
    log = WorkerLog((step(0.0, 0.010, 0.008), step(0.014, 0.024, 0.006)), ((0.010, 0.012),), ((-1.0, 0.006),))
    found = profile([(log, 0.0, 0.024)])
    assert found is not None
    assert found.steps == 2
    parts = (found.forward_ms, found.own_ms, found.wait_ms, found.between_ms)
    assert parts == pytest.approx((7.0, 3.0, 1.0, 1.0))
    assert sum(parts) == pytest.approx(1000 * 0.024 / 2)
    assert found.longest_wait_ms == pytest.approx(2.0)
    assert found.own_share == pytest.approx(0.3)
    assert found.draft_busy == pytest.approx(0.25)


def test_no_steps_no_profile():
    assert profile([(WorkerLog(), 0.0, 1.0)]) is None


def test_acceptance_by_depth_counts_steps_that_got_there():
    steps = [
        step(0, 1, 1, 4, 2, (1, 1, 2, 3)),  # a tree: kept to depth 2, refused at 3
        step(1, 2, 1, 2, 0, (1, 2)),  # refused at 1, so depth 2 was not tried
        step(2, 3, 1, 1, 1, (1,)),
        step(3, 4, 1),
    ]
    assert acceptance_by_depth(steps) == (Depth(1, 3, 2), Depth(2, 1, 1), Depth(3, 1, 0))


PAIR = Pair("stretched 0.8", Path("target"), Path("draft"), 1_000_000, "A pair made by hand.")
OPTIONS = SpeculationOptions(prompts=3, bursts=2, layers=32)


def summary(rows: list[Row]) -> dict[str, float]:
    return against(GOALS, rows)["summary"]


def row(setting: ComparisonSetting, contender: str, *rates: float, **rest: object) -> Row:
    made = Row(PAIR.name, setting, contender, "", rates, tokens_per_step=3.0, kept=0.5, same_text=1.0)
    return replace(made, **rest)


def measured_rows() -> list[Row]:
    """Rates of three prompts for everything that the goals need; ours always has 100, 200, 300."""
    known = {
        "efficiency": (0.8, 0.9, 0.95),
        "profile": Profile(9, 30.0, 2.0, 1.0, 4.0, 1.0, 0.6),
        "depths": (Depth(1, 9, 8),),
    }
    ours = (100.0, 200.0, 300.0)
    found = []
    for setting in (NEAR, FAR):
        found += [
            row(setting, PLAIN, 50.0, 50.0, 50.0),
            row(setting, OURS, *ours, **known),
            row(setting, SEQUENTIAL, 80.0, 100.0, 100.0),
            row(setting, PARALLEL, 50.0, 100.0, 100.0),
        ]
    found += [row(TRANSFORMERS, OURS, *ours), row(TRANSFORMERS, ASSISTED, 40.0, 50.0, 60.0)]
    for setting in (DEAD, WRONG_COLD, WRONG, BATCH_16):
        found += [row(setting, PLAIN, 100.0, 202.0, 310.0), row(setting, OURS, *ours)]
    return found


@pytest.fixture
def result() -> Result:
    outcome = PairResult(PAIR, measured_rows(), measured_rows()[:1])
    return replace(report.result(OPTIONS, [outcome]), day=date(2026, 1, 2))


def test_a_ratio_is_the_median_over_prompts():
    near = measured_rows()[:3]
    assert ratio(near[1], near[2]) == (2.0, 1.25, 3.0)


def test_no_ratio_across_settings():
    with pytest.raises(AssertionError, match="within one setting"):
        ratio(row(NEAR, OURS, 1.0), row(FAR, PLAIN, 1.0))


def test_the_summary_has_exactly_the_keys_of_the_goals():
    assert summary(measured_rows()) == pytest.approx(
        {
            "pipeline_efficiency_0ms": 0.9,
            "pipeline_efficiency_20ms": 0.9,
            "over_sequential_0ms": 2.0,
            "over_sequential_20ms": 2.0,
            "over_plain_0ms": 4.0,
            "over_plain_20ms": 4.0,
            "over_transformers_assisted": 4.0,
            "dead_drafter_over_plain": 200 / 202,
            "wrong_drafter_over_plain": 200 / 202,
            "batch16_over_plain": 200 / 202,
        }
    )


def test_the_page_of_results_wants_what_a_run_does():
    page = (CHECKOUT / "docs" / "results.md").read_text(encoding="utf-8")
    section = page.split("\n## Speculation\n")[1].split("\n## ")[0]
    wanted = re.findall(r"^\| [^|]+ \| (\d\.\d+) \|", section, re.MULTILINE)
    assert [float(bound) for bound in wanted] == [goal.bound for goal in GOALS]


def test_the_summary_is_of_the_main_pair_which_comes_first():
    others = [replace(one, pair="another", rates=(1.0, 1.0, 1.0)) for one in measured_rows()]
    assert summary([*measured_rows(), *others]) == summary(measured_rows())


@pytest.mark.parametrize("plans", [QUICK, FULL])
def test_every_goal_is_measured_on_the_first_pair(plans):
    planned = {*plans[0].settings, *((TRANSFORMERS, DEAD, WRONG) if plans[0].extras else ())}
    assert summary([one for one in measured_rows() if one.setting in planned]) == summary(measured_rows())


@pytest.mark.parametrize("plans", [QUICK, FULL])
def test_settings_of_a_pair_have_names_of_their_own(plans):
    for plan in plans:
        names = [setting.name for setting in plan.settings]
        assert len(set(names)) == len(names)


def run_of(texts: list[list[tuple[float, int, int, int]]], traffic: Traffic | None = None) -> Run:
    """Requests given by their commits: time, tokens, accepted, offered."""
    decoded = [
        Decoded(tuple(range(sum(tokens for _, tokens, *_ in one))), tuple(TimedCommit(*commit) for commit in one))
        for one in texts
    ]
    return Run(tuple(decoded), traffic)


def rows_of(*runs: Run, setting: ComparisonSetting = NEAR, log: WorkerLog = WorkerLog()) -> list[Row]:
    named = zip((PLAIN, OURS), runs, strict=False)
    return rows([MeasuredRuns("p", setting, name, (one,), "K = 4") for name, one in named], log)


def test_rows_join_runs_and_records():
    plain = run_of([[(0.0, 1, 0, 0), (0.1, 1, 0, 0), (0.2, 1, 0, 0), (0.3, 1, 0, 0), (0.4, 1, 0, 0)]])
    ours = run_of([[(1.0, 1, 0, 0), (1.1, 3, 2, 4), (1.2, 1, 0, 4)]], Traffic(50, 100))
    steps = (
        step(0.0, 0.09, 0.08),
        step(0.9, 0.99, 9.0),  # the prompt: before the first tokens
        step(1.0, 1.09, 0.08, 4, 2, (1, 2, 3, 4)),
        step(1.1, 1.19, 0.08, 4, 0, (1, 2, 3, 4)),
    )
    one, two = rows_of(plain, ours, log=WorkerLog(steps))
    assert one.rates == pytest.approx((10.0,))
    assert two.rates == pytest.approx((20.0,))
    assert (two.choice, two.tokens_per_step, two.kept, two.same_text) == ("K = 4", 2.0, 0.25, 1.0)
    assert two.efficiency == pytest.approx((0.8,))
    assert two.profile is not None and two.profile.steps == 2
    assert two.depths[0] == Depth(1, 2, 1)
    assert (two.sent_per_token, two.received_per_token) == (10.0, 20.0)
    assert one.sent_per_token is None


def test_without_drafts_no_share_of_them_is_kept():
    (found,) = rows_of(run_of([[(0.0, 1, 0, 0), (1.0, 1, 0, 0)]]))
    assert found.kept is None


def test_another_text_is_told():
    one, other = run_of([[(0.0, 1, 0, 0), (0.1, 2, 0, 0)]]), run_of([[(1.0, 1, 0, 0), (1.1, 3, 0, 0)]])
    assert [row.same_text for row in rows_of(one, other)] == [1.0, 0.0]


def test_no_efficiency_of_a_batch():
    one = run_of([[(0.0, 1, 0, 0), (1.0, 1, 0, 0)], [(0.0, 1, 0, 0), (1.0, 1, 0, 0)]])
    (found,) = rows_of(one, setting=BATCH_16, log=WorkerLog((step(0.5, 1.0, 0.4),)))
    assert (found.efficiency, found.profile) == ((), None)


def test_the_document_says_what_was_measured_and_on_what(result):
    document = json.loads(json.dumps(result.document()))
    about = {"date", "machine", "hardware", "command", "notes"}
    assert set(document) == {"summary", "wanted", "options", "pairs", "rows", "tried"} | about
    assert document["summary"] == pytest.approx(summary(measured_rows()))
    assert document["pairs"] == [{"name": PAIR.name, "parameters": 1_000_000, "about": PAIR.about}]
    assert len(document["rows"]) == len(measured_rows())
    assert document["rows"][0]["setting"]["rtt_ms"] == 0.0
    assert "out" not in document["options"], "the figures name a folder of this machine"


def test_goals_tell_what_was_not_reached():
    lines = {line[0]: line[1:] for line in goals_table(GOALS, measured_rows()).lines}
    assert lines["over plain decoding, 0 ms"] == ("at least 2.2", "4.00", "yes")
    assert lines["over plain, 16 requests at once"] == ("at least 1", "0.99", "NO")


def test_the_folder_holds_figures_plots_and_a_page_that_shows_them(result, tmp_path):
    pytest.importorskip("matplotlib")
    result.write_folder(tmp_path)
    page = (tmp_path / "README.md").read_text()
    for name in ("speedup", "acceptance"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        assert f"({name}.png)" in page
    assert json.loads((tmp_path / "speculation.json").read_text())["date"] == "2026-01-02"
    for words in (PAIR.about, "Must reach", "Where every millisecond of a step goes", "0.97"):
        assert words in page


def test_a_panel_for_each_pair_measured_at_several_round_trips():
    alone = [replace(one, pair="trained") for one in measured_rows() if one.setting == NEAR]
    (panel,) = report.speedup([*measured_rows(), *alone])
    assert panel.title == PAIR.name
    lines = {label: [y for _, y in points] for label, points, _ in panel.lines}
    assert lines == {OURS: [4.0, 4.0], SEQUENTIAL: [2.0, 2.0], PARALLEL: [2.0, 2.0], PLAIN: [1.0, 1.0]}
