"""How a drafter and a target agree along a text: recorded from a real pair, or made up from two figures.

For the simulator. A text is a sequence of :class:`~speculation.draft_session.Outcome`: what the drafter thinks of its
candidates at each place, and which of them the target takes. Easy and hard stretches of a real text are long, and how
much a drafter gets done before the next refusal depends on that; so what was recorded is replayed in its order, and
what is made up comes in such stretches too. Once a path has left the text, nothing on it is right any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from speculation import digest as digests
from speculation import noise
from speculation.draft_session import NONE_RIGHT, Candidate, Outcome
from speculation.messages import Token

VOCABULARY = 4096
CANDIDATES = 3
"""Candidates at each place of a made-up text."""
HARD_SHARE = 0.3
"""Share of a made-up text that is hard: there the first candidate is right with the acceptance squared."""
STRETCH = 8.0
"""Mean length of an easy stretch, in tokens."""
SPREAD = 1.0
"""How evenly confidences are spread within a stretch (a and b of their beta distribution add up to this)."""
BLUR = 0.3
"""Share of a confidence that means nothing."""
LIKEWISE = 0.6
"""A further candidate is right, where those before it are not, with this much of the acceptance unless told."""


def made_up(
    rng: Random, acceptance: float, coverage: float | None = None, length: int = 4000, blur: float = BLUR
) -> list[Outcome]:
    """A text whose first candidate is right with probability ``acceptance``.

    ``coverage`` is the chance of the second to be right where the first is not, and of the third where neither is. A
    confidence is what such a place deserves on average, so it is calibrated; ``blur`` of it is noise.
    """
    coverage = LIKEWISE * acceptance if coverage is None else coverage
    hard_chance = acceptance**2
    easy_chance = (acceptance - HARD_SHARE * hard_chance) / (1 - HARD_SHARE)
    ends_easy = 1 / STRETCH
    ends_hard = ends_easy * (1 - HARD_SHARE) / HARD_SHARE
    outcomes: list[Outcome] = []
    hard = rng.random() < HARD_SHARE
    for _ in range(length):
        hard ^= rng.random() < (ends_hard if hard else ends_easy)
        mean = hard_chance if hard else easy_chance
        stated = rng.betavariate(SPREAD * mean, SPREAD * (1 - mean)) if 0 < mean < 1 else mean
        first = blur * mean + (1 - blur) * stated
        chances = [first, *(coverage for _ in range(CANDIDATES - 1))]
        right = next((rank for rank, chance in enumerate(chances) if rng.random() < chance), NONE_RIGHT)
        rest = 1 - stated
        outcomes.append(Outcome((stated, rest * coverage, rest * (1 - coverage) * coverage), right))
    return outcomes


class Text:
    """What both models say at every place that a session can get to. Places are named as everywhere, by digest."""

    def __init__(self, outcomes: Sequence[Outcome], first: int, seed: int) -> None:
        """Replay ``outcomes`` from index ``first`` on, round and round. ``seed`` sets the words."""
        self._outcomes, self._first, self._seed = outcomes, first, seed
        self._digests = [digests.EMPTY]

    def token(self, position: int) -> Token:
        """The token of the true text at ``position``."""
        return noise.splitmix64(self._seed ^ position) % VOCABULARY

    def drawn(self, end: int, digest: int) -> Token:
        """What the target says after the prefix of length ``end`` that ``digest`` names."""
        return self.token(end) if self._holds(end, digest) else noise.splitmix64(digest) % VOCABULARY

    def candidates(self, end: int, digest: int) -> list[Candidate]:
        """What the drafter says there."""
        if not self._holds(end, digest):
            at = noise.splitmix64(digest)
            outcome, right, wrong = self._outcomes[at % len(self._outcomes)], NONE_RIGHT, at
        else:
            outcome = self._outcomes[(self._first + end) % len(self._outcomes)]
            right, wrong = outcome.right, self.token(end) + 1
        return [
            Candidate((self.token(end) if rank == right else wrong + rank) % VOCABULARY, confidence)
            for rank, confidence in enumerate(outcome.confidences)
        ]

    def _holds(self, end: int, digest: int) -> bool:
        """Whether a prefix is that of the true text."""
        while len(self._digests) <= end:
            self._digests.append(digests.extend(self._digests[-1], self.token(len(self._digests) - 1)))
        return self._digests[end] == digest
