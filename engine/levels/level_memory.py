"""What a launch of several draft levels is told, what it keeps on the device, and what it says.

Decided here: how that lies in memory, in the order in which it is uploaded and downloaded. Nothing is computed.

Tensor legend: N sessions, W places that a level expands of each, M = N * W rows, C draws kept at a place, K levels,
H leaves left over, L = H + K * W places (first those that leaves hang from), P = H + K * W * C leaves, B slots of a
branch, V vocabulary, X numbers of a place that are downloaded, S numbers that are uploaded of a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.rows import Rows, fixed_size, max_wanted
from speculation.frozen import frozen
from speculation.messages import Sampling, Token
from speculation.verifying.calibration import CELLS, RANKS

MAX_LEVELS = 8
"""Of a launch, the first included."""

MAX_BRANCH = 64
"""Drafts in a row that may lie away from home, up to a place of the last level."""

MAX_STOPS = 8
"""Stop tokens of a session."""

NO_LEAF, GIVEN = -1, -2
"""What was chosen where nothing was, and where the first level has its places."""

NO_LIMIT = 1 << 30

TOLD = 3
"""Numbers of a place before its tokens and confidences: what was chosen, whether its logits are numbers, and how many
draws there are."""

REALS = ("factor", "temperature", "min_weight", "weight", "leaf_weight")
"""The first of :func:`session_fields`: floating-point numbers in double precision, the others are integers."""


@frozen
class TreePlace:
    """Where a place of a draft tree is in the cache."""

    end: int
    """Tokens up to and with its own."""
    home: int
    """How many of them, from the first on, are at home."""
    branch: Sequence[int]
    """Slots of the others."""


@frozen
class Leaf:
    """A draft that may be expanded."""

    token: Token
    weight: float
    above: TreePlace
    """What it hangs from."""


@frozen
class LevelExpansion:
    """What a launch needs to know of a session, whose places have been computed as a step's first level."""

    sampling: Sampling
    """Without filters."""
    stops: Sequence[Token]
    """Drafts that are never expanded, at most :data:`MAX_STOPS`."""
    position: int
    """Of the next token: how many are committed."""
    max_end: int
    """A draft that ends further behind is not expanded."""
    min_weight: float
    """Chance of being kept below which nothing is expanded."""
    width: int
    """Places that a level expands."""
    children: int
    """Drafts that hang from a place."""
    factors: Sequence[float]
    """Of the session, see :meth:`speculation.verifying.calibration.Calibration.factors`."""
    blocks: Sequence[int]
    """The block table of its sequence."""
    rows: Sequence[int]
    """Which logits of the step are those of its ``places``."""
    places: Sequence[TreePlace]
    weights: Sequence[float]
    """Of the places."""
    leaves: Sequence[Leaf]
    """Best first; those beyond :data:`~engine.levels.levels.LEAVES` are left out."""
    slots: Sequence[int]
    """Where what is expanded goes: of every further level as many as the launch is wide."""
    before: int = 0
    """Tokens of the text before the first that the cache holds: places count them, blocks do not."""


class Expanded(NamedTuple):
    """A place that a level expanded."""

    leaf: int | None
    """Which leaf from before the launch it was; None: the launch drafted it, or it is a place of the first level."""
    above: tuple[int, int] | None
    """Level and place that it hangs from, if the launch drafted it."""
    token: Token
    """If the launch drafted it."""
    draws: Sequence[tuple[Token, float]]
    """What may follow it, best first, each with its confidence."""
    sound: bool
    """Whether its logits are numbers."""


def session_fields(width: int, leaves: int) -> dict[str, int]:
    """How many numbers of 8 bytes are uploaded of a session, in the order of their memory.

    Of a session that is there to pad they are all 0. A temperature of 0 stands for greedy.
    """
    reals = {"factor": RANKS, "temperature": 1, "min_weight": 1, "weight": width, "leaf_weight": leaves}
    single = dict.fromkeys(("seed", "width", "children", "position", "max_end", "before", "table"), 1)
    several = {"stop": MAX_STOPS, "leaf_token": leaves, "slot": (MAX_LEVELS - 1) * width}
    return reals | single | several | dict.fromkeys(("end", "home", "branch"), leaves + width)


class LevelMemory:
    """What the levels of a launch of so many sessions read and write: where it is never changes."""

    def __init__(
        self,
        sessions: int,
        width: int,
        children: int,
        leaves: int,
        *,
        group: int,
        spare: int,
        pages: int,
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``group``: rows that read common keys together, which divides the width.

        ``spare``: the first slot that is nobody's; ``pages``: of the longest sequence; ``dtype``: of the logits.
        """
        self.sessions, self.width, self.children, self.leaves = sessions, width, children, leaves
        self.group, self.spare = group, spare
        self.count = rows = sessions * width
        """Of its rows."""
        sizes = session_fields(width, leaves)
        record, odds = sum(sizes.values()), RANKS + 2 * CELLS
        # Numbers of 8 bytes before what is uploaded, even, so that kernels find all memories aligned alike.
        before = 2 * -(-(fixed_size(rows) + rows * MAX_BRANCH) // 4)
        fixed = rows + odds + sessions * record
        tail = sessions * (pages + (leaves + width) * MAX_BRANCH)
        all_F = torch.zeros(before + fixed + -(-tail // 2), dtype=torch.int64, device=device)
        self.buffer = all_F.view(torch.int32)
        """Of the rows of a level; what is uploaded lies behind them, so that it need not be copied to get there."""
        self.rows = Rows.within(self.buffer, rows)
        """Views of it. The branches of its rows come first among its numbers."""
        self.rows.wanted_R.copy_(torch.arange(max_wanted(rows)))
        self.rows.branch_T.copy_(MAX_BRANCH * torch.arange(rows))
        self.inputs_F = all_F[before:]
        """What is uploaded, int64: ``source_M``, ``odds_F``, ``record_NS``, then page tables and branches in int32."""
        self.tail_start = 2 * (before + fixed) - fixed_size(rows)
        """Where in ``rows.numbers_F`` these tables and branches begin."""
        self.source_M = self.inputs_F[:rows]
        """Which logits of the step are those of a row of the first level."""
        self.odds_F = self.inputs_F[rows : rows + odds].view(torch.float64)
        """Factors by rank, then slopes and offsets, float64."""
        self.record_NS = self.inputs_F[rows + odds : fixed].view(sessions, record)
        parts = zip(sizes, torch.split_with_sizes(self.record_NS, list(sizes.values()), 1), strict=True)
        self.fields = {name: part.view(torch.float64) if name in REALS else part for name, part in parts}
        """Views of ``record_NS``, ``[N, *]``, see :func:`session_fields`."""

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        places, drafts = leaves + MAX_LEVELS * width, leaves + MAX_LEVELS * width * children
        self.constants = {"WIDTH": width, "CHILDREN": children, "LEAVES": leaves, "PLACES": places, "DRAFTS": drafts}
        """What kernels are compiled for, as they call it."""
        self.level_N = empty(sessions)
        """The level whose rows are in the buffer. All are equal; each session has its own to count."""
        self.logits_MV = empty(rows, vocabulary, dtype=dtype)
        """Of the first level."""
        self.branch_NLB = empty(sessions, places, MAX_BRANCH)
        self.home_NL = empty(sessions, places)
        self.end_NL = empty(sessions, places)
        self.weight_NP = empty(sessions, drafts, dtype=torch.float64)
        """0: not to be expanded (any more)."""
        self.token_NP = empty(sessions, drafts)
        self.place_weight_NW = empty(sessions, width, dtype=torch.float64)
        """Of the places of that level; 0: none is there."""
        self.found_KNWX = empty(MAX_LEVELS, sessions, width, TOLD + 2 * children, dtype=torch.float64)
        """All that is downloaded, float64: see :data:`TOLD`, then C tokens, then C confidences."""
