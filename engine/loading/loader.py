"""What model do we run, and does our attention compute it correctly.

Has the linear layers quantised and packed and the decoder layers fused, as far as that is right here, and refuses what
cannot be served with one line that says why. What is read, and in which numbers, is :mod:`engine.loading.checkpoint`'s
part; whether the numbers are right is :mod:`engine.loading.self_test`'s to say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.attention.attention import NAME
from engine.attention.row_attention import RowAttention, UnsupportedAttention
from engine.attention.triton_rows import find_attention
from engine.cpu.rows import CpuRows, on_cpu
from engine.cpu.stack import fuse_on_cpu, unfuse_on_cpu, widens
from engine.cpu.thread_choice import leave_cores_to_steps, set_threads
from engine.layers.fused import RowOpsStack, Unrecognised, fuse, unfuse
from engine.layers.linear import pack_linears
from engine.loading.checkpoint import (
    ON_ONE_RANK,
    choose_device,
    choose_dtype,
    digest_of,
    is_folder,
    quiet,
    read_config,
    read_module,
    read_tokenizer,
    tokens_of,
)
from engine.loading.quantisation import check, quantise, weight_bytes
from engine.loading.self_test import SelfTest
from engine.model import CannotSpeculate, Model, ModelError, key_heads_of, kind_and_line, layers_of, positions_of
from engine.parallel.group import Group
from engine.parallel.shards import own_part, use_slices
from engine.settings import NONE
from engine.stateful import RIGHT_IN_PARTS
from speculation.messages import Loading, Progress

log = logging.getLogger(__name__)

Report = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Treatment:
    """What is made of a model that is read; see :func:`load`."""

    quantization: str = NONE
    pack: bool = True
    self_test: bool = True
    without_speculation: bool = False
    group: Group | None = None
    by_rows: bool = True

    def in_cpp(self, device: torch.device) -> bool:
        """Whether :mod:`engine.cpu` is to compute the layers, if it knows the model."""
        ours = self.pack and self.by_rows and device.type == "cpu"
        return ours and self.group is None and self.quantization == NONE

    def number_format(self, path: str, dtype: str, device: torch.device) -> torch.dtype:
        """What the model there is computed in, of which ``dtype`` is asked. Raises ModelError."""
        with quiet():
            widened = dtype == "auto" and self.in_cpp(device) and widens(read_config(path))
        return choose_dtype(dtype, device, widened=widened)


def load(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int = 1,
    max_threads: int = 0,
    quantization: str = NONE,
    pack: bool = True,
    self_test: bool = True,
    without_speculation: bool = False,
    group: Group | None = None,
    by_rows: bool = True,
    progress: Progress | None = None,
) -> Model:
    """Load the causal language model in the folder ``path``, or of the hub id ``Org/Name``. Raises ModelError.

    ``dtype`` auto: bfloat16 where the hardware computes it or our C++ widens it, else float32. ``threads``,
    ``max_threads``: as of :func:`engine.cpu.thread_choice.set_threads`.
    ``quantization``: one of :data:`engine.loading.quantisation.CHOICES`. ``pack``: store linear layers in oneDNN's
    layout (CPU only). ``without_speculation``: take a model that cannot speculate as well, if it is not to be quantised
    and :mod:`engine.stateful` can run it. ``group``: read only this rank's slice of the weights; every rank has to load
    the same. ``by_rows``: by kernels and C++ of our own, if that is right here. ``progress`` hears of each
    slow part.
    """

    def report(doing: str) -> None:
        if progress is not None:
            progress(Loading(doing))

    set_threads(threads, max_threads)
    is_folder(path)  # or nothing else is said
    chosen_device = choose_device(device) if group is None else group.device
    how = Treatment(quantization, pack, self_test, without_speculation, group, by_rows)
    chosen_dtype = how.number_format(path, dtype, chosen_device)
    check(quantization, chosen_dtype, chosen_device)
    report(f"reading {Path(path).name} in {str(chosen_dtype).removeprefix('torch.')} on {chosen_device}")
    with quiet():
        module = read_module(path, chosen_dtype, chosen_device, group, progress).to(chosen_device)
        tokens = tokens_of(path, read_tokenizer(path), _ends(module))
    model = from_module(path, module, tokens, chosen_dtype, chosen_device, how, report)
    leave_cores_to_steps(in_cpp=isinstance(model.attention, CpuRows) and model.attention.all_layers)
    return model


def describe(path: str, dtype: str = "auto", device: str = "auto") -> Model:
    """The model in the folder ``path`` without its weights: what is known of its tokens. Raises ModelError."""
    is_folder(path)
    chosen_device = choose_device(device)
    shell: Any = torch.nn.Module()
    with quiet():
        shell.config, shell.generation_config = read_config(path), None
        tokens = tokens_of(path, read_tokenizer(path), _ends(shell))
    return _describe(path, shell, tokens, choose_dtype(dtype, chosen_device), chosen_device)


def from_module(
    name: str,
    module: Any,
    tokens: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
    how: Treatment,
    report: Report = lambda _: None,
) -> Model:
    """What :func:`load` makes of a transformers model that is in memory already, which is changed. Raises ModelError.

    ``tokens``: of its tokenizer, by name; empty if it has none.
    """
    if device.type == "cuda":
        # It plans anew for every number of keys, which changes with each token, and keeps all plans.
        torch.backends.cuda.enable_cudnn_sdp(False)
    _check_numbers(name, module)
    model = _describe(name, module, tokens, dtype, device)
    test = SelfTest(model) if how.self_test else None
    if test is not None:
        report("computing reference logits")
        _guarded(test.expect, lambda why: ModelError(f"model type {model.kind!r} is not supported: {why}"))
    try:
        return _for_speculation(model, test, report, how)
    except CannotSpeculate as reason:
        own = isinstance(reason.__cause__, UnsupportedAttention)  # and not the want of memory, or of a rank
        if own and how.group is not None and how.quantization == NONE:
            raise ModelError(f"{reason}; {ON_ONE_RANK}") from reason
        if not how.without_speculation or how.quantization != NONE:
            raise
        return _for_plain_decoding(model, test, report, reason)


def _for_speculation(model: Model, test: SelfTest | None, report: Report, how: Treatment) -> Model:
    """Let the model compute through :mod:`engine.attention.attention`; raises :class:`CannotSpeculate`."""
    module: Any = model.module
    quantization, group = how.quantization, how.group
    if module._is_stateful:
        raise CannotSpeculate(model, "it keeps a recurrent state, which cannot roll back")
    if group is not None:
        use_slices(module, group)
    if quantization != NONE:
        report(f"quantising linear layers to {quantization}")
        model = _quantised(model, quantization)
    if how.in_cpp(model.device):
        try:
            return _in_one_call(model, test, report)
        except (Unrecognised, CannotSpeculate) as reason:
            report(f"decoder layers are computed one operation at a time: {reason}")
    if how.pack and model.device.type == "cpu":
        report("packing linear layers")
        pack_linears(module)
        _leave_file(module)
    if test is not None and quantization != NONE:
        drift = _guarded(partial(test.expect_quantised, model), partial(CannotSpeculate, model))
        report(f"{model.weights}; logits moved by {drift:.2g} (relative)")
    with quiet():
        module.set_attn_implementation(NAME)
    if group is not None:
        group.meet()
    attention = _attention(model, group, by_rows=how.by_rows)
    if attention.replayed:
        report(_fuse(module) or "decoder layers are computed fused")
    agreed = bool if group is None else partial(group.all_agree, patience=group.patience)
    return _tested(replace(model, attention=attention), test, report, agreed)


def _in_one_call(model: Model, test: SelfTest | None, report: Report) -> Model:
    """The model with its decoder layers computed by :mod:`engine.cpu`; raises Unrecognised or CannotSpeculate."""
    module: Any = model.module
    attention = fuse_on_cpu(module)
    try:
        report("decoder layers are computed fused")
        _leave_file(module)
        with quiet():
            module.set_attn_implementation(NAME)
        model = replace(model, attention=attention)
        if test is not None:
            _pass(test.check, model, report)
    except BaseException:
        unfuse_on_cpu(module)
        raise
    return model


def _fuse(module: Any) -> str:
    """Have layers that are known computed fused; returns why not, or nothing."""
    from engine.layers.layer_kernels import TritonOps

    ops = TritonOps()
    reason = fuse(module, ops.dtypes, lambda base: RowOpsStack(base, ops))
    return f"decoder layers are computed as transformers wrote them: {reason}" if reason else ""


def _attention(model: Model, group: Group | None, *, by_rows: bool) -> RowAttention:
    """What computes its attention: torch where nothing else is wanted, or some rank of the group has nothing else."""
    attention: RowAttention | None = None
    if by_rows:
        layers = layers_of(model.config.get_text_config(decoder=True))
        per_key = max(layer.num_attention_heads // key_heads_of(layer) for layer in layers)
        attention = find_attention(model.context, per_key, model.dtype, model.device) or on_cpu(per_key, model.device)
    if group is not None and not group.minimum(int(attention is not None)):
        attention = None
    return attention or RowAttention()


def _tested(model: Model, test: SelfTest | None, report: Report, agreed: Callable[[bool], bool] = bool) -> Model:
    """The model as it passes its test: with layers that are not fused, with attention by torch, if need be.

    ``agreed``: whether all ranks say so, which have to compute alike.
    """
    if test is None:
        return model
    failure: CannotSpeculate | None = None
    try:
        _pass(test.check, model, report)
    except CannotSpeculate as error:
        failure = error
    try:
        if agreed(failure is None):
            return model
    except RuntimeError as error:  # a rank hangs, or is lost
        raise failure or ModelError(f"{model.name}: a rank does not answer in its self-test") from error
    reason = failure or CannotSpeculate(model, "another rank computes it wrong")
    if type(model.attention) is RowAttention:
        raise reason
    if unfuse(model.module):
        log.warning("decoder layers are computed as transformers wrote them, which is slower: %s", reason)
        return _tested(model, test, report, agreed)
    log.warning("attention is computed by torch, which is slower: %s", reason)
    return _tested(replace(model, attention=RowAttention()), test, report, agreed)


def _for_plain_decoding(model: Model, test: SelfTest | None, report: Report, reason: CannotSpeculate) -> Model:
    """Let the model compute over its own cache; raises :class:`ModelError`."""
    plain = replace(model, no_speculation=str(reason), whole_prompts=model.kind not in RIGHT_IN_PARTS)
    if test is not None:
        report(f"{reason}; trying without")
        try:
            _pass(test.check_stateful, plain, report)
        except CannotSpeculate as failure:
            raise ModelError(f"{reason}; nor can it be served without: {failure}") from failure
    return plain


def _pass(check: Callable[[Model], float], model: Model, report: Report) -> None:
    """Have the model tried; raises :class:`CannotSpeculate`."""
    difference = _guarded(partial(check, model), partial(CannotSpeculate, model))
    report(f"self-test passed: logits within {difference:.1g} of the stock forward (relative)")


def _check_numbers(path: str, module: Any) -> None:
    """Refuse weights that are no numbers: they would make every logit one that is none.

    Those that are stored quantised are not looked at, float8 (which torch cannot compare) among them: what is no number
    in them, or in scales they hold, is found by the self-test.
    """
    for name, parameter in module.named_parameters():
        tensor = own_part(parameter)
        plain = type(tensor.data) is torch.Tensor and tensor.is_floating_point() and tensor.itemsize > 1
        if not plain or not tensor.numel():
            continue
        if not all(end.isfinite() for end in tensor.aminmax()):
            raise ModelError(f"{path}: tensor {name!r} holds NaN or infinite values in {tensor.dtype}")


def _describe(path: str, module: Any, tokens: dict[str, int], dtype: torch.dtype, device: torch.device) -> Model:
    config = module.config.get_text_config(decoder=True)
    vocabulary = config.vocab_size
    if tokens:
        vocabulary = min(vocabulary, max(tokens.values()) + 1)
    return Model(
        name=path,
        module=module,
        config=module.config,
        vocabulary=vocabulary,
        context=context_of(config),
        stop_tokens=frozenset(token for token in _ends(module) if 0 <= token < vocabulary),
        tokenizer_digest=digest_of(tokens),
        dtype=dtype,
        device=device,
        layers=config.num_hidden_layers,
        weights=_quantised_before(module),
    )


def _quantised_before(module: Any) -> str:
    """What to say of weights that were stored quantised; empty for others."""
    quantizer = getattr(module, "hf_quantizer", None)
    return f"{quantizer.quantization_config.quant_method.value} weights of {_size(module)}" if quantizer else ""


def _size(module: Any) -> str:
    return f"{weight_bytes(module) / 1e6:.0f} MB"


def context_of(config: Any) -> int:
    """Positions of a text model's configuration up to which packed sequences compute what they would alone."""
    context = positions_of(config) or 1 << 20
    # Attention in fixed chunks is a mask the attention function is not told about.
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        context = min(context, config.attention_chunk_size)
    # This one rotates by the longest sequence of the whole batch; up to the trained length it does not. ("dynamic" does
    # so from max_position_embeddings on, where the context ends anyway.)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # some have one per kind of layer
        if part.get("rope_type") == "longrope":
            trained = part.get("original_max_position_embeddings")
            context = min(context, trained or getattr(config, "original_max_position_embeddings", None) or context)
    return context


def _ends(module: Any) -> set[int]:
    """Tokens that end texts, by both of a model's configurations, each of which has one, a list or none."""
    configs = module.config.get_text_config(decoder=True), module.generation_config
    named = [getattr(each, "eos_token_id", None) for each in configs]
    return {token for said in named for token in (said if isinstance(said, list) else [said]) if token is not None}


def _quantised(model: Model, quantization: str) -> Model:
    module: Any = model.module
    if model.weights:
        raise ModelError(f"{model.name}: its weights are quantised already; quantization must be {NONE}")
    before = _size(module)
    if not quantise(module, quantization):
        raise ModelError(f"model type {model.kind!r} has no linear layers that could be quantised to {quantization}")
    return replace(model, weights=f"{quantization} weights of {_size(module)} instead of {before}")


def _leave_file(module: Any) -> None:
    """Copy what is left of the weights out of the checkpoint, which stays mapped as long as anything is read from it.

    All of its pages are this process's memory then: those of the packed weights a second time, for nothing.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if type(tensor.data) is torch.Tensor:  # others are quantised, and were made anew
            tensor.data = tensor.data.clone()


def _guarded(part: Callable[[], T], failed: Callable[[str], ModelError]) -> T:
    """Run a part of the self-test; whatever a model does in it ends as one clear line."""
    try:
        with quiet():
            return part()
    except ModelError:
        raise
    except Exception as error:
        raise failed(kind_and_line(error)) from error
