"""Checkpoints of what drafts from a target's hidden states, whichever heads they are: read, checked, written, placed.

A checkpoint is a folder with config.json and a file of tensors by name. Whatever is wrong with it ends as one line that
names the file. What a configuration and its tensors mean is :mod:`engine.medusa`'s and :mod:`engine.eagle`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.cpu.stack import pack_head
from engine.model import ModelError, first_line

CONFIG = "config.json"

Tensors = dict[str, Tensor]
Heads = TypeVar("Heads", bound=nn.Module)


def read_config(folder: Path, heads: str) -> Any:
    """What config.json says of ``heads``. Raises :class:`engine.model.ModelError`."""
    file = folder / CONFIG
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: not {heads}, it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {first_line(error)}") from error


def read_tensors(file: Path, heads: str) -> Tensors:
    """All tensors of a file, safetensors or torch's, by name. Raises :class:`engine.model.ModelError`."""
    try:
        loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # whatever the two libraries raise for what is not theirs
        raise ModelError(f"{file}: cannot be read: {first_line(error)}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ModelError(f"{file}: must hold tensors by name, as the training of {heads} writes them")
    return loaded


def check_names(file: Path, tensors: Tensors, expected: Collection[str], told: str) -> None:
    """Raise :class:`engine.model.ModelError` unless these are the tensors of config.json, which ``told`` sums up."""
    if missing := sorted(set(expected) - tensors.keys()):
        raise ModelError(f"{file}: lacks {len(missing)} tensors, first {missing[0]!r}; {told}")
    if extra := sorted(tensors.keys() - set(expected)):
        raise ModelError(f"{file}: has {len(extra)} tensors too many, first {extra[0]!r}; {told}")


def check_numbers(file: Path, tensors: Tensors, expected: Mapping[str, Tensor], by: str) -> None:
    """Raise :class:`engine.model.ModelError` for other shapes than these, which follow from ``by``, or no numbers."""
    for name, wanted in expected.items():
        tensor = tensors[name]
        if tensor.shape != wanted.shape:
            wrong = f"has the shape {list(tensor.shape)}; {by} it must have {list(wanted.shape)}"
        elif not tensor.is_floating_point():
            wrong = f"holds {tensor.dtype}; it must hold floating-point numbers"
        elif not bool(tensor.isfinite().all()):
            wrong = "holds NaN or infinite values"
        else:
            continue
        raise ModelError(f"{file}: tensor {name!r} {wrong}")


def write(folder: Path, config: Mapping[str, Any], name: str, save: Callable[[Path], object]) -> None:
    """Write config.json, and have ``save`` write the file ``name``, which is there whole or not. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    fresh = folder / f".{name}.new"
    save(fresh)
    fresh.replace(folder / name)


def placed(module: Heads, dtype: torch.dtype, device: torch.device | None = None) -> Heads:
    """The module, moved, its parameters cast.

    Buffers stay as precise as they are: rounded to bfloat16, the frequencies by which positions are told apart are
    others.
    """
    nn.Module.to(module, device=device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def ready(heads: Heads, device: torch.device, dtype: torch.dtype) -> Heads:
    """The heads as they are served: there, in that format; packed on a CPU."""
    placed(heads, dtype, device).eval().requires_grad_(False)
    if device.type == "cpu":
        pack_head(heads)
    return heads
