"""A step as a list of rows: what every token of it needs to know, in one piece of memory.

Decides how a step is laid out for :mod:`engine.attention.row_attention`, whatever its tokens are for: prompts,
decoding, chains or trees of drafts, or a mixture. The number of rows is padded to one of a few classes, so that a step
of a class can be recorded once and replayed with other contents (:mod:`engine.cuda.graphs`); a step that is larger than
the largest class is cut into several, each of which finds the keys of those before it in the cache. Works from plain
numbers; knows nothing of models.

A token sees the tokens at positions 0 to its own. Those that lie at home (:mod:`engine.cache.sequence_state`) are found
by the sequence's page table; the rest, which are drafts beside others, by a list of slots: its branch.

Tensor legend: T rows, R of them wanted, F numbers behind them (page tables and branches).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.sequence_state import SequenceState
from engine.host.upload import upload
from engine.sampling.sampling import DRAW_FIELDS

ROW_CLASSES = (16, 32, 64, 128, 256, 512)
"""Numbers of rows that steps are padded to."""

MAX_WANTED = 256
"""Rows of a step whose logits can be asked for; a step that wants more is cut."""

SLICE = 128
"""Rows whose attention is computed together; groups do not reach across their ends."""

FIELDS = ("tokens", "positions", "slots", "keys", "home", "pages", "branch", "group", "common", "reach")
"""The columns of :class:`Rows`, in the order of their memory."""

SLOTS = FIELDS.index("slots")


@dataclass(frozen=True, slots=True)
class Rows:
    """A step on its device: views into one int32 tensor, which stays where it is when the step is recorded."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """Where the row's keys and values go."""
    keys_T: Tensor
    """How many tokens of its sequence the row sees, itself included. 0: padding."""
    home_T: Tensor
    """How many of them, from the first on, are found by the page table."""
    pages_T: Tensor
    """Where in ``numbers_F`` the page table of its sequence begins."""
    branch_T: Tensor
    """Where in ``numbers_F`` the slots of the others begin."""
    group_T: Tensor
    """How many rows, from this one on, it reads common keys for; 0: one before it does."""
    common_T: Tensor
    """How many keys all rows of its group find by the page table."""
    reach_T: Tensor
    """Of a group without branches, how many keys any of its rows sees, which are read for all of them; else 0."""
    wanted_R: Tensor
    """Rows whose logits are wanted."""
    draws_3R: Tensor
    """How they are drawn; see :func:`engine.sampling.sampling.draw_numbers`."""
    numbers_F: Tensor

    @classmethod
    def within(cls, buffer: Tensor, rows: int) -> Rows:
        """Views of a step of ``rows`` rows."""
        columns = {f"{name}_T": buffer[i * rows : (i + 1) * rows] for i, name in enumerate(FIELDS)}
        rest = buffer[len(FIELDS) * rows :]
        wanted = max_wanted(rows)
        wanted_R, draws, numbers_F = rest.tensor_split((wanted, (1 + DRAW_FIELDS) * wanted))
        return cls(wanted_R=wanted_R, draws_3R=draws.view(DRAW_FIELDS, wanted), numbers_F=numbers_F, **columns)

    def __len__(self) -> int:
        return len(self.keys_T)

    def cut(self, start: int, stop: int) -> Rows:
        """Some of the rows."""
        return replace(self, **{f"{name}_T": getattr(self, f"{name}_T")[start:stop] for name in FIELDS})


def max_wanted(rows: int) -> int:
    """How many rows of a step of ``rows`` rows may be wanted."""
    return min(rows, MAX_WANTED)


INTEGERS = partial(array, "i")
"""Those of 32 bits, which are copied into a step's layout at once."""


@dataclass(slots=True)
class Packed:
    """Rows on the host: a step, or as much of one as has room. They stand for consecutive tokens of the step."""

    first: int
    """Of its tokens, as an index into those of the step."""
    group: int
    """How many rows read common keys together at most."""
    max_rows: int
    max_numbers: int
    tokens: Sequence[int] = ()
    wanted: Sequence[int] = ()
    """Its own rows."""
    depths: array[int] = field(default_factory=INTEGERS)
    slots: array[int] = field(default_factory=INTEGERS)
    branch_sizes: array[int] = field(default_factory=INTEGERS)
    """Of its rows up to the last one that has a branch, or further."""
    branches: array[int] = field(default_factory=INTEGERS)
    """The slots of all branches, one after the other."""
    tables: array[int] = field(default_factory=INTEGERS)
    """As many pages of each sequence as are needed."""
    runs: array[int] = field(default_factory=INTEGERS)
    """Of each sequence's rows that are side by side in a slice: how many, which is the first, committed tokens before
    them, the position of the first of these, and where their page table begins."""

    def __len__(self) -> int:
        return len(self.depths)

    @property
    def numbers(self) -> int:
        """In all tables and branches."""
        return len(self.tables) + len(self.branches)

    def takes(self, state: SequenceState, start: int, stop: int, asked: Sequence[int]) -> int:
        """How many of a sequence's pending nodes ``start`` to ``stop`` there is room for, from the first one on.

        ``asked``: which of the step's tokens have logits that are wanted, ascending.
        """
        rows = min(stop - start, self.max_rows - len(self))
        index = self.first + len(self)
        end = bisect_left(asked, self.first) + max_wanted(self.max_rows)
        if end < len(asked):
            rows = min(rows, asked[end] - index)
        if self.numbers + len(state.blocks) + _slots(state, start, start + rows) > self.max_numbers:
            while rows and not self._has_room(state, start, start + rows):
                rows //= 2
        return rows

    def _has_room(self, state: SequenceState, start: int, stop: int) -> bool:
        numbers = _pages(state, max(state.depths[start:stop])) + _slots(state, start, stop)
        return self.numbers + numbers <= self.max_numbers

    def add(self, state: SequenceState, start: int, stop: int) -> None:
        """Add pending nodes of a sequence."""
        row, count, blocks, tables = len(self.depths), stop - start, state.blocks, self.tables
        length, origin = state.length, state.first
        depths, branches = state.depths[start:stop], state.branches[start:stop]
        deepest = max(depths)
        if row % SLICE + count <= SLICE:
            self.runs.extend((count, row, length, origin, len(tables)))
        else:
            for first in range(row - row % SLICE, row + count, SLICE):
                begin, end = max(first, row), min(first + SLICE, row + count)
                self.runs.extend((end - begin, begin, length, origin, len(tables)))
        self.depths.extend(depths)
        self.slots.extend(state.pending_slots[start:stop])
        if any(branches):
            self.branch_sizes.extend(repeat(0, row - len(self.branch_sizes)))
            self.branch_sizes.extend(map(len, branches))
            self.branches.extend(chain.from_iterable(branches))
        pages = _pages(state, deepest)
        tables.extend(blocks if pages == len(blocks) else blocks[:pages])

    def fits(self, rows: int, pages: int) -> bool:
        """Whether its page tables and branches have room in a step of ``rows`` rows."""
        return self.numbers <= max_numbers(rows, pages)

    def host_buffer(self, rows: int, spare: int) -> Tensor:
        """A step padded to ``rows`` rows as :meth:`Rows.within` finds it, as far as there is anything: int32."""
        return HostBuffer(rows, spare, self.numbers).fill(self)


class HostBuffer:
    """Memory on the host in which steps padded to the same number of rows are laid out, one after the other."""

    def __init__(self, rows: int, spare: int, numbers: int, *, pinned: bool = False) -> None:
        """``spare``: the first of the slots that are nobody's, which padding writes.

        ``numbers``: room for page tables and branches.
        """
        behind, fixed = len(FIELDS) * rows, fixed_size(rows)
        self._fixed = fixed
        self._buffer = torch.zeros(fixed + numbers, dtype=torch.int32, pin_memory=pinned)
        flat: NDArray[np.int32] = self._buffer.numpy()
        self._columns = flat[:behind].reshape(len(FIELDS), rows)
        self._wanted_draws = flat[behind:fixed].reshape(1 + DRAW_FIELDS, max_wanted(rows))
        self._numbers = flat[fixed:]
        self._spare = np.arange(spare, spare + rows, dtype=np.int32)

    def fill(self, piece: Packed, draws: NDArray[np.int32] | None = None) -> Tensor:
        """Lay out a step as :meth:`Rows.within` finds it; what comes is that part of the memory which says anything.

        Padding sees nothing. ``draws``: of the rows that are wanted, as :func:`~engine.sampling.sampling.draw_numbers`
        has them, if they are drawn in the step.
        """
        count, pages, numbers = len(piece), len(piece.tables), piece.numbers
        self._columns[:, count:] = 0
        self._columns[SLOTS, count:] = self._spare[: len(self._spare) - count]
        tokens, positions, slots, keys, home, pages_, branch, group, common, reach = self._columns[:, :count]
        of_run = np.frombuffer(piece.runs, np.int32).reshape(-1, 5)
        alone = len(of_run) == count
        run_rows, before, lengths, origins, pages_[:] = (of_run if alone else of_run.repeat(of_run[:, 0], axis=0)).T
        tokens[:] = piece.tokens
        slots[:] = piece.slots
        np.add(piece.depths, lengths, out=keys)
        np.add(keys, origins, out=positions)
        keys += 1
        home[:] = keys
        branch[:] = 0
        if piece.branches:
            lacking = np.frombuffer(piece.branch_sizes, np.int32)
            home[: len(lacking)] -= lacking
            branch[: len(lacking)] = pages + lacking.cumsum() - lacking
        if alone:
            group[:], common[:] = 1, home
            reach[:] = np.where(home == keys, keys, 0) if piece.branches else keys
        else:
            place = np.arange(count, dtype=np.int32) - before  # in its run
            leaders = (place % piece.group == 0).nonzero()[0]
            together = np.minimum(run_rows - place, piece.group)[leaders]
            group[:] = 0
            group[leaders] = together
            common[:] = np.minimum.reduceat(home, leaders).repeat(together)
            furthest = np.maximum.reduceat(keys, leaders)
            if piece.branches:
                furthest *= np.logical_and.reduceat(home == keys, leaders)
            reach[:] = furthest.repeat(together)
        self._wanted_draws[:] = 0
        self._wanted_draws[0, : len(piece.wanted)] = piece.wanted
        if draws is not None:
            self._wanted_draws[1:, : draws.shape[1]] = draws
        self._numbers[:pages] = piece.tables
        self._numbers[pages:numbers] = piece.branches
        return self._buffer[: self._fixed + numbers]


def _pages(state: SequenceState, depth: int) -> int:
    """Of the block table, up to a pending node of this depth."""
    return (state.length + depth) // state.block + 1


def _slots(state: SequenceState, start: int, stop: int) -> int:
    """In the branches of pending nodes."""
    return sum(map(len, state.branches[start:stop]))


def max_numbers(rows: int, pages: int) -> int:
    """Room for branches, and tables of up to ``pages`` pages, in a step of ``rows`` rows; more is cut."""
    return min(rows, 64) * pages + 64 * rows


def packed(
    tokens: Sequence[int],
    wanted: Sequence[int],
    chunks: Sequence[tuple[SequenceState, int]],
    *,
    group: int,
    max_rows: int,
    pages: int,
) -> Iterator[Packed]:
    """The rows of a step, in one piece or several.

    ``wanted``: ascending indices into ``tokens``; ``chunks``: as of :class:`engine.forward.StepInput`; ``group``: how
    many rows read common keys together at most; ``pages``: of the longest sequence.
    """
    assert all(a < b for a, b in pairwise(wanted)), f"rows are not in order: {list(wanted)}"
    room = max_numbers(max_rows, pages)

    def complete(piece: Packed) -> Packed:
        end = piece.first + len(piece)
        piece.tokens = tokens[piece.first : end]
        asked = wanted[bisect_left(wanted, piece.first) : bisect_left(wanted, end)]
        piece.wanted = [row - piece.first for row in asked] if piece.first else asked
        return piece

    piece = Packed(0, group, max_rows, room)
    if len(tokens) <= max_rows and len(wanted) <= max_wanted(max_rows):
        for state, count in chunks:
            end = len(state.parents)
            piece.add(state, end - count, end)
        if piece.numbers <= room:
            piece.tokens, piece.wanted = tokens, wanted
            yield piece
            return
        piece = Packed(0, group, max_rows, room)
    for state, count in chunks:
        start = state.pending - count
        while start < state.pending:
            rows = piece.takes(state, start, state.pending, wanted)
            if rows:
                piece.add(state, start, start + rows)
                start += rows
            else:
                assert len(piece), f"a row with {len(state.blocks)} pages has no room among {room} numbers"
                yield complete(piece)
                piece = Packed(piece.first + len(piece), group, max_rows, room)
    if len(piece):
        yield complete(piece)


def empty_buffer(rows: int, pages: int, device: torch.device) -> Tensor:
    """Memory for a step of ``rows`` rows, ``[*]`` int32."""
    return torch.zeros(fixed_size(rows) + max_numbers(rows, pages), dtype=torch.int32, device=device)


def fixed_size(rows: int) -> int:
    """Of what is before the page tables and branches of a step of ``rows`` rows."""
    return len(FIELDS) * rows + (1 + DRAW_FIELDS) * max_wanted(rows)


def as_wanted(found: Sequence[Tensor], order: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """The rows of pieces of a step, ``[R, V]`` each and in ascending ``order`` together, as they were ``wanted``."""
    found_RV = torch.cat(tuple(found)) if len(found) > 1 else found[0]
    if list(order) == list(wanted):
        return found_RV
    place = {row: i for i, row in enumerate(order)}
    return found_RV.index_select(0, upload([place[row] for row in wanted], found_RV.device))
