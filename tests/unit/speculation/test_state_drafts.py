"""What a head guessed for a place: what is drafted of it, for how long it is good, and when a head rests."""

from __future__ import annotations

from collections.abc import Sequence

from speculation.drafting.draft_session import Candidate
from speculation.drafting.heads import NODES, PATIENCE, REST, GrowingTree, GuessTree, StateDrafts
from speculation.messages import Limits, Open, Rule, Sampling, SessionId, Source, Speculation
from speculation.verifying.target_session import TargetSession
from tests.unit.speculation.test_eagle_trees import paths

PROMPT = (1, 2, 3)


def opened(speculation: Speculation) -> Open:
    return Open(SessionId(1), 1, PROMPT, Sampling(0.0), Limits(50), speculation=speculation)


def guessed(*levels: Sequence[tuple[int, float]]) -> GuessTree:
    """The same guesses behind each place of a level."""
    tree = GrowingTree()
    for level in levels:
        tree.grow([(place, [Candidate(*guess) for guess in level]) for place in tree.frontier()])
    return tree.likeliest(NODES)


def test_a_tree_hangs_from_the_text_and_each_guess_is_credited() -> None:
    drafts = StateDrafts(Source.EAGLE, 2)
    one = TargetSession(opened(Speculation()), vocabulary=50, sources=[drafts])
    drafts.guess(len(PROMPT), guessed([(7, 0.6), (8, 0.3)], [(9, 0.5), (7, 0.4)]))
    offer = one.begin_verification(one.candidates(12))
    assert sorted(paths(GuessTree(offer.tokens, offer.parents))) == [(7,), (7, 7), (7, 9), (8,), (8, 7), (8, 9)]
    assert {node.source for node in offer.nodes} == {Source.EAGLE}
    drawn = [8, *(9 if node.token == 8 else 4 for node in offer.nodes)]
    verification = one.commit(drawn).verification
    assert verification.tokens == (8, 9, 4)
    assert set(verification.sources) == {Source.EAGLE}


def test_guesses_are_good_for_one_place_only() -> None:
    drafts = StateDrafts(Source.EAGLE, 1)
    one = TargetSession(opened(Speculation()), vocabulary=50, sources=[drafts])
    drafts.guess(len(PROMPT), guessed([(7, 0.9)]))
    assert one.candidates(4).tokens == (7,)
    one.begin_verification(one.candidates(0))
    one.commit([5])
    assert one.candidates(4).tokens == ()
    drafts.guess(len(PROMPT) + 1, guessed([(6, 0.9)]))
    drafts.extend(())
    assert drafts.propose(1).tokens == (6,)


def test_of_a_tree_a_chain_takes_what_comes_first() -> None:
    speculation = Speculation(rule=Rule.REJECTION, sources=frozenset({Source.EAGLE}))
    drafts = StateDrafts(Source.EAGLE, 2)
    one = TargetSession(opened(speculation), vocabulary=50, sources=[drafts])
    drafts.guess(len(PROMPT), guessed([(7, 0.6), (8, 0.3)], [(9, 0.5)]))
    assert one.candidates(8).tokens == (7, 9)


def test_heads_rest_that_bring_nothing_and_are_tried_again() -> None:
    drafts = StateDrafts(Source.EAGLE, 2)
    asked = []
    for step in range(PATIENCE + 2 * REST + 1):
        if not drafts.rests:
            asked.append(step)
        drafts.stepped(verified=False)
    assert asked == [*range(PATIENCE + 1), PATIENCE + REST, PATIENCE + 2 * REST]
    drafts.stepped(verified=True)
    assert not drafts.rests
