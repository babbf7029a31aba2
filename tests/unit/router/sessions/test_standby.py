"""Which targets stand by, from how many there are and since when."""

from __future__ import annotations

from router.sessions.choice import KnownTarget, StandbyTargets, idle_targets
from speculation.events import PeerId
from speculation.messages import Welcome


def up(names: str, model: str = "m") -> list[KnownTarget]:
    """Targets that started one after the other, in another order."""
    return sorted(
        (
            KnownTarget(PeerId(name), Welcome("target", model, 100, 1000, started=float(i)), up=True, listed=True)
            for i, name in enumerate(names)
        ),
        key=lambda target: target.peer,
    )


def lost(name: str, model: str = "", *, listed: bool = True) -> KnownTarget:
    """A target that is not there; one that never was up is of no model."""
    return KnownTarget(PeerId(name), Welcome("target", model, 100, 1000) if model else None, up=False, listed=listed)


def test_the_latest_stand_by() -> None:
    assert idle_targets(up("cab"), {"": StandbyTargets(2, 1)}) == {"b"}
    assert idle_targets(up("cab"), {"": StandbyTargets(1, 2)}) == {"b", "a"}
    assert not idle_targets(up("cab"), {})


def test_none_stands_by_for_each_that_is_missing() -> None:
    assert not idle_targets([*up("ab"), lost("c", "m")], {"": StandbyTargets(2, 1)})
    assert not idle_targets([*up("ab"), lost("c")], {"": StandbyTargets(2, 1)})
    assert not idle_targets(up("ab"), {"": StandbyTargets(2, 1)})  # the lost one is not on the list any more
    assert idle_targets([*up("ab"), lost("c", "m")], {"": StandbyTargets(1, 2)}) == {"b"}
    assert not idle_targets(up("a"), {"": StandbyTargets(1, 2)})
    assert not idle_targets([], {"": StandbyTargets(1, 1)})


def test_more_than_configured_are_on_the_list() -> None:
    assert idle_targets(up("abc"), {"": StandbyTargets(1, 1)}) == {"c"}
    assert not idle_targets([*up("ab"), lost("c", "m")], {"": StandbyTargets(1, 1)})
    assert idle_targets([*up("ab"), lost("c", "m", listed=False)], {"": StandbyTargets(1, 1)}) == {"b"}


def test_every_model_has_its_own() -> None:
    targets = [*up("abc"), *up("xyz", "other")]
    assert idle_targets(targets, {"other": StandbyTargets(2, 1)}) == {"z"}
    assert idle_targets([*targets, lost("w", "m")], {"m": StandbyTargets(2, 1), "other": StandbyTargets(1, 2)}) == {
        "z",
        "y",
    }
