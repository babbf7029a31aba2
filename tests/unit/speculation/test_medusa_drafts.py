"""Guesses for places become a tree; what is drafted of it, and when heads rest."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from speculation.drafting.draft_session import Candidate
from speculation.drafting.heads import NODES, PATIENCE, REST, GuessTree, StateDrafts, likeliest
from speculation.messages import ANCHOR, Limits, Open, Rule, Sampling, SessionId, Source, Speculation
from speculation.verifying.target_session import TargetSession

PROMPT = (1, 2, 3)


def paths(tree: GuessTree) -> list[tuple[int, ...]]:
    """From the root to each token."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert ANCHOR <= parent < len(found)
        found.append((*(found[parent] if parent != ANCHOR else ()), token))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_paths_are_drafted(seed: int) -> None:
    rng = Random(seed)
    places = []
    for depth in range(rng.randint(1, 4)):
        said = sorted((rng.uniform(0.01, 0.5) for _ in range(rng.randint(1, 3))), reverse=True)
        places.append([Candidate(10 * depth + rank, sure) for rank, sure in enumerate(said)])
    max_tokens = rng.randint(1, 30)
    chances = {}
    for depth in range(1, len(places) + 1):
        for path in itertools.product(*places[:depth]):
            chances[tuple(guess.token for guess in path)] = math.prod(guess.confidence for guess in path)
    tree = likeliest(places, max_tokens)
    expected = sorted(chances.values(), reverse=True)[:max_tokens]
    assert [chances[path] for path in paths(tree)] == pytest.approx(expected), f"seed {seed}"
    assert len(set(paths(tree))) == len(tree.tokens) == min(max_tokens, len(chances)), f"seed {seed}"
    said_of = {guess.token: guess.confidence for place in places for guess in place}
    assert tree.confidence == tuple(said_of[token] for token in tree.tokens)


def test_nothing_is_drafted_of_nothing() -> None:
    assert likeliest([], 5) == likeliest([[], [Candidate(1, 0.5)]], 5) == GuessTree()


def opened(speculation: Speculation) -> Open:
    return Open(SessionId(1), 1, PROMPT, Sampling(0.0), Limits(50), speculation=speculation)


def test_a_tree_hangs_from_the_text_and_each_guess_is_credited() -> None:
    drafts = StateDrafts(Source.MEDUSA, 2)
    one = TargetSession(opened(Speculation()), vocabulary=50, sources=[drafts])
    drafts.guess(
        len(PROMPT), likeliest([[Candidate(7, 0.6), Candidate(8, 0.3)], [Candidate(9, 0.5), Candidate(7, 0.4)]], NODES)
    )
    offer = one.begin_verification(one.candidates(12))
    assert sorted(paths(GuessTree(offer.tokens, offer.parents))) == [(7,), (7, 7), (7, 9), (8,), (8, 7), (8, 9)]
    assert {node.source for node in offer.nodes} == {Source.MEDUSA}
    drawn = [8, *(9 if node.token == 8 else 4 for node in offer.nodes)]
    verification = one.commit(drawn).verification
    assert verification.tokens == (8, 9, 4)
    assert set(verification.sources) == {Source.MEDUSA}


def test_guesses_are_good_for_one_place_only() -> None:
    drafts = StateDrafts(Source.MEDUSA, 1)
    one = TargetSession(opened(Speculation()), vocabulary=50, sources=[drafts])
    drafts.guess(len(PROMPT), likeliest([[Candidate(7, 0.9)]], NODES))
    assert one.candidates(4).tokens == (7,)
    one.begin_verification(one.candidates(0))
    one.commit([5])
    assert one.candidates(4).tokens == ()
    drafts.guess(len(PROMPT) + 1, likeliest([[Candidate(6, 0.9)]], NODES))
    drafts.extend(())
    assert drafts.propose(1).tokens == (6,)


def test_of_a_tree_a_chain_takes_what_comes_first() -> None:
    speculation = Speculation(rule=Rule.REJECTION, sources=frozenset({Source.MEDUSA}))
    drafts = StateDrafts(Source.MEDUSA, 2)
    one = TargetSession(opened(speculation), vocabulary=50, sources=[drafts])
    drafts.guess(len(PROMPT), likeliest([[Candidate(7, 0.6), Candidate(8, 0.3)], [Candidate(9, 0.5)]], NODES))
    assert one.candidates(8).tokens == (7, 9)


def test_heads_rest_that_bring_nothing_and_are_tried_again() -> None:
    drafts = StateDrafts(Source.MEDUSA, 2)
    asked = []
    for step in range(PATIENCE + 2 * REST + 1):
        if not drafts.rests:
            asked.append(step)
        drafts.stepped(verified=False)
    assert asked == [*range(PATIENCE + 1), PATIENCE + REST, PATIENCE + 2 * REST]
    drafts.stepped(verified=True)
    assert not drafts.rests
