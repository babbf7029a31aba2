"""The protocol under faults: many seeds must pass, and planted bugs must be found."""

from dataclasses import replace

import pytest

from speculation import acceptance, target_session
from speculation.events import Emit
from speculation.faults import Weather, World, main
from speculation.messages import Sampling, Verification
from speculation.session import Session

SEEDS = 60
STORM = Weather(loss=0.05, doubling=0.1, delay=0.01, crash_every=0.5, hang_every=1.0)


def test_many_kinds_of_weather(capsys):
    assert main(["--seeds", str(SEEDS)]) == 0, capsys.readouterr().err


def test_a_storm():
    for seed in range(5):
        World(seed, STORM).run()


def test_a_calm_run_speculates_and_never_fails_over():
    world = World(1, Weather(delay=0.0005, agreement=1.0))
    world.run()
    assert sum(session.reopened for session in world.sessions) == 0
    emitted = sum(map(len, world.emitted))
    assert world.accepted > emitted / 2


def test_a_seed_replays_exactly():
    def trace(seed: int) -> tuple[int, float, list[list[int]]]:
        world = World(seed)
        world.run()
        return world.events, world.now, world.emitted

    assert trace(3) == trace(3)


def found(monkeypatch: pytest.MonkeyPatch, seeds: int = 40) -> bool:
    """Whether the simulator notices what was planted."""
    monkeypatch.setattr("speculation.faults.HORIZON", 200.0)
    for seed in range(seeds):
        try:
            World(seed, replace(STORM, hang_every=0.0)).run()
        except AssertionError:
            return True
    return False


def test_it_finds_a_router_that_commits_whatever_arrives(monkeypatch):
    def commit_unchecked(self: Session, now: float, verification: Verification):
        self._tokens.extend(verification.tokens)
        return [Emit(verification.tokens, 0, 0)]

    monkeypatch.setattr(Session, "_verified", commit_unchecked)
    assert found(monkeypatch)


def test_it_finds_a_target_that_keeps_a_draft_it_did_not_draw(monkeypatch):
    def generous(tokens, parents, drawn):
        outcome = acceptance.walk(tokens, parents, drawn)
        return outcome if outcome.kept or not tokens else acceptance.Walk((0,), drawn[1])

    monkeypatch.setattr(target_session, "walk", generous)
    assert found(monkeypatch)


def reopening_as(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Change what is sent when a session is opened again after it has committed something."""
    opening = Session._opening

    def changed(self: Session, epoch: int):
        opened = opening(self, epoch)
        return change(opened) if len(opened.tokens) > self.prompt_length else opened

    monkeypatch.setattr(Session, "_opening", changed)


def test_it_finds_a_failover_that_forgets_the_seed(monkeypatch):
    reopening_as(monkeypatch, lambda opened: replace(opened, sampling=Sampling(seed=0)))
    assert found(monkeypatch)


def test_a_failover_from_an_earlier_token_heals_itself(monkeypatch):
    """What overlaps is recognised by position and digest, so going back too far costs time only."""
    reopening_as(monkeypatch, lambda opened: replace(opened, tokens=opened.tokens[:-1]))
    assert not found(monkeypatch)
