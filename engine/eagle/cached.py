"""An EAGLE-3 head over a cache of its own: rows of many sessions in one forward, chains or trees.

The cache is kept as the target's is (:mod:`engine.cache.kv_cache`), one slot a row: what sessions begin with is shared,
and guesses are pending nodes that are dropped. Row p of a session is what the head makes of the target's state at
position p and the token after it (:mod:`engine.eagle.head`). A session's rows need not begin at position 0.

Where the head drafts on another worker, its fused states travel as bytes: decided here is how they are rounded
(:class:`speculation.messages.FeatureFormat`), and what a receiver takes for numbers.

On CUDA forwards are recorded, as a model's steps are (:mod:`engine.cuda.graphs`).

Tensor legend: N rows, T those of a forward, R that are wanted, D hidden size of the head, S slots, Q query heads,
K key/value heads, E head size, V the target's vocabulary, X outputs of the head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.attention import PagedLayers, Step, forward_context, paged_attention, steps_of
from engine.attention.row_attention import RowAttention
from engine.attention.rows import Rows
from engine.attention.triton_rows import find_attention
from engine.cache.kv_cache import CachedSequence, KVCache
from engine.cpu.levels import HeadStates, levels_of
from engine.cpu.rows import on_cpu
from engine.cuda.graphs import CudaRecorder, Record, RowSteps
from engine.cuda.recorded_levels import recorded_levels
from engine.eagle.cpu_head import pack
from engine.eagle.head import EagleHead
from engine.host.upload import upload
from engine.layers.linear import products
from engine.levels.levels import Levels
from engine.model import kind_and_line
from speculation.messages import FeatureFormat, Features

log = logging.getLogger(__name__)

ROWS_AT_ONCE, SEQUENCES_AT_ONCE = 256, 64
"""Of a forward, so that it is never computed in pieces as long as drafts lie no deeper than those of a launch: what a
row leads to must not be written before all that read a true state there have done so."""

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
MAX_FEATURE = 1e6
"""Larger ones are none that a head makes."""


class HeadChunk(NamedTuple):
    """Rows to append to one sequence, as pending nodes. None hangs from another one here whose state it has to read."""

    sequence: CachedSequence
    """``first`` is the position of the token of its first row, which is one behind the row's state."""
    tokens: Sequence[int]
    """The token of each row."""
    states: Mapping[int, Tensor]
    """True states, ``[D]``, of rows by their index in ``tokens``: what :meth:`engine.eagle.head.EagleHead.fuse` made of
    the target's. Others read what the row they hang from leads to."""
    parents: Sequence[int]
    """As of :class:`engine.forward.Chunk`."""
    rows: Sequence[int]
    """Whose logits are wanted, ascending indices into ``tokens``."""


def row_bytes(head: EagleHead) -> int:
    """What a row takes in the cache: keys, values, and the state that it leads to."""
    config = head.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim + config.hidden_size
    return numbers * head.norm.weight.itemsize


class CachedHead:
    """Computes rows of a head; the books of the cache are the caller's to keep."""

    def __init__(
        self,
        head: EagleHead,
        capacity: int,
        context: int | None = None,
        *,
        attention: RowAttention | None = None,
        record: Record | None = None,
    ) -> None:
        """``capacity``: rows that fit, of all sessions together; ``context``: of the longest, at most.

        ``attention``, ``record``: how rows are attended to, and forwards recorded; None: as is best on the device.
        """
        config, weight = head.config, head.norm.weight
        self.head = head
        attention = attention or _attention(head, context or capacity)
        by_rows = attention.replayed
        self.cache = KVCache(
            config.num_hidden_layers,
            capacity,
            block=attention.page,
            spare=ROWS_AT_ONCE if by_rows else 0,
            kernels=by_rows,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.next_SD = self.cache.store.beside(config.hidden_size)
        """What the row in each slot leads to; when a forward begins, the true state in its place where it is known."""
        self._first_TD = self.next_SD.new_zeros(ROWS_AT_ONCE, config.hidden_size)
        """The states of those rows of a forward that hang from none, or from slots that are nobody's: a trial's."""
        context = min(context or self.cache.capacity, self.cache.capacity)
        self._paged = PagedLayers(self.cache.store, attention, config.num_hidden_layers, context)
        self._packed = pack(head) if type(head) is EagleHead and weight.device.type == "cpu" and not by_rows else None
        self._says_all = head.target_ids.tolist() == list(range(config.vocab_size))
        self._layers: list[Any] = [SimpleNamespace(layer_idx=layer) for layer in range(config.num_hidden_layers)]
        self._steps = self._recorded(record or CudaRecorder(weight.device)) if by_rows else None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.cache.store.device

    def _recorded(self, record: Record) -> RowSteps | None:
        """Its forwards, recorded; None where the kernels cannot compute it, which then is done without them."""
        steps = RowSteps(self._compute, self._paged, record)
        try:
            steps.warm_up()
        except Exception as failure:  # whatever kernels say of sizes that they do not know
            log.warning("an EAGLE head is computed without kernels of its own: %s", kind_and_line(failure))
            self._paged = replace(self._paged, attention=RowAttention(page=self._paged.attention.page))
            return None
        return steps

    @torch.inference_mode()
    def run(self, chunks: Sequence[HeadChunk], vocabulary: int) -> Tensor:
        """What it says of the target's tokens below ``vocabulary`` behind wanted rows, ``[R, V]``; see :meth:`said`.

        The rows become pending nodes of their sequences, at most :data:`ROWS_AT_ONCE` of :data:`SEQUENCES_AT_ONCE`.
        Raises :class:`engine.cache.kv_cache.CacheFull`; then, as after any other exception, no sequence has changed.
        """
        appended: list[tuple[CachedSequence, int]] = []
        tokens: list[int] = []
        wanted: list[int] = []
        try:
            for chunk in chunks:
                chunk.sequence.append(chunk.parents)
                appended.append((chunk.sequence, len(chunk.tokens)))
                wanted += [len(tokens) + row for row in chunk.rows]
                tokens += chunk.tokens
            assert len(tokens) <= ROWS_AT_ONCE and len(chunks) <= SEQUENCES_AT_ONCE, "rows would be computed in pieces"
            self._move()
            self._place(chunks)
            if self._steps is not None:
                own_RX = self._steps.run(tokens, wanted, appended)
            else:
                ((_, step, tokens_T, positions_T),) = steps_of(tokens, wanted, appended, self._paged)
                own_RX = self._compute(step, tokens_T, positions_T, upload(wanted, self.device))
            return self.said(own_RX, vocabulary)
        except BaseException:
            for sequence, count in appended:
                sequence.retract(count)
            raise

    def _move(self) -> None:
        """As :meth:`engine.step.Engine.run` does: what could not be moved for want of memory is to be moved yet."""
        moves = self.cache.take_moves()
        try:
            self.cache.store.move(moves)
        except BaseException:
            self.cache.moves.note(moves)
            raise

    def said(self, own_RX: Tensor, vocabulary: int) -> Tensor:
        """Logits of tokens, in float32, of those of its outputs; -inf of those it cannot say."""
        if self._says_all:
            return own_RX[:, :vocabulary].float()
        return self.head.by_token(own_RX.float())[:, :vocabulary]

    def levels(self, vocabulary: int, *, width: int, children: int) -> Levels | None:
        """What expands several levels in one launch; None where that cannot be had."""
        head, sizes = self.head, {"width": width, "children": children}
        if self._packed is not None:
            states = HeadStates(self.next_SD, head.config.norm_output, None if self._says_all else head.target_ids)
            return levels_of(head, self._packed, head.lm_head, self._paged, vocabulary, states, **sizes)
        if self._steps is None:
            return None
        by_token = None if self._says_all else head.by_token
        return recorded_levels(self._steps, vocabulary, torch.float32, by_token=by_token, **sizes)

    def _place(self, chunks: Sequence[HeadChunk]) -> None:
        """Put true states where rows will read them."""
        states: dict[int, Tensor] = {}  # by slot
        number = 0
        for sequence, tokens, known, parents, _ in chunks:
            for row, parent in enumerate(parents):
                state_D = known.get(row)
                if parent < 0 and not sequence.length:
                    self._first_TD[number + row] = 0 if state_D is None else state_D
                elif state_D is not None:
                    slot = sequence.pending_slots[parent] if parent >= 0 else sequence.home(sequence.length - 1)
                    states[slot] = state_D
            number += len(tokens)
        if states:
            slots_N = upload([*states], self.device)
            self.next_SD.index_copy_(0, slots_N, torch.stack([*states.values()]).to(self.next_SD))

    @torch.inference_mode()
    def _compute(self, step: Step, tokens_T: Tensor, positions_T: Tensor, wanted_R: Tensor) -> Tensor:
        """What its outputs say behind the wanted rows, ``[R, X]``: what may be recorded."""
        with forward_context(step), products(invariant=False):
            normed_TD = self.normed(step, tokens_T, positions_T)
            return self.head.logits(normed_TD.index_select(0, wanted_R))

    def normed(self, step: Step, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """The normed states of rows, ``[T, D]``; what they lead to is kept."""
        states_TD = self.states(step)
        next_TD, normed_TD = self._forward(self.head.embed(tokens_T), states_TD, positions_T - 1)
        self.next_SD.index_copy_(0, step.slots_T, next_TD.to(self.next_SD))
        return normed_TD

    def states(self, step: Step) -> Tensor:
        """What the rows of a step read, ``[T, D]``."""
        above_T = slots_above(step.rows, self._paged.attention.page).to(self.device)
        first_T = (step.rows.keys_T == 1).to(self.device) | (above_T >= self.cache.store.slots)
        return torch.where(first_T[:, None], self._first_TD[: len(above_T)], self.next_SD.index_select(0, above_T))

    def _forward(self, embeddings_ND: Tensor, states_ND: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`engine.eagle.head.EagleHead.forward`."""
        if self._packed is None:
            return self.head(embeddings_ND, states_ND, positions_N, self._attend)  # type: ignore[no-any-return]
        cos_N1E, sin_N1E = self.head.rotation(positions_N, states_ND)
        hidden_ND, normed_ND = self._packed.states(embeddings_ND, states_ND, (cos_N1E[:, 0], sin_N1E[:, 0]))
        return (normed_ND if self.head.config.norm_output else hidden_ND).to(states_ND), normed_ND

    def _attend(self, layer: int, q_NQE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
        q_1QNE, k_1KNE, v_1KNE = (x.transpose(0, 1)[None] for x in (q_NQE, k_NKE, v_NKE))
        found_1NQE, _ = paged_attention(self._layers[layer], q_1QNE, k_1KNE, v_1KNE, None)
        return found_1NQE[0]


def _attention(head: EagleHead, context: int) -> RowAttention:
    """What computes it best where the head is."""
    weight, heads_per_key = head.norm.weight, head.config.num_attention_heads // head.config.num_key_value_heads
    found = find_attention(context, heads_per_key, weight.dtype, weight.device) or on_cpu(heads_per_key, weight.device)
    return found or RowAttention()


def slots_above(rows: Rows, page: int) -> Tensor:
    """The slot of the row that each row hangs from, int64 ``[T]``; 0 where there is none, as of padding."""
    last_T, home_T = rows.keys_T - 2, rows.home_T  # it is the last but one that a row sees
    at_home_T, place_T = last_T < home_T, last_T.clamp(min=0)
    where_T = torch.where(at_home_T, rows.pages_T + place_T // page, rows.branch_T + place_T - home_T)
    number_T = rows.numbers_F[where_T.long().clamp_(0, len(rows.numbers_F) - 1)]
    slot_T = torch.where(at_home_T, number_T * page + place_T % page, number_T)
    return slot_T.long().masked_fill_(last_T < 0, 0)


def packed(states_ND: Tensor, wanted: FeatureFormat) -> tuple[bytes, bytes]:
    """The numbers of ``[N, D]`` in that format, and its scales if it has any."""
    if wanted is FeatureFormat.BF16:
        return _bytes(states_ND.to(torch.bfloat16)), b""
    states_ND = states_ND.float()
    scales_N1 = states_ND.abs().amax(-1, keepdim=True).clamp_min(1e-12) / MAX_FP8
    return _bytes((states_ND / scales_N1).to(FP8)), _bytes(scales_N1)


def unpacked(features: Features, width: int, dtype: torch.dtype) -> Tensor:
    """``[N, D]`` on the CPU. Raises ValueError if they are no features of a head of this ``width``."""
    if features.width != width:
        raise ValueError(f"features of {features.width} numbers a token, for a head of {width}")
    own = torch.bfloat16 if features.format is FeatureFormat.BF16 else FP8
    states_ND = torch.frombuffer(bytearray(features.values), dtype=own).view(-1, width).float()
    if features.scales:
        states_ND *= torch.frombuffer(bytearray(features.scales), dtype=torch.float32)[:, None]
    if not bool((states_ND.abs() <= MAX_FEATURE).all()):  # NaN is not
        raise ValueError("features that are no numbers, or beyond all bounds")
    return states_ND.to(dtype)


def _bytes(numbers: Tensor) -> bytes:
    return numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes()
