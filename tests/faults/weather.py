"""The weather of a simulated run: which faults it has, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from speculation.request.poison_detector import PoisonLimits

ROOMY = 1 << 20
STORMY_TRIES = 6
"""Where a storm begins with the first request, its first two deaths are as often chance as not."""


@dataclass(frozen=True, slots=True)
class Weather:
    """The faults of one run. Times are mean seconds between two such faults; 0: never."""

    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.002
    """Mean one-way delay in seconds, exponentially distributed; order within a stream is kept."""
    crash_every: float = 0.0
    """For each worker, as the next ones."""
    hang_every: float = 0.0
    """Stopped for a while, as by SIGSTOP."""
    stuck_every: float = 0.0
    """A computing thread that does not come back from a step."""
    cut_every: float = 0.0
    """A stream that ends for one side only."""
    drain_every: float = 0.0
    """A worker drained and replaced."""
    unlist_every: float = 0.0
    """A worker that leaves the list of workers and is back on it soon."""
    node_every: float = 0.0
    """A target and two drafters killed at once."""
    drafts_away_every: float = 0.0
    """All drafters drained, to come back later."""
    scale_every: float = 0.0
    upgrade_after: float = 0.0
    """Mean seconds until all targets are replaced, one after another, by those of another revision; 0: never."""
    router_every: float = 0.0
    """The router lost, and everything begun again at another."""
    lies: bool = False
    """Whether a drafter says what only targets say."""
    capacity: int = ROOMY
    """Sessions that a target takes from one router."""
    poison: str = ""
    """What a request does to targets that compute it; none if empty."""
    poisonous: int = 0
    agreement: float = 0.8

    @classmethod
    def random(cls, rng: Random) -> Weather:
        """One of many kinds of weather, calm ones included."""
        calm = cls(
            doubling=rng.choice([0.0, 0.05]),
            delay=rng.choice([0.0005, 0.005, 0.05]),
            agreement=rng.choice([0.0, 0.5, 0.8, 1.0]),
            capacity=rng.choice([ROOMY, ROOMY, ROOMY, 2]),
            poison=rng.choice(["", "", "", "dies", "dies", "hangs", "refuses"]),
            poisonous=rng.choice([1, 1, 2]),
            lies=rng.choice([False, False, True]),
        )
        match rng.randrange(6):
            case 0:
                return calm
            case 1:  # planned changes only
                return replace(
                    calm,
                    drain_every=rng.choice([0.0, 1.0, 3.0]),
                    drafts_away_every=rng.choice([0.0, 1.0]),
                    scale_every=rng.choice([0.0, 1.0]),
                )
            case 2:  # and a new revision
                return replace(
                    calm, poison="", upgrade_after=rng.choice([0.3, 1.0]), drain_every=rng.choice([0.0, 1.0])
                )
            case _:
                # Poison that computes on where the router believes it gone cannot be told from chance.
                believed = not calm.poison
                return replace(
                    calm,
                    loss=rng.choice([0.0, 0.0, 0.01, 0.1]) * believed,
                    crash_every=rng.choice([0.0, 0.3, 2.0]),
                    hang_every=rng.choice([0.0, 0.0, 1.0]),
                    stuck_every=rng.choice([0.0, 0.0, 2.0]),
                    cut_every=rng.choice([0.0, 0.0, 1.0]) * believed,
                    drain_every=rng.choice([0.0, 1.0]),
                    node_every=rng.choice([0.0, 0.0, 2.0]),
                    drafts_away_every=rng.choice([0.0, 2.0]),
                    scale_every=rng.choice([0.0, 1.0]),
                    router_every=rng.choice([0.0, 0.0, 0.0, 3.0]) * believed,
                )

    @property
    def quiet(self) -> bool:
        """Whether workers come to harm by poison only."""
        troubles = (self.loss, self.crash_every, self.hang_every, self.stuck_every, self.cut_every, self.node_every)
        return not any(troubles) and not self.router_every

    @property
    def tries(self) -> int:
        """See :class:`speculation.request.poison_detector.PoisonLimits`."""
        return PoisonLimits().tries if self.quiet else STORMY_TRIES
