"""One session at a draft worker: where to draft next, what to push when, and what a verification leaves standing.

The drafter keeps the same trie as the target, ahead of it: a tree of likely outcomes, grown best first. It expands
nodes without being asked, pushes what it adds, and re-roots at every verification. What the verification now in flight
may turn out to be is in the tree already, alternatives included, so after a refusal drafting goes on where the text
does.

Under the baseline schedules, and under the rejection rule, the tree is a chain. Knows nothing of models or scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf

from speculation.drafting.proposals import PROPOSAL_BYTES, proposal_bytes, proposals_of, token_bytes
from speculation.frozen import frozen
from speculation.messages import Open, Proposal, Rule, Schedule, Support, Token, Verification
from speculation.trie import Node, SpeculationTrie, TrieLimits
from speculation.verifying.calibration import Calibration


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How far a drafter may run ahead of what is committed."""

    lead: int = 48
    """Longest path below the committed prefix."""
    nodes: int = 128
    children: int = 3
    """Alternatives at one place."""
    width: int = 4
    """Most places of one session expanded in one step."""
    hungry_width: int = 1
    """The same while its target has no drafts: the likeliest that follow each other are there the soonest."""
    min_weight: float = 0.01
    """Chance of being kept below which nothing is drafted; the baselines draft all they are told to."""
    hold: int = 4
    """Steps whose drafts go out together. Fewer while the target has hardly any."""
    enough: int = 8
    """Lead pushed to the target from which on twice as many go out together."""
    bytes_a_token: float = 58.0
    """What may be pushed for every token committed, in bytes. Chains may exceed it: they are drafted to be sent."""

    def of_head(self) -> DraftLimits:
        """What an EAGLE head may do, where a draft model may do this."""
        return replace(
            self,
            nodes=WIDER * self.nodes,
            width=WIDER * self.width,
            children=self.children + MORE,
            bytes_a_token=PUSHED * self.bytes_a_token,
        )


WIDER, MORE = 2, 2
"""Times the drafts that a session of a head may have, and the places expanded in one step, of what a draft model has,
and how many alternatives more at a place. After each verification a head drafts anew beside what it sent before, a
place read without the last outcome is wrong more often, and eight rows of one layer take no longer than four."""
PUSHED = 16.0
"""Times the bytes a committed token that a head may push, of what a draft model may. Features make most drafts new."""


IGNORED_BEFORE_REPUSH = 3
"""Verifications in a row that ignore what was pushed, before it is pushed again; doubles each time."""


FIRST_CREDIT, MAX_CREDIT = 8, 64
"""Committed tokens whose bytes a session may spend at its start, and may save up: a hard passage takes more."""
LARGEST_SHARE = 0.5
"""Share of the savings that one push may spend while the target has drafts: the next may be needed more."""


class Sync(Enum):
    """What a verification did to a draft session."""

    IGNORED = auto()
    """Of another epoch, or known already."""
    ADVANCED = auto()
    LOST = auto()
    """It does not connect to what is known here: the session must be opened again."""
    FINISHED = auto()


@frozen
class Candidate:
    """A token the draft model would follow a node with, and its estimate that the target does the same."""

    token: Token
    confidence: float
    q: Support | None = None
    """What the token was drawn from, under the rejection rule."""


NONE_RIGHT = -1


@frozen
class Outcome:
    """What the drafter thought of its candidates at a place that the text went through, and which one came true."""

    confidences: tuple[float, ...]
    """Best first; at least one."""
    right: int
    """Index of the one that the target took, or :data:`NONE_RIGHT`."""


class DraftSession:
    """The committed tokens of a session as far as known here, and the drafts beyond them."""

    def __init__(
        self,
        opened: Open,
        *,
        vocabulary: int,
        limits: DraftLimits = DraftLimits(),
        calibration: Calibration | None = None,
        resting: bool = False,
    ) -> None:
        """Take over a session as the router opened it. ``calibration``: what other sessions have shown.

        ``resting``: whether to rest until a verification says how far to run ahead, where verifications do.
        """
        assert opened.tokens, "a session has at least one token"
        self.opened = opened
        self.limits = limits
        self.calibration = Calibration(calibration or Calibration())
        self.children = 1 if opened.speculation.chains else limits.children
        """How many alternatives are drafted at a place."""
        self.price = 0.0
        """Tokens that one more draft costs where that is known: what is less likely to be kept is not worth drafting.

        Counts under the coupled rule alone, where no choice among drafts changes the law of the text.
        """
        # Drafted anew, a place may get others than it had: room for both.
        most = 1 if opened.speculation.chains else 2 * self.children
        trie_limits = TrieLimits(limits.nodes, limits.lead, most)
        self.trie = SpeculationTrie(
            opened.tokens, vocabulary=vocabulary, limits=trie_limits, odds=self.calibration, digest=opened.digest
        )
        self._lead = 0 if resting and opened.speculation.ahead else limits.lead
        self._leaves: dict[Node, None] = {self.trie.root: None}  # an ordered set: what may be expanded
        self._unsent: dict[Node, None] = {}
        self._held = 0  # steps that have added to what is unsent
        self._unaffordable = False  # whether nothing of what is unsent could be paid for when last looked at
        self._places: tuple[float, list[Node]] | None = None  # as found at this price; None: to be found
        self._sent_end = self.trie.position
        self._credit = FIRST_CREDIT * limits.bytes_a_token
        self._ignored = 0  # verifications in a row that offered nothing although drafts stood
        self._repush_after = IGNORED_BEFORE_REPUSH
        self.outcomes: list[Outcome] | None = None
        """What became of the places along the text, in its order, for a record; None: not kept."""
        self._said: dict[Node, Sequence[Candidate]] = {}
        """What the draft model said at each expanded place, what was not worth adding yet included."""

    @property
    def tokens(self) -> Sequence[Token]:
        """Committed tokens, prompt included."""
        return self.trie.tokens

    @property
    def lead(self) -> tuple[int, int]:
        """How far ahead drafting should be for a verification that comes now, in tokens, and how far of that it is."""
        asked = max(self._depth, 0) if self._lead else 0
        return asked, min(self.trie.lead, asked)

    # -- drafting ------------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """How many places are expanded in one step."""
        wide = self.limits.width if self._sent_lookahead else self.limits.hungry_width
        return 1 if self.opened.speculation.chains else wide

    def frontier(self) -> list[Node]:
        """The places to expand now, best first by the chance that the text gets there; none if all is done."""
        return self.places()[: self.width]

    def places(self) -> list[Node]:
        """All places worth expanding, best first."""
        if len(self.trie) >= self.limits.nodes or not self._lead:
            return []
        if self._places is None or self._places[0] != self.price:
            self._places = self.price, sorted(self._worth_expanding(self._leaves), key=lambda node: -node.weight)
        return self._places[1]

    @property
    def min_weight(self) -> float:
        """Chance of being kept below which no place is expanded."""
        return self._min_draft_weight if self.opened.speculation.ahead else 0.0

    @property
    def _min_draft_weight(self) -> float:
        """Chance of being kept below which a draft is left out that is not the likeliest at its place."""
        priced = self.opened.speculation.rule is Rule.COUPLED
        return max(self.limits.min_weight, self.price) if priced else self.limits.min_weight

    def _worth_expanding(self, leaves: Iterable[Node]) -> list[Node]:
        deepest, min_weight = self.trie.position + self._depth, self.min_weight
        worth = [node for node in leaves if node.weight >= min_weight and node.end < deepest]
        return [node for node in worth if node.token not in self.opened.limits.stop_tokens]

    def levels_below(self, node: Node) -> int:
        """How many tokens may be drafted below a place, one after another."""
        return self.trie.position + self._depth - node.end

    @property
    def _depth(self) -> int:
        """How many draft tokens may follow each other now."""
        room = self.opened.limits.end - 1 - self.trie.position
        if self.opened.speculation.schedule is Schedule.SEQUENTIAL:
            return min(self.opened.speculation.max_depth, room)
        if self.opened.speculation.schedule is Schedule.PARALLEL:
            # What is being verified, the target's own token after it, and the next draft.
            return min(2 * self.opened.speculation.max_depth + 1, self.limits.lead, room)
        return min(self._lead, self.limits.lead, room)

    def expand(self, node: Node, candidates: Sequence[Candidate]) -> int:
        """Go on from ``node`` with ``candidates``, best first; return how many are new drafts."""
        self._leaves.pop(node, None)
        self._said[node] = candidates
        self._changed()
        return self._branch(node)

    def _changed(self) -> None:
        """Drafts, savings or lead are others now: places, and what can be paid for, are found anew. Mostly none are."""
        self._unaffordable, self._places = False, None

    def draft_below(self, node: Node, token: Token) -> Node | None:
        """The draft ``token`` at an expanded place, if it is there and worth expanding itself."""
        child = node.children.get(token)
        if child is None or child not in self._leaves or len(self.trie) >= self.limits.nodes:
            return None
        return child if self._worth_expanding([child]) else None

    def redraft(self) -> None:
        """Go through it all again from the end of the text, whose drafts may come out otherwise now.

        What was sent stays: the target has it. Under the rejection rule so does the rest, which was drawn once.
        """
        if self.opened.speculation.rule is not Rule.REJECTION:
            for node in sorted(self._unsent, key=lambda node: -node.end):
                self.trie.remove(node)
            self._unsent = {}
            if 2 * len(self.trie) > self.limits.nodes:
                self.trie.clear()
        self._leaves, self._said = {self.trie.root: None}, {}
        self._changed()
        self._sent_end = self.trie.position  # what is new is awaited, for all that was sent before

    def _branch(self, node: Node) -> int:
        """Add those candidates at an expanded place that are worth it by now; return how many.

        The first is taken whatever it is worth, or a wrong estimate would end drafting for good; the others once they
        may be expanded themselves. Far ahead of the text hardly any may; they are asked about again as it comes nearer.
        """
        added = 0
        for rank, candidate in enumerate(self._said[node][: self.children]):
            if candidate.token in node.children:
                if (drafted := node.children[candidate.token]) not in self._said:
                    self._leaves[drafted] = None  # again, after :meth:`redraft`
                continue
            worth = self._min_draft_weight if rank else 0.0
            child = self.trie.add(node, candidate.token, candidate.confidence, q=candidate.q, min_weight=worth)
            if child is None:
                break
            self._leaves[child] = self._unsent[child] = None
            added += 1
        if added:
            self._leaves.pop(node, None)
        return added

    # -- pushing -------------------------------------------------------------------------------------------------------

    def pushes(self, seconds: float = 0.0) -> list[Proposal]:
        """What is to be sent now: called after each step, whether it expanded this session or not, and verification.

        While the target has enough to go on with, the drafts of a few steps go out together. The likeliest go first,
        as many as the bytes allow; others may become likely later.

        Under the rejection rule each token goes out with the step that drew it. How long it waited for those behind it
        would depend on what these are, hence on itself: a stop token has none (:mod:`speculation.acceptance`).

        ``seconds``: what drafting has taken since the last push.
        """
        if not self._unsent:
            return []
        self._held += 1
        if self._unaffordable or (self._held < self._steps_to_hold() and self.frontier()):
            return []
        chosen = self._affordable()
        if not chosen:
            self._unaffordable = True
            return []
        self._held = 0
        self._sent_end = max(self._sent_end, *(node.end for node in chosen))
        proposals = proposals_of(self.opened, self.trie.root, chosen, round(seconds * 1e6))
        for node in chosen:
            del self._unsent[node]
        self._credit -= sum(map(proposal_bytes, proposals))
        return proposals

    def _steps_to_hold(self) -> float:
        """For how many steps drafts are gathered before they go out: the more the target has, the less haste."""
        limits, lead = self.limits, self._sent_lookahead
        if self.opened.speculation.rule is Rule.REJECTION:
            return 1
        if self.opened.speculation.schedule is Schedule.SEQUENTIAL:
            return inf  # until all is drafted
        if lead < limits.hold:
            return 2 if lead else 1
        return limits.hold if lead < limits.enough else 2 * limits.hold

    @property
    def _sent_lookahead(self) -> int:
        """How far the target has drafts, for all that is known here; 0: it has none."""
        return self._sent_end - self.trie.position

    def _affordable(self) -> list[Node]:
        """The likeliest of what is unsent that may be sent; a parent is never less likely than its child."""
        if self.opened.speculation.chains:
            return list(self._unsent)
        left = self._credit * (LARGEST_SHARE if self._sent_lookahead else 1.0)
        chosen: dict[Node, None] = {}
        anchors: set[Node] = set()
        for node in sorted(self._unsent, key=lambda node: (-node.weight, node.end)):
            above = node.above
            if above not in chosen and above not in anchors:
                left -= PROPOSAL_BYTES  # at most: one proposal may span several places
                anchors.add(above)
            left -= token_bytes(node.token)
            if left < 0:
                break
            chosen[node] = None
        return list(chosen)

    # -- following the target ------------------------------------------------------------------------------------------

    def verified(self, verification: Verification) -> Sync:
        """Follow the target. Safe against repeats, old epochs and gaps."""
        if verification.epoch != self.opened.epoch:
            return Sync.IGNORED
        known = self.trie.position - verification.position
        if known < 0:
            return Sync.LOST
        if known >= len(verification.tokens):
            return Sync.FINISHED if verification.finish else Sync.IGNORED
        self._advance(verification.tokens[known:], verification.offered)
        if verification.lead is not None:
            self._lead = verification.lead
        self._changed()
        if self.trie.digest != verification.digest:
            return Sync.LOST
        return Sync.FINISHED if verification.finish else Sync.ADVANCED

    def _advance(self, tokens: Sequence[Token], offered: int) -> None:
        limits = self.limits
        self._credit = min(self._credit + limits.bytes_a_token * len(tokens), MAX_CREDIT * limits.bytes_a_token)
        self._learn(tokens)
        self.trie.advance(tokens)
        if self.opened.speculation.schedule is Schedule.SEQUENTIAL:
            self.trie.clear()
        standing = list(self.trie)
        self._unsent = {node: None for node in standing if node in self._unsent}
        self._said = {node: self._said[node] for node in (self.trie.root, *standing) if node in self._said}
        self._leaves = dict.fromkeys(filter(self._is_leaf, (self.trie.root, *standing)))
        if offered:
            self._ignored, self._repush_after = 0, IGNORED_BEFORE_REPUSH
        elif self._lead and len(standing) > len(self._unsent):
            self._ignored += 1
        if self._ignored >= self._repush_after:
            # Pushed long ago and never verified: the push may have been lost. Or the target does not want them.
            self._unsent, self._ignored, self._repush_after = dict.fromkeys(standing), 0, 2 * self._repush_after
        sent = [node.end for node in standing if node not in self._unsent]
        self._sent_end = max(sent, default=self.trie.position)
        for node in self._said:
            self._branch(node)

    def _is_leaf(self, node: Node) -> bool:
        """Whether it is the end of what was drafted, and not left over from before :meth:`redraft`."""
        return not node.children and (node is self.trie.root or node.parent in self._said)

    def _learn(self, tokens: Sequence[Token]) -> None:
        node = self.trie.root
        for token in tokens:
            self.calibration.observe(node, token)
            if self.outcomes is not None and node in self._said:
                said = self._said[node]
                right = next((rank for rank, candidate in enumerate(said) if candidate.token == token), NONE_RIGHT)
                self.outcomes.append(Outcome(tuple(candidate.confidence for candidate in said), right))
            if token not in node.children:
                return
            node = node.children[token]
