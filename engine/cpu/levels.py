"""Several levels of draft trees on a CPU: one call of :mod:`engine.cpu.library` for all of them.

Of a small model Python takes ten times as long for a draft step as the model itself. For models whose layers and output
layer are computed there, with embeddings and angles that follow from a table and from frequencies alone.

Tensor legend: as in :mod:`engine.levels.level_memory`; E head size, D hidden size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention import PagedLayers
from engine.cpu.library import CDrafter, CLaunch, Library
from engine.cpu.stack import CpuStack, RowLinear
from engine.cpu.thread_choice import COUNTS
from engine.host.upload import upload
from engine.layers.fused import fused_stack
from engine.levels.level_memory import GIVEN, MAX_BRANCH, MAX_LEVELS, MAX_STOPS, NO_LEAF, TOLD, LevelMemory
from engine.levels.level_ops import LevelOps
from engine.levels.levels import Levels
from engine.sampling.sampling import RIVALS
from speculation.trie import MIN_CONFIDENCE
from speculation.verifying.calibration import BINS, DEPTHS, DISTANCES, MAX_ODDS, MIN_ODDS, RANKS

ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64)
"""Rows that there is memory for; only those that there are get computed."""

FIXED_ANGLES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotation that do not change with the length of a text."""

MAX_KEPT = 32
"""Draws that are looked at of a row, ``KEPT`` in ``levels.h``."""

RENAMED = {
    "width": "max_width",
    "children": "max_children",
    "end": "given_end",
    "home": "given_home",
    "branch": "given_branch",
}
"""Of what is told of a session, what ``levels.h`` calls otherwise."""


class CpuLevelOps(LevelOps):
    """The operations beside the model alone."""

    def __init__(self, library: Library) -> None:
        self._library, self._depths = library, upload(DEPTHS, torch.device("cpu"))
        self._described: dict[LevelMemory, CLaunch] = {}  # where each memory is never changes

    def described(self, memory: LevelMemory, *, noisy: bool) -> CLaunch:
        """A launch as the library reads it, as long as its memory stays."""
        if memory not in self._described:
            self._described[memory] = self._describe(memory)
        self._described[memory].noisy = noisy
        return self._described[memory]

    def _describe(self, memory: LevelMemory) -> CLaunch:
        rows = memory.rows
        state = {
            "level": memory.level_N, "branches": memory.branch_NLB, "home": memory.home_NL, "end": memory.end_NL,
            "leaf_chance": memory.weight_NP, "token": memory.token_NP, "place_weight": memory.place_weight_NW,
            "found": memory.found_KNWX, "tokens": rows.tokens_T, "positions": rows.positions_T, "slots": rows.slots_T,
            "keys": rows.keys_T, "homes": rows.home_T, "pages": rows.pages_T, "groups": rows.group_T,
            "commons": rows.common_T, "numbers": rows.numbers_F, "odds": memory.odds_F, "depths": self._depths,
        }  # fmt: skip
        told = {RENAMED.get(name, name): field.data_ptr() for name, field in memory.fields.items()}
        return CLaunch(
            sessions=memory.sessions, width=memory.width, children=memory.children, leaves=memory.leaves,
            levels=MAX_LEVELS, group=memory.group, spare=memory.spare, vocabulary=memory.logits_MV.shape[1],
            record=memory.record_NS.shape[1], branch=MAX_BRANCH, stops=MAX_STOPS, told=TOLD,
            ranks=RANKS, bins=BINS, distances=DISTANCES, rivals=RIVALS, no_leaf=NO_LEAF, given=GIVEN,
            min_confidence=MIN_CONFIDENCE, min_odds=MIN_ODDS, max_odds=MAX_ODDS,
            **told, **{name: tensor.data_ptr() for name, tensor in state.items()},
        )  # fmt: skip

    def begin(self, memory: LevelMemory) -> None:
        """See :meth:`.LevelOps.begin`."""
        self._library.begin_launch(self.described(memory, noisy=False))

    def expand(self, memory: LevelMemory, logits_MX: Tensor, *, noisy: bool) -> None:
        """See :meth:`.LevelOps.expand`."""
        self._library.expand_level(self.described(memory, noisy=noisy), logits_MX.float().contiguous())


@dataclass(frozen=True, slots=True)
class HeadStates:
    """What levels of an EAGLE-3 head read and write besides."""

    next_SD: Tensor
    """What each row leads to."""
    next_normed: bool
    """Whether that is its state behind the final norm."""
    ids_V: Tensor | None
    """int64: which token each output stands for; None: its own number."""

    def described(self) -> dict[str, int]:
        """As the library reads it."""
        chosen = {} if self.ids_V is None else {"ids": self.ids_V.data_ptr(), "outputs": len(self.ids_V)}
        return {"next": self.next_SD.data_ptr(), "next_normed": self.next_normed, **chosen}


class CpuLevels(Levels):
    """Launches of a model that the library computes all of."""

    def __init__(
        self,
        base: Any,
        stack: CpuStack,
        head: RowLinear,
        layers: PagedLayers,
        vocabulary: int,
        states: HeadStates | None = None,
        **sizes: int,
    ) -> None:
        """``base``: has the embedding and rotation of ``stack``; ``head`` is behind it.

        ``states``: None of a model. ``sizes``: as of a :class:`.Levels`.
        """
        super().__init__(layers, vocabulary, torch.float32, ROW_CLASSES, **sizes)
        self._stack, self._states, self._head = stack, states, head  # whose memory the library reads
        self._ops = CpuLevelOps(stack.library)
        self._embedding_VD = base.embed_tokens.weight.detach()
        self._frequencies_E = base.rotary_emb.inv_freq.detach().float().contiguous()
        self._drafter = CDrafter(
            stack=ctypes.pointer(stack.described),
            head=head.packed.data_ptr(),
            head_bias=None if head.bias is None else head.bias.data_ptr(),
            embedding=self._embedding_VD.data_ptr(),
            frequencies=self._frequencies_E.data_ptr(),
            rotary_scale=base.rotary_emb.attention_scaling,
            page=layers.attention.page,
            **({} if states is None else states.described()),
        )

    def _expand(self, memory: LevelMemory, levels: int, *, noisy: bool) -> None:
        self._stack.reads(self._layers.store)
        launch = self._ops.described(memory, noisy=noisy)
        self._stack.library.launch(launch, self._drafter, memory.logits_MV, levels, COUNTS.few)


def cpu_levels(module: Any, layers: PagedLayers, vocabulary: int, *, width: int, children: int) -> CpuLevels | None:
    """What expands several levels of a model in one call; None if the library does not compute all of it."""
    head = module.get_output_embeddings()
    return levels_of(module.base_model, fused_stack(module), head, layers, vocabulary, width=width, children=children)


def levels_of(
    base: Any,
    stack: nn.Module | None,
    head: nn.Module,
    layers: PagedLayers,
    vocabulary: int,
    states: HeadStates | None = None,
    *,
    width: int,
    children: int,
) -> CpuLevels | None:
    """See :class:`CpuLevels`; None if the library does not compute all of it."""
    if not isinstance(stack, CpuStack) or not isinstance(head, RowLinear) or children + RIVALS > MAX_KEPT:
        return None
    embedding, angles = base.embed_tokens, base.rotary_emb
    if type(embedding) is not nn.Embedding or embedding.weight.dtype != head.weight.dtype:
        return None
    if angles.rope_type not in FIXED_ANGLES:
        return None
    return CpuLevels(base, stack, head, layers, vocabulary, states, width=width, children=children)
