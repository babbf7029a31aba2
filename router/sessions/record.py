"""What became of drafts: the share that targets kept, by pair of models and by drafter, the recent counting most."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from speculation.events import PeerId

REMEMBERED = 4096.0
"""Drafts that count; each one more pushes the older ones out by as much."""
PRIOR, PRIOR_DRAFTS = 0.6, 64.0
"""What is expected of a pair of which nothing is known, and how many drafts that is worth. Rather much: a drafter that
was never tried should be."""
PAIR_DRAFTS = 256.0
"""How many drafts of its own outweigh what is known of a drafter's model."""


@dataclass(slots=True)
class _Share:
    kept: float = 0.0
    offered: float = 0.0

    def add(self, kept: int, offered: int) -> None:
        old = max(1.0 - offered / REMEMBERED, 0.0)
        self.kept, self.offered = self.kept * old + kept, self.offered * old + offered

    def expected(self, prior: float, weight: float) -> float:
        return (self.kept + prior * weight) / (self.offered + weight)


class AcceptanceRecord:
    """Of one router."""

    def __init__(self) -> None:
        """Nothing was drafted yet."""
        self._pairs: defaultdict[tuple[str, str], _Share] = defaultdict(_Share)
        self._drafters: defaultdict[tuple[str, PeerId], _Share] = defaultdict(_Share)
        self._targets: defaultdict[PeerId, _Share] = defaultdict(_Share)

    def add(
        self, target: PeerId, target_model: str, drafter: PeerId, draft_model: str, kept: int, offered: int
    ) -> None:
        """So many drafts of a drafter were offered to a target in a step, and so many of them kept."""
        self._pairs[target_model, draft_model].add(kept, offered)
        self._drafters[target_model, drafter].add(kept, offered)
        self._targets[target].add(kept, offered)

    def expected(self, target_model: str, draft_model: str, drafter: PeerId) -> float:
        """The share of this drafter's drafts that will be kept: from its own, and for lack of them from its pair's."""
        pair = self._pairs.get((target_model, draft_model), _Share()).expected(PRIOR, PRIOR_DRAFTS)
        return self._drafters.get((target_model, drafter), _Share()).expected(pair, PAIR_DRAFTS)

    def measured(self) -> dict[PeerId, float]:
        """The share of drafters' drafts that were kept, of every worker that some were offered of or to.

        A target and a drafter that have only each other have the same.
        """
        sums: defaultdict[PeerId, _Share] = defaultdict(_Share, self._targets)
        for (_, drafter), share in self._drafters.items():
            sums[drafter].kept += share.kept
            sums[drafter].offered += share.offered
        return {worker: total.kept / total.offered for worker, total in sums.items() if total.offered}

    def forget(self, worker: PeerId) -> None:
        """It has left."""
        self._targets.pop(worker, None)
        for key in [key for key in self._drafters if key[1] == worker]:
            del self._drafters[key]
