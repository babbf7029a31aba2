"""The law by exact enumeration: no sampling, no tolerance."""

from fractions import Fraction
from itertools import product
from random import Random

import pytest

from speculation.acceptance import finish_at, walk
from speculation.messages import ANCHOR, FinishReason, Limits


def test_a_chain_is_kept_up_to_the_first_difference():
    outcome = walk([4, 5, 6], [ANCHOR, 0, 1], [4, 5, 9, 1])
    assert outcome.kept == (0, 1)
    assert outcome.own == 9  # recovered


def test_a_chain_kept_whole_is_followed_by_a_bonus_token():
    assert walk([4, 5], [ANCHOR, 0], [4, 5, 6]).own == 6
    assert walk([], [], [3]).kept == ()


def test_a_branch_is_found_after_its_sibling_fails():
    outcome = walk([4, 5, 6], [ANCHOR, ANCHOR, 1], [5, 0, 6, 7])
    assert outcome.kept == (1, 2)
    assert outcome.own == 7


def random_law(rng: Random, vocabulary: int) -> tuple[Fraction, ...]:
    weights = [rng.randint(0, 5) for _ in range(vocabulary)]
    weights[rng.randrange(vocabulary)] += 1
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def random_tree(rng: Random, vocabulary: int, nodes: int) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(nodes):
        parent, token = rng.randrange(-1, len(tokens)), rng.randrange(vocabulary)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
    return tokens, parents


def prefix_of(node: int, tokens: list[int], parents: list[int]) -> tuple[int, ...]:
    return () if node == ANCHOR else (*prefix_of(parents[node], tokens, parents), tokens[node])


def committed_law(tokens, parents, model, vocabulary, rule) -> dict[tuple[int, ...], Fraction]:
    """The exact distribution of the tokens one step commits, over every combination of the target's draws."""
    prefixes = [prefix_of(node, tokens, parents) for node in range(-1, len(tokens))]
    law: dict[tuple[int, ...], Fraction] = {}
    for drawn in product(range(vocabulary), repeat=len(prefixes)):
        probability = Fraction(1)
        for prefix, token in zip(prefixes, drawn, strict=True):
            probability *= model(prefix)[token]
        if probability:
            outcome = rule(tokens, parents, drawn)
            committed = (*(tokens[i] for i in outcome.kept), outcome.own)
            law[committed] = law.get(committed, Fraction(0)) + probability
    return law


def complete(law, model, length) -> dict[tuple[int, ...], Fraction]:
    """Continue every outcome with plain decoding to a common length."""
    full: dict[tuple[int, ...], Fraction] = {}

    def extend(sequence: tuple[int, ...], probability: Fraction) -> None:
        if len(sequence) >= length:
            full[sequence[:length]] = full.get(sequence[:length], Fraction(0)) + probability
            return
        for token, p in enumerate(model(sequence)):
            if p:
                extend((*sequence, token), probability * p)

    for sequence, probability in law.items():
        extend(sequence, probability)
    return full


def biased_walk(tokens, parents, drawn):
    """A planted error: refuses a leaf although the target drew it."""
    outcome = walk(tokens, parents, drawn)
    if len(outcome.kept) == 1 and drawn[0] == 0:
        return type(outcome)((), drawn[-1])
    return outcome


@pytest.mark.parametrize("seed", range(40))
def test_committed_tokens_have_exactly_the_targets_distribution(seed: int):
    rng = Random(seed)
    vocabulary = rng.choice([2, 3])
    laws: dict[tuple[int, ...], tuple[Fraction, ...]] = {}

    def model(prefix: tuple[int, ...]) -> tuple[Fraction, ...]:
        return laws.setdefault(prefix, random_law(rng, vocabulary))

    tokens, parents = random_tree(rng, vocabulary, nodes=5)
    depth = max((len(prefix_of(i, tokens, parents)) for i in range(len(tokens))), default=0) + 1
    plain = complete({(): Fraction(1)}, model, depth)
    assert complete(committed_law(tokens, parents, model, vocabulary, walk), model, depth) == plain


def test_the_enumeration_catches_a_planted_error():
    def model(prefix: tuple[int, ...]) -> tuple[Fraction, ...]:
        return (Fraction(1, 3), Fraction(2, 3)) if len(prefix) % 2 else (Fraction(1, 2), Fraction(1, 2))

    plain = complete({(): Fraction(1)}, model, 2)
    assert complete(committed_law([0], [ANCHOR], model, 2, biased_walk), model, 2) != plain


def test_a_session_ends_at_its_limit_or_after_a_stop_token():
    limits = Limits(end=10, stop_tokens=frozenset({0}))
    assert finish_at(7, [5, 6], limits) == (2, None)
    assert finish_at(7, [5, 6, 7, 8], limits) == (3, FinishReason.LENGTH)
    assert finish_at(7, [5, 0, 7], limits) == (2, FinishReason.STOP)
    assert finish_at(8, [5, 0], limits) == (2, FinishReason.STOP)
