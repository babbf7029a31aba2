"""What became of drafts: which share targets keep, and whether drafts that used to be accepted no longer are.

For each pair of a target and a draft worker the draft tokens offered are counted in blocks; a block's acceptance is
compared with the pair's long-run value. Acceptance has collapsed when a block falls below a fraction of that value, or
below an absolute floor, and the episode is over when a block is clearly above both again; since the long-run value
follows, it is also over once the low value has become the usual one. One warning is logged per episode. Text is never
at stake: drafts are hints, and a collapse costs speed only.

What the target finds itself (prompt lookup, a caller's prediction) does not count: no drafter has to answer for it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from speculation.events import PeerId

log = logging.getLogger(__name__)


BLOCK = 2000
"""Offered draft tokens in a block."""
COLLAPSED_SHARE, FLOOR = 0.4, 0.02
"""Acceptance below this share of the long-run value, or below the floor, has collapsed. Of a tree only one path can be
accepted, so usual values are 0.15 to 0.8."""
RECOVERY = 1.5
"""Times the value below which it would collapse: from there on an episode is over."""
MEMORY = 16
"""Blocks that the long-run value looks back on, roughly."""
MAX_PAIRS = 1024
"""That are watched; the one not heard of for the longest time is forgotten."""
REMEMBERED = 4096.0
"""Drafts that count for a share; each one more pushes the older ones out by as much."""
PRIOR, PRIOR_DRAFTS = 0.6, 64.0
"""What is expected of a pair of which nothing is known, and how many drafts that is worth. Rather much: a drafter that
was never tried should be."""
PAIR_DRAFTS = 256.0
"""How many drafts of its own outweigh what is known of a drafter's model."""


@dataclass(slots=True)
class WatchedPair:
    """What is known of one target worker and one draft worker together."""

    offered: int = 0
    accepted: int = 0
    """Of the block under way."""
    usual: float | None = None
    """Long-run acceptance; None before the first block."""
    latest: float | None = None
    """Acceptance in the last whole block."""
    collapsed: bool = False


class AcceptanceWatch:
    """Notices a collapse, of all pairs of one router."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[PeerId, PeerId], WatchedPair] = OrderedDict()
        self.collapses = 0
        """Episodes so far."""

    def offered(self, target: PeerId, draft: PeerId, offered: int, accepted: int) -> None:
        """A verification offered draft tokens of this pair; ``accepted`` of them were kept."""
        pair = self._pairs.get((target, draft))
        if pair is None:
            if len(self._pairs) >= MAX_PAIRS:
                self._pairs.popitem(last=False)
            pair = self._pairs[target, draft] = WatchedPair()
        pair.offered += offered
        pair.accepted += accepted
        if pair.offered >= BLOCK:
            self._pairs.move_to_end((target, draft))
            self._close_block(target, draft, pair)

    def pairs(self) -> Iterator[tuple[PeerId, PeerId, WatchedPair]]:
        """All that are watched."""
        return ((target, draft, pair) for (target, draft), pair in self._pairs.items())

    def forget(self, worker: PeerId) -> None:
        """It has left: nobody has to answer for its pairs any more."""
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]

    def _close_block(self, target: PeerId, draft: PeerId, pair: WatchedPair) -> None:
        pair.latest = rate = pair.accepted / pair.offered
        pair.offered = pair.accepted = 0
        line = max(FLOOR, COLLAPSED_SHARE * (pair.usual or 0.0))
        if not pair.collapsed and rate < line:
            pair.collapsed = True
            self.collapses += 1
            usual = "no value before it" if pair.usual is None else f"{pair.usual:.3f} is usual"
            log.warning("acceptance of drafts from %s at %s collapsed to %.3f (%s)", draft, target, rate, usual)
        elif pair.collapsed and rate >= RECOVERY * line:
            pair.collapsed = False
            log.info("acceptance of drafts from %s at %s is no longer unusual: %.3f", draft, target, rate)
        pair.usual = rate if pair.usual is None else pair.usual + (rate - pair.usual) / MEMORY


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
    """The share of drafts that targets kept, by pair of models and by drafter, the recent counting most."""

    def __init__(self) -> None:
        self.watch = AcceptanceWatch()
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
        self.watch.offered(target, drafter, offered, kept)

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
        self.watch.forget(worker)
        self._targets.pop(worker, None)
        for key in [key for key in self._drafters if key[1] == worker]:
            del self._drafters[key]
