"""Pairwise covering designs: few combinations of many factors in which any two values meet that can."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Row = dict[str, Any]
"""A value for every factor."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]

TRIES = 3
"""Rows that are grown for each one that is taken."""


def covering(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool], seed: int) -> list[Row]:
    """Rows in which every pair of values of two factors occurs that can; the same for the same ``seed``.

    Greedy, as AETG (Cohen et al. 1997, "The AETG system"): a row grows from a pair that is missing, factor by factor,
    by the value with which most missing pairs come in. ``possible`` must not mind a row that lacks factors; it is
    taken at its word: what it finds possible can be made a whole row.
    """
    rng = Random(seed)
    missing: dict[Pair, None] = {}  # in order, unlike a set
    for one, other in combinations(factors, 2):
        for pair in product(product([one], factors[one]), product([other], factors[other])):
            if possible(dict(pair)):
                missing[pair] = None
    rows: list[Row] = []
    while missing:
        grown = [_grown(dict(rng.choice(list(missing))), factors, possible, missing, rng) for _ in range(TRIES)]
        best = max(grown, key=lambda row: sum(pair in missing for pair in _pairs(row, factors)))
        rows.append(best)
        for pair in _pairs(best, factors):
            missing.pop(pair, None)
    return rows


def _grown(
    row: Row,
    factors: Mapping[str, Sequence[Any]],
    possible: Callable[[Row], bool],
    missing: Container[Pair],
    rng: Random,
) -> Row:
    for name in rng.sample(list(factors), len(factors)):
        if name not in row:
            values = rng.sample(list(factors[name]), len(factors[name]))
            wider = [candidate for value in values if possible(candidate := row | {name: value})]
            row = max(wider, key=lambda candidate: sum(pair in missing for pair in _pairs(candidate, factors)))
    return row


def _pairs(row: Row, factors: Iterable[str]) -> Iterable[Pair]:
    return combinations([(name, row[name]) for name in factors if name in row], 2)
