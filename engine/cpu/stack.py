"""The decoder layers of a recognised model on a CPU: all of a step in one call of :mod:`engine.cpu.library`.

Decides how the weights are held: packed for that call, each in place of the model's own. Numbers between products are
float32, whatever the weights are; so a token's logits are nearer to the weights' than where each operation rounds.

Tensor legend: T tokens, D hidden size, E head size, O outputs, I inputs.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention import Step, current_step
from engine.cache.kv_store import KVStore
from engine.cpu.library import DTYPES, CLayer, CRows, CStack, Library, find_library
from engine.cpu.rows import CpuRows, described
from engine.cpu.thread_choice import ThreadChoice
from engine.host.memory import collapse
from engine.layers.fused import FAMILIES, FusedLayer, FusedStack, Unrecognised, fuse, unfuse
from engine.layers.linear import has_tiles, pack_linears, packs_bfloat16
from engine.parallel.shards import plain_linear


class RowLinear(nn.Module):
    """``x @ weight.T + bias`` with a packed weight, each row added up in the same order whatever the others."""

    def __init__(self, library: Library, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library = library
        self.packed = packed(library, linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.weight = linear.weight.new_empty(0)
        """Empty, for models that ask for its dtype; the numbers are packed."""

    def restored(self) -> nn.Linear:
        """What it was made of."""
        weight_OI = self._library.unpack(self.packed, self.out_features)
        return plain_linear(weight_OI, None if self.bias is None else self.bias.to(weight_OI.dtype))

    def forward(self, x_NI: Tensor) -> Tensor:
        """``[..., I] -> [..., O]``, in the dtype of ``x_NI``."""
        flat_TI = x_NI.reshape(-1, self.in_features).float().contiguous()
        found_TO = self._library.product(self.packed, self.bias, self.out_features, flat_TI)
        return found_TO.to(x_NI.dtype).view(*x_NI.shape[:-1], self.out_features)


def pack_head(module: nn.Module) -> None:
    """Replace every linear layer inside ``module``, which drafts beside a model and need not be exact, by a faster one.

    That is oneDNN's, or where it has none for bfloat16 (without AVX-512, torch multiplies a number at a time) ours.
    """
    library = None if packs_bfloat16() else find_library()
    for parent in module.modules():
        for name, child in parent.named_children():
            if library is None or type(child) is not nn.Linear or child.weight.dtype != torch.bfloat16:
                continue
            if child.in_features % library.width == 0:
                setattr(parent, name, RowLinear(library, child))
    pack_linears(module)


def packed(library: Library, weight_OI: Tensor) -> Tensor:
    """A weight as products read it, in huge pages where there are some."""
    found = library.pack(weight_OI)
    collapse(found.data_ptr(), found.nbytes)
    return found


class CpuStack(FusedStack):
    """All decoder layers and the final norm, in the place of one decoder layer."""

    def __init__(self, stock: Any, library: Library) -> None:
        """``stock``: as :class:`.FusedStack` takes it.

        Raises :class:`engine.layers.fused.Unrecognised` for sizes that are not computed here; then nothing has changed.
        """
        if reason := obstacle(stock.config, library.width):
            raise Unrecognised(reason)
        super().__init__(stock)
        self.library, self._threads = library, ThreadChoice()
        self._store: weakref.ref[KVStore] | None = None
        self._vectors: list[Tensor] = []
        self._packed: list[tuple[list[nn.Linear], Tensor, bool]] = []
        first = self.layers[0]
        self._of_layers = (CLayer * len(self.layers))(*map(self._layer, self.layers, stock.layers))
        self.described = CStack(
            layers=self._of_layers,
            norm=self._kept(self.norm.weight),
            eps=self.norm.eps,
            count=len(self.layers),
            hidden=stock.config.hidden_size,
            query_heads=first.heads,
            key_heads=first.key_heads,
            head_size=first.head_size,
            value_size=first.head_size,
            intermediate=stock.config.intermediate_size,
            half=self.layers[0].output.weight.dtype == torch.bfloat16,
        )
        for parameter in (*stock.layers.parameters(), *stock.norm.parameters()):
            parameter.data = parameter.data.clone()  # what is left would keep the checkpoint mapped

    def forward(
        self,
        hidden_1TD: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """As transformers calls a decoder layer, with all tokens of the step in one row; ``[1, T, D]``."""
        step = current_step()
        assert len(hidden_1TD) == 1 and attention_mask is None, "only packed steps"
        self.reads(step.store)
        count, rows = hidden_1TD.shape[1], described(step.rows, step.attention.page)
        states_TLD = self._wanted(step, rows)
        hidden_TD = hidden_1TD[0].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        found_TD = self.compute(rows, hidden_TD, (position_embeddings[0][0], position_embeddings[1][0]))
        step.calls = [calls + 1 for calls in step.calls]
        if step.tap is not None and states_TLD is not None:
            step.tap.room(count).copy_(states_TLD)
        return found_TD.to(hidden_1TD.dtype)[None]

    def compute(
        self, rows: CRows, hidden_TD: Tensor, angles_TE: tuple[Tensor, Tensor], embeddings_TD: Tensor | None = None
    ) -> Tensor:
        """See :meth:`.Library.step`; angles may have any format."""
        angles_TE = (angles_TE[0].float().contiguous(), angles_TE[1].float().contiguous())
        threads, started = self._threads.choose(rows.count), time.perf_counter()
        found_TD = self.library.step(self.described, rows, hidden_TD, angles_TE, threads, embeddings_TD)
        self._threads.observe(rows.count, threads, time.perf_counter() - started)
        return found_TD

    def _wanted(self, step: Step, rows: CRows) -> Tensor | None:
        """Where the states between layers are written, ``[T, L, D]`` in float32; None if none are wanted."""
        if step.tap is None:
            return None
        layers = step.tap.layers
        states_TLD = torch.empty(rows.count, len(layers), self.described.hidden)
        rows.kept, rows.states = (ctypes.c_int * len(layers))(*layers), states_TLD.data_ptr()
        rows.kept_count = len(layers)
        return states_TLD

    def restore(self) -> tuple[nn.ModuleList, nn.Module]:
        """The layers and the norm that this stands for, with their weights."""
        for parts, packed_PIW, gated in self._packed:
            sizes = [part.out_features for part in parts]
            weight_OI = self.library.unpack(packed_PIW, sum(sizes))
            plain_OI = self._apart(weight_OI) if gated else weight_OI
            for part, own_OI in zip(parts, torch.split_with_sizes(plain_OI, sizes), strict=True):
                part.weight.data = own_OI
        return super().restore()

    def reads(self, store: KVStore) -> None:
        """Read and write this cache from now on."""
        for layer, of_layer in zip(self.layers, self._of_layers, strict=True):
            of_layer.window = layer.sliding_window or 0
        if self._store is not None and self._store() is store:
            return
        for index, (layer, of_layer) in enumerate(zip(self.layers, self._of_layers, strict=True)):
            keys_SHE, values_SHE = store.layer(index, layer.key_heads, layer.head_size, layer.head_size)
            of_layer.keys, of_layer.values = keys_SHE.data_ptr(), values_SHE.data_ptr()
        self._store = weakref.ref(store)

    def _kept(self, vector: Tensor | None) -> int | None:
        """Where a vector lies that the library reads in float32; it stays."""
        if vector is None:
            return None
        self._vectors.append(vector.detach().to(torch.float32, copy=True).contiguous())
        return self._vectors[-1].data_ptr()

    def _layer(self, layer: FusedLayer, stock: Any) -> CLayer:
        attention, mlp = stock.self_attn, stock.mlp
        norms = {"input": layer.input_norm, "mlp": layer.mlp_norm, "query": layer.query_norm, "key": layer.key_norm}
        biases: list[Tensor | None] = [linear.bias for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]  # type: ignore[misc]
        qkv, output, gate_up, down = biases
        return CLayer(
            qkv=self._weight(layer.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
            output=self._weight(layer.output, [attention.o_proj]),
            gate_up=self._weight(layer.gate_up, [mlp.gate_proj, mlp.up_proj], gated=True),
            down=self._weight(layer.down, [mlp.down_proj]),
            qkv_bias=self._kept(qkv),
            output_bias=self._kept(output),
            gate_up_bias=self._kept(None if gate_up is None else self._in_turn(gate_up)),
            down_bias=self._kept(down),
            **{f"{name}_norm": self._kept(norm.weight) for name, norm in norms.items() if norm is not None},
            **{f"{name}_eps": norm.eps for name, norm in norms.items() if norm is not None},
            scaling=layer.scaling,
            gelu=layer.activation == "gelu_tanh",
        )

    def _weight(self, linear: Any, parts: list[nn.Linear], *, gated: bool = False) -> int:
        """Where the packed weights of ``linear`` lie, which takes the place of its own and of those of its parts."""
        weight_OI = linear.weight.detach()
        packed_PIW = packed(self.library, self._in_turn(weight_OI) if gated else weight_OI)
        self._packed.append((parts, packed_PIW, gated))
        for each in (linear, *parts):
            each.weight.data = weight_OI.new_empty(0)
        return packed_PIW.data_ptr()

    def _in_turn(self, rows_O: Tensor) -> Tensor:
        """Gate and up as panels hold them: a vector of the one, a vector of the other."""
        shape = rows_O.shape[1:]
        return rows_O.reshape(2, -1, self.library.width, *shape).transpose(0, 1).reshape(-1, *shape)

    def _apart(self, rows_O: Tensor) -> Tensor:
        """What :meth:`_in_turn` was given."""
        shape = rows_O.shape[1:]
        return rows_O.reshape(-1, 2, self.library.width, *shape).transpose(0, 1).reshape(-1, *shape)


def obstacle(config: Any, width: int) -> str:
    """What of a model of this configuration is not computed here; empty if all is."""
    sizes = (
        ("heads", getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, 2 * width),
        ("a hidden size", config.hidden_size, width),
        ("an intermediate size", config.intermediate_size, width),
    )
    return next((f"{name} of {size}, no multiple of {unit}" for name, size, unit in sizes if size % unit), "")


def widens(config: Any) -> bool:
    """Whether a model of this configuration is stored in bfloat16, and its layers would be computed here from that."""
    if getattr(config, "quantization_config", None):
        return False
    config = config.get_text_config(decoder=True)
    if config.dtype != torch.bfloat16 or config.model_type not in FAMILIES or has_tiles():
        return False
    library = find_library()
    return library is not None and not obstacle(config, library.width)


def fuse_on_cpu(module: Any) -> CpuRows:
    """Have a transformers model compute its decoder layers and its output layer here; :func:`unfuse_on_cpu` ends it.

    Raises :class:`engine.layers.fused.Unrecognised`; then nothing has changed.
    """
    if next(module.parameters()).dtype == torch.bfloat16 and has_tiles():
        raise Unrecognised("oneDNN multiplies bfloat16 in tiles on this processor")
    library = find_library()
    if library is None:
        raise Unrecognised("the C++ for them is not there")
    if any(type(weight.data) is not Tensor for weight in module.parameters()):
        raise Unrecognised("its weights are quantised")
    if reason := fuse(module, DTYPES, lambda base: CpuStack(base, library)):
        raise Unrecognised(reason)
    head = module.get_output_embeddings()
    for name, child in module.named_children():
        if child is head and type(head) is nn.Linear:
            setattr(module, name, RowLinear(library, head))
    first = module.base_model.layers[0].layers[0]
    return CpuRows(library, first.heads // first.key_heads, all_layers=True)


def unfuse_on_cpu(module: Any) -> None:
    """Have it compute as transformers does again, with the same weights."""
    unfuse(module)
    for name, child in module.named_children():
        if isinstance(child, RowLinear):
            setattr(module, name, child.restored())
