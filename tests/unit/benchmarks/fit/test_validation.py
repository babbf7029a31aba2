"""What a check of the prediction comes to."""

import pytest

from benchmarks.fit.command import DEPTH, Way
from benchmarks.fit.validate import Checked, Validation, depths_around


def validation(*depths: tuple[int, float, float]) -> Validation:
    return Validation(Way("a"), tuple(Checked(*one, 2.0, 2.0) for one in depths), 40.0, 41.0, 1.0)


def test_the_best_is_told_by_one_rule_for_both():
    found = validation((3, 1.7, 1.6), (4, 1.99, 1.9), (5, 2.0, 2.0), (16, 2.01, 2.02))
    assert found.best == (4, 5)
    assert found.lost == pytest.approx(1 - 1.9 / 2.02)
    assert found.worst == pytest.approx(1.7 / 1.6 - 1)
    assert [round(100 * one.error) for one in found.depths] == [6, 5, 0, 0]


@pytest.mark.parametrize(
    ("best", "tried"), [(1, [1, 2, 32]), (2, [1, 2, 3, 32]), (7, [3, 6, 7, 8, 32]), (DEPTH, [16, 31, 32])]
)
def test_neighbours_and_what_is_far_off_are_tried(best, tried):
    assert depths_around(best) == tried
