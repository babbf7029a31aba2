"""What a launch of several draft levels computes beside the model: what a level says, and which rows the next one has.

:class:`LevelOps` defines it in plain torch; :mod:`engine.cuda.level_kernels` and :mod:`engine.cpu.levels` must agree.
All read what :class:`engine.levels.levels.Levels` uploads and write to
:class:`~engine.levels.level_memory.LevelMemory` alone, so that what was launched can be replayed. Decided here: what
may follow a place, what that is worth, and which leaves are expanded next. Of equal logits the token with the lower
number comes first, of equally likely leaves the one that was there first.

Tensor legend: as in :mod:`engine.levels.level_memory`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.host.upload import upload
from engine.levels.level_memory import GIVEN, MAX_BRANCH, MAX_LEVELS, NO_LEAF, NO_LIMIT, TOLD, LevelMemory
from engine.sampling.noise import gumbel, keys_at
from engine.sampling.sampling import RIVALS
from speculation.trie import MIN_CONFIDENCE
from speculation.verifying.calibration import BINS, CELLS, DEPTHS, DISTANCES, MAX_ODDS, MIN_ODDS, RANKS


class LevelOps:
    """The definition, on any device. What a backend launches depends on shapes alone, and nothing waits."""

    def begin(self, memory: LevelMemory) -> None:
        """Take in what a launch was told: its first level is to be said next."""
        fields, leaves = memory.fields, memory.leaves
        given = slice(0, leaves + memory.width)
        memory.level_N.zero_()
        memory.weight_NP.zero_()
        memory.weight_NP[:, :leaves] = fields["leaf_weight"]
        memory.token_NP[:, :leaves] = fields["leaf_token"]
        memory.end_NL[:, given], memory.home_NL[:, given] = fields["end"], fields["home"]
        at_B, numbers_F = torch.arange(MAX_BRANCH, device=memory.buffer.device), memory.rows.numbers_F
        at_NLB = (fields["branch"][..., None] + at_B).clamp_(max=len(numbers_F) - 1)
        size_NL1 = (fields["end"] - fields["home"])[..., None]
        memory.branch_NLB[:, given] = numbers_F[at_NLB].masked_fill(at_B >= size_NL1, 0).long()
        memory.rows.pages_T.copy_(fields["table"].expand(-1, memory.width).flatten())
        memory.place_weight_NW.copy_(fields["weight"])
        memory.found_KNWX[0, :, :, 0].fill_(GIVEN).masked_fill_(fields["weight"] == 0, NO_LEAF)

    def expand(self, memory: LevelMemory, logits_MX: Tensor, *, noisy: bool) -> None:
        """Note what may follow the places of a level, make leaves of it, and rows of the best leaves of every session.

        ``logits_MX``: of the level's rows, whatever their format, with anything behind the vocabulary. ``noisy``:
        whether any session draws with noise.
        """
        level = int(memory.level_N[0])
        self._say(memory, logits_MX[:, : memory.logits_MV.shape[1]].to(memory.logits_MV.dtype), level, noisy=noisy)
        if level + 1 < MAX_LEVELS:
            self._choose(memory, level + 1)
            memory.level_N.fill_(level + 1)

    def _say(self, memory: LevelMemory, logits_MV: Tensor, level: int, *, noisy: bool) -> None:
        fields, children = memory.fields, memory.children
        shape = (memory.sessions, memory.width, children)
        first = memory.leaves + level * memory.width
        end_NW = memory.end_NL[:, first : first + memory.width]
        seed_M, temperature_M = (fields[name].expand(-1, memory.width).flatten() for name in ("seed", "temperature"))
        greedy_M1 = temperature_M[:, None] == 0.0
        tokens_MC, confidence_MC, there_MC = best_draws(
            logits_MV,
            greedy_M1,
            temperature_M[:, None].to(logits_MV.dtype).masked_fill_(greedy_M1, 1.0),
            keys_at(seed_M, end_NW.flatten()) if noisy else None,
            children,
        )
        tokens_NWC, confidence_NWC = tokens_MC.view(shape), confidence_MC.view(shape).double()
        there_NWC = there_MC.view(shape)
        weight_NWC = _worth(memory, end_NW, tokens_NWC, confidence_NWC, there_NWC)
        start = memory.leaves + level * memory.width * children
        new = slice(start, start + memory.width * children)
        memory.weight_NP[:, new] = weight_NWC.flatten(1)
        memory.token_NP[:, new] = tokens_NWC.flatten(1)
        found_NWX = memory.found_KNWX[level]
        found_NWX[..., 1] = logits_MV.amax(-1).isfinite().view(shape[:2])
        found_NWX[..., 2] = there_NWC.sum(-1)
        found_NWX[..., TOLD:] = torch.cat((tokens_NWC.double(), confidence_NWC), -1)

    def _choose(self, memory: LevelMemory, level: int) -> None:
        """Make rows of this level of the best leaves of every session."""
        fields, rows, width, leaves = memory.fields, memory.rows, memory.width, memory.leaves
        device = memory.buffer.device
        at_W, at_B = torch.arange(width, device=device), torch.arange(MAX_BRANCH, device=device)
        weight_NW, leaf_NW = (each[:, :width] for each in memory.weight_NP.sort(dim=1, descending=True, stable=True))
        active_NW = (weight_NW > 0) & (at_W < fields["width"])
        memory.weight_NP.scatter_(1, leaf_NW, weight_NW.masked_fill(active_NW, 0.0))
        memory.place_weight_NW.copy_(weight_NW.masked_fill(~active_NW, 0.0))
        memory.found_KNWX[level, :, :, 0] = leaf_NW.masked_fill(~active_NW, NO_LEAF).double()
        # What is made of no leaf is all zeros.
        above_NW = torch.where(leaf_NW < leaves, leaf_NW, leaves + (leaf_NW - leaves) // memory.children)
        home_NW = memory.home_NL.gather(1, above_NW) * active_NW
        end_NW = (memory.end_NL.gather(1, above_NW) + 1) * active_NW
        slot_NW = fields["slot"][:, (level - 1) * width : level * width]
        branch_NWB = memory.branch_NLB.gather(1, above_NW[..., None].expand(-1, -1, MAX_BRANCH))
        last_NW = (end_NW - 1 - home_NW).clamp(0, MAX_BRANCH - 1)
        branch_NWB = torch.where(at_B == last_NW[..., None], slot_NW[..., None], branch_NWB) * active_NW[..., None]
        here = slice(leaves + level * width, leaves + (level + 1) * width)
        memory.home_NL[:, here], memory.end_NL[:, here], memory.branch_NLB[:, here] = home_NW, end_NW, branch_NWB
        before_N1 = fields["before"]
        row_home_NW = (home_NW - before_N1) * active_NW
        spare_NW = memory.spare + torch.arange(memory.count, device=device).view_as(slot_NW)
        rows.tokens_T.copy_((memory.token_NP.gather(1, leaf_NW) * active_NW).flatten())
        rows.positions_T.copy_((end_NW - 1).clamp(min=0).flatten())
        rows.slots_T.copy_(torch.where(active_NW, slot_NW, spare_NW).flatten())
        rows.keys_T.copy_(((end_NW - before_N1) * active_NW).flatten())
        rows.home_T.copy_(row_home_NW.flatten())
        rows.numbers_F[: memory.count * MAX_BRANCH].copy_(branch_NWB.flatten())
        # The likeliest come first, so those of a group that are there stand side by side.
        active_GS, home_GS = active_NW.view(-1, memory.group), row_home_NW.view(-1, memory.group)
        common_G1 = home_GS.masked_fill(~active_GS, NO_LIMIT).amin(1, keepdim=True)
        size_GS = active_GS.sum(1, keepdim=True) * (torch.arange(memory.group, device=device) == 0)
        rows.common_T.copy_((common_G1 * active_GS).flatten())
        rows.group_T.copy_(size_GS.flatten())


def _worth(
    memory: LevelMemory, end_NW: Tensor, tokens_NWC: Tensor, confidence_NWC: Tensor, there_NWC: Tensor
) -> Tensor:
    """The chance that the text gets to each new draft, as :class:`speculation.trie.SpeculationTrie` has it.

    0 where it is no draft, or none to be expanded. In double precision, as on the host.
    """
    fields, weight_NW = memory.fields, memory.place_weight_NW
    wide_factor, slope, offset = memory.odds_F.tensor_split((RANKS, RANKS + CELLS))
    said_NWC = confidence_NWC.clamp(MIN_CONFIDENCE, 1.0)
    ahead_NW1 = (end_NW - fields["position"])[..., None]
    depth_NW = (ahead_NW1 >= upload(DEPTHS, ahead_NW1.device)).sum(-1)
    min_N1 = fields["min_weight"]
    may_NW = end_NW < fields["max_end"]
    stops_NWC = (tokens_NWC[..., None] == fields["stop"][:, None, None, :]).any(-1)
    before_NW, left_NW = torch.zeros_like(weight_NW), torch.ones_like(weight_NW)
    taken_NW = torch.ones_like(may_NW)
    found: list[Tensor] = []
    for number in range(memory.children):
        rank, said_NW = min(number, RANKS - 1), said_NWC[..., number]
        claim_NW = said_NW / torch.maximum(1.0 - before_NW, said_NW)
        tenth_NW = (claim_NW * BINS).long().clamp_(0, BINS - 1)
        cell_NW = (rank * BINS + tenth_NW) * DISTANCES + depth_NW
        odds_NW = (claim_NW * wide_factor[rank]).clamp(max=1.0)
        odds_NW = (odds_NW * slope[cell_NW] + offset[cell_NW]).clamp(MIN_ODDS, MAX_ODDS)
        odds_NW = (odds_NW * fields["factor"][:, rank, None]).clamp(MIN_ODDS, MAX_ODDS)
        odds_NW = (left_NW * odds_NW).clamp(min=MIN_CONFIDENCE)
        chance_NW = weight_NW * odds_NW
        taken_NW = taken_NW & there_NWC[..., number] & (number < fields["children"])
        if number:
            taken_NW = taken_NW & (chance_NW >= min_N1)
        opened_NW = taken_NW & may_NW & (chance_NW >= min_N1) & ~stops_NWC[..., number]
        found.append(chance_NW.masked_fill(~opened_NW, 0.0))
        before_NW, left_NW = before_NW + said_NW, left_NW - odds_NW
    return torch.stack(found, -1)


def best_draws(
    logits_MV: Tensor, greedy_M1: Tensor, temperature_M1: Tensor, keys_M: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`engine.sampling.sampling.candidates` finds for draws without filters, left on the device.

    Tokens, confidences, and whether they may be drawn at all, ``[M, k]`` each; none may of a row whose logits are no
    numbers. ``keys_M``: of the noise (:func:`engine.sampling.noise.keys_at`); None: all rows are greedy.
    """
    largest_M1 = logits_MV.amax(-1, keepdim=True)
    perturbed_MV = logits_MV
    if keys_M is not None:
        perturbed_MV = (logits_MV - largest_M1) / temperature_M1
        noise_MV = gumbel(keys_M, logits_MV.shape[-1], logits_MV.dtype, logits_MV.device)
        perturbed_MV += noise_MV.masked_fill_(greedy_M1, 0.0)
    best_MV, tokens_MV = perturbed_MV.sort(dim=-1, descending=True, stable=True)
    best_MC = best_MV[:, : k + RIVALS]
    confidence_MC = (best_MC - perturbed_MV.logsumexp(-1, keepdim=True)).exp()
    if keys_M is not None:
        confidence_MC = torch.where(greedy_M1, confidence_MC, best_MC.softmax(-1))
    confidence_MC = confidence_MC.masked_fill(~largest_M1.isfinite(), 0.0)
    confidence_MC = confidence_MC.clamp(torch.finfo(confidence_MC.dtype).tiny, 1.0)
    there_MC = (best_MC > float("-inf")) & largest_M1.isfinite()
    return tokens_MV[:, :k], confidence_MC[:, :k], there_MC[:, :k]
