"""A simulated drafter: what its model has read of each session, what it would say, and when it does.

A part of :mod:`simulation.simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from simulation.agreement import ReplayedText
from simulation.simulated_world import SimulatedWorld
from speculation import digest as digests
from speculation.drafting.draft_session import DraftSession, Sync
from speculation.drafting.guesses import MAX_GUESSES, MAX_SESSIONS, Forward, Guesses, draft_along
from speculation.messages import Open, Proposal, SessionId, Verification
from speculation.sources.lookup import PromptLookup
from speculation.trie import Node
from speculation.verifying.budget import StepCost, best_places
from speculation.verifying.calibration import Calibration

Push = Callable[[Proposal], None]
"""Hands a proposal to the target of its session."""


class SimulatedDraft:
    """A session, and the text it is about. Nothing takes time here."""

    def __init__(
        self, session: DraftSession, text: ReplayedText, push: Push, calibration: Calibration, *, features: bool
    ) -> None:
        """``calibration``: what guesses have been worth in other sessions. ``features``: whether a head drafts."""
        self.session, self.push = session, push
        self._text, self._features = text, features
        self._computed: set[Node] = set()
        """Drafts that the model has read."""
        self._cached = 0
        """Committed tokens that it has read."""
        self._fed_end = 0
        """End of the text of which a head has all features; 0: of none."""
        self._guesses = Guesses(text.vocabulary, calibration)
        self._known = PromptLookup()

    def verified(self, verification: Verification) -> Sync:
        """Follow the target; what the model has read along the way it need not read again."""
        node: Node | None = self.session.trie.root
        for token in verification.tokens:
            node = node.children.get(token) if node else None
            self._cached += node in self._computed
        sync = self.session.verified(verification)
        self._computed.intersection_update(self.session.trie)
        return sync

    def fed(self, end: int) -> None:
        """Features have come up to the ``end`` of a text: a head reads again what it read without, and drafts again."""
        self._cached, self._fed_end = min(self._cached, self._fed_end), end
        self._computed.clear()
        self.session.redraft()

    @property
    def can_draft(self) -> bool:
        """Whether there is anything to read: a head needs features."""
        return self._fed_end > 0 or not self._features

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step which expands the end of the text computes: at least the last one, for its logits."""
        return max(len(self.session.tokens) - self._cached, 1)

    def computed(self, places: Sequence[Node]) -> int:
        """Tokens that a step which expands ``places`` computes, without guesses."""
        return self.num_uncomputed_tokens if places[0] is self.session.trie.root else len(places)

    def expand(self, node: Node) -> None:
        """The model has read up to ``node`` and says what follows."""
        if node is self.session.trie.root:
            self._cached = len(self.session.tokens)
        else:
            self._computed.add(node)
        age = node.end - self._fed_end if self._features else 0
        self.session.expand(node, self._text.candidates(node.end, node.digest, age))

    def guess(self, place: Node) -> list[float]:
        """Guess what the model says behind a place; the chances that it does and that the text gets there, falling."""
        self._guesses.clear()
        levels = min(self.session.levels_below(place) - 1, MAX_GUESSES)
        if levels > 0:
            self._known.extend(self.session.tokens[len(self._known) :])
            path = [node.token for node in place.path_from(self.session.trie.root)]
            self._guesses.copy(self._known.propose_after(path, levels))
        return [place.weight * odds for odds in self._guesses.tree.odds]

    def follow(self, place: Node, computed: int) -> None:
        """The forward has verified the first ``computed`` guesses: those that the model says itself become drafts."""
        tokens = self._guesses.tree.tokens
        if not tokens:
            return
        end, digest = place.end, place.digest
        rows = [self._text.candidates(end, digest)]
        for token in tokens[:computed]:
            end, digest = end + 1, digests.extend(digest, token)
            rows.append(self._text.candidates(end, digest))
        kept = self._guesses.settle(computed, [row[0].token for row in rows])
        self._computed.update(draft_along(self.session, place, tokens[:kept], rows[1:]))


class SimulatedDrafter:
    """The lookahead over sessions whose prompts are in the cache."""

    def __init__(self, world: SimulatedWorld) -> None:
        """Nothing is open."""
        self._world = world
        self._sequences: dict[SessionId, SimulatedDraft] = {}
        self._inbox: list[Callable[[], None]] = []
        self._calibration, self._guess_calibration = Calibration(), Calibration()
        self._cost = StepCost()
        self._resting = False
        self._idle = True

    def open(self, opened: Open, text: ReplayedText, push: Push) -> None:
        """Draft for a session from now on, until its last token is heard of; ``push`` reaches its target."""
        limits, features = self._world.bounds.draft, self._world.setting.features
        session = DraftSession(
            opened,
            vocabulary=text.vocabulary,
            limits=limits.of_head() if features else limits,
            calibration=self._calibration,
            resting=self._resting,
        )
        draft = SimulatedDraft(session, text, push, self._guess_calibration, features=features)
        self._sequences[opened.session] = draft
        self._wake()

    def hear(self, verification: Verification) -> None:
        """A verification has come."""
        self._inbox.append(lambda: self._follow(verification))
        self._wake()

    def feed(self, session: SessionId, end: int) -> None:
        """Features have come, of a session's text up to ``end``."""
        self._inbox.append(lambda: self._sequences[session].fed(end) if session in self._sequences else None)
        self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._world.after(0.0, self._step)

    def _step(self) -> None:
        for take in self._inbox:
            take()
        self._inbox.clear()
        places = self._places()
        if places:
            world = self._world
            tokens = sum(sequence.computed(nodes) for sequence, nodes in places.items())
            guesses = self._guess(places, tokens) if world.setting.guesses else {}
            beside = world.costs.draft_contention if world.verifying else 1.0
            seconds = world.varied(beside * world.costs.draft(tokens + sum(guesses.values())))
            world.drafted_until = max(world.drafted_until, world.now + seconds)
            world.after(seconds, lambda: self._expand(places, tokens, guesses, seconds))
        else:
            self._idle = True
            self._push(self._sequences.values())

    def _follow(self, verification: Verification) -> None:
        """Take a verification, and answer with what is drafted already."""
        sequence = self._sequences[verification.session]
        self._resting = verification.lead == 0
        sync = sequence.verified(verification)
        assert sync in (Sync.ADVANCED, Sync.FINISHED), f"the drafter lost its place: {sync}"
        if sync is Sync.FINISHED:
            del self._sequences[verification.session]
        else:
            self._push([sequence])

    def _places(self) -> dict[SimulatedDraft, list[Node]]:
        """What to expand, by the rule of :mod:`draft_service.lookahead`: ends of texts first, then what pays."""
        found: dict[SimulatedDraft, list[Node]] = {}
        further: dict[SimulatedDraft, Sequence[Node]] = {}
        for sequence in self._sequences.values():
            frontier = sequence.session.frontier() if sequence.can_draft else []
            if frontier and frontier[0] is sequence.session.trie.root:
                found[sequence] = [frontier[0]]
            else:
                further[sequence] = frontier
        num_scheduled_tokens = sum(sequence.num_uncomputed_tokens for sequence in found)
        return found | best_places(further, self._world.bounds.places, num_scheduled_tokens, len(found), self._cost)

    def _guess(self, places: Mapping[SimulatedDraft, Sequence[Node]], tokens: int) -> dict[SimulatedDraft, int]:
        """How many guesses of each session join a forward of ``tokens``, by the rule of staged drafting."""
        guessed = sorted(places, key=lambda sequence: -places[sequence][0].weight)[:MAX_SESSIONS]
        gain = sum(node.weight for nodes in places.values() for node in nodes)
        chances = [sequence.guess(places[sequence][0]) for sequence in guessed]
        return dict(zip(guessed, Forward(tokens, gain, self._cost).worth(chances), strict=True))

    def _expand(
        self,
        places: Mapping[SimulatedDraft, Sequence[Node]],
        tokens: int,
        guesses: Mapping[SimulatedDraft, int],
        seconds: float,
    ) -> None:
        world = self._world
        if tokens == sum(len(nodes) for nodes in places.values()):
            self._cost.observe(tokens + sum(guesses.values()), seconds)
        world.totals.drafting += seconds
        for sequence, nodes in places.items():
            for node in nodes:
                sequence.expand(node)
            if sequence in guesses:
                sequence.follow(nodes[0], guesses[sequence])
        self._push(self._sequences.values())
        world.after(world.costs.draft_pause, self._step)

    def _push(self, sessions: Iterable[SimulatedDraft]) -> None:
        world = self._world
        for sequence in sessions:
            for proposal in sequence.session.pushes():
                world.after(world.costs.to_target + world.setting.rtt / 2, partial(sequence.push, proposal))
