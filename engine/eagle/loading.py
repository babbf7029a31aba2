"""Reads and writes EAGLE-3 checkpoints, and puts what they leave to the target in its place.

A checkpoint is a folder with config.json (:mod:`engine.eagle.config`) and ``*.safetensors`` or ``pytorch_model*.bin``:

    fc.weight               [D, auxiliary states x target's hidden size]; fc_norm.{i}.weight, input_norm.weight if told
    midlayer.* or layers.{i}.*
                            input_layernorm (on the embedding), hidden_norm (on the state; first layer alone),
                            self_attn.{q,k,v,o}_proj, post_attention_layernorm, mlp.{gate,up,down}_proj
    norm.weight, lm_head.weight [V, D], embed_tokens.weight
    d2t                     [V] integers, offsets: token i of the head is i + d2t[i] of the target; t2d [T] bool

Any of the names may follow ``model.``. The embedding, and an output layer for the target's own vocabulary, may be left
out: they are the target's then. Whatever does not fit is refused with one line.

Tensor legend: D hidden size of the head, H of the target, V draft vocabulary, T the target's vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.eagle.config import CONFIG, EagleConfig
from engine.eagle.head import EagleHead
from engine.model import Model, ModelError, first_line, folder_of, placed

WEIGHTS = "model.safetensors"
PATTERNS = ("*.safetensors", "pytorch_model*.bin")
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
D2T, T2D = "d2t", "t2d"
NOT_NEEDED = re.compile(r"rotary_emb\.|^verifier_|^target_model\.")
"""What some training leaves in: tables that follow from the configuration, and parts of the target."""
TARGETS_NAMES = {
    EMBEDDING: ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
    OUTPUT: ("lm_head.weight", "language_model.lm_head.weight"),
}

Tensors = dict[str, Tensor]
Borrow = Callable[[str], Tensor]
"""The target's own tensor of this name, :data:`EMBEDDING` or :data:`OUTPUT`, ``[T, H]``. Raises ModelError."""


def load_beside(path: str, model: Model) -> EagleHead:
    """The head in the folder ``path``, ready to run beside ``model``. Raises :class:`engine.model.ModelError`."""
    return _ready(read_beside(path, model), model.device, model.dtype)


def read_beside(path: str, model: Model) -> EagleHead:
    """The head in the folder ``path``, as stored, checked against ``model``, some of whose weights it may share."""
    check_fit(path, model)
    folder = Path(path).expanduser()
    return read(folder, lambda name: _of_module(folder, model, name))


def load_alone(path: str, target: str, device: torch.device, dtype: torch.dtype) -> EagleHead:
    """The head in the folder ``path`` without its target, of which only the folder is here. Raises ModelError.

    ``target`` may be empty if the checkpoint leaves nothing to it.
    """
    folder = Path(path).expanduser()
    return _ready(read(folder, lambda name: targets_own(folder, target, name)), device, dtype)


def check_fit(path: str, model: Model) -> None:
    """Raise ModelError for a head of another target than ``model``, by its config.json; it may know padding or not."""
    config, hint = EagleConfig.from_folder(Path(path).expanduser()), "give a head that was trained for it"
    target = model.config.get_text_config(decoder=True)
    if config.target_hidden_size != target.hidden_size:
        told = f"reads hidden states of {config.target_hidden_size} numbers"
        raise ModelError(f"{path}: this head {told}, {model.name} has {target.hidden_size}; {hint}")
    if not model.vocabulary <= config.vocab_size <= target.vocab_size:
        told = f"knows {config.vocab_size} tokens"
        raise ModelError(f"{path}: this head {told}, {model.name} has {target.vocab_size}; {hint}")
    try:
        config.aux_layers_of(model.layers)
    except ModelError as error:
        raise ModelError(f"{path}: {error}; {hint}") from error


def read(folder: Path, borrow: Borrow) -> EagleHead:
    """The checkpoint in ``folder``, as stored; what it lacks of the target's is borrowed. Raises ModelError."""
    config = EagleConfig.from_folder(folder)
    file, tensors = _read_tensors(folder)
    target_ids = _target_ids(file, tensors, config)
    _check_kind(file, tensors, config)
    rotation = _rotation(folder, config)
    with torch.device("meta"):
        head = EagleHead(config)
    head.rotary_emb = rotation
    head.target_ids = target_ids
    if EMBEDDING not in tensors:
        tensors[EMBEDDING] = _borrowed(file, EMBEDDING, config, borrow)
    if OUTPUT not in tensors:
        tied = config.tie_word_embeddings
        whole = tensors[EMBEDDING] if tied else _borrowed(file, OUTPUT, config, borrow)
        if whole.shape[:1] == (config.vocab_size,) and not torch.equal(target_ids, torch.arange(config.vocab_size)):
            whole = whole[target_ids.to(whole.device)]
        tensors[OUTPUT] = whole
    _check_names(file, tensors, head)
    _check_numbers(file, tensors, head)
    head.load_state_dict(tensors, assign=True)
    return head


def save(head: EagleHead, folder: Path, *, embedding: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint in the authors' layout, with or without the embedding. Raises OSError."""
    config = head.config
    tensors = {
        re.sub(r"^layers\.0\.", "midlayer.", name): tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in head.state_dict().items()
        if embedding or name != EMBEDDING
    }
    ids = head.target_ids.cpu()
    tensors[D2T] = ids - torch.arange(len(ids))
    tensors[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    said = config.plain() | {"dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    fresh = folder / f".{WEIGHTS}.new"
    save_file(tensors, fresh, metadata={"format": "pt"})
    fresh.replace(folder / WEIGHTS)  # there whole or not


def _rotation(folder: Path, config: EagleConfig) -> LlamaRotaryEmbedding:
    """A table that follows from the configuration, not weights. Raises ModelError where it leads to no numbers."""
    try:
        rotation = LlamaRotaryEmbedding(config.llama())
        if bool(rotation.inv_freq.isfinite().all()):
            return rotation
        why = "leads to frequencies that are no numbers"
    except Exception as error:  # whatever transformers raises for values that it did not check
        why = first_line(error)
    raise ModelError(f"{folder / CONFIG}: rope_parameters {dict(config.rope_parameters)!r} cannot be used: {why}")


def _read_tensors(folder: Path) -> tuple[Path, Tensors]:
    """All tensors under the names that :class:`EagleHead` gives them, and the file (or folder) that holds them."""
    files = next((found for pattern in PATTERNS if (found := sorted(folder.glob(pattern)))), [])
    if not files:
        raise ModelError(f"{folder}: has no weights; they must be in {WEIGHTS} or pytorch_model.bin")
    tensors: Tensors = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            ours = re.sub(r"^midlayer\.", "layers.0.", re.sub(r"^(module\.)?(model\.)?", "", name))
            if not NOT_NEEDED.search(ours):
                tensors[ours] = tensor
    return files[0] if len(files) == 1 else folder, tensors


def _read_file(file: Path) -> Tensors:
    """All tensors of a file, safetensors or torch's, as they are called there."""
    try:
        loaded = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # whatever the two libraries raise for what is not theirs
        raise ModelError(f"{file}: cannot be read: {first_line(error)}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise ModelError(f"{file}: must hold tensors by name, as the training of an EAGLE-3 head writes them")
    return loaded


def _target_ids(file: Path, tensors: Tensors, config: EagleConfig) -> Tensor:
    """Which of the target's tokens each of the head's is; the two maps are taken out of ``tensors``."""
    offsets, known = tensors.pop(D2T, None), tensors.pop(T2D, None)
    size, vocabulary = config.draft_vocab_size, config.vocab_size
    listed = None
    if known is not None:
        if list(known.shape) != [vocabulary]:
            raise ModelError(f"{file}: tensor {T2D!r} has the shape {list(known.shape)}; it must have [{vocabulary}]")
        listed = known.bool().nonzero().flatten()
    if offsets is None:
        ids = torch.arange(size) if size == vocabulary else listed
        if ids is None or len(ids) != size:
            raise ModelError(
                f"{file}: lacks {D2T!r}, which must say which {size} of the target's {vocabulary} tokens "
                "this head knows"
            )
        return ids
    if list(offsets.shape) != [size] or offsets.is_floating_point():
        told = f"holds {offsets.dtype} of the shape {list(offsets.shape)}"
        raise ModelError(f"{file}: tensor {D2T!r} {told}; it must hold integers, [{size}]")
    ids = torch.arange(size) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(set(ids.tolist())) < size:
        raise ModelError(
            f"{file}: tensor {D2T!r} must hold offsets that lead each of {size} tokens to another below {vocabulary}"
        )
    if listed is not None and not torch.equal(listed, ids.sort().values):
        raise ModelError(f"{file}: {D2T!r} and {T2D!r} tell of different tokens; give the checkpoint as it was trained")
    return ids


def _check_kind(file: Path, tensors: Tensors, config: EagleConfig) -> None:
    """Raise for the weights of a head of another kind, whatever its config.json says."""
    fc, size = tensors.get("fc.weight"), config.hidden_size
    attention = tensors.get("layers.0.self_attn.q_proj.weight")
    old = (
        fc is not None
        and list(fc.shape) == [size, 2 * size]
        and config.aux_states * config.target_hidden_size != 2 * size
    )
    if old or (fc is not None and attention is not None and attention.shape[-1] == size):
        told = "its fc reads an embedding and one state, its layer what comes of them"
        raise ModelError(f"{file}: an EAGLE-1 or EAGLE-2 head: {told}; give one that was trained as EAGLE-3")
    if any(re.match(r"^(medusa_heads?\.)?\d+\.", name) for name in tensors):
        raise ModelError(f"{file}: Medusa heads, not an EAGLE-3 head; train one in their place: paceline align eagle")
    if fc is None and config.num_hidden_layers <= len(
        {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    ):
        raise ModelError(f"{file}: lacks 'fc.weight': a full model or another drafter; give an EAGLE-3 head")


def _check_names(file: Path, tensors: Tensors, head: EagleHead) -> None:
    """Raise unless these are the tensors that follow from config.json."""
    expected, told = head.state_dict(), f"{CONFIG} tells of an EAGLE-3 head of {head.config.num_hidden_layers} layers"
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"{file}: lacks {len(missing)} tensors, first {missing[0]!r}; {told}")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise ModelError(f"{file}: has {len(extra)} tensors too many, first {extra[0]!r}; {told}")


def _check_numbers(file: Path, tensors: Tensors, head: EagleHead) -> None:
    """Raise for other shapes than follow from config.json, or no numbers."""
    for name, wanted in head.state_dict().items():
        tensor = tensors[name]
        if tensor.shape != wanted.shape:
            wrong = f"has the shape {list(tensor.shape)}; by {CONFIG} it must have {list(wanted.shape)}"
        elif not tensor.is_floating_point():
            wrong = f"holds {tensor.dtype}; it must hold floating-point numbers"
        elif tensor.itemsize < 2:
            wrong = f"holds {tensor.dtype}, and quantised heads are not read; give the original, of 16 or 32 bits"
        elif not bool(tensor.isfinite().all()):
            wrong = "holds NaN or infinite values"
        else:
            continue
        raise ModelError(f"{file}: tensor {name!r} {wrong}")


def _ready(head: EagleHead, device: torch.device, dtype: torch.dtype) -> EagleHead:
    """The head as it is served: there, in that format."""
    placed(head, dtype, device).eval().requires_grad_(False)
    return head


def _borrowed(file: Path, name: str, config: EagleConfig, borrow: Borrow) -> Tensor:
    if config.hidden_size != config.target_hidden_size:
        sizes = f"{config.hidden_size} numbers, the target's {config.target_hidden_size}"
        raise ModelError(f"{file}: lacks {name!r}, which cannot be the target's: the head's states have {sizes}")
    tensor = borrow(name)
    return tensor[: config.vocab_size] if len(tensor) > config.vocab_size else tensor


def _of_module(folder: Path, model: Model, name: str) -> Tensor:
    """From a model that is loaded; its output layer may be packed, and then only its file has the numbers."""
    module: Any = model.module
    layers = {EMBEDDING: module.get_input_embeddings(), OUTPUT: module.get_output_embeddings()}
    weight: Any = getattr(layers[name], "weight", None)
    if type(getattr(weight, "data", None)) is Tensor and weight.is_floating_point() and weight.numel():
        return torch.Tensor.detach(weight)
    return targets_own(folder, model.name, name)


def targets_own(folder: Path, target: str, name: str) -> Tensor:
    """:data:`EMBEDDING` or :data:`OUTPUT` from the target's safetensors, which the head in ``folder`` needs.

    A target that ties its layers has the embedding for both. Raises ModelError.
    """
    wanted = [*TARGETS_NAMES[name], *(TARGETS_NAMES[EMBEDDING] if name == OUTPUT else ())]
    held: dict[str, Path] = {}
    for file in _files_of(target):
        with safe_open(file, "pt") as stored:
            held |= dict.fromkeys(set(wanted) & set(stored.keys()), file)
    for candidate in wanted:
        if candidate in held:
            with safe_open(held[candidate], "pt") as stored:
                tensor: Tensor = stored.get_tensor(candidate)
            return tensor
    hint = f"{target} holds none in safetensors here" if target else "name the target's folder"
    raise ModelError(f"{folder}: leaves {name!r} to the target, whose own is needed: {hint}")


def _files_of(target: str) -> list[Path]:
    """Its safetensors, as far as they are here."""
    try:
        return sorted(folder_of(target).glob("*.safetensors")) if target else []
    except OSError:  # a hub id of which nothing was loaded
        return []
