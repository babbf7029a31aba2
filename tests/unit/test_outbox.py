"""The sending side of a stream."""

from __future__ import annotations

from protos.paceline.v1 import worker_pb2 as pb
from transport.outbox import SLICE, slices


def test_a_frame_is_cut_into_slices_that_say_the_same_once_and_in_order():
    for size in (0, 1, SLICE, SLICE + 1, 3 * SLICE):
        entries = [bytes((number,)) for number in range(size)]
        parts = list(slices(pb.Frame(messages=entries, pong=7)))
        assert [entry for part in parts for entry in part.messages] == entries
        assert all(len(part.messages) <= SLICE for part in parts)
        assert [part.pong for part in parts if part.HasField("pong")] == [7]
