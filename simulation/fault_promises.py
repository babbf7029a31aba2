"""What must hold after every run of the fault simulation, whatever happened in it.

That the text is the target's own, and nothing is said twice, is checked at every emission; that every session ends, by
the clock of the world.
"""

from __future__ import annotations

from simulation.fault_world import FaultWorld
from speculation.events import FailureCode
from speculation.messages import SessionId
from speculation.request.poison_detector import PoisonLimits


def check(world: FaultWorld, *, quiet: bool, lossless: bool, roomy: bool) -> None:
    """Raise AssertionError where a promise is broken.

    ``quiet``: nothing happened but planned changes and poison; ``lossless``: no single messages were lost; ``roomy``:
    there was always room at the targets.
    """
    for number in world.sessions:
        _check_end(world, number, roomy=roomy)
    _check_poison(world, quiet=quiet)
    if quiet and not world.poison:
        assert not world.unexpected, "a worker left that had not said so"
        reopened = sum(session.reopened for session in world.sessions.values())
        assert not reopened, f"{reopened} sessions counted a fault where there was none"
    if lossless:
        held = {
            name: list(worker.sessions)
            for name, peer in world.peers.items()
            for worker in peer.links.values()
            if worker.sessions
        }
        assert not held, f"sessions left behind: {held}"
    known = world.poison_detector
    assert not known.waiting and not known.on_probation, "a router remembers sessions that are over"


def _check_end(world: FaultWorld, number: SessionId, *, roomy: bool) -> None:
    """Innocent requests end with all their text; what the client stopped, with a part of it."""
    session, emitted = world.sessions[number], tuple(world.emitted[number])
    assert emitted == session.output, "what was emitted is not what is committed"
    code = world.failed.get(number)
    if code is FailureCode.OVERLOADED:
        assert not roomy and not emitted, f"session {number} was begun, and then refused for want of room"
    elif code is FailureCode.UNAVAILABLE and world.upgraded and emitted and not world.revisions[number]:
        assert emitted == world.truth[number][: len(emitted)]  # no target of its revision was left
    elif number not in world.poison:
        assert code is None, f"session {number} is innocent, and was failed: {code}"
        assert number in world.stopped or emitted == world.truth[number], f"session {number} ended early"


def _check_poison(world: FaultWorld, *, quiet: bool) -> None:
    """Poison is failed, after as many tries as it takes to be sure, and no more."""
    limits = PoisonLimits()
    for number in world.poison:
        code, harmed = world.failed.get(number), world.harmed.get(number, 0)
        assert code in (FailureCode.FAULTY, FailureCode.OVERLOADED) or number in world.stopped, (
            f"poison request {number} was not failed"
        )
        # One more if it was among others at first, or had committed before it did harm.
        assert not quiet or harmed <= limits.tries + 10, f"poison request {number} harmed {harmed} targets"
