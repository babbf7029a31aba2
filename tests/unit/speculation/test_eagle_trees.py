"""Trees as an EAGLE head grows them: what is gone on with, what is drafted, and what is cut off."""

from __future__ import annotations

import random

from speculation.drafting.draft_session import Candidate
from speculation.drafting.heads import MIN_CHANCE, WIDTH, GrowingTree, GuessPlace, GuessTree
from speculation.messages import ANCHOR


def grown(seed: int, levels: int) -> tuple[GrowingTree, dict[tuple[int, ...], float]]:
    """A random tree, and the chance of every path that was guessed."""
    rng, tree, chances = random.Random(seed), GrowingTree(), dict[tuple[int, ...], float]()
    for _ in range(levels):
        level = []
        for place in tree.frontier():
            sure = rng.uniform(0.3, 0.9)
            guesses = [Candidate(rng.randrange(50) * 10 + i, sure * 0.5**i) for i in range(6)]
            level.append((place, guesses))
            for guess in guesses[:WIDTH]:
                chances[(*place.path, guess.token)] = place.chance * guess.confidence
        tree.grow(level)
    return tree, chances


def paths(tree: GuessTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(() if parent == ANCHOR else found[parent]), token))
    return found


def test_the_likeliest_guesses_are_drafted_with_all_that_is_before_them() -> None:
    for seed in range(20):
        tree, chances = grown(seed, 4)
        drafted = paths(tree.likeliest(9))
        assert sorted((chances[path] for path in drafted), reverse=True) == sorted(chances.values(), reverse=True)[:9]
        assert all(path[:-1] in drafted or len(path) == 1 for path in drafted)


def test_only_likely_paths_are_gone_on_with_and_few_of_them() -> None:
    for seed in range(20):
        tree, chances = grown(seed, 3)
        places = tree.frontier()
        assert len(places) <= WIDTH and all(place.chance >= MIN_CHANCE for place in places)
        of_level = sorted((chance for path, chance in chances.items() if len(path) == 3), reverse=True)
        assert [place.chance for place in places] == [chance for chance in of_level[:WIDTH] if chance >= MIN_CHANCE]


def test_a_chain_has_one_guess_for_each_place() -> None:
    tree = GrowingTree(width=1)
    tree.grow([(GuessPlace(), [Candidate(5, 0.6), Candidate(6, 0.4)])])
    (place,) = tree.frontier()
    assert place == GuessPlace(0, ANCHOR, (5,), 0.6)
    tree.grow([(place, [Candidate(7, 0.5)])])
    assert tree.likeliest(9) == GuessTree((5, 7), (ANCHOR, 0), (0.6, 0.5))


def test_what_is_no_chance_is_no_guess() -> None:
    tree = GrowingTree()
    tree.grow([(GuessPlace(), [Candidate(5, float("nan")), Candidate(6, 0.0), Candidate(7, float("inf"))])])
    assert not tree.frontier() and tree.likeliest(9) == GuessTree()


def test_a_tree_is_cut_at_a_depth() -> None:
    tree = GuessTree((1, 2, 3, 4), (ANCHOR, 0, ANCHOR, 1), (0.9, 0.8, 0.1, 0.7))
    assert tree.cut(3) is tree
    assert tree.cut(2) == GuessTree((1, 2, 3), (ANCHOR, 0, ANCHOR), (0.9, 0.8, 0.1))
    assert tree.cut(1) == GuessTree((1, 3), (ANCHOR, ANCHOR), (0.9, 0.1))
    assert tree.cut(0) == GuessTree()
