"""What the loops record is what the simulator reads: written and read with nothing faked in between."""

from __future__ import annotations

import json
from random import Random

import pytest

from draft_service.lookahead import Lookahead
from engine.build import build, welcome
from engine.recorder import Recorder
from simulation import recorded
from simulation.simulate import SimulationSettings, simulate
from speculation.messages import Limits, Open, Sampling, Schedule, SessionId, Source, Speculation
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.stack import held_out_prompts, settings

LINK = "router"
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[dict]:
    """Records of both loops over one request."""
    folder = tmp_path_factory.mktemp("records")
    files = {role: folder / f"{role}.jsonl" for role in ("target", "draft")}
    recorders = {role: Recorder(file) for role, file in files.items()}
    engines = {role: build(settings(role)) for role in files}
    hello = {role: welcome(settings(role), engine.model, role) for role, engine in engines.items()}
    limits = TargetLimits(adaptive=False)
    target = VerifyLoop(engines["target"], hello["target"], limits, recorder=recorders["target"])
    drafter = Lookahead(engines["draft"], hello["draft"], recorder=recorders["draft"])
    prompt = held_out_prompts()[0]
    only_drafts = Speculation(sources=frozenset({Source.DRAFT}))
    opened = Open(SessionId(1), 1, prompt, Sampling(temperature=0.0), Limits(len(prompt) + NEW_TOKENS), only_drafts)
    target.receive(LINK, opened)
    drafter.receive(LINK, opened)
    while (sent := target.step()) is not None:
        for _, message in sent:
            drafter.receive(LINK, message)
        for _ in range(3):
            for _, message in drafter.step() or []:
                target.receive(LINK, message)
    for recorder in recorders.values():
        recorder.flush()
    return [json.loads(line) for file in files.values() for line in file.read_text().splitlines()]


def test_costs_are_those_of_the_steps(lines):
    costs = recorded.read(lines)[0]
    longest = max(line["end"] - line["start"] for line in lines)
    assert 0 < costs.verify_seconds(1, 1) <= longest
    assert 0 < costs.draft(1) <= longest


def test_outcomes_are_those_of_the_text(lines):
    """Every accepted draft was a right candidate; where the text went on without one, none was right."""
    outcomes = recorded.read(lines)[1]
    accepted = sum(session["accepted"] for line in lines if line["role"] == "target" for session in line["sessions"])
    right = [outcome for outcome in outcomes if outcome.right >= 0]
    assert 0 < accepted <= len(right) <= len(outcomes) <= NEW_TOKENS
    assert all(0 < confidence <= 1 for outcome in outcomes for confidence in outcome.confidences)


def test_the_recorded_set_up_can_be_simulated(lines):
    found = recorded.read(lines)
    waiting = SimulationSettings(
        schedule=Schedule.SEQUENTIAL
    )  # running ahead, drafts may all come late on a busy machine
    report = simulate(waiting, *found, Random(1), tokens=100)
    assert report.accepted > 0
