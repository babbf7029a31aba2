"""Which targets stay idle for now, loaded, so that the loss of another one costs seconds.

Pure. Those that started last, so that every router names the same ones without asking: who replaces a lost target is
idle next, and nobody's sessions move for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from speculation.events import PeerId
from speculation.messages import Welcome


@dataclass(frozen=True, slots=True)
class StandbyTargets:
    """How many targets one model is to have."""

    active: int
    """Those that take sessions."""
    idle: int
    """Those that take some only while others are missing."""


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """A target as a router knows it."""

    peer: PeerId
    described: Welcome | None
    """As it last introduced itself; None: it never was up."""
    up: bool
    """Whether it is connected and stays."""
    listed: bool
    """Whether it is on the list of workers, which may lack those that are lost."""


def idle_targets(targets: Iterable[KnownTarget], wanted: Mapping[str, StandbyTargets]) -> set[PeerId]:
    """The targets that are to take no sessions now. ``wanted``: by the name of a model, or under no name for any."""
    by_model: defaultdict[str, list[KnownTarget]] = defaultdict(list)
    for target in targets:
        by_model[target.described.model if target.described else ""].append(target)
    unknown = by_model.pop("", [])  # may be of any model
    return {
        peer
        for model, own in by_model.items()
        if (numbers := wanted.get(model) or wanted.get(""))
        for peer in _latest([*own, *unknown], numbers)
    }


def _latest(targets: Sequence[KnownTarget], wanted: StandbyTargets) -> Sequence[PeerId]:
    """Of one model those that started last, as many as are to be idle, less those that are missing."""
    up = {target.peer: target.described for target in targets if target.up and target.described}
    missing = max(wanted.active + wanted.idle, sum(target.listed for target in targets)) - len(up)
    latest = sorted(up, key=lambda peer: (up[peer].started, up[peer].instance), reverse=True)
    return latest[: max(wanted.idle - missing, 0)]
