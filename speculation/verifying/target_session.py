"""One session at a target worker: its committed tokens, its drafts, and the rules that turn one into the other.

Knows nothing of models, caches or scheduling. The worker takes a first part of the candidates as its
:class:`~speculation.trie.VerificationTree`, runs the model over it, and hands back what the target drew; between the
two, proposals keep arriving. What the session learns on the way (whom to believe, how far drafters shall run ahead, how
long drafts take to come) it shares with the other sessions of its worker through :class:`SharedEstimators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from speculation.acceptance import AcceptanceResult, finish_at, walk
from speculation.frozen import frozen
from speculation.messages import (
    ANCHOR,
    FinishReason,
    Open,
    Proposal,
    Rule,
    Source,
    SourceName,
    Token,
    Verification,
    depths_of,
)
from speculation.settings import Constraint
from speculation.sources.lookup import confidence
from speculation.sources.registry import Guarded, LocalSource, Suggestion, local_sources
from speculation.trie import NO_DRAFTS, InsertResult, Node, SpeculationTrie, TrieLimits, VerificationTree
from speculation.verifying.calibration import Calibration
from speculation.verifying.payoff import (
    BREAK_EVEN,
    Answered,
    DraftLatencyEstimator,
    LookaheadPolicy,
    ThroughputEstimator,
)

FORCED_CONFIDENCE = 0.9
"""That forced text is tokenised as proposed, for a start."""
SURE = confidence(16)
"""Confidence from which on a source at the target may take the one place of a chain before a draft model does."""
READ_AT_ONCE = 1024
"""Tokens that the sources of all sessions read with a step, besides what it computed: some 5 us each, which all wait
for. Where a long prompt was found in the cache, it comes to its end over the steps after."""
READ_AT_LEAST = 64
"""What each may read of them when no more are left, so that none falls behind its own text."""
SKIMS = frozenset({Source.PREDICTION, Source.SUFFIX})
"""Sources that pass over a prompt for nothing, however long, and so need not wait to be asked."""


@dataclass(slots=True)
class SharedEstimators:
    """What the sessions of one target worker have learned together: where a new one starts from."""

    calibration: Calibration = field(default_factory=Calibration)
    lookahead_policy: LookaheadPolicy = field(default_factory=LookaheadPolicy)
    draft_latency: DraftLatencyEstimator = field(default_factory=DraftLatencyEstimator)
    throughput: ThroughputEstimator = field(default_factory=ThroughputEstimator)
    drafting_pays: bool = True
    """Whether drafters shall work at present; else they rest (:mod:`speculation.verifying.payoff`)."""
    break_even: float = BREAK_EVEN
    """Accepted drafts a verification that make up for what drafting takes."""
    unread: int = READ_AT_ONCE
    """Tokens that sources may still read with the step at hand."""


@frozen
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
        shared_estimators: SharedEstimators | None = None,
        sources: Sequence[LocalSource] | None = None,
    ) -> None:
        """Take over a session as the router opened it. ``vocabulary`` bounds what drafts may contain.

        ``sources``: those at this worker, of which the session uses what it allows; None: all that need nothing but it.
        """
        assert opened.tokens, "a session has at least one token"
        shared_estimators = shared_estimators or SharedEstimators()
        self.opened = opened
        speculation = opened.speculation
        self.ahead, self.chains = speculation.ahead, speculation.chains
        self._takes_drafts = speculation.takes(Source.DRAFT)
        self.calibration = Calibration(shared_estimators.calibration)
        self.lookahead_policy = LookaheadPolicy(shared_estimators.lookahead_policy, shared_estimators.break_even)
        self.draft_latency = DraftLatencyEstimator(shared_estimators.draft_latency)
        self.throughput = ThroughputEstimator(shared_estimators.throughput)
        self._shared = shared_estimators
        self._sent_lookahead: int | None = None  # the lead that drafters were told last
        if self.chains:
            trie_limits = TrieLimits(trie_limits.nodes, trie_limits.depth, children=1)
        self.trie = SpeculationTrie(
            opened.tokens, vocabulary=vocabulary, limits=trie_limits, odds=self.calibration, digest=opened.digest
        )
        self.tokens = self.trie.tokens
        """Committed tokens, prompt included."""
        self.finished: FinishReason | None = None
        self.in_vain = False
        """A baseline schedule waited for a draft that did not come, and none has come since: it waits no more."""
        self.committed_at: float | None = None
        self.answered: Answered | None = None
        """The last commit, which drafters answer with what they make of it; None: none is asked to."""
        self._answered_before: Answered | None = None
        """The commit before: what came while the step was under way is heard of now."""
        self.constraint: Constraint | None = None
        """What its text is held to. The worker draws accordingly."""
        self._tree: VerificationTree | None = None
        self._drafted_chain = self.chains and Source.DRAFT in speculation.sources
        known = local_sources(opened) if sources is None else sources
        self._sources = [one for one in known if speculation.allows(one.source)]
        self._read = [0] * len(self._sources)  # committed tokens that each of these has seen
        self._suggested = -1  # position at which they were asked last

    @property
    def faults(self) -> dict[SourceName, str]:
        """Of registered sources that it does without since they failed: why they did, in one line each."""
        return {one.source: one.fault for one in self._sources if isinstance(one, Guarded) and one.fault}

    @property
    def room(self) -> int:
        """How many draft tokens can follow each other before the session's last position, which is the target's own."""
        return self.opened.limits.end - self.trie.position - 1

    @property
    def deepest(self) -> int:
        """How many draft tokens may follow each other in one step."""
        return min(self.opened.speculation.max_depth, self.room)

    @property
    def expects_drafts(self) -> bool:
        """Whether a draft worker may be at work for it, and is not told to rest."""
        return self._takes_drafts and self._sent_lookahead != 0

    def waits_since(self, now: float) -> float:
        """Since when a session that must have drafts has waited for them: since its last commit, or since ``now``."""
        if self.committed_at is None:
            self.committed_at = now
        return self.committed_at

    # -- drafts --------------------------------------------------------------------------------------------------------

    def propose(self, proposal: Proposal, at: float = 0.0) -> InsertResult:
        """Take in a proposal; one of another epoch, or of a session that wants no drafts, is stale."""
        speculation = self.opened.speculation
        if proposal.epoch != self.opened.epoch or not speculation.takes(proposal.source):
            return InsertResult.STALE
        if speculation.rule is Rule.REJECTION and not proposal.q:
            return InsertResult.MISSING_Q
        result = self.trie.insert(proposal)
        if result in (InsertResult.PLACED, InsertResult.STALE):
            self._arrived(proposal, at)
        return result

    def _arrived(self, proposal: Proposal, at: float) -> None:
        """Time the drafts that answer a commit; what arrives during a step is looked at after it."""
        self.in_vain = False
        answered = self.answered
        if answered is not None and at < answered.at:
            answered = self._answered_before
        if answered is not None and proposal.tokens and at >= answered.at:
            answered.arrived(proposal.anchor_position + max(depths_of(proposal.parents)) - answered.position, at)

    def candidates(self, budget: int) -> VerificationTree:
        """The at most ``budget`` draft tokens most likely to be kept, best first.

        Drafts past the last position the session may reach are never among them.
        """
        if not self.opened.speculation.enabled or budget <= 0:
            return NO_DRAFTS
        self._suggest()
        self._force()
        return self.trie.select(budget, self.deepest)

    def begin_verification(self, chosen: VerificationTree) -> VerificationTree:
        """Verify ``chosen`` in the step that ``commit`` ends; returns it in the order to compute it in."""
        assert self._tree is None and self.finished is None
        self._tree = chosen.depth_first()
        return self._tree

    def withdraw(self) -> VerificationTree:
        """Verify no drafts in the step that ``commit`` ends, whatever was offered; they stay at hand."""
        assert self._tree is not None, "withdraw without a tree"
        self._tree = NO_DRAFTS
        return self._tree

    def index(self, end: int, computed: int = 0) -> None:
        """Let the sources here see the tokens before ``end``: a long prompt is read as it is prefilled.

        As many as the step at hand ``computed``, or what is left of :data:`READ_AT_ONCE`.
        """
        for number, one in enumerate(self._sources):
            read, skims = self._read[number], one.source in SKIMS
            until = end if skims else min(end, read + max(computed, self._shared.unread, READ_AT_LEAST))
            if until > read:
                one.extend(self.trie.tokens[read:until])
                self._read[number] = until
                if not skims:
                    self._shared.unread -= max(until - read - computed, 0)

    def _suggest(self) -> None:
        """Ask the sources here that have read all of the text how it goes on, and draft what the surest say first."""
        position = self.trie.position
        if not self._sources or self._suggested == position:
            return
        self.index(position)
        self._suggested = position
        ready = [one for one, read in zip(self._sources, self._read, strict=True) if read == position]
        found = [(one.source, one.propose(min(one.depth, self.room))) for one in ready]
        found = [(source, suggestion) for source, suggestion in found if suggestion.tokens]
        for source, suggestion in sorted(found, key=lambda pair: -pair[1].confidence[0]):
            if not self._drafted_chain or suggestion.confidence[0] >= SURE:
                self._add(source, suggestion)

    def _add(self, source: SourceName, suggestion: Suggestion) -> None:
        """Hang a suggestion from the end of the text, as far as there is room; whoever drafted a token first has it."""
        places: list[Node | None] = []
        for token, parent, sure in zip(suggestion.tokens, suggestion.parents, suggestion.confidence, strict=True):
            above = self.trie.root if parent == ANCHOR else places[parent]
            known = above and above.children.get(token)
            places.append(known or (above and self.trie.add(above, token, sure, source)))

    def _force(self) -> None:
        """Where the likeliest drafts end, propose what must follow: the only text that the constraint leaves open."""
        if self.constraint is None or not self.opened.speculation.allows(Source.GRAMMAR):
            return
        node, path = self.trie.root, list[Token]()
        while node.children:
            node = max(node.children.values(), key=lambda child: child.weight)
            path.append(node.token)
        for token in self.constraint.forced(path):
            child = self.trie.add(node, token, FORCED_CONFIDENCE, Source.GRAMMAR)
            if child is None:
                return
            node = child

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def commit(self, drawn: Sequence[Token], at: float | None = None) -> Commit:
        """Decide the step by the coupled rule.

        ``drawn[0]`` is the target's token after the prefix, ``drawn[i + 1]`` its token after offer ``i``; ``at``: now.
        """
        assert self._tree is not None, "commit without a tree"
        return self.settle(walk(self._tree.tokens, self._tree.parents, drawn), at)

    def settle(
        self, outcome: AcceptanceResult, at: float | None = None, *, took_us: int = 0, waited_us: int = 0
    ) -> Commit:
        """Decide the step by an outcome that a rule has come to; what it took and waited is told as it is."""
        tree, self._tree = self._tree, None
        assert tree is not None, "settle without a tree"
        tokens = (*[tree.nodes[i].token for i in outcome.kept], outcome.own)
        position = self.trie.position
        count, self.finished = finish_at(position, tokens, self.opened.limits)
        if self.constraint is not None and (end := self.constraint.ending(tokens[:count])) is not None:
            count, self.finished = end, FinishReason.STOP
        tokens, kept = tokens[:count], outcome.kept[:count]
        sources, refused = _sources_of(tree, kept) if tree.nodes else ((), ())
        end = outcome.kept[-1] if outcome.kept else ANCHOR
        self._learn(tokens, len(kept))
        self.trie.advance(tokens)
        if self.ahead:
            self._sent_lookahead = self.lookahead_policy.lead if self._shared.drafting_pays else 0
        if at is not None:
            self._clock(at, count, len(tree.nodes))
        verification = Verification(
            session=self.opened.session,
            epoch=self.opened.epoch,
            position=position,
            tokens=tokens,
            digest=self.trie.digest,
            accepted=len(kept),
            offered=len(tree.nodes),
            finish=self.finished,
            lead=self._sent_lookahead,
            sources=sources,
            refused=refused,
            recovered=count > len(outcome.kept) and end in tree.parents,
            took_us=took_us,
            waited_us=waited_us,
        )
        return Commit(verification, kept)

    def _learn(self, tokens: Sequence[Token], accepted: int) -> None:
        """Compare all drafts along the way, verified or not, with what was committed."""
        node, matched, diverged = self.trie.root, 0, False
        for token in tokens:
            if not node.children:
                break
            self.calibration.observe(node, token)
            if token not in node.children:
                diverged = True
                break
            node, matched = node.children[token], matched + 1
        if self._shared.drafting_pays:
            of_drafters = accepted if self._takes_drafts else None
            self.lookahead_policy.observe(matched, diverged, of_drafters, self._shared.break_even)

    def _clock(self, at: float, count: int, offered: int) -> None:
        """Measure the throughput of steps with drafts, and have drafters timed that answer this one."""
        previous, self.committed_at = self.committed_at, at
        if offered and previous is not None:
            self.throughput.observe(count, at - previous)
        if self._answered_before is not None:
            self.draft_latency.observe(self._answered_before)
        self._answered_before = self.answered
        asked = self._shared.drafting_pays and self.expects_drafts
        self.answered = Answered(at, self.trie.position) if asked else None


def _sources_of(tree: VerificationTree, kept: Sequence[int]) -> tuple[tuple[SourceName, ...], tuple[SourceName, ...]]:
    """What a message says of where the drafts came from that were ``kept``, and the refused ones."""
    sources = tuple([tree.nodes[i].source for i in kept])
    refused = tuple([node.source for i, node in enumerate(tree.nodes) if i not in kept])
    return _unless_drafted(sources), _unless_drafted(refused)


def _unless_drafted(sources: tuple[SourceName, ...]) -> tuple[SourceName, ...]:
    """What a message says of drafts that came from these sources."""
    return () if not sources or set(sources) == {Source.DRAFT} else sources
