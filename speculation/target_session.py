"""One session at a target worker: what to verify next, and what a verification commits.

Knows nothing of models, caches or scheduling. The worker takes a first part of the candidates as its
:class:`~speculation.trie.Offer`, runs the model over it, and hands back the tokens the target drew; between the two,
proposals keep arriving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculation.acceptance import finish_at, walk
from speculation.messages import FinishReason, Open, Proposal, Token, Verification
from speculation.trie import Fate, Offer, Placement, SpeculationTrie, TrieLimits


@dataclass(frozen=True, slots=True)
class Commit:
    """What one step decided: the message to send, and the offer indices whose cache entries stay."""

    verification: Verification
    kept: tuple[int, ...]


class TargetSession:
    """The committed tokens of a session, its drafts, and the rules that turn one into the other."""

    def __init__(self, opened: Open, *, vocabulary: int, trie_limits: TrieLimits = TrieLimits()) -> None:
        """Take over a session as the router opened it. ``vocabulary`` bounds what drafts may contain."""
        assert opened.tokens, "a session has at least one token"
        self.opened = opened
        self.trie = SpeculationTrie(opened.tokens, vocabulary=vocabulary, limits=trie_limits)
        self.finished: FinishReason | None = None
        self._offer: Offer | None = None

    @property
    def tokens(self) -> Sequence[Token]:
        """Committed tokens, prompt included."""
        return self.trie.tokens

    def propose(self, proposal: Proposal) -> Placement:
        """Take in a proposal; one of another epoch, or of a session that wants no drafts, is stale."""
        if proposal.epoch != self.opened.epoch or not self.opened.speculation.enabled:
            return Placement(Fate.STALE)
        return self.trie.insert(proposal)

    def candidates(self, budget: int) -> Offer:
        """The at most ``budget`` draft tokens most likely to be kept, best first.

        Drafts past the last position the session may reach are never among them.
        """
        if not self.opened.speculation.enabled:
            return Offer()
        room = self.opened.limits.end - self.trie.position - 1
        return self.trie.select(budget, min(self.opened.speculation.max_depth, room))

    def offer(self, chosen: Offer) -> Offer:
        """Verify ``chosen``, a first part of ``candidates``, in the step that ``commit`` ends."""
        assert self._offer is None and self.finished is None
        self._offer = chosen
        return chosen

    def commit(self, drawn: Sequence[Token]) -> Commit:
        """Decide the step: ``drawn[0]`` is the target's token after the prefix, ``drawn[i + 1]`` after offer ``i``."""
        offer, self._offer = self._offer, None
        assert offer is not None, "commit without offer"
        outcome = walk(offer.tokens, offer.parents, drawn)
        tokens = (*(offer.nodes[i].token for i in outcome.kept), outcome.own)
        position = self.trie.position
        count, self.finished = finish_at(position, tokens, self.opened.limits)
        tokens, kept = tokens[:count], outcome.kept[:count]
        self.trie.advance(tokens)
        verification = Verification(
            session=self.opened.session,
            epoch=self.opened.epoch,
            position=position,
            tokens=tokens,
            digest=self.trie.digest,
            accepted=len(kept),
            offered=len(offer.nodes),
            finish=self.finished,
        )
        return Commit(verification, kept)
