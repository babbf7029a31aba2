"""The sending side of a stream."""

from __future__ import annotations

from protos.paceline.v1 import worker_pb2 as pb
from transport.outbox import MAX_SLICES, MIN_SLICE, slices


def test_a_frame_is_cut_into_slices_that_say_the_same_once_and_in_order():
    for size in (0, 1, MIN_SLICE, MIN_SLICE + 1, MIN_SLICE * MAX_SLICES, 10 * MIN_SLICE * MAX_SLICES + 1):
        entries = [b"%d" % number for number in range(size)]
        parts = list(slices(pb.Frame(messages=entries, pong=7)))
        assert [entry for part in parts for entry in part.messages] == entries
        assert len(parts) == max(1, min(-(-size // MIN_SLICE), MAX_SLICES))
        assert [part.pong for part in parts if part.HasField("pong")] == [7]
