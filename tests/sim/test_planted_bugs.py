"""Bugs planted in the machines that serve, one at a time: the simulator must find each within a few hundred seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from speculation import acceptance
from speculation.events import Emit, PoisonRequest, Send
from speculation.messages import Close, Sampling, Verification
from speculation.request.placement import RetryState
from speculation.request.poison_detector import PoisonDetector
from speculation.request.session import Session
from speculation.verifying import target_session
from tests.faults.run import FaultRun, Weather

STORM = Weather(loss=0.05, doubling=0.1, delay=0.01, crash_every=0.5)
LOSSY = Weather(loss=0.1, delay=0.01)
SLOW = Weather(loss=0.1, doubling=0.1, delay=0.05, crash_every=0.5)
ROLLING = Weather(delay=0.002, drain_every=0.3, agreement=1.0)
UPGRADING = Weather(delay=0.005, upgrade_after=0.5)
POISONED = Weather(delay=0.005, poison="dies", poisonous=1)
LYING = Weather(delay=0.005, lies=True)
FLAPPING = Weather(delay=0.01, crash_every=0.5)
UNLISTED = Weather(delay=0.01, crash_every=0.5, unlist_every=0.3)
SEEDS = 200

Plant = Callable[[pytest.MonkeyPatch], None]


def unchecked(patch: pytest.MonkeyPatch) -> None:
    """Commit whatever arrives."""

    def verified(self: Session, verification: Verification):
        self._tokens.extend(verification.tokens)
        return [Emit(verification.tokens, 0, 0)]

    patch.setattr(Session, "_verified", verified)


def older_epochs(patch: pytest.MonkeyPatch) -> None:
    """Commit what the same target said under an older epoch, as if it had been said now."""
    verified = Session._verified

    def any_epoch(self: Session, message: Verification):
        if message.epoch < self._target.epoch:
            self._tokens.extend(message.tokens)
            return [Emit(message.tokens, 0, 0)]
        return verified(self, message)

    patch.setattr(Session, "_verified", any_epoch)


def no_digest(patch: pytest.MonkeyPatch) -> None:
    """Commit what does not connect: neither gap nor digest is looked at."""
    verified = Session._verified

    def careless(self: Session, message: Verification):
        if message.epoch == self._target.epoch and message.position > len(self._tokens):
            self._tokens.extend(message.tokens)
            return [Emit(message.tokens, 0, 0)]
        return verified(self, message)

    patch.setattr(Session, "_verified", careless)


def doubled(patch: pytest.MonkeyPatch) -> None:
    """Emit what is known already."""
    verified = Session._verified

    def again(self: Session, message: Verification):
        known = message.epoch == self._target.epoch and message.end <= len(self._tokens)
        return [Emit(message.tokens, 0, 0)] if known else verified(self, message)

    patch.setattr(Session, "_verified", again)


def left_open(patch: pytest.MonkeyPatch) -> None:
    """Do not close the old opening when a session moves."""
    inherit = Session._migrate

    def leaves(self: Session):
        effects = inherit(self)
        return [e for e in effects if not (isinstance(e, Send) and isinstance(e.message, Close))]

    patch.setattr(Session, "_migrate", leaves)


def heirs_of_any_revision(patch: pytest.MonkeyPatch) -> None:
    """Move to the heir that was chosen before the text began, whatever revision began it."""
    patch.setattr(Session, "_drop_migration_target", lambda self: [])


def drain_is_a_fault(patch: pytest.MonkeyPatch) -> None:
    """Count every loss as a fault, also of a worker that had said it would go."""
    lose = Session._lose

    def counts(self: Session, peer):
        self._draining = frozenset()
        return lose(self, peer)

    patch.setattr(Session, "_lose", counts)
    patch.setattr(Session, "_seek_migration_target", lambda self: [])


def no_probation(patch: pytest.MonkeyPatch) -> None:
    """Open suspects anywhere, at any time, and blame everyone who was there."""
    patch.setattr(PoisonDetector, "_blocked", lambda self, session: frozenset())
    for_ever(patch)
    place = PoisonDetector.place

    def blames(self: PoisonDetector, now: float, session, avoid, choose):
        deaths = self._suspicions[session].deaths if session in self._suspicions else 0
        return PoisonRequest(deaths) if deaths >= 2 else place(self, now, session, avoid, choose)

    patch.setattr(PoisonDetector, "place", blames)


def no_second_thought(patch: pytest.MonkeyPatch) -> None:
    """Condemn after two deaths, although workers die all the time."""
    patch.setattr(PoisonDetector, "_tries", lambda self, now, session: 2)


def drafters_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Commit what a drafter says as if its target had said it."""
    receive = Session._receive

    def believes(self: Session, peer, message):
        if isinstance(message, Verification) and self.drafting.at(peer) and self._target is not None:
            return self._verified(replace(message, epoch=self._target.epoch))
        return receive(self, peer, message)

    patch.setattr(Session, "_receive", believes)


def for_ever(patch: pytest.MonkeyPatch) -> None:
    """Retry for ever."""
    patch.setattr(PoisonDetector, "_tries", lambda self, now, session: 1 << 30)


def forgotten_waiters(patch: pytest.MonkeyPatch) -> None:
    """Keep a target reserved for a session that is over."""
    patch.setattr(PoisonDetector, "_leave_queue", lambda self, session: None)


def deaf_to_second_thoughts(patch: pytest.MonkeyPatch) -> None:
    """Keep a target reserved for a session that need not leave its own any more."""
    patch.setattr(PoisonDetector, "stays", lambda self, peer: None)


def endless_patience(patch: pytest.MonkeyPatch) -> None:
    """Wait for ever for a target that says nothing."""
    patch.setattr(RetryState, "stalled_at", property(lambda self: float("inf")))


def no_drafter(patch: pytest.MonkeyPatch) -> None:
    """Forget to open the drafter again when the target moves."""
    place_draft = Session._place_draft
    patch.setattr(Session, "_place_draft", lambda self: [] if self.moved else place_draft(self))


def forgotten_seed(patch: pytest.MonkeyPatch) -> None:
    """Open again without the seed."""
    opening = Session._opening

    def changed(self: Session, epoch: int):
        opened = opening(self, epoch)
        return replace(opened, sampling=Sampling(seed=0)) if len(opened.tokens) > self.prompt_length else opened

    patch.setattr(Session, "_opening", changed)


def generous(patch: pytest.MonkeyPatch) -> None:
    """Keep a draft that the target did not draw."""

    def walk(tokens, parents, drawn):
        outcome = acceptance.walk(tokens, parents, drawn)
        return outcome if outcome.kept or not tokens else acceptance.AcceptanceResult((0,), drawn[1])

    patch.setattr(target_session, "walk", walk)


PLANTS = [
    (unchecked, STORM),
    (older_epochs, SLOW),
    (no_digest, STORM),
    (doubled, STORM),
    (left_open, ROLLING),
    (heirs_of_any_revision, UPGRADING),
    (drain_is_a_fault, ROLLING),
    (drafters_are_believed, LYING),
    (no_probation, POISONED),
    (no_second_thought, FLAPPING),
    (for_ever, POISONED),
    (forgotten_waiters, POISONED),
    (deaf_to_second_thoughts, UNLISTED),
    (endless_patience, LOSSY),
    (no_drafter, ROLLING),
    (forgotten_seed, STORM),
    (generous, STORM),
]


def found(weather: Weather, seeds: int = SEEDS) -> str:
    """What the simulator says to it; empty if it notices nothing."""
    for seed in range(seeds):
        try:
            world = FaultRun(seed, weather).run()
            drafted = world.accepted / sum(map(len, world.emitted.values()))
            assert weather is not ROLLING or drafted > 0.5, f"only {drafted:.0%} of the tokens were drafted"
        except AssertionError as error:
            return f"{seed}: {error}"
    return ""


@pytest.mark.parametrize("weather", [STORM, LOSSY, SLOW, ROLLING, UPGRADING, POISONED, LYING, FLAPPING, UNLISTED])
def test_without_a_bug_nothing_is_found(weather: Weather):
    assert not found(weather, 10)


@pytest.mark.parametrize(("plant", "weather"), PLANTS, ids=[plant.__name__ for plant, _ in PLANTS])
def test_it_is_found(plant: Plant, weather: Weather, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.faults.world.HORIZON", 100.0)
    plant(monkeypatch)
    assert found(weather), plant.__doc__
