"""A step as a list of rows: what every token of it needs to know, in one piece of memory.

Decides how a step is laid out for :mod:`engine.cuda.attention`, whatever its tokens are for: prompts, decoding,
chains or trees of drafts, or a mixture. The number of rows is padded to one of a few classes, so that a step of a class
can be recorded once and replayed with other contents (:mod:`engine.cuda.graphs`); a step that is larger than the
largest class is cut into several, each of which finds the keys of those before it in the cache. Works from plain
numbers; knows nothing of models.

A token sees the tokens at positions 0 to its own. Those that lie at home (:mod:`engine.sequence_state`) are found by
the sequence's page table; the rest, which are drafts beside others, by a list of slots: its branch.

Tensor legend: T rows, R of them wanted, F numbers behind them (page tables and branches).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sequence_state import ROOT, SequenceState

ROW_CLASSES = (16, 32, 64, 128, 256, 512)
"""Numbers of rows that steps are padded to."""

MAX_WANTED = 256
"""Rows of a step whose logits can be asked for; a step that wants more is cut."""

SLICE = 128
"""Rows whose attention is computed together; groups do not reach across their ends."""

FIELDS = ("tokens", "positions", "slots", "keys", "home", "pages", "branch", "group", "common")
"""The columns of :class:`Rows`, in the order of their memory."""


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
    wanted_R: Tensor
    """Rows whose logits are wanted."""
    numbers_F: Tensor

    @classmethod
    def within(cls, buffer: Tensor, rows: int) -> Rows:
        """Views of a step of ``rows`` rows."""
        columns = {f"{name}_T": buffer[i * rows : (i + 1) * rows] for i, name in enumerate(FIELDS)}
        rest = buffer[len(FIELDS) * rows :]
        wanted = max_wanted(rows)
        return cls(wanted_R=rest[:wanted], numbers_F=rest[wanted:], **columns)

    def cut(self, start: int, stop: int) -> Rows:
        """Some of the rows."""
        return replace(self, **{f"{name}_T": getattr(self, f"{name}_T")[start:stop] for name in FIELDS})


def max_wanted(rows: int) -> int:
    """How many rows of a step of ``rows`` rows may be wanted."""
    return min(rows, MAX_WANTED)


@dataclass(slots=True)
class Packed:
    """Rows on the host: a step, or as much of one as has room."""

    max_rows: int
    max_numbers: int
    max_wanted: int
    columns: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in FIELDS})
    wanted: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns["tokens"])

    @property
    def max_keys(self) -> int:
        """Of any of its rows."""
        return max(self.columns["keys"])

    def fits(self, rows: int, wanted: int, numbers: int) -> bool:
        """Whether there is room for so much more."""
        return (
            len(self) + rows <= self.max_rows
            and len(self.wanted) + wanted <= self.max_wanted
            and len(self.numbers) + numbers <= self.max_numbers
        )

    def add(self, group: Sequence[_Node], tokens: Sequence[int], pages: int) -> None:
        """Add nodes of one sequence that read common keys together; its page table begins at ``pages``."""
        common = min(node.home for node in group)
        sizes = [len(group), *[0] * (len(group) - 1)]
        for node, token, size in zip(group, tokens, sizes, strict=True):
            row = (
                token,
                node.position,
                node.slot,
                node.position + 1,
                node.home,
                pages,
                len(self.numbers),
                size,
                common,
            )
            for column, number in zip(self.columns.values(), row, strict=True):
                column.append(number)
            self.numbers += node.branch

    def flat(self, rows: int, spare: int) -> list[int]:
        """All numbers of a step padded to ``rows`` rows, as :meth:`Rows.within` finds them.

        Padding sees nothing and writes slots from ``spare`` on, which are nobody's.
        """
        padding = rows - len(self)
        found: list[int] = []
        for name, column in self.columns.items():
            found += column
            found += range(spare, spare + padding) if name == "slots" else [0] * padding
        found += self.wanted
        found += [0] * (max_wanted(rows) - len(self.wanted))
        found += self.numbers
        return found


class _Node(NamedTuple):
    """A pending node of a sequence."""

    position: int
    slot: int
    home: int
    branch: tuple[int, ...]


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
    wanted_at_most: int | None = None,
) -> Iterator[Packed]:
    """The rows of a step, in one piece or several.

    ``wanted``: ascending indices into ``tokens``; ``chunks``: as of :class:`engine.forward.StepInput`; ``group``: how
    many rows read common keys together at most; ``pages``: of the longest sequence; ``wanted_at_most``: of a piece, by
    default as many as a padded one has room for.
    """
    assert all(a < b for a, b in pairwise(wanted)), f"rows are not in order: {list(wanted)}"
    room = max_numbers(max_rows, pages)
    limits = (max_rows, room, max_wanted(max_rows) if wanted_at_most is None else wanted_at_most)
    piece = Packed(*limits)
    first = 0
    for state, count in chunks:
        nodes = _nodes(state)[-count:]
        table = state.blocks[: -(-max(node.position + 1 for node in nodes) // state.block)]
        begin: int | None = None  # where the page table is
        start = 0
        while start < count:
            of_slice = SLICE - len(piece) % SLICE
            together = nodes[start : start + min(group, of_slice)]
            index, end = first + start, first + start + len(together)
            asked = wanted[bisect_left(wanted, index) : bisect_left(wanted, end)]
            numbers = sum(len(node.branch) for node in together) + (len(table) if begin is None else 0)
            if not piece.fits(len(together), len(asked), numbers):
                assert len(piece), f"a row with {numbers} pages and slots has no room among {room}"
                yield piece
                piece, begin = Packed(*limits), None
                continue
            if begin is None:
                begin = len(piece.numbers)
                piece.numbers += table
            piece.wanted += [len(piece) + row - index for row in asked]
            piece.add(together, tokens[index:end], begin)
            start += len(together)
        first += count
    if len(piece):
        yield piece


def _nodes(state: SequenceState) -> list[_Node]:
    """All pending nodes of a sequence."""
    nodes: list[_Node] = []
    for depth, parent, slot in zip(state.depths, state.parents, state.pending_slots, strict=True):
        position = state.length + depth
        home, branch = (position, ()) if parent == ROOT else (nodes[parent].home, nodes[parent].branch)
        if home == position and slot == state.home(position):
            nodes.append(_Node(position, slot, position + 1, ()))
        else:
            nodes.append(_Node(position, slot, home, (*branch, slot)))
    return nodes


def empty_buffer(rows: int, pages: int, device: torch.device) -> Tensor:
    """Memory for a step of ``rows`` rows, ``[*]`` int32."""
    size = len(FIELDS) * rows + max_wanted(rows) + max_numbers(rows, pages)
    return torch.zeros(size, dtype=torch.int32, device=device)
