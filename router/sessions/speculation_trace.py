"""What a router sees of one session's speculation, for a request that wants to know.

Proposals pass through the router on their way from drafter to target. A trace keeps those since the last commit, with
the router's own times, and gives them out with the next one. Few requests ask for it; all others have none.
Drafts are numbered, so that who is told of them knows which branch a later proposal continues.
"""

from __future__ import annotations

from router.generation import Details, Passed
from speculation import digest as digests
from speculation.events import PeerId
from speculation.messages import ANCHOR, Proposal

MAX_TOKENS = 512
"""Draft tokens kept between two commits; what passes after them is not shown."""
MAX_NUMBERS = 4096
"""Places whose number is known; of more, the newest."""


class SpeculationTrace:
    """Of one session. Times go in on the router's clock and come out since the session began."""

    def __init__(self, began: float) -> None:
        """Nothing has passed."""
        self._began = began
        self._passed: list[Passed] = []
        self._tokens = 0
        self._numbers: dict[int, int] = {}
        """Of every draft token, by the digest of the text that ends with it."""
        self._last = 0

    def proposed(self, now: float, proposal: Proposal) -> None:
        """A proposal was passed on to the target."""
        self._tokens += len(proposal.tokens)
        if self._tokens <= MAX_TOKENS:
            after = self._numbers.get(proposal.anchor_digest)
            self._passed.append(Passed(now - self._began, proposal, self._numbered(proposal), after))

    def _numbered(self, proposal: Proposal) -> tuple[int, ...]:
        places: list[int] = []
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            places.append(digests.extend(proposal.anchor_digest if parent == ANCHOR else places[parent], token))
        for place in places:
            if place not in self._numbers:
                self._last += 1
                self._numbers[place] = self._last
        numbers = tuple(self._numbers[place] for place in places)
        while len(self._numbers) > MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return numbers

    def committed(self, now: float, target: PeerId, draft: PeerId | None, reopened: int) -> Details:
        """Tokens were committed; what is said of them starts over."""
        passed, self._passed, self._tokens = tuple(self._passed), [], 0
        return Details(now - self._began, passed, target, draft, reopened)
