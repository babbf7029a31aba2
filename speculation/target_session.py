"""One session at a target worker: its committed tokens, its drafts, and the rules that turn one into the other.

Knows nothing of models, caches or scheduling. The worker takes a first part of the candidates as its
:class:`~speculation.trie.Offer`, runs the model over it, and hands back what the target drew; between the two,
proposals keep arriving. What the session learns on the way (whom to believe, how far drafters shall run ahead, how long
drafts take to come) it shares with the other sessions of its worker through :class:`Experience`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from speculation.acceptance import Walk, finish_at, walk
from speculation.arrivals import Arrivals, Miss
from speculation.calibration import Calibration
from speculation.lookup import PromptLookup
from speculation.messages import FinishReason, Open, Proposal, Rule, Schedule, Source, Token, Verification
from speculation.pace import Pace
from speculation.tempo import Tempo
from speculation.trie import Fate, Offer, Placement, SpeculationTrie, TrieLimits

LONGEST_LEAD = 48
LOOKUP_DEPTH = 8
"""Tokens that prompt lookup proposes at once."""
SURE_MATCH = 16
"""Equal tokens from which on a lookup may take the one place of a chain before a draft model does."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What the sessions of one target worker have learned together: where a new one starts from."""

    calibration: Calibration = field(default_factory=Calibration)
    pace: Pace = field(default_factory=lambda: Pace(LONGEST_LEAD))
    arrivals: Arrivals = field(default_factory=Arrivals)
    tempo: Tempo = field(default_factory=Tempo)


@dataclass(frozen=True, slots=True)
class Commit:
    """What one step decided: the message to send, and the offer indices whose cache entries stay."""

    verification: Verification
    kept: tuple[int, ...]


class TargetSession:
    """The committed tokens of a session and the drafts at hand.

    Times are seconds on any clock, as long as it is one; without any, nothing is ever waited for.
    """

    def __init__(
        self,
        opened: Open,
        *,
        vocabulary: int,
        trie_limits: TrieLimits = TrieLimits(),
        experience: Experience | None = None,
    ) -> None:
        """Take over a session as the router opened it. ``vocabulary`` bounds what drafts may contain."""
        assert opened.tokens, "a session has at least one token"
        experience = experience or Experience()
        self.opened = opened
        self.calibration = Calibration(experience.calibration)
        self.pace = Pace(LONGEST_LEAD, experience.pace)
        self.arrivals = Arrivals(experience.arrivals)
        self.tempo = Tempo(experience.tempo)
        if opened.speculation.chains:
            trie_limits = TrieLimits(trie_limits.nodes, trie_limits.depth, children=1)
        self.trie = SpeculationTrie(opened.tokens, vocabulary=vocabulary, limits=trie_limits, odds=self.calibration)
        self.finished: FinishReason | None = None
        self.in_vain = False
        """A baseline schedule waited for a draft that did not come, and none has come since."""
        self.committed_at: float | None = None
        self.miss: Miss | None = None
        """Since when, and where, no drafts are at hand, if so; not over before those that come are there and used."""
        self._offer: Offer | None = None
        allowed = opened.speculation.enabled and Source.LOOKUP in opened.speculation.sources
        self._looked_up = -1
        self._drafted_chain = opened.speculation.chains and Source.DRAFT in opened.speculation.sources
        self._lookup = PromptLookup() if allowed and opened.speculation.schedule is Schedule.TRIE else None

    @property
    def tokens(self) -> Sequence[Token]:
        """Committed tokens, prompt included."""
        return self.trie.tokens

    @property
    def room(self) -> int:
        """How many draft tokens can follow each other before the session's last position, which is the target's own."""
        return self.opened.limits.end - self.trie.position - 1

    @property
    def expects_drafts(self) -> bool:
        """Whether a draft worker may be at work for it, and is not told to rest."""
        speculation = self.opened.speculation
        return speculation.enabled and Source.DRAFT in speculation.sources and self.pace.lead > 0

    @property
    def agreement(self) -> float:
        """Chance of one draft token to be kept, no higher than what steps with drafts have really committed allows."""
        return min(self.pace.agreement, 1.0 - 1.0 / max(self.tempo.tokens, 1.0))

    # -- drafts --------------------------------------------------------------------------------------------------------

    def propose(self, proposal: Proposal, at: float = 0.0) -> Placement:
        """Take in a proposal; one of another epoch, or of a session that wants no drafts, is stale."""
        speculation = self.opened.speculation
        if proposal.epoch != self.opened.epoch or not speculation.enabled or proposal.source not in speculation.sources:
            return Placement(Fate.STALE)
        if speculation.rule is Rule.REJECTION and not proposal.q:
            return Placement(Fate.MISSING_Q)
        placement = self.trie.insert(proposal)
        if placement.fate in (Fate.PLACED, Fate.STALE):
            self._arrived(proposal, at)
        return placement

    def _arrived(self, proposal: Proposal, at: float) -> None:
        """Time the drafts after a miss.

        What arrives during a step is looked at after it. So drafts may turn out to have been here before the commit
        that seemed to leave none: then that was no miss.
        """
        self.in_vain = False
        if self.miss is not None and at < self.miss.at and len(self.trie):
            self.miss = None
        elif self.miss is not None and at >= self.miss.at and proposal.tokens:
            reached = proposal.anchor_position + max(proposal.depths) - self.miss.position
            self.miss.arrived(reached, at)

    def candidates(self, budget: int) -> Offer:
        """The at most ``budget`` draft tokens most likely to be kept, best first.

        Drafts past the last position the session may reach are never among them.
        """
        if not self.opened.speculation.enabled or budget <= 0:
            return Offer()
        self._look_up()
        return self.trie.select(budget, min(self.opened.speculation.max_depth, self.room))

    def offer(self, chosen: Offer) -> Offer:
        """Verify ``chosen`` in the step that ``commit`` ends; returns it in the order to compute it in."""
        assert self._offer is None and self.finished is None
        self._offer = chosen.depth_first()
        return self._offer

    def index(self, end: int) -> None:
        """Let prompt lookup see the tokens before ``end``: a long prompt is indexed as it is prefilled."""
        if self._lookup is not None:
            self._lookup.extend(self.trie.tokens[len(self._lookup) : end])

    def _look_up(self) -> None:
        """Propose what followed when the text last read as it does now."""
        if self._lookup is None or self._looked_up == self.trie.position:
            return
        self.index(self.trie.position)
        self._looked_up = self.trie.position
        found = self._lookup.propose(LOOKUP_DEPTH)
        if self._drafted_chain and (len(self.trie) or found.matched < SURE_MATCH):
            return
        node = self.trie.root
        for token, confidence in zip(found.tokens, found.confidence, strict=True):
            child = node.children.get(token) or self.trie.add(node, token, confidence, Source.LOOKUP)
            if child is None:
                return
            node = child

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def commit(self, drawn: Sequence[Token], at: float | None = None) -> Commit:
        """Decide the step by the coupled rule.

        ``drawn[0]`` is the target's token after the prefix, ``drawn[i + 1]`` its token after offer ``i``; ``at``: now.
        """
        assert self._offer is not None, "commit without offer"
        return self.settle(walk(self._offer.tokens, self._offer.parents, drawn), at)

    def settle(self, outcome: Walk, at: float | None = None) -> Commit:
        """Decide the step by an outcome that a rule has come to."""
        offer, self._offer = self._offer, None
        assert offer is not None, "settle without offer"
        tokens = (*(offer.nodes[i].token for i in outcome.kept), outcome.own)
        position = self.trie.position
        count, self.finished = finish_at(position, tokens, self.opened.limits)
        tokens, kept = tokens[:count], outcome.kept[:count]
        self._learn(tokens, len(kept))
        self.trie.advance(tokens)
        if at is not None:
            self._clock(at, count, len(offer.nodes))
        verification = Verification(
            session=self.opened.session,
            epoch=self.opened.epoch,
            position=position,
            tokens=tokens,
            digest=self.trie.digest,
            accepted=len(kept),
            offered=len(offer.nodes),
            finish=self.finished,
            lead=self.pace.lead if self.opened.speculation.schedule is Schedule.TRIE else None,
        )
        return Commit(verification, kept)

    def _learn(self, tokens: Sequence[Token], accepted: int) -> None:
        """Compare all drafts along the way, verified or not, with what was committed."""
        node, matched, diverged = self.trie.root, 0, False
        for token in tokens:
            self.calibration.observe(node, token)
            diverged = bool(node.children)
            if token not in node.children:
                break
            node, matched, diverged = node.children[token], matched + 1, False
        self.pace.observe(matched, diverged, accepted)

    def _clock(self, at: float, count: int, offered: int) -> None:
        """Measure the pace of steps with drafts, and note whether this one left some."""
        if offered and self.committed_at is not None and self.miss is None:
            self.tempo.observe(count, at - self.committed_at)
        watched, self.committed_at = self.committed_at, at
        if self.miss is not None:
            if not offered and not len(self.trie):
                return  # still the same one
            if self.miss.reached or watched != self.miss.at:
                self.arrivals.observe(self.miss)
            # Else prompt lookup had something for the very next step: that says nothing of drafts.
        self.miss = None if len(self.trie) else Miss(at, self.trie.position)
