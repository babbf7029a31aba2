"""A ready engine from settings: model, cache, how its worker introduces itself, and the life of its ranks."""

from __future__ import annotations

import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from engine.cache.kv_cache import KVCache
from engine.cpu.stack import pack_head
from engine.cuda.graphs import CudaRecorder, Record
from engine.eagle.cached import row_bytes
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_beside
from engine.eagle.mtp import MTP, load_mtp
from engine.exactness import warm_up
from engine.forward import ForwardPass, StepInput
from engine.interface import StepEngine
from engine.leader import Leader, Ranks
from engine.loading.cache_size import fitting_tokens
from engine.loading.checkpoint import check_devices, check_split, choose_device, head_revision, revision_of
from engine.loading.loader import load
from engine.model import Model, ModelError
from engine.parallel.group import Group, RankTask, joined_key, rendezvous
from engine.parallel.shards import splits_heads
from engine.settings import EngineSettings
from engine.stateful import StatefulCache, StatefulEngine
from engine.step import Engine
from speculation.messages import EXACT, Loading, Progress, Welcome

log = logging.getLogger(__name__)

STATEFUL_TOKENS = 32_768
"""What sessions of a model without a slot cache may hold together, unless settings or its context say more."""
ROUNDS_FINELY = torch.float32.itemsize
"""Bytes of a number from which on ranks, devices and batches change 1e-6 of a logit, and no text was seen to change."""


def build(
    settings: EngineSettings, progress: Progress | None = None, *, invariant: bool = True, ranks: Ranks | None = None
) -> Engine:
    """Load the model and set up its cache.

    ``invariant``: see :class:`engine.step.Engine`. A drafter, whose tokens are only hints, does without. ``ranks``:
    what starts the other ranks, if there are to be more than one. Raises :class:`engine.model.ModelError`, or
    :class:`engine.parallel.group.RankError` if a rank does not come or is lost.
    """
    if settings.tensor_parallel_size == 1:
        model = load_model(settings, progress)
        return build_alone(settings, model, progress, invariant=invariant)
    assert ranks is not None, "nothing to start the ranks with"
    device = choose_device(settings.device)
    check_split(settings.model, settings.tensor_parallel_size)
    check_devices(device, settings.tensor_parallel_size, own_gpus=ranks.own_gpus)
    leader = Leader(settings, ranks, device)
    with leader.loading() as group:
        model = load_model(settings, progress, group)
        engine = _assembled(settings, model, progress, invariant=invariant, leader=leader, group=group)
    return _warmed(engine, progress)


def build_target(settings: EngineSettings, progress: Progress | None = None, ranks: Ranks | None = None) -> StepEngine:
    """As :func:`build`, but a model that cannot speculate is served without, if that can be had: on one rank."""
    if settings.tensor_parallel_size > 1:
        return build(settings, progress, ranks=ranks)
    model = load_model(settings, progress, without_speculation=True)
    if not model.no_speculation:
        return build_alone(settings, model, progress)
    if settings.eagle:
        raise ModelError(f"{settings.eagle}: {settings.model} cannot use an EAGLE-3 head: {model.no_speculation}")
    log.warning("%s is served without speculation: %s", settings.model, model.no_speculation)
    capacity = settings.cache_tokens or max(model.context, STATEFUL_TOKENS)
    return StatefulEngine(model, StatefulCache(capacity, dtype=model.dtype, device=model.device))


def load_model(
    settings: EngineSettings,
    progress: Progress | None = None,
    group: Group | None = None,
    *,
    without_speculation: bool = False,
) -> Model:
    """The model alone, or this rank's part of it."""
    return load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        quantization=settings.quantization,
        by_rows=not settings.plain_cuda,
        threads=settings.threads,
        max_threads=settings.max_threads,
        without_speculation=without_speculation,
        group=group,
        progress=progress,
    )


def eagle_for(settings: EngineSettings, model: Model, progress: Progress | None = None) -> EagleHead | None:
    """The EAGLE-3 head, or layer of its own, to run beside ``model``, on rank 0 alone, if any.

    Raises :class:`engine.model.ModelError`.
    """
    if not settings.eagle:
        return None
    if settings.eagle == MTP and settings.eagle_away:
        raise ModelError("the target's own layer (mtp) drafts in its process; leave eagle_at out, or give a head")
    if settings.eagle == MTP:
        return load_mtp(model)
    if progress is not None:
        progress(Loading(f"reading an EAGLE-3 head from {Path(settings.eagle).name}"))
    head = load_beside(settings.eagle, model)
    if settings.eagle_away:  # of which only what fuses states is used here
        head.fingerprint = head_revision(settings.eagle, head.embed_tokens.weight)
        del head.layers, head.lm_head
        if model.device.type == "cpu":
            pack_head(head)
    return head


def cache_for(
    settings: EngineSettings, model: Model, group: Group | None = None, eagle: EagleHead | None = None
) -> KVCache:
    """A cache of the same size on every rank, beside which one for ``eagle`` has room.

    Raises :class:`engine.model.ModelError`.
    """
    beside = 0 if eagle is None or settings.eagle_away else row_bytes(eagle)
    if settings.cache_tokens:
        capacity = settings.cache_tokens
    elif group is None:
        capacity = fitting_tokens(model, gpu_share=settings.gpu_share, beside=beside)
    else:
        module: Any = model.module
        parts, copies = (group.world, 1) if splits_heads(module.tp_plan) else (1, group.world)
        fitting = fitting_tokens(model, parts, copies, gpu_share=settings.gpu_share, beside=beside)
        capacity = group.minimum(fitting)
    return model.new_cache(capacity)


def build_alone(
    settings: EngineSettings,
    model: Model,
    progress: Progress | None = None,
    *,
    invariant: bool = True,
    record: Record | None = None,
) -> Engine:
    """An engine without other ranks.

    ``record``: how steps are recorded, instead of the usual way. Raises :class:`engine.model.ModelError`.
    """
    return _warmed(_assembled(settings, model, progress, invariant=invariant, record=record), progress)


def _assembled(
    settings: EngineSettings,
    model: Model,
    progress: Progress | None,
    *,
    invariant: bool,
    record: Record | None = None,
    leader: Leader | None = None,
    group: Group | None = None,
) -> Engine:
    eagle = eagle_for(settings, model, progress)
    record, cache = record or recorder_for(model), cache_for(settings, model, group, eagle)
    return Engine(model, cache, invariant=invariant, leader=leader, record=record, eagle=eagle)


def recorder_for(model: Model) -> Record | None:
    """What records its steps to be replayed; None where they are not computed by rows, or on a CPU."""
    return CudaRecorder(model.device) if model.attention is not None and model.attention.replayed else None


def _warmed(engine: Engine, progress: Progress | None) -> Engine:
    if progress is not None:
        on_gpu = engine.model.device.type == "cuda"
        progress(Loading("warming up, recording CUDA graphs" if on_gpu else "warming up"))
    try:
        warm_up(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def welcome(settings: EngineSettings, model: Model, role: str, exactness: str = "") -> Welcome:
    """What a worker with this model says of itself."""
    folder = Path(settings.model)
    ranks = f"{settings.tensor_parallel_size} ranks" if settings.tensor_parallel_size > 1 else ""
    number_format = _listed(str(model.dtype).removeprefix("torch."), model.weights)
    arithmetic = "" if model.attention is None else model.attention.arithmetic(model.dtype)
    if model.dtype.itemsize < ROUNDS_FINELY or model.weights:
        arithmetic = _listed(arithmetic, ranks, _device_class(model, exactness))
    return Welcome(
        role=role,
        model=settings.served_name,
        vocabulary=model.vocabulary,
        context=model.context,
        tokenizer=model.tokenizer_digest,
        instance=f"{os.getpid()}-{uuid.uuid4().hex[:8]}",
        dtype=_listed(number_format, ranks),
        source=str(folder.resolve()) if folder.is_dir() else settings.model,
        speculates=not model.no_speculation,
        revision=revision_of(settings.model, _listed(number_format, arithmetic)),
        started=time.time(),
        exactness=exactness,
    )


def _device_class(model: Model, exactness: str) -> str:
    """Which devices compute the same bits: those of one kind where they are exact; of those that are not, any."""
    if exactness == EXACT:
        return torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
    return exactness and "not exact"


def _listed(*facts: str) -> str:
    return ", ".join(filter(None, facts))


def serve_rank(task: RankTask) -> None:
    """Be a rank other than 0: load a part of the model, then compute what rank 0 says until it says no more.

    Raises :class:`engine.model.ModelError` for what the model is to blame for, and torch's errors if a rank was lost.
    """
    settings = task.settings
    store = rendezvous(settings.tensor_parallel_size, task.port)
    store.set(joined_key(task.rank), "")
    device = choose_device(settings.device)
    group = Group(task.rank, settings.tensor_parallel_size, store, device, settings.load_timeout)
    model = load_model(settings, group=group)
    forward = ForwardPass(model, cache_for(settings, model, group).store, recorder_for(model), agreed=group.all_agree)
    group.meet()
    forward.record_steps()
    while message := group.hear():
        forward.compute(StepInput.decoded(message))
    group.leave()
