"""Medusa heads: what a target drafts with by itself, and the layout they are published in.

A head (Cai et al. 2024, arXiv:2401.10774) reads the hidden state that the output layer reads: where that one gives the
token at position p, head i (from 0) guesses the one at p + 1 + i. It is a chain of residual blocks, x + SiLU(W x + b),
and an output layer of its own. A checkpoint is a folder with

    config.json             medusa_num_heads, medusa_num_layers (blocks of a head)
    medusa_lm_head.pt, or medusa_lm_head.safetensors
                            {head}.{block}.linear.weight and .bias, {head}.{blocks}.weight for the output layer

as the authors' training writes it; the names may follow ``medusa_head.`` or ``medusa_heads.``. In a ``.pt`` file heads
may share one output layer, which is then stored, and multiplied with, once. Whatever does not fit the target is refused
with one line.

Tensor legend: N rows, H heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.head_files import CONFIG, Tensors, check_names, check_numbers, read_config, read_tensors, ready, write
from engine.model import Model, ModelError

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MAX_HEADS, MAX_LAYERS = 32, 16
PREFIX = re.compile(r"^(module\.)?(medusa_heads?\.)?")


class MedusaHeads(nn.Module):
    """All heads of a target. Fresh ones are as the paper starts from: blocks that change nothing."""

    def __init__(self, hidden: int, vocabulary: int, heads: int, layers: int, *, shared: bool = False) -> None:
        """``layers``: residual blocks of a head; ``shared``: all heads have one output layer.

        Output layers are left as torch fills them.
        """
        super().__init__()
        self.hidden, self.vocabulary, self.layers = hidden, vocabulary, layers
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers)) for _ in range(heads)
        )
        self.outputs = nn.ModuleList(nn.Linear(hidden, vocabulary, bias=False) for _ in range(1 if shared else heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def __len__(self) -> int:
        return len(self.blocks)

    def head(self, number: int, hidden_ND: Tensor) -> Tensor:
        """What one head says, ``[..., V]``."""
        logits_NV: Tensor = self._output(number)(self._through_blocks(number, hidden_ND))
        return logits_NV

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """What all heads say, ``[H, N, V]``."""
        if len(self.outputs) > 1:
            return torch.stack([self.head(number, hidden_ND) for number in range(len(self))])
        x_HND = torch.stack([self._through_blocks(number, hidden_ND) for number in range(len(self))])
        logits_HNV: Tensor = self._output(0)(x_HND)
        return logits_HNV

    def tensors(self) -> Tensors:
        """All weights by their published names; a shared output layer is one tensor under several."""
        state = self.state_dict()
        return {name: state[own] for name, own in _names(len(self), self.layers, shared=len(self.outputs) == 1).items()}

    def _through_blocks(self, number: int, x_ND: Tensor) -> Tensor:
        blocks: Any = self.blocks[number]
        for linear in blocks:
            x_ND = x_ND + silu(linear(x_ND))
        return x_ND

    def _output(self, number: int) -> nn.Module:
        return self.outputs[number if len(self.outputs) > 1 else 0]


def save(heads: MedusaHeads, folder: Path, base: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint of heads trained for the model ``base``. Raises OSError."""
    stored: dict[int, Tensor] = {}
    tensors = {
        name: stored.setdefault(tensor.data_ptr(), tensor.to("cpu", dtype, copy=True))
        for name, tensor in heads.tensors().items()
    }
    config = {"medusa_num_heads": len(heads), "medusa_num_layers": heads.layers, "base_model_name_or_path": base}
    write(folder, config, FILES[1], lambda file: torch.save(tensors, file))


def load_heads(path: str, model: Model) -> MedusaHeads:
    """The heads in the folder ``path``, ready to run beside ``model``. Raises :class:`engine.model.ModelError`."""
    config = model.config.get_text_config(decoder=True)
    heads = read(Path(path).expanduser())
    hidden, rows = heads.hidden, heads.vocabulary
    if hidden != config.hidden_size:
        raise ModelError(
            f"{path}: these heads read hidden states of {hidden} numbers, {model.name} has {config.hidden_size}; "
            "give heads that were trained for it"
        )
    if not model.vocabulary <= rows <= config.vocab_size:
        raise ModelError(
            f"{path}: these heads know {rows} tokens, {model.name} has {config.vocab_size}; "
            "give heads that were trained for it"
        )
    return ready(heads, model.device, model.dtype)


def read(folder: Path) -> MedusaHeads:
    """The checkpoint in ``folder``, as stored. Raises :class:`engine.model.ModelError`."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give the one that holds {CONFIG} and {FILES[1]}")
    count, layers = _counts(folder)
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise ModelError(f"{folder}: has no weights; they must be in {' or '.join(FILES)}")
    tensors = {PREFIX.sub("", name): tensor for name, tensor in read_tensors(file, "Medusa heads").items()}
    check_names(file, tensors, _names(count, layers), f"{CONFIG} tells of {count} heads of {layers} blocks")
    outputs = [tensors[f"{head}.{layers}.weight"] for head in range(count)]
    if outputs[0].dim() != 2:
        raise ModelError(f"{file}: tensor '0.{layers}.weight' has the shape {list(outputs[0].shape)}; it must have two")
    vocabulary, hidden = outputs[0].shape
    shared = count > 1 and len({(output.data_ptr(), output.shape) for output in outputs}) == 1
    with torch.device("meta"):
        heads = MedusaHeads(hidden, vocabulary, count, layers, shared=shared)
    check_numbers(file, tensors, heads.tensors(), "beside the output layer of head 0")
    own_names = _names(count, layers, shared=shared)
    heads.load_state_dict({own: tensors[name] for name, own in own_names.items()}, assign=True)
    return heads


def _names(heads: int, layers: int, *, shared: bool = False) -> dict[str, str]:
    """What each tensor is called by the authors, and here."""
    blocks = {
        f"{head}.{layer}.linear.{part}": f"blocks.{head}.{layer}.{part}"
        for head in range(heads)
        for layer in range(layers)
        for part in ("weight", "bias")
    }
    return blocks | {f"{head}.{layers}.weight": f"outputs.{0 if shared else head}.weight" for head in range(heads)}


def _counts(folder: Path) -> tuple[int, int]:
    """How many heads there are, and how many residual blocks each has."""
    config, file, found = read_config(folder, "a folder of Medusa heads"), folder / CONFIG, []
    for key, minimum, maximum in (("medusa_num_heads", 1, MAX_HEADS), ("medusa_num_layers", 0, MAX_LAYERS)):
        value = config.get(key) if isinstance(config, dict) else None
        if value is None:
            raise ModelError(f"{file}: has no {key}; it must say how the heads are built, as their training writes it")
        if type(value) is not int or not minimum <= value <= maximum:
            raise ModelError(f"{file}: {key} must be a whole number from {minimum} to {maximum}, got {value!r}")
        found.append(value)
    return found[0], found[1]
