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

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.sequence_state import SequenceState
from engine.host.upload import upload
from engine.sampling.draws import DRAW_FIELDS, draw_numbers
from engine.sampling.sampling import Draw

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
    """How many tokens the row sees, itself included: its position + 1. 0: padding."""
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
    """How they are drawn; see :func:`engine.sampling.draws.draw_numbers`."""
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
    depths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    branch_sizes: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    """The slots of all branches, one after the other."""
    tables: list[tuple[Sequence[int], int]] = field(default_factory=list)
    """Page tables, and how many pages of each are needed."""
    pages: int = 0
    """In all tables."""
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Rows of a sequence that are side by side in a slice: how many, which is the first, committed tokens before them,
    and where their page table begins."""

    def __len__(self) -> int:
        return len(self.depths)

    def takes(self, state: SequenceState, start: int, stop: int, asked: Sequence[int]) -> int:
        """How many of a sequence's pending nodes ``start`` to ``stop`` there is room for, from the first one on.

        ``asked``: which of the step's tokens have logits that are wanted, ascending.
        """
        rows = min(stop - start, self.max_rows - len(self))
        index = self.first + len(self)
        end = bisect_left(asked, self.first) + max_wanted(self.max_rows)
        if end < len(asked):
            rows = min(rows, asked[end] - index)
        if self.pages + len(state.blocks) + len(self.branches) + _slots(state, start, start + rows) > self.max_numbers:
            while rows and not self._has_room(state, start, start + rows):
                rows //= 2
        return rows

    def _has_room(self, state: SequenceState, start: int, stop: int) -> bool:
        numbers = _pages(state, max(state.depths[start:stop])) + _slots(state, start, stop)
        return self.pages + len(self.branches) + numbers <= self.max_numbers

    def add(self, state: SequenceState, start: int, stop: int) -> None:
        """Add pending nodes of a sequence."""
        row, count, length = len(self.depths), stop - start, state.length
        depths, branches = state.depths[start:stop], state.branches[start:stop]
        deepest = max(depths)
        pages = _pages(state, deepest)
        if row % SLICE + count <= SLICE:
            self.runs.append((count, row, length, self.pages))
        else:
            for first in range(row - row % SLICE, row + count, SLICE):
                begin, end = max(first, row), min(first + SLICE, row + count)
                self.runs.append((end - begin, begin, length, self.pages))
        self.depths += depths
        self.slots += state.pending_slots[start:stop]
        self.branch_sizes += map(len, branches)
        self.branches += chain.from_iterable(branches)
        self.tables.append((state.blocks, pages))
        self.pages += pages

    def fits(self, rows: int, pages: int) -> bool:
        """Whether its page tables and branches have room in a step of ``rows`` rows."""
        return self.pages + len(self.branches) <= max_numbers(rows, pages)

    def host_buffer(self, rows: int, spare: int, draws: Sequence[Draw] = (), *, pinned: bool = False) -> Tensor:
        """A step padded to ``rows`` rows as :meth:`Rows.within` finds it, as far as there is anything: int32.

        Padding sees nothing and writes slots from ``spare`` on, which are nobody's. ``draws``: of the rows that are
        wanted, if they are drawn in the step.
        """
        count, behind = len(self), len(FIELDS) * rows
        wanted = behind + max_wanted(rows)
        numbers = wanted + DRAW_FIELDS * max_wanted(rows)
        size = numbers + self.pages + len(self.branches)
        # Torch keeps pinned memory until copies from it are made, and gives it out again then.
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        flat: NDArray[np.int32] = buffer.numpy()
        flat[:numbers] = 0
        columns = flat[:behind].reshape(len(FIELDS), rows)
        columns[SLOTS, count:] = np.arange(spare, spare + rows - count)
        tokens, positions, slots, keys, home, pages, branch, group, common, reach = columns[:, :count]
        of_run = np.array(self.runs, np.int32)
        run_rows, before, lengths, pages[:] = of_run.repeat(of_run[:, 0], axis=0).T
        tokens[:] = self.tokens
        slots[:] = self.slots
        positions[:] = self.depths
        positions += lengths
        np.add(positions, 1, out=keys)
        home[:] = keys
        if self.branches:
            lacking = np.array(self.branch_sizes, np.int32)
            home -= lacking
            branch[:] = self.pages + lacking.cumsum() - lacking
        if len(self.runs) == count:
            group[:], common[:] = 1, home
            reach[:] = np.where(home == keys, keys, 0) if self.branches else keys
        else:
            place = np.arange(count, dtype=np.int32) - before  # in its run
            leaders = (place % self.group == 0).nonzero()[0]
            together = np.minimum(run_rows - place, self.group)[leaders]
            group[leaders] = together
            common[:] = np.minimum.reduceat(home, leaders).repeat(together)
            furthest = np.maximum.reduceat(keys, leaders)
            if self.branches:
                furthest *= np.logical_and.reduceat(home == keys, leaders)
            reach[:] = furthest.repeat(together)
        flat[behind : behind + len(self.wanted)] = self.wanted
        if draws:
            flat[wanted:numbers].reshape(DRAW_FIELDS, -1)[:, : len(draws)] = draw_numbers(draws)
        at = numbers
        for blocks, needed in self.tables:
            flat[at : at + needed] = blocks[:needed]
            at += needed
        flat[at:] = self.branches
        return buffer


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
    assert list(wanted) == sorted(set(wanted)), f"rows are not in order: {list(wanted)}"
    room = max_numbers(max_rows, pages)

    def complete(piece: Packed) -> Packed:
        end = piece.first + len(piece)
        piece.tokens = tokens[piece.first : end]
        asked = wanted[bisect_left(wanted, piece.first) : bisect_left(wanted, end)]
        piece.wanted = [row - piece.first for row in asked] if piece.first else asked
        return piece

    piece = Packed(0, group, max_rows, room)
    bound = sum(len(state.blocks) + count * state.pending for state, count in chunks)
    if len(tokens) <= max_rows and len(wanted) <= max_wanted(max_rows) and bound <= room:
        for state, count in chunks:
            piece.add(state, state.pending - count, state.pending)
        chunks = ()
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
    """The rows of pieces of a step, ``[R, X]`` each and in ascending ``order`` together, as they were ``wanted``."""
    found_RX = torch.cat(tuple(found)) if len(found) > 1 else found[0]
    if list(order) == list(wanted):
        return found_RX
    place = {row: i for i, row in enumerate(order)}
    return found_RX.index_select(0, upload([place[row] for row in wanted], found_RX.device))
