"""What the ranks of a worker say to each other: read again as it was, and never more than data."""

from __future__ import annotations

import os
import pickle
from array import array

import pytest

from engine.cache.sequence_state import SequenceState
from engine.forward import StepInput


def test_a_step_is_read_again_as_it_was():
    state = SequenceState(16, array("i", [3, 5]), 20, [-1, 0], [0, 1], [7, 9])
    step = StepInput([1, 2], [1], [(state, 2)], [(4, 5)], True)
    again = StepInput.decoded(step.encoded())
    assert (again.tokens, again.rows, again.moves, again.invariant) == ([1, 2], [1], [(4, 5)], True)
    assert [(vars(sequence), count) for sequence, count in again.chunks] == [(vars(state), 2)]


class Attack:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.putenv, ("PACELINE_ATTACKED", "yes")


@pytest.mark.parametrize("attack", [Attack(), os.system, SystemExit, SequenceState.home])
def test_nothing_but_data_is_read_from_another_rank(attack):
    data = pickle.dumps(([1], [0], [], [attack], False))
    with pytest.raises(pickle.UnpicklingError, match="does not belong in a step"):
        StepInput.decoded(data)
