"""Whatever a draft session is told, it drafts places once, sends what its target can place, and keeps to its bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from speculation.drafting.draft_session import (
    FIRST_CREDIT,
    IGNORED_BEFORE_REPUSH,
    LARGEST_SHARE,
    MAX_CREDIT,
    Candidate,
    DraftLimits,
    DraftSession,
    Sync,
)
from speculation.messages import Limits, Open, Proposal, Sampling, SessionId, Source, Speculation, Token
from speculation.trie import InsertResult, Node
from speculation.verifying.target_session import TargetSession
from transport.codec import encode_to_worker

VOCABULARY = 1000
PROMPT = (1, 2, 3)
END = 400
LENGTH_PREFIX = 2
"""Bytes of a message's place in its frame."""


@dataclass(frozen=True)
class Round:
    """Draft steps, then one verification."""

    steps: int
    agreed: int
    """Draft tokens that the target follows, as far as there are any."""
    rank: int
    """Which of the choices at each place it follows, or the last one."""
    offered: int
    """Draft tokens it verifies at most; 0: it seems to have none."""
    redrafts: bool = False
    """Whether all is drafted again afterwards, since more is known of the text."""
    idle: int = 0
    """Steps after these in which it is looked at, and nothing is drafted."""
    price: float = 0.0
    lead: int | None = None
    """How far ahead to draft from then on; None: as before."""


rounds = st.builds(
    Round,
    steps=st.integers(0, 6),
    agreed=st.integers(0, 4),
    rank=st.sampled_from([0, 0, 0, 1, 2]),
    offered=st.sampled_from([0, 8, 8, 8]),
    redrafts=st.sampled_from([False, False, True]),
    idle=st.integers(0, 3),
    price=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    lead=st.sampled_from([None, None, None, 0, 2, 24]),
)
limits = st.builds(
    DraftLimits,
    lead=st.sampled_from([3, 24]),
    nodes=st.sampled_from([4, 12, 128]),
    min_weight=st.sampled_from([0.0, 0.01, 0.1]),
    hold=st.sampled_from([1, 4]),
    bytes_a_token=st.sampled_from([10.0, 58.0]),
)


class Forgetful(DraftSession):
    """Finds all out anew whenever it is asked."""

    def places(self) -> list[Node]:
        self._places = None
        return super().places()

    def pushes(self, seconds: float = 0.0) -> list[Proposal]:
        self._unaffordable = False
        return super().pushes(seconds)


class Pair:
    """A drafter and its target, next to each other: nothing is lost and nothing late."""

    def __init__(self, limits: DraftLimits, rng: Random, kind: type[DraftSession] = DraftSession) -> None:
        speculation = Speculation(sources=frozenset({Source.DRAFT}))
        opened = Open(SessionId(1), 1, PROMPT, Sampling(), Limits(END), speculation)
        self.drafter = kind(opened, vocabulary=VOCABULARY, limits=limits)
        self.target = TargetSession(opened, vocabulary=VOCABULARY)
        self.rng = rng
        self.expanded: set[Node] = set()
        self.savings = FIRST_CREDIT * limits.bytes_a_token
        self.sent = 0
        self.ignored = 0
        """Verifications in a row that offered nothing."""
        self.doubted = False
        """Whether the drafter may think that the target has nothing, although it has."""
        self.anew = False
        """Whether nothing was sent of what is drafted again: that is awaited, whatever the target still has."""
        self.said: list[Sequence[int] | Sequence[Proposal]] = []
        """The places that were to be expanded and what was pushed, in turn."""

    def run(self, one: Round) -> None:
        self.drafter.price = one.price
        for _ in range(one.steps):
            self.draft()
            self.push()
        for _ in range(one.idle):
            self.said.append([node.digest for node in self.drafter.frontier()])
            self.push()
        self.verify(one)
        self.push()
        if one.redrafts:
            self.drafter.redraft()
            self.expanded.clear()
            self.anew = True
            assert self.drafter.frontier() in ([self.drafter.trie.root], [])
        self.drafter.trie.validate()
        self.target.trie.validate()

    def draft(self) -> None:
        frontier = self.drafter.frontier()
        self.said.append([node.digest for node in frontier])
        for place in frontier:
            assert place not in self.expanded, "a place is expanded twice"
            self.expanded.add(place)
            self.drafter.expand(place, self.candidates())

    def candidates(self) -> list[Candidate]:
        tokens = self.rng.sample(range(VOCABULARY), 3)
        first = self.rng.random()
        return [Candidate(token, first * (1 - first) ** rank) for rank, token in enumerate(tokens)]

    def push(self) -> None:
        starved = not len(self.target.trie)
        self.doubted = self.doubted and not starved
        proposals = self.drafter.pushes()
        self.said.append(proposals)
        for proposal in proposals:
            assert self.target.propose(proposal) in (InsertResult.PLACED, InsertResult.STALE)
        size = sum(map(wire_bytes, proposals))
        assert size <= self.savings * (1.0 if starved or self.doubted or self.anew else LARGEST_SHARE)
        self.anew = self.anew and not proposals
        self.savings -= size
        self.sent += size

    def verify(self, one: Round) -> None:
        chosen = self.target.begin_verification(self.target.candidates(one.offered))
        commit = self.target.commit([self.answer(node, one) for node in (None, *chosen.nodes)])
        tokens = commit.verification.tokens
        self.ignored = 0 if chosen.nodes else self.ignored + 1
        self.doubted = self.doubted or self.ignored >= IGNORED_BEFORE_REPUSH
        assert self.drafter.verified(replace(commit.verification, lead=one.lead)) is Sync.ADVANCED
        assert self.drafter.tokens == self.target.tokens
        rate = self.drafter.limits.bytes_a_token
        self.savings = min(self.savings + rate * len(tokens), MAX_CREDIT * rate)

    def answer(self, node: Node | None, one: Round) -> Token:
        """The target's token after a place: one of the drafts there, as long as it agrees."""
        place = node or self.target.trie.root
        following = list(place.children)
        if place.end - self.target.trie.position >= one.agreed or not following:
            return self.rng.randrange(VOCABULARY)
        return following[min(one.rank, len(following) - 1)]


def wire_bytes(proposal: Proposal) -> int:
    return len(encode_to_worker(proposal)) + LENGTH_PREFIX


@settings(max_examples=200)
@example(  # what is drafted again goes out at once, though the target has some drafts left
    DraftLimits(lead=3, nodes=4, min_weight=0.1, hold=1, bytes_a_token=10.0),
    1,
    [Round(0, 0, 0, 0), Round(2, 1, 0, 0, redrafts=True), Round(1, 0, 0, 0)],
)
@given(limits, st.integers(0, 2**32 - 1), st.lists(rounds, min_size=1, max_size=30))
def test_places_are_drafted_once_pushes_can_be_placed_and_bytes_are_earned(limits, seed, script):
    pair = Pair(limits, Random(seed))
    for one in script:
        pair.run(one)
        committed = len(pair.drafter.tokens) - len(PROMPT)
        assert pair.sent <= limits.bytes_a_token * (FIRST_CREDIT + committed)


@settings(max_examples=200)
@given(limits, st.integers(0, 2**32 - 1), st.lists(rounds, min_size=1, max_size=30))
def test_what_is_known_of_drafts_from_before_is_what_is_found_anew(limits, seed, script):
    knowing, forgetful = Pair(limits, Random(seed)), Pair(limits, Random(seed), Forgetful)
    for one in script:
        knowing.run(one)
        forgetful.run(one)
        assert knowing.said == forgetful.said
