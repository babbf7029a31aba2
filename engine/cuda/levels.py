"""Several levels of draft trees in one launch: what a level expands is chosen on the device by what the last one said.

A step computes the first level as any other (:mod:`engine.cuda.graphs`). Its logits stay on the device: the likeliest
draws of every place become leaves, the best leaves of every session the rows of the next level, and so on; one download
at the end tells what was expanded and what may follow. A level is recorded once and replayed as often as levels are
wanted, so the host neither lays out nor draws anything between them.

Decided here: which leaves a level expands. They are those that
:meth:`speculation.drafting.draft_session.DraftSession.frontier` would choose one level later: of all leaves of the
session, new ones and the best that were left over, the likeliest by what :mod:`speculation.verifying.calibration` makes
of the draws. What is expanded for nothing costs time, never a wrong draft.

Tensor legend: N sessions, W places that a level expands of each, M = N * W rows, C draws kept at a place, K levels,
H leaves left over, L = H + K * W places (first those that leaves hang from), P = H + K * W * C leaves, B slots of a
branch, V vocabulary, R rows of the first level, F numbers behind the fields of a launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from engine.attention.row_attention import first_line
from engine.attention.rows import Rows, fixed_size, max_wanted
from engine.cuda.graphs import TOLERANCE, Basis, StepShape
from engine.host.upload import to_device, upload
from engine.sampling.noise import gumbel, keys_at
from engine.sampling.sampling import RIVALS
from speculation.messages import Sampling, Token
from speculation.noise import splitmix64
from speculation.trie import MIN_CONFIDENCE
from speculation.verifying.calibration import BINS, CELLS, DEPTHS, MAX_ODDS, MIN_ODDS, RANKS, OddsTable

log = logging.getLogger(__name__)

MAX_LEVELS = 8
"""Of a launch, the first included."""

MAX_ROWS = 64
"""Of a level. So many sessions are computed together that the host has time for one level after the other."""

MAX_BRANCH = 64
"""Drafts in a row that may lie away from home, up to a place of the last level."""

MAX_STOPS = 8
"""Stop tokens of a session."""

LEAVES = 8
"""Leaves of a session from before the launch that it may expand."""


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Where a place of a draft tree is in the cache."""

    end: int
    """Tokens up to and with its own."""
    home: int
    """How many of them, from the first on, are at home."""
    branch: Sequence[int]
    """Slots of the others."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A draft that may be expanded."""

    token: Token
    weight: float
    above: TreePlace
    """What it hangs from."""


@dataclass(frozen=True, slots=True)
class Growth:
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
    """Best first; those beyond :data:`LEAVES` are left out."""
    slots: Sequence[int]
    """Where what is expanded goes: of every further level as many as the launch is wide."""


@dataclass(frozen=True, slots=True)
class Expanded:
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


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """What decides which kernels a level launches."""

    sessions: int
    noisy: bool
    """Whether any session draws with noise."""


@dataclass(slots=True)
class Memory:
    """What the levels of a launch of so many sessions read and write: where it is never changes."""

    rows: int
    fields: dict[str, Tensor]
    """Views of ``inputs_F``."""
    inputs_F: Tensor
    tail_F: Tensor
    """Behind the fields: block tables, then branches."""
    buffer: Tensor
    """Of the rows of a level."""
    level_1: Tensor
    logits_MV: Tensor
    """Of the first level."""
    branch_NLB: Tensor
    home_NL: Tensor
    end_NL: Tensor
    weight_NP: Tensor
    """0: not to be expanded (any more)."""
    token_NP: Tensor
    place_weight_NW: Tensor
    """Of the places of the last level; 0: none is there."""
    chosen_NW: Tensor
    """Which leaves they were, or one of :data:`NO_LEAF` and :data:`GIVEN`."""
    found_KNWX: Tensor
    """All that is downloaded: what was chosen, whether it is sound, C tokens, confidences, whether they are there."""
    recordings: dict[LaunchKind, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = field(default_factory=dict)
    """What the first level says, and a further one."""


class Levels:
    """Launches several levels over the store of one model."""

    def __init__(self, basis: Basis, vocabulary: int, dtype: torch.dtype, *, width: int, children: int) -> None:
        """``dtype``: of the logits. ``width``: most places of a session in a level; ``children``: most at a place."""
        self.width, self.children = 1 << (width - 1).bit_length(), children
        self.leaves = LEAVES
        width = self.width
        self._basis, self._vocabulary, self._dtype = basis, vocabulary, dtype
        self._device = basis.store.device
        self.classes = tuple(rows // width for rows in basis.classes if width <= rows <= MAX_ROWS)
        """Numbers of sessions that launches are padded to, ascending."""
        self._memories: dict[int, Memory] = {}
        self._group = max(size for size in range(1, width + 1) if width % size == 0 and size <= basis.attention.group)
        places = torch.arange(MAX_LEVELS * width * children, device=self._device) // children
        self._origin_P = torch.cat((torch.arange(LEAVES, device=self._device), LEAVES + places))
        self._at_W = torch.arange(width, device=self._device)
        self._at_WC = torch.arange(width * children, device=self._device)
        self._at_B = torch.arange(MAX_BRANCH, device=self._device)
        self._depths = upload(DEPTHS, self._device)

    @property
    def max_sessions(self) -> int:
        """Of a launch; 0: there is none."""
        return max(self.classes, default=0)

    # -- launching -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, logits_RV: Tensor, growths: Sequence[Growth], odds: OddsTable, levels: int) -> Tensor:
        """Expand ``levels`` in all, the first of which was computed with ``logits_RV``; see :meth:`read`.

        Returns at once; the device may still be at it.
        """
        assert 1 <= levels <= MAX_LEVELS
        sessions = next(each for each in self.classes if each >= len(growths))
        kind = LaunchKind(sessions, any(not growth.sampling.greedy for growth in growths))
        memory = self._memory(sessions)
        self._fill(memory, logits_RV, growths, odds)
        first, further = memory.recordings.get(kind) or self._functions(memory, kind)
        found_KNWX = first()
        for _ in range(levels - 1):
            found_KNWX = further()
        return found_KNWX[:levels, : len(growths)]

    def read(self, found_KNWX: Tensor) -> list[list[list[Expanded | None]]]:
        """By session and level, what its places are, None where there was none. Waits for the device."""
        sessions: list[list[list[Expanded | None]]] = [[] for _ in range(found_KNWX.shape[1])]
        for found_NWX in found_KNWX.tolist():
            for levels, found_WX in zip(sessions, found_NWX, strict=True):
                levels.append([self._expanded(found_X, levels) for found_X in found_WX])
        return sessions

    def _expanded(self, numbers: Sequence[float], before: Sequence[Sequence[Expanded | None]]) -> Expanded | None:
        """``before``: the levels before its own."""
        children = self.children
        found = zip(*(numbers[2 + i * children : 2 + (i + 1) * children] for i in range(3)), strict=True)
        draws = [(int(token), confidence) for token, confidence, there in found if there]
        chosen, sound = int(numbers[0]), bool(numbers[1])
        if chosen == NO_LEAF:
            return None
        if chosen == GIVEN:
            return Expanded(None, None, 0, draws, sound)
        if chosen < LEAVES:
            return Expanded(chosen, None, 0, draws, sound)
        place, rank = divmod(chosen - LEAVES, children)
        level, place = divmod(place, self.width)
        above = before[level][place]
        assert above is not None, "a draft that hangs from nothing was expanded"
        return Expanded(None, (level, place), above.draws[rank][0], draws, sound)

    # -- what is given in ----------------------------------------------------------------------------------------------

    def _fields(self, sessions: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what a launch is told, floating-point numbers first."""
        of_places = (sessions, LEAVES + self.width)
        return {
            "wide_factor": (RANKS,),
            "slope": (CELLS,),
            "offset": (CELLS,),
            "factor": (sessions, RANKS),
            "temperature": (sessions,),
            "min_weight": (sessions,),
            "weight": (sessions, self.width),
            "leaf_weight": (sessions, LEAVES),
            "greedy": (sessions,),
            "seed": (sessions,),
            "width": (sessions,),
            "children": (sessions,),
            "position": (sessions,),
            "max_end": (sessions,),
            "table": (sessions,),
            "stop": (sessions, MAX_STOPS),
            "leaf_token": (sessions, LEAVES),
            "slot": (sessions, (MAX_LEVELS - 1) * self.width),
            "end": of_places,
            "home": of_places,
            "branch": of_places,
        }

    def _fill(self, memory: Memory, logits_RV: Tensor, growths: Sequence[Growth], odds: OddsTable) -> None:
        """Upload what the levels are told, and put the logits of every place where they look for them."""
        values: dict[str, list[float]] = {name: [] for name in memory.fields}
        tables: list[int] = []
        branches: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        values["wide_factor"] += odds.factors
        values["slope"] += odds.slopes
        values["offset"] += odds.offsets
        for number, growth in enumerate(growths):
            leaves = growth.leaves[:LEAVES]
            unused = (LEAVES - len(leaves), self.width - len(growth.places))
            sampling = growth.sampling
            for name, value in (
                ("factor", growth.factors),
                (
                    "temperature",
                    (1.0 if sampling.greedy else max(sampling.temperature, torch.finfo(self._dtype).tiny),),
                ),
                ("min_weight", (growth.min_weight,)),
                ("weight", (*growth.weights, *[0.0] * unused[1])),
                ("leaf_weight", (*(leaf.weight for leaf in leaves), *[0.0] * unused[0])),
                ("greedy", (sampling.greedy,)),
                ("seed", (_signed(splitmix64(sampling.seed & (1 << 64) - 1)),)),
                ("width", (growth.width,)),
                ("children", (growth.children,)),
                ("position", (growth.position,)),
                ("max_end", (growth.max_end,)),
                ("table", (len(tables),)),
                ("stop", (*growth.stops, *[-1] * (MAX_STOPS - len(growth.stops)))),
                ("leaf_token", (*(leaf.token for leaf in leaves), *[0] * unused[0])),
                ("slot", (*growth.slots, *[0] * ((MAX_LEVELS - 1) * self.width - len(growth.slots)))),
            ):
                values[name] += value
            places = [*(leaf.above for leaf in leaves), *[NOWHERE] * unused[0], *growth.places, *[NOWHERE] * unused[1]]
            for place in places:
                values["end"].append(place.end)
                values["home"].append(place.home)
                values["branch"].append(len(branches))
                branches += place.branch
            tables += growth.blocks[: -(-max(place.home for place in places) // self._basis.attention.page)]
            sources += growth.rows
            targets += range(number * self.width, number * self.width + len(growth.rows))
        values["branch"] = [offset + len(tables) for offset in values["branch"]]
        flat_F = torch.cat(
            [
                torch.tensor(value + [0] * (memory.fields[name].numel() - len(value)), dtype=memory.fields[name].dtype)
                .view(torch.int64)
                .flatten()
                for name, value in values.items()
            ]
            + [torch.tensor(tables + branches, dtype=torch.int64)]
        )
        memory.inputs_F[: len(flat_F)].copy_(to_device(flat_F, self._device))
        at_S = upload(sources, self._device)
        memory.logits_MV.index_copy_(0, upload(targets, self._device), logits_RV.index_select(0, at_S))

    def _memory(self, sessions: int) -> Memory:
        """Taken at the first use, and kept."""
        if sessions not in self._memories:
            self._memories[sessions] = self._empty_memory(sessions)
        return self._memories[sessions]

    def _empty_memory(self, sessions: int) -> Memory:
        device, rows = self._device, sessions * self.width
        places, leaves = LEAVES + MAX_LEVELS * self.width, LEAVES + MAX_LEVELS * self.width * self.children
        shapes = self._fields(sessions)
        fixed = sum(prod(shape) for shape in shapes.values())
        tables = sessions * self._basis.pages
        inputs_F = torch.zeros(
            fixed + tables + sessions * (LEAVES + self.width) * MAX_BRANCH, dtype=torch.int64, device=device
        )
        fields, start = {}, 0
        for name, shape in shapes.items():
            part = inputs_F[start : start + prod(shape)].view(shape)
            fields[name] = part.view(torch.float64) if name in REALS else part
            start += prod(shape)

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        numbers = fixed_size(rows) + tables + rows * MAX_BRANCH
        buffer = empty(numbers, dtype=torch.int32)
        Rows.within(buffer, rows).wanted_R.copy_(torch.arange(max_wanted(rows)))
        return Memory(
            rows=rows,
            fields=fields,
            inputs_F=inputs_F,
            tail_F=inputs_F[fixed:],
            buffer=buffer,
            level_1=empty(1),
            logits_MV=empty(rows, self._vocabulary, dtype=self._dtype),
            branch_NLB=empty(sessions, places, MAX_BRANCH),
            home_NL=empty(sessions, places),
            end_NL=empty(sessions, places),
            weight_NP=empty(sessions, leaves, dtype=torch.float64),
            token_NP=empty(sessions, leaves),
            place_weight_NW=empty(sessions, self.width, dtype=torch.float64),
            chosen_NW=empty(sessions, self.width),
            found_KNWX=empty(MAX_LEVELS, sessions, self.width, 2 + 3 * self.children, dtype=torch.float64),
        )

    # -- what is computed, and may be recorded -------------------------------------------------------------------------

    def _functions(self, memory: Memory, kind: LaunchKind) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        return (lambda: self._first(memory, kind)), (lambda: self._further(memory, kind))

    @torch.inference_mode()
    def _first(self, memory: Memory, kind: LaunchKind) -> Tensor:
        """Take in what the launch was told, and what the first level says."""
        fields, tables = memory.fields, kind.sessions * self._basis.pages
        memory.level_1.zero_()
        memory.weight_NP.zero_()
        memory.weight_NP[:, :LEAVES] = fields["leaf_weight"]
        memory.token_NP[:, :LEAVES] = fields["leaf_token"]
        given = slice(0, LEAVES + self.width)
        memory.end_NL[:, given], memory.home_NL[:, given] = fields["end"], fields["home"]
        at_NLB = (fields["branch"][..., None] + self._at_B).clamp_(max=len(memory.tail_F) - 1)
        memory.branch_NLB[:, given] = memory.tail_F[at_NLB]
        rows = Rows.within(memory.buffer, memory.rows)
        rows.numbers_F[:tables].copy_(memory.tail_F[:tables])
        rows.pages_T.copy_(self._by_row(fields["table"]))
        rows.branch_T.copy_(tables + MAX_BRANCH * torch.arange(memory.rows, device=self._device))
        memory.place_weight_NW.copy_(fields["weight"])
        memory.chosen_NW.fill_(GIVEN).masked_fill_(fields["weight"] == 0, NO_LEAF)
        return self._say(memory, kind, memory.logits_MV)

    @torch.inference_mode()
    def _further(self, memory: Memory, kind: LaunchKind) -> Tensor:
        """Expand the best leaves."""
        memory.level_1.add_(1).clamp_(max=MAX_LEVELS - 1)
        self._choose(memory)
        logits_MX = self._basis.forward(StepShape(memory.rows), memory.buffer)
        return self._say(memory, kind, logits_MX[:, : self._vocabulary].to(self._dtype))

    def _choose(self, memory: Memory) -> None:
        """Make rows of the best leaves of every session."""
        fields, level_1 = memory.fields, memory.level_1
        weight_NW, leaf_NW = memory.weight_NP.topk(self.width, dim=1)
        active_NW = (weight_NW > 0) & (self._at_W < fields["width"][:, None])
        memory.weight_NP.scatter_(1, leaf_NW, weight_NW.masked_fill(active_NW, 0.0))
        memory.place_weight_NW.copy_(weight_NW.masked_fill(~active_NW, 0.0))
        memory.chosen_NW.copy_(leaf_NW.masked_fill(~active_NW, NO_LEAF))
        above_NW = self._origin_P[leaf_NW]
        home_NW, end_NW = memory.home_NL.gather(1, above_NW), memory.end_NL.gather(1, above_NW) + 1
        slot_NW = fields["slot"].index_select(1, (level_1 - 1) * self.width + self._at_W)
        branch_NWB = memory.branch_NLB.gather(1, above_NW[..., None].expand(-1, -1, MAX_BRANCH))
        last_NW = (end_NW - 1 - home_NW).clamp(0, MAX_BRANCH - 1)
        branch_NWB.scatter_(2, last_NW[..., None], slot_NW[..., None])
        here_W = LEAVES + level_1 * self.width + self._at_W
        memory.home_NL.index_copy_(1, here_W, home_NW)
        memory.end_NL.index_copy_(1, here_W, end_NW)
        memory.branch_NLB.index_copy_(1, here_W, branch_NWB)
        rows = Rows.within(memory.buffer, memory.rows)
        spare_NW = self._basis.store.slots + torch.arange(memory.rows, device=self._device).view_as(slot_NW)
        token_NW = memory.token_NP.gather(1, leaf_NW)
        idle_NW = ~active_NW
        rows.tokens_T.copy_(token_NW.masked_fill(idle_NW, 0).flatten())
        rows.positions_T.copy_((end_NW - 1).masked_fill(idle_NW, 0).flatten())
        rows.slots_T.copy_(torch.where(active_NW, slot_NW, spare_NW).flatten())
        rows.keys_T.copy_(end_NW.masked_fill(idle_NW, 0).flatten())
        rows.home_T.copy_(home_NW.masked_fill(idle_NW, 0).flatten())
        rows.numbers_F[-memory.rows * MAX_BRANCH :].copy_(branch_NWB.flatten())
        # The likeliest come first, so those of a group that are there stand side by side.
        active_GS, home_GS = active_NW.view(-1, self._group), home_NW.view(-1, self._group)
        common_G1 = home_GS.masked_fill(~active_GS, NO_LIMIT).amin(1, keepdim=True)
        size_GS = active_GS.sum(1, keepdim=True) * (torch.arange(self._group, device=self._device) == 0)
        rows.common_T.copy_(common_G1.expand_as(home_GS).masked_fill(~active_GS, 0).flatten())
        rows.group_T.copy_(size_GS.flatten())

    def _by_row(self, value_N: Tensor) -> Tensor:
        return value_N[:, None].expand(-1, self.width).flatten()

    def _say(self, memory: Memory, kind: LaunchKind, logits_MV: Tensor) -> Tensor:
        """Note what may follow the places of a level, and make leaves of it."""
        fields, shape = memory.fields, (kind.sessions, self.width, self.children)
        here_W = LEAVES + memory.level_1 * self.width + self._at_W
        end_NW = memory.end_NL.index_select(1, here_W)
        seed_M, greedy_M, temperature_M = (self._by_row(fields[name]) for name in ("seed", "greedy", "temperature"))
        tokens_MC, confidence_MC, there_MC = best_draws(
            logits_MV,
            greedy_M[:, None].bool(),
            temperature_M[:, None].to(logits_MV.dtype),
            keys_at(seed_M, end_NW.flatten()) if kind.noisy else None,
            self.children,
        )
        tokens_NWC, confidence_NWC = tokens_MC.view(shape), confidence_MC.view(shape).double()
        there_NWC = there_MC.view(shape)
        weight_NWC = self._worth(fields, memory.place_weight_NW, end_NW, tokens_NWC, confidence_NWC, there_NWC)
        leaves_WC = LEAVES + memory.level_1 * len(self._at_WC) + self._at_WC
        memory.weight_NP.index_copy_(1, leaves_WC, weight_NWC.flatten(1))
        memory.token_NP.index_copy_(1, leaves_WC, tokens_NWC.flatten(1))
        sound_NW = logits_MV.amax(-1).isfinite().view(shape[:2])
        told_NW2 = torch.stack((memory.chosen_NW.double(), sound_NW.double()), -1)
        found_NWX = torch.cat((told_NW2, tokens_NWC.double(), confidence_NWC, there_NWC.double()), -1)
        return memory.found_KNWX.index_copy_(0, memory.level_1, found_NWX[None])

    def _worth(
        self,
        fields: dict[str, Tensor],
        weight_NW: Tensor,
        end_NW: Tensor,
        tokens_NWC: Tensor,
        confidence_NWC: Tensor,
        there_NWC: Tensor,
    ) -> Tensor:
        """The chance that the text gets to each new draft, as :class:`speculation.trie.SpeculationTrie` has it.

        0 where it is no draft, or none to be expanded. In double precision, as on the host.
        """
        said_NWC = confidence_NWC.clamp(MIN_CONFIDENCE, 1.0)
        ahead_NW = end_NW - fields["position"][:, None]
        depth_NW = (ahead_NW[..., None] >= self._depths).sum(-1)
        min_N1 = fields["min_weight"][:, None]
        may_N1W = end_NW < fields["max_end"][:, None]
        stops_NWC = (tokens_NWC[..., None] == fields["stop"][:, None, None, :]).any(-1)
        before_NW, left_NW = torch.zeros_like(weight_NW), torch.ones_like(weight_NW)
        taken_NW = torch.ones_like(may_N1W)
        found: list[Tensor] = []
        for number in range(self.children):
            rank, said_NW = min(number, RANKS - 1), said_NWC[..., number]
            claim_NW = said_NW / torch.maximum(1.0 - before_NW, said_NW)
            tenth_NW = (claim_NW * BINS).nan_to_num().long().clamp_(0, BINS - 1)
            cell_NW = (rank * BINS + tenth_NW) * (len(DEPTHS) + 1) + depth_NW
            odds_NW = (claim_NW * fields["wide_factor"][rank]).clamp(max=1.0)
            odds_NW = (odds_NW * fields["slope"][cell_NW] + fields["offset"][cell_NW]).clamp(MIN_ODDS, MAX_ODDS)
            odds_NW = (odds_NW * fields["factor"][:, rank, None]).clamp(MIN_ODDS, MAX_ODDS)
            odds_NW = (left_NW * odds_NW).clamp(min=MIN_CONFIDENCE)
            chance_NW = weight_NW * odds_NW
            taken_NW = taken_NW & there_NWC[..., number] & (number < fields["children"][:, None])
            if number:
                taken_NW = taken_NW & (chance_NW >= min_N1)
            opened_NW = taken_NW & may_N1W & (chance_NW >= min_N1) & ~stops_NWC[..., number]
            found.append(chance_NW.masked_fill(~opened_NW, 0.0))
            before_NW, left_NW = before_NW + said_NW, left_NW - odds_NW
        return torch.stack(found, -1)

    # -- recording -----------------------------------------------------------------------------------------------------

    def record(self) -> bool:
        """Record levels of every kind, and see that each says the same as computed; False: they are not to be used."""
        started = time.perf_counter()
        try:
            error = self._recorded()
        except Exception as failure:  # whatever a model does that cannot be recorded, or too little memory
            why = first_line(failure)
        else:
            if error <= TOLERANCE:  # not if it is NaN
                log.info("draft levels recorded in %.1f s", time.perf_counter() - started)
                return True
            why = f"replayed ones are off by {error:.2g}"
        log.warning("draft levels are computed one by one: %s", why)
        return False

    @torch.inference_mode()
    def _recorded(self) -> float:
        """Record all; the largest difference between what is replayed and what was computed."""
        assert self._basis.record is not None
        kinds = [LaunchKind(sessions, noisy) for sessions in reversed(self.classes) for noisy in (False, True)]
        expected: dict[LaunchKind, Tensor] = {}
        for kind in kinds:
            memory = self._memory(kind.sessions)
            expected[kind] = self._trial(memory, kind)
            first, further = self._functions(memory, kind)
            memory.recordings[kind] = self._basis.record(first), self._basis.record(further)
        # Once all are recorded: a later one may overwrite what an earlier one holds.
        errors = [
            (self._trial(self._memory(kind.sessions), kind) - found_KNWX).abs().max()
            for kind, found_KNWX in expected.items()
        ]
        return float(torch.stack(errors).max())  # NaN stays NaN

    def _trial(self, memory: Memory, kind: LaunchKind) -> Tensor:
        """What two levels say that begin with random logits, in slots that are nobody's."""
        first_slot, page = self._basis.store.slots, self._basis.attention.page
        generator = torch.Generator().manual_seed(kind.sessions)
        logits_MV = 8 * torch.randn(memory.rows, self._vocabulary, generator=generator)
        sampling = Sampling(temperature=0.8, seed=3) if kind.noisy else Sampling(temperature=0.0)
        growths = [
            Growth(
                sampling=sampling,
                stops=(),
                position=1,
                max_end=1 << 30,
                min_weight=0.0,
                width=self.width,
                children=self.children,
                factors=[1.0] * RANKS,
                blocks=[first_slot // page],
                rows=range(session * self.width, (session + 1) * self.width),
                places=[TreePlace(1, 1, ())] * self.width,
                weights=[1.0] * self.width,
                leaves=(),
                slots=range(first_slot + session * self.width, first_slot + (session + 1) * self.width),
            )
            for session in range(kind.sessions)
        ]
        odds = OddsTable([1.0] * RANKS, [1.0] * CELLS, [0.0] * CELLS)
        self._fill(memory, to_device(logits_MV.to(self._dtype), self._device), growths, odds)
        first, further = memory.recordings.get(kind) or self._functions(memory, kind)
        first()
        return further()[:2].clone()


REALS = frozenset({"wide_factor", "slope", "offset", "factor", "temperature", "min_weight", "weight", "leaf_weight"})
NO_LEAF, GIVEN = -1, -2
"""What was chosen where nothing was, and where the first level has its places."""
NO_LIMIT = 1 << 30
NOWHERE = TreePlace(0, 0, ())


def best_draws(
    logits_MV: Tensor, greedy_M1: Tensor, temperature_M1: Tensor, keys_M: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`engine.sampling.sampling.candidates` finds for draws without filters, left on the device.

    Tokens, confidences, and whether they may be drawn at all, ``[M, k]`` each. ``keys_M``: of the noise
    (:func:`engine.sampling.noise.keys_at`); None: all rows are greedy.
    """
    perturbed_MV = logits_MV
    if keys_M is not None:
        perturbed_MV = (logits_MV - logits_MV.amax(-1, keepdim=True)) / temperature_M1
        noise_MV = gumbel(keys_M, logits_MV.shape[-1], logits_MV.dtype, logits_MV.device)
        perturbed_MV += noise_MV.masked_fill_(greedy_M1, 0.0)
    best_MC, tokens_MC = perturbed_MV.topk(min(k + RIVALS, perturbed_MV.shape[-1]), dim=-1)
    confidence_MC = (best_MC - perturbed_MV.logsumexp(-1, keepdim=True)).exp()
    if keys_M is not None:
        confidence_MC = torch.where(greedy_M1, confidence_MC, best_MC.softmax(-1))
    confidence_MC = confidence_MC.clamp(torch.finfo(confidence_MC.dtype).tiny, 1.0)
    return tokens_MC[:, :k], confidence_MC[:, :k], best_MC[:, :k] > float("-inf")


def _signed(word: int) -> int:
    """The signed number with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word
