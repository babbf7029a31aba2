"""From step records to efficiency, profile and acceptance by depth, on records made by hand."""

import json

import pytest

from benchmarks.speculation.figures import (
    Depth,
    WorkerLog,
    acceptance_by_depth,
    efficiency,
    offered,
    profile,
    read_log,
    verify_seconds,
)


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
