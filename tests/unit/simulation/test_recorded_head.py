"""What a simulated head at a target drafts: the likeliest of all it says, with all that is before them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from simulation.simulated_world import HEAD_LEVELS, HEAD_NODES, HEAD_WIDTH, MIN_CHANCE, PATIENCE, REST, RecordedEagle
from speculation import digest as digests
from speculation.drafting.draft_session import Candidate
from speculation.messages import ANCHOR


@dataclass
class Says:
    """Any number of tokens behind each path, the surer the earlier."""

    seed: int

    def digest(self, _end: int) -> int:
        return digests.EMPTY

    def candidates(self, end: int, digest: int, age: int) -> list[Candidate]:
        assert end == 5 + age
        rng = Random(f"{self.seed}{digest}")
        sure = rng.uniform(0.3, 0.9)
        return [Candidate(rng.randrange(50) * 10 + i, sure * 0.5**i) for i in range(6)]


def test_the_likeliest_of_all_it_says() -> None:
    for seed in range(20):
        head = RecordedEagle(4, Says(seed))  # type: ignore[arg-type]
        head.extend([1, 2, 3, 4])
        assert head.propose(3).tokens == (), "nothing to read"
        head.extend([5])
        depth = 3 if seed % 2 else 20
        tree = head.propose(depth)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(() if parent == ANCHOR else paths[parent]), token))
        chances = said(Says(seed), min(depth, HEAD_LEVELS))
        assert (
            sorted((chances[path] for path in paths), reverse=True)
            == sorted(chances.values(), reverse=True)[:HEAD_NODES]
        )
        assert all(path[:-1] in paths or len(path) == 1 for path in paths)


def test_a_head_rests_that_brings_nothing_and_is_tried_again() -> None:
    head, asked = RecordedEagle(0, Says(1)), []  # type: ignore[arg-type]
    head.extend([1])
    for step in range(PATIENCE + 2 * REST + 1):
        if head.reads:
            asked.append(step)
        head.stepped(verified=False)
    assert asked == [*range(PATIENCE + 1), PATIENCE + REST, PATIENCE + 2 * REST]
    head.stepped(verified=True)
    assert head.reads


def said(says: Says, depth: int) -> dict[tuple[int, ...], float]:
    """The chance of every path that is said behind those that are gone on from."""
    chances: dict[tuple[int, ...], float] = {}
    places = [((), 1.0)]
    for age in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, chance in places:
            digest = digests.EMPTY
            for token in path:
                digest = digests.extend(digest, token)
            for one in says.candidates(5 + age, digest, age)[:HEAD_WIDTH]:
                level[*path, one.token] = chance * one.confidence
        chances |= level
        best = sorted(level.items(), key=lambda pair: -pair[1])[:HEAD_WIDTH]
        places = [(path, chance) for path, chance in best if chance >= MIN_CHANCE]
    return chances
