"""What a machine has: GPUs that PyTorch sees, memory that is large enough, cores, ports, disk and shared memory."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cluster.config.config import Config, max_replicas_of
from cluster.config.environment import expanded, variable
from cluster.config.pools import NO_QUANTIZATION, DraftConfig, TargetConfig, chosen_threads
from cluster.doctor.finding import Finding, ok, problem, warning
from cluster.doctor.models import Weights, WeightsError, read_weights
from cluster.local.gpus import divided
from cluster.local.threads import usable_cores
from engine.host.memory import GIB, available_bytes
from engine.loading.cache_size import CPU_SHARE, CUDA_SHARE, bytes_a_token
from engine.loading.checkpoint import is_stateful, is_unpacked, read_config
from engine.loading.loader import Treatment, context_of
from engine.model import ModelError
from engine.parallel.shards import splits_heads
from engine.stateful import RIGHT_IN_PARTS
from transport.address import AddressError, check_free, join

DRIVER, SHARED_MEMORY = Path("/proc/driver/nvidia/version"), Path("/dev/shm")
SMALLEST_CONTEXT = 4096
"""Tokens of a cache below which a worker is of little use, where the model allows more."""
SHORTER = "set cache_tokens to serve shorter texts, of a draft model in the same process as well"
DISK_SHARE = 0.95
"""Ray stops writing to a disk that is fuller than this."""
TIGHT_DISK = 2 * GIB
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Devices:
    """What this machine computes with."""

    driver: bool
    """Whether an NVIDIA driver is loaded."""
    cuda: str | None
    """The CUDA version that PyTorch was built for."""
    gpus: Sequence[Gpu]
    """As PyTorch sees them."""
    memory: int
    """Main memory that is left, in bytes."""


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Memory of one rank of a worker, in bytes."""

    pool: str
    """For people."""
    path: str
    """Where its settings stand in the configuration."""
    ranks: int
    """Of all workers of the pool together."""
    weights: int
    cache: int
    """Of the shortest cache that makes sense."""
    share: float = 1.0
    """What part of a GPU a rank has."""
    on_cpu: bool = False
    """Whether it computes there, whatever else there is."""
    longest: int = 0
    """Of a cache for one whole context, without which a worker ends that nobody tells how large it is to be."""
    size: int = 1
    """Ranks of one worker."""


def seen() -> Devices:
    """What is here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    gpus = [Gpu(found.name, found.total_memory) for found in properties]
    return Devices(DRIVER.exists(), torch.version.cuda, gpus, available_bytes())


def check_driver(devices: Devices, config: Config) -> Iterator[Finding]:
    """Whether driver, CUDA and PyTorch go together, and there is a GPU where one is asked for."""
    if devices.gpus:
        listed = ", ".join(f"{gpu.name} with {gpu.memory / GIB:.0f} GiB" for gpu in devices.gpus)
        yield ok("gpu", f"{listed}; CUDA {devices.cuda}")
    elif devices.driver and devices.cuda is None:
        fix = "install the build of torch for your CUDA (pip install torch --index-url of your CUDA's index)"
        yield problem("gpu", "there is an NVIDIA driver, but this PyTorch is built for the CPU", fix)
    elif devices.driver:
        text = f"there is an NVIDIA driver, but PyTorch, built for CUDA {devices.cuda}, sees no GPU"
        yield problem("gpu", text, "update the driver for that CUDA, or give the container its GPUs; see nvidia-smi")
    elif any(pool.settings.gpus or pool.settings.device.startswith("cuda") for pool in config.nonempty_pools()):
        yield problem("gpu", "the configuration asks for GPUs and there is none", "set gpus to 0 and device to auto")
    else:
        yield ok("gpu", "none; the CPU computes")


def check_compiler(devices: Devices, headers: Path | None = None) -> Iterator[Finding]:
    """Whether Triton can compile what launches our kernels, which it does at their first use."""
    headers = headers or Path(sysconfig.get_path("include"))
    compiler = variable("CC") or shutil.which("gcc") or shutil.which("clang")
    missing = "C compiler" if not compiler else "" if (headers / "Python.h").exists() else f"Python.h in {headers}"
    if devices.gpus and missing:
        text = f"there is no {missing}, so our kernels cannot be launched: steps on GPUs are slower, and not exact"
        yield warning("compiler", text, "install gcc and Python's headers (gcc, libc6-dev, python3-dev)")


def check_memory(needs: Iterable[DeviceNeed], devices: Devices) -> Iterator[Finding]:
    """Whether weights and a cache fit: each rank on a GPU, or in main memory beside all others that compute there."""
    needs = list(needs)
    here = [need for need in needs if need.on_cpu or not devices.gpus]
    if here or not devices.gpus:
        yield from _check_main_memory(here, devices.memory)
    yield from _check_gpus([need for need in needs if need not in here], devices.gpus)


def _check_gpus(needs: Sequence[DeviceNeed], gpus: Sequence[Gpu]) -> Iterator[Finding]:
    asked = sum(need.ranks * need.share for need in needs)
    for need in needs:
        least, each = (need.weights + cache for cache in (need.cache, max(need.cache, need.longest)))
        large = [gpu for gpu in gpus if CUDA_SHARE * need.share * gpu.memory >= each]
        text = f"a rank of {need.pool} needs {each / GIB:.1f} GiB ({need.weights / GIB:.1f} of weights)"
        if not large:
            max_memory = max(need.share * gpu.memory for gpu in gpus) / GIB
            of = "the largest GPU has" if need.share == 1 else f"its share of the largest GPU ({need.share:.0%}) is"
            larger = "" if need.share == 1 else f"{need.path}.gpus or "
            fix = f"raise {larger}{need.path}.tensor_parallel_size, quantise, or lower {need.path}.cache_tokens"
            if CUDA_SHARE * max_memory * GIB >= least:
                fix = SHORTER
            yield problem("memory", f"{text}, {of} {max_memory:.1f}", fix)
        elif len(large) < need.ranks * need.share:
            fix = "lower replicas or tensor_parallel_size, or set gpus below 1 for them to share a GPU"
            yield warning("memory", f"{text}, and {need.ranks} ranks have {len(large)} such GPUs", fix)
        elif len(gpus) < asked:
            fix = "set gpus of all workers, so that those on a GPU add up to 1 at most"
            text = f"{text}, and all workers together ask for {asked:.3g} GPUs of {len(gpus)}"
            yield warning("memory", text, fix)
        else:
            yield ok("memory", text)


def _check_main_memory(needs: Sequence[DeviceNeed], left: int) -> Iterator[Finding]:
    wanted = sum(need.ranks * (need.weights + need.cache) for need in needs)
    text = f"weights and caches take {wanted / GIB:.1f} GiB, {left / GIB:.1f} GiB of main memory are left"
    allowed = CPU_SHARE * (left - sum(need.ranks * need.weights for need in needs))
    if wanted > left:
        yield problem("memory", text, "lower dtype, replicas or cache_tokens, or use a larger machine")
    elif refused := [need for need in needs if need.size * need.longest > allowed]:
        for need in refused:
            longest = f"{need.size * need.longest / GIB:.1f} GiB, it may have {allowed / GIB:.1f}"
            yield problem("memory", f"{text}; a cache for one whole context of {need.pool} takes {longest}", SHORTER)
    elif sum(need.ranks * need.cache for need in needs) > CPU_SHARE * left:
        yield warning("memory", text, "lower cache_tokens: the cache gets a quarter of what is left")
    else:
        yield ok("memory", text)


def needs(config: Config, devices: Devices) -> Iterator[DeviceNeed]:
    """What the pools ask for, as far as their models are folders that can be read."""
    for named in config.nonempty_pools():
        pool, beside = named.settings, config.shared_draft(named)
        own = _memory(pool, devices)
        drafting = _ModelMemory(0, 0, 0) if beside is None else _memory(beside, devices)
        if own is not None and drafting is not None:
            weights, cache = own.weights + drafting.weights, own.cache + drafting.cache
            ranks = max_replicas_of(pool) * pool.tensor_parallel_size
            share, on_cpu = min(pool.gpus or 1.0, 1.0), pool.device == "cpu"
            # The draft model is loaded first: what its cache takes, that of the target has not.
            each = [max(one.longest, one.cache) for one in (own, drafting)]
            longest = sum(each) if own.longest or drafting.longest else 0
            size = pool.tensor_parallel_size
            yield DeviceNeed(str(named), named.path, ranks, weights, cache, share, on_cpu, longest, size)


class _ModelMemory(NamedTuple):
    """Of one model on one rank, in bytes, as in :class:`DeviceNeed`."""

    weights: int
    cache: int
    longest: int


def _needs_whole_context(pool: TargetConfig | DraftConfig, model_config: Any) -> bool:
    """Whether a worker insists on it: it is not told otherwise, and keeps a cache that has to be there at once."""
    of_head = isinstance(pool, DraftConfig) and bool(pool.eagle)
    kept = not (of_head or is_stateful(model_config))
    return (
        kept and not pool.cache_tokens and model_config.get_text_config(decoder=True).model_type not in RIGHT_IN_PARTS
    )


def _loaded(weights: Weights, model_config: Any, *, on_cpu: bool) -> Weights:
    """The same, with the output layer as it is once loaded.

    One that is the embedding is packed beside it on a CPU; on a GPU it is none of its own, even if the files hold one.
    """
    if not weights.embedding or not getattr(model_config, "tie_word_embeddings", False):
        return weights
    packed = on_cpu and not is_stateful(model_config)
    head = weights.embedding if packed else 0
    return replace(weights, numbers=weights.numbers - weights.head + head, head=head)


def _memory(pool: TargetConfig | DraftConfig, devices: Devices) -> _ModelMemory | None:
    """What the model of a pool takes; None if it cannot be read, or not here."""
    try:
        if (weights := read_weights(expanded(pool.model))) is None:
            return None  # and its configuration is asked of no hub
        model_config = read_config(pool.model)
    except (ModelError, WeightsError):
        return None  # told by the check of the model's files
    # Ranks, too, compute nothing in C++.
    how = Treatment(pool.quantization, by_rows=not pool.plain_cuda and pool.tensor_parallel_size == 1)
    device = torch.device("cuda" if devices.gpus and pool.device != "cpu" else "cpu")
    itemsize = how.number_format(pool.model, pool.dtype, device).itemsize
    stored = 1 if pool.quantization != NO_QUANTIZATION else itemsize
    text_config = model_config.get_text_config(decoder=True)
    context = context_of(text_config)
    told = pool.cache_tokens or min(context, SMALLEST_CONTEXT)
    wanted = context if _needs_whole_context(pool, model_config) else 0
    a_token = bytes_a_token(text_config, itemsize)
    weights = _loaded(weights, model_config, on_cpu=device.type == "cpu")
    kept = weights.embedding + weights.head  # what we quantise is between them
    loaded = (weights.numbers - kept) * stored + kept * itemsize + weights.fixed_bytes
    if is_unpacked(model_config, device):
        loaded = (weights.numbers + weights.packed) * itemsize
    parts = pool.tensor_parallel_size if splits_heads(text_config.base_model_tp_plan or {}) else 1
    return _ModelMemory(loaded // pool.tensor_parallel_size, told * a_token // parts, wanted * a_token // parts)


def check_devices(config: Config) -> Iterator[Finding]:
    """What a Paceline that is to run here computes with, and whether it fits."""
    devices = seen()
    yield from check_driver(devices, config)
    yield from check_compiler(devices)
    config = divided(config, len(devices.gpus))
    counted = list(needs(config, devices))
    known = {need.pool for need in counted}
    if missing := [str(pool) for pool in config.nonempty_pools() if str(pool) not in known]:
        text = f"not counted: {', '.join(missing)}, without a folder here whose weights can be read"
        yield warning("memory", text, "give folders to know whether they fit")
    if counted:
        yield from check_memory(counted, devices)


def room_of(folder: Path) -> tuple[int, int]:
    """Bytes of a file system, all and those left; none where there is no such file system."""
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return total, free


def check_threads(config: Config, cores: int) -> Iterator[Finding]:
    """Whether workers of this machine ask for more threads than it has cores."""
    pools = [pool.settings for pool in config.nonempty_pools()]
    asked = sum(max_replicas_of(pool) * pool.tensor_parallel_size * chosen_threads(pool) for pool in pools)
    chosen = any(isinstance(pool.threads, int) for pool in pools)
    text = f"workers here compute with {asked} threads, but there are {cores} cores"
    crowded = warning("cores", text, "lower target.threads or draft.threads, or leave them at auto")
    yield crowded if chosen and asked > cores else ok("cores", f"{cores}")


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Whether HTTP can be served where the configuration says."""
    address = join(host, port)
    try:
        check_free(address)
    except AddressError as error:
        fix = f"end what listens there, or set router.port; if it is Paceline, `paceline doctor --url http://{address}`"
        yield problem("port", str(error), fix)
    else:
        yield ok("port", f"{address} is free")


def check_disk(folder: Path, total: int, free: int) -> Iterator[Finding]:
    """Whether Ray and logs have room."""
    if not total:
        return
    text = f"{folder} has {free / GIB:.1f} of {total / GIB:.0f} GiB free"
    if free < (1 - DISK_SHARE) * total:
        yield problem("disk", f"{text}, and Ray stops at {DISK_SHARE:.0%}", "make room, or set TMPDIR to a larger disk")
    elif free < TIGHT_DISK:
        yield warning("disk", text, "make room for logs and for objects that Ray spills")
    else:
        yield ok("disk", text)


def check_shared_memory(total: int, free: int, object_store_mb: int) -> Iterator[Finding]:
    """Whether Ray's object store fits; where it does not, Ray falls back to the disk."""
    subject = str(SHARED_MEMORY)
    if not total:
        yield warning(subject, "is missing", "mount a tmpfs there; Ray keeps objects on disk otherwise")
    elif free < object_store_mb * MIB:
        text = f"has {free // MIB} MB free, Ray's object store takes {object_store_mb}"
        more = "give the container more (docker --shm-size, a Memory emptyDir in Kubernetes)"
        yield warning(subject, text, f"{more}, or lower ray.object_store_mb")
    else:
        yield ok(subject, f"{free // MIB} MB free")


def check_machine(config: Config) -> Iterator[Finding]:
    """The rest: cores, port, disk and shared memory."""
    yield from check_threads(config, usable_cores())
    yield from check_port(config.router.host, config.router.port)
    folder = Path(tempfile.gettempdir())
    yield from check_disk(folder, *room_of(folder))
    if config.backend == "ray":
        yield from check_shared_memory(*room_of(SHARED_MEMORY), config.ray.object_store_mb)
