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

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.cpu.stack import pack_head
from engine.model import Model, ModelError, first_line

CONFIG = "config.json"
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MAX_HEADS, MAX_LAYERS = 32, 16
PREFIX = re.compile(r"^(module\.)?(medusa_heads?\.)?")

Tensors = dict[str, Tensor]


class MedusaHeads(nn.Module):
    """All heads of a target. Fresh ones are as the paper starts from: blocks that change nothing."""

    def __init__(self, hidden: int, vocabulary: int, heads: int, layers: int, *, shared: bool = False) -> None:
        """``shared``: all heads have one output layer. Output layers are left as torch fills them."""
        super().__init__()
        self.hidden, self.vocabulary = hidden, vocabulary
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers)) for _ in range(heads)
        )
        self.outputs = nn.ModuleList(nn.Linear(hidden, vocabulary, bias=False) for _ in range(1 if shared else heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def layers(self) -> int:
        """Residual blocks of a head."""
        first = self.blocks[0]
        assert isinstance(first, nn.ModuleList)
        return len(first)

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
        named: Tensors = {}
        for head in range(len(self)):
            for layer in range(self.layers):
                linear: Any = self.blocks.get_submodule(f"{head}.{layer}")
                named[f"{head}.{layer}.linear.weight"] = linear.weight.detach()
                named[f"{head}.{layer}.linear.bias"] = linear.bias.detach()
            output: Any = self._output(head)
            named[f"{head}.{self.layers}.weight"] = output.weight.detach()
        return named

    def _through_blocks(self, number: int, x_ND: Tensor) -> Tensor:
        blocks: Any = self.blocks[number]
        for linear in blocks:
            x_ND = x_ND + silu(linear(x_ND))
        return x_ND

    def _output(self, number: int) -> nn.Module:
        return self.outputs[number if len(self.outputs) > 1 else 0]


def save(heads: MedusaHeads, folder: Path, base: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint of heads trained for the model ``base``. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[int, Tensor] = {}
    tensors = {
        name: stored.setdefault(tensor.data_ptr(), tensor.to("cpu", dtype, copy=True))
        for name, tensor in heads.tensors().items()
    }
    known = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.layers,
        "base_model_name_or_path": base,
    }
    (folder / CONFIG).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    fresh = folder / f".{FILES[1]}.new"
    torch.save(tensors, fresh)
    fresh.replace(folder / FILES[1])


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
    ready = heads.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
    if model.device.type == "cpu":
        pack_head(ready)
    return ready


def read(folder: Path) -> MedusaHeads:
    """The checkpoint in ``folder``, as stored. Raises :class:`engine.model.ModelError`."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; give the one that holds {CONFIG} and {FILES[1]}")
    count, layers = _counts(folder / CONFIG)
    file, tensors = _read_tensors(folder)
    _check_names(file, tensors, count, layers)
    outputs = [tensors[f"{head}.{layers}.weight"] for head in range(count)]
    if outputs[0].dim() != 2:
        raise ModelError(f"{file}: tensor '0.{layers}.weight' has the shape {list(outputs[0].shape)}; it must have two")
    vocabulary, hidden = outputs[0].shape
    shared = count > 1 and len({(output.data_ptr(), output.shape) for output in outputs}) == 1
    with torch.device("meta"):
        heads = MedusaHeads(hidden, vocabulary, count, layers, shared=shared)
    for name, expected in heads.tensors().items():
        _check_numbers(file, name, tensors[name], expected)
    blocks = {
        f"blocks.{head}.{layer}.{part}": tensors[f"{head}.{layer}.linear.{part}"]
        for head in range(count)
        for layer in range(layers)
        for part in ("weight", "bias")
    }
    last = {f"outputs.{head}.weight": output for head, output in enumerate(outputs[:1] if shared else outputs)}
    heads.load_state_dict(blocks | last, assign=True)
    return heads


def _counts(file: Path) -> tuple[int, int]:
    """How many heads there are, and how many residual blocks each has."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent}: not a folder of Medusa heads, it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {first_line(error)}") from error
    found = []
    for key, minimum, maximum in (("medusa_num_heads", 1, MAX_HEADS), ("medusa_num_layers", 0, MAX_LAYERS)):
        value = config.get(key) if isinstance(config, dict) else None
        if value is None:
            raise ModelError(f"{file}: has no {key}; it must say how the heads are built, as their training writes it")
        if type(value) is not int or not minimum <= value <= maximum:
            raise ModelError(f"{file}: {key} must be a whole number from {minimum} to {maximum}, got {value!r}")
        found.append(value)
    return found[0], found[1]


def _read_tensors(folder: Path) -> tuple[Path, Tensors]:
    """All tensors by their names without prefixes, and the file that holds them."""
    file = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise ModelError(f"{folder}: has no weights; they must be in {' or '.join(FILES)}")
    try:
        loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # whatever the two libraries raise for what is not theirs
        raise ModelError(f"{file}: cannot be read: {first_line(error)}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ModelError(f"{file}: must hold tensors by name, as the training of Medusa heads writes them")
    return file, {PREFIX.sub("", name): tensor for name, tensor in loaded.items()}


def _check_names(file: Path, tensors: Tensors, heads: int, layers: int) -> None:
    expected = {f"{head}.{layers}.weight" for head in range(heads)}
    expected |= {
        f"{head}.{layer}.linear.{part}"
        for head in range(heads)
        for layer in range(layers)
        for part in ("weight", "bias")
    }
    told = f"{CONFIG} tells of {heads} heads of {layers} blocks"
    if missing := sorted(expected - tensors.keys()):
        raise ModelError(f"{file}: lacks {len(missing)} tensors, first {missing[0]!r}; {told}")
    if extra := sorted(tensors.keys() - expected):
        raise ModelError(f"{file}: has {len(extra)} tensors too many, first {extra[0]!r}; {told}")


def _check_numbers(file: Path, name: str, tensor: Tensor, expected: Tensor) -> None:
    if tensor.shape != expected.shape:
        wanted = f"beside the output layer of head 0 it must have {list(expected.shape)}"
        raise ModelError(f"{file}: tensor {name!r} has the shape {list(tensor.shape)}; {wanted}")
    if not tensor.is_floating_point():
        raise ModelError(f"{file}: tensor {name!r} holds {tensor.dtype}; it must hold floating-point numbers")
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{file}: tensor {name!r} holds NaN or infinite values")
