"""In which order keys are read where results must not depend on the batch (bfloat16 on a CPU).

Decides a place for every key such that the sums over a query's keys round the same way whether its token is decoded
alone, verified in a chain or in a tree, or recomputed in a prefill. Two facts about torch's and oneDNN's kernels carry
this; they are tested, not promised by anyone:

- The softmax of a row adds up in 16 lanes, and a product over up to 512 keys (:data:`COLUMNS`) adds up key after key,
  so *whole groups* of 16 keys of weight 0, wherever they stand, change no sum (of 32 with AMX, which adds up 32 keys
  before it adds them to the whole). Over more keys a product is cut where its size says, so here it is cut by position
  instead: into segments that are summed apart.
- A score is a sum over the head's size, whatever stands beside it.

So the keys of a path stand in groups of :data:`GROUP` consecutive positions, each starting at a multiple of it, one
group after the other. A chain just takes one column per position. Where a tree forks in the middle of a group, the
branch gets a group of its own, which begins with the same ancestors once more. A view that runs out of columns is
followed by another one for the nodes that are left.

Tensor legend: T queries, K keys read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from engine.attention.visibility import HIDDEN, KeyView, mask_of_bits, oldest_needed
from engine.cache.sequence_state import ROOT, SequenceState
from engine.layers.linear import has_tiles

GROUP = 32 if has_tiles() else 16
"""Consecutive positions that stand in adjacent columns: as many as a kernel adds up before it adds to the whole."""

KEY_BLOCK = 64
"""A segment is read in multiples of this: torch computes very small products by another kernel."""

SEGMENT = 384
"""Positions whose keys are summed in one product."""

COLUMNS = 512
"""Columns of one product, at most. What SEGMENT leaves free is for branches."""

FULL = (1 << GROUP) - 1


@dataclass(eq=False, slots=True)
class RowGroup:
    """Up to ``GROUP`` keys of one path at consecutive positions, the first a multiple of ``GROUP``."""

    position: int
    slots: list[int]
    above: RowGroup | None
    """The one before it on the path; None where that is committed entirely."""
    column: int = 0
    """Of the first key, counted like ``above_bits`` from the first group that is not committed entirely."""
    above_bits: int = 0
    """One bit for every column of the groups before it on the path."""


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where the key of a node is: the last of the first ``count`` keys of a group."""

    group: RowGroup
    count: int

    @property
    def bits(self) -> int:
        """One bit for every column that the node sees."""
        return self.group.above_bits | ((1 << self.count) - 1) << self.group.column


class Layout:
    """Places for pending nodes of one sequence and their ancestors, as many as fit into one view."""

    def __init__(self, sequence: SequenceState, reach: int) -> None:
        """Nothing is placed yet. Committed positions from ``reach`` on, a multiple of ``KEY_BLOCK``, are visible."""
        self.start = sequence.length - sequence.length % GROUP
        """Columns of earlier positions are all committed, in order, and seen by every node."""
        self.reach = reach
        self.queries: list[int] = []
        self._sequence = sequence
        root = RowGroup(self.start, sequence.committed_slots(self.start), None)
        self._groups = [root]
        self._places = {ROOT: RowPlace(root, len(root.slots))}
        segment = self.start // SEGMENT
        self._columns = Counter({segment: self.start - max(reach, segment * SEGMENT) + GROUP})

    def add_query(self, node: int) -> bool:
        """Place a node and the ancestors it lacks; whether there was room."""
        missing = []
        above = node
        while above not in self._places:
            missing.append(above)
            above = self._sequence.parents[above]
        if not all(self._place(each) for each in reversed(missing)):
            return False
        self.queries.append(node)
        return True

    def _place(self, node: int) -> bool:
        sequence = self._sequence
        parent = self._places[sequence.parents[node]]
        group, count = parent.group, parent.count
        if count == GROUP or count < len(group.slots):
            position = sequence.length + sequence.depths[node]
            if self._columns[position // SEGMENT] + GROUP > COLUMNS:
                return False
            self._columns[position // SEGMENT] += GROUP
            if count == GROUP:
                group, count = RowGroup(position, [], above=group), 0
            else:
                group = RowGroup(group.position, group.slots[:count], group.above)
            self._groups.append(group)
        group.slots.append(sequence.pending_slots[node])
        self._places[node] = RowPlace(group, count + 1)
        return True

    def view(self, window: int | None, room: int) -> KeyView:
        """The finished view; a mask in float32. ``room``: slots of the cache."""
        prefix = self.start - self.reach
        width, segments = self._assign_columns()
        keys = prefix + width
        base = self._base(keys, room)
        slots_K = None if base is not None else self._slots(width)
        mask_TK = torch.zeros(len(self.queries), keys)
        mask_TK[:, prefix:] = mask_of_bits([self._places[node].bits for node in self.queries], width)
        if window is not None:
            self._hide_passed(mask_TK, window)
        return KeyView(len(self.queries), keys, base or 0, slots_K, mask_TK, segments)

    def _assign_columns(self) -> tuple[int, list[tuple[int, int]]]:
        """Give every group its column; return how many there are, and all segments (with the prefix) as ranges."""
        prefix = self.start - self.reach
        cuts = [0, *(cut - self.reach for cut in range(SEGMENT, self.start, SEGMENT) if cut > self.reach)]
        width = 0
        in_segments = sorted(self._groups, key=lambda group: group.position // SEGMENT)
        for segment, groups in groupby(in_segments, key=lambda group: group.position // SEGMENT):
            if segment * SEGMENT >= max(self.start, self.reach + 1):
                cuts.append(prefix + width)
            for group in groups:
                group.column = width
                width += GROUP
            width += -(prefix + width) % KEY_BLOCK
        for group in self._groups:  # in the order they were made: the one above comes first
            if group.above is not None:
                group.above_bits = group.above.above_bits | FULL << group.above.column
        return width, list(zip(cuts, [*cuts[1:], prefix + width], strict=True))

    def _base(self, keys: int, room: int) -> int | None:
        """The slot of the first column, if the others follow it one by one."""
        sequence, prefix = self._sequence, self.start - self.reach
        if sequence.ascending < self.start:
            return None
        base = sequence.committed_slots(0, 1)[0] + self.reach if self.start else self._groups[0].slots[0]
        for group in self._groups:
            first = base + prefix + group.column
            if group.slots != list(range(first, first + len(group.slots))):
                return None
        return base if base + keys <= room else None

    def _slots(self, width: int) -> Tensor:
        # Columns without a key repeat one: their weight is 0, but a value that is not a number would count.
        tail = [self._sequence.pending_slots[-1]] * width
        for group in self._groups:
            tail[group.column : group.column + len(group.slots)] = group.slots
        return torch.cat((self._sequence.slots(self.reach)[: self.start - self.reach], torch.tensor(tail)))

    def _hide_passed(self, mask_TK: Tensor, window: int) -> None:
        """Hide what is more than ``window - 1`` positions before a query."""
        prefix = self.start - self.reach
        positions_K = torch.arange(self.reach, self.reach + mask_TK.shape[1])
        for group in self._groups:
            column = prefix + group.column
            positions_K[column : column + GROUP] = torch.arange(group.position, group.position + GROUP)
        depths_T1 = torch.tensor([self._sequence.depths[node] for node in self.queries])[:, None]
        mask_TK.masked_fill_(positions_K <= self._sequence.length + depths_T1 - window, HIDDEN)


def chain_segments(end: int) -> list[tuple[int, int]]:
    """How :func:`position_ordered` lays out a chain that ends before position ``end`` and sees all: as it comes."""
    cuts = [*range(0, end, SEGMENT), end + -end % KEY_BLOCK]
    return list(pairwise(cuts))


def position_ordered(sequence: SequenceState, tokens: int, window: int | None, room: int) -> Sequence[KeyView]:
    """Views for the last ``tokens`` pending nodes of ``sequence``, in this order; nearly always one.

    ``window``: positions back that the layer sees. ``room``: slots of the cache.
    """
    reach = oldest_needed(sequence, tokens, window)
    reach -= reach % KEY_BLOCK
    layouts = [Layout(sequence, reach)]
    for node in range(sequence.pending - tokens, sequence.pending):
        if not layouts[-1].add_query(node):
            layouts.append(Layout(sequence, reach))
            placed = layouts[-1].add_query(node)
            assert placed, "a path fits into an empty layout"
    return [layout.view(window, room) for layout in layouts]
