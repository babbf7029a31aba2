"""What is in a model folder, or at a hub id, and on what devices and in which numbers it is read.

Read with plain transformers: configuration, weights, tokenizer. Whatever is wrong with them ends as one line that names
the place. What becomes of the model is :mod:`engine.loading.loader`'s part.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_kernels_available

from engine.model import ModelError, first_line, folder_of, layers_of, scales_of
from engine.parallel.group import Group
from engine.settings import misplaced
from speculation.messages import Loading, Progress

STOCK = "eager"
"""The attention that transformers has of every model."""

SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of) for of in SHORT_NAMES for name in (of, SHORT_NAMES[of])}

TELLINGS = 20
"""How often to say how far weights are loaded."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


PATTERNS = ("config.json", "*.safetensors", "*.bin")
HEAD_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 64, 4096

ON_ONE_RANK = "a target serves it on one rank, without speculation: use tensor_parallel_size 1"
"""Of a model that cannot speculate."""

UNPACKED = ("fp8", "mxfp4")
"""How weights may be stored that transformers can make plain ones of."""

NOT_READ = "take the original, or a format that transformers reads"

SPLIT_BY = {
    "num_key_value_heads": "key/value heads",
    "num_attention_heads": "attention heads",
    "intermediate_size": "inner units of a layer (intermediate_size)",
    "moe_intermediate_size": "inner units of an expert (moe_intermediate_size)",
}
"""What ranks divide among themselves: the name in configurations, and in words."""


def is_folder(path: str) -> bool:
    """Whether ``path`` is a folder here; raises for what was surely meant to be one, so that nothing is downloaded."""
    if why := misplaced(path):
        raise ModelError(f"{path}: {why}")
    return Path(path).expanduser().is_dir()


def choose_device(device: str) -> torch.device:
    """The device of this name; auto: a GPU where there is one. Raises ModelError, with the reason."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        why = [first_line(error), *(no_cuda_hint() if device.startswith("cuda") else [])]
        raise ModelError(f"device {device!r} cannot be used here: {'; '.join(why)}") from error


def no_cuda_hint(devices: Path = Path("/dev")) -> list[str]:
    """What keeps torch from a GPU on this machine, beyond its own words; nothing where those must do."""
    if torch.version.hip is not None:
        return []
    if torch.version.cuda is None:
        return ["this build of torch is for the CPU: take the image, or the wheel, for CUDA"]
    if not any((devices / name).exists() for name in ("nvidiactl", "dxg")):
        return ["there is no /dev/nvidiactl: request nvidia.com/gpu, or set the runtime class nvidia"]
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ["libcuda.so.1 is not found: add where the driver's libraries lie to LD_LIBRARY_PATH"]
    return []  # a driver that is too old, for instance, which torch says


def choose_dtype(dtype: str, device: torch.device, *, widened: bool = False) -> torch.dtype:
    """The number format of this name; auto: bfloat16 where the device computes it, else float32. Raises ModelError.

    ``widened``: the weights are stored in bfloat16, and are widened as they are read, so that numbers between products
    are float32 all the same and a step reads half as much. Never float16 unless asked for: what was trained in bfloat16
    may overflow there.
    """
    if dtype == "auto":
        return torch.bfloat16 if widened or computes_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown; choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the hardware does, instead of emulating it; taken for granted of a GPU that torch does not see here."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return True
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def _source(path: str) -> dict[str, Any]:
    """What transformers is told of a folder, or of a hub id."""
    folder = Path(path).expanduser()
    local = folder.is_dir()
    where = {"pretrained_model_name_or_path": folder if local else path, "local_files_only": local}
    return where | {"trust_remote_code": False}  # or it asks on the terminal whether to run some


@contextmanager
def _reading(path: str, failed: str) -> Iterator[None]:
    """Whatever a library raises ends as one line that names the place."""
    try:
        yield
    except Exception as error:
        own_code = "trust_remote_code" in str(error)
        why = "it brings code of its own, which is not run" if own_code else first_line(error)
        raise ModelError(f"{path}: {failed}: {why}") from error


def read_config(path: str) -> Any:
    """The configuration of the causal language model in a folder, or of a hub id. Raises ModelError."""
    is_folder(path)
    with _reading(path, "cannot read the configuration"):
        config = AutoConfig.from_pretrained(**_source(path))
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{path}: model type {config.model_type!r} is not a causal language model")
    if stored := quantisation_of(config):
        with _reading(path, "cannot read the configuration"), quiet():
            known = AutoHfQuantizer.supports_quant_method(stored)  # type: ignore[no-untyped-call]
        if not known:  # transformers only warns, and reads the weights as if they were not
            raise ModelError(f"{path}: its weights are quantised by {stored['quant_method']!r}; {NOT_READ}")
    return config


def quantisation_of(config: Any) -> Any:
    """What a configuration says of how its weights are quantised; None where they are not."""
    parts = (config, config.get_text_config(decoder=True))
    return next((said for part in parts if (said := getattr(part, "quantization_config", None))), None)


def is_unpacked(config: Any, device: torch.device) -> bool:
    """Whether weights that are stored quantised become plain ones as they are read.

    Without the package ``kernels`` transformers has no products of float8, and would find out at the first step.
    """
    method = (quantisation_of(config) or {}).get("quant_method")
    return method in UNPACKED and (device.type == "cpu" or not is_kernels_available())


def is_stateful(config: Any) -> bool:
    """Whether the model of a configuration keeps a recurrent state."""
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return bool(model_class._is_stateful)


def read_module(
    path: str, dtype: torch.dtype, device: torch.device, group: Group | None, progress: Progress | None = None
) -> Any:
    """The model in a folder or of a hub id, weights and all, or this rank's slice of them. Raises ModelError.

    A GPU gets each tensor straight from its file, several at a time, instead of after a copy of all in the host's
    memory; ranks get their slices so. On a CPU they are left where they are read. ``progress`` hears
    how many are read, now and then.
    """
    config = read_config(path)
    quantised = bool(quantisation_of(config))  # which the configuration no longer says of weights dequantised as read
    if is_unpacked(config, device):
        quantisation_of(config)["dequantize"] = True
        if progress is not None:
            progress(Loading(f"its quantised weights are read as {str(dtype).removeprefix('torch.')}"))
    module: Any
    loaded: dict[str, Any]
    with _reading(path, "cannot load the weights"), _told(progress):
        module, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            **_source(path),
            config=config,
            dtype=dtype,
            attn_implementation=STOCK,
            output_loading_info=True,
            distributed_config=None if group is None else DistributedConfig(tp_size=group.world),
            device_map={"": device} if group is None and device.type != "cpu" else None,
        )
    if missing := sorted(loaded["missing_keys"]):
        # transformers fills these with random numbers and only warns.
        raise ModelError(f"{path}: the weights lack {len(missing)} tensors of the model, first {missing[0]!r}")
    if not quantised and (scales := scales_of(loaded["unexpected_keys"])):
        raise ModelError(f"{path}: its weights are quantised, with scales like {scales[0]!r}; {NOT_READ}")
    if quantised and getattr(module, "hf_quantizer", None) is None:
        _cast(module, dtype)
    return module.eval().requires_grad_(False)


def _cast(module: Any, dtype: torch.dtype) -> None:
    """What transformers left as it is stored beside weights that it dequantised: embeddings, norms and the last layer.

    What is stored in float32 is meant to stay so.
    """
    made: dict[int, torch.nn.Parameter] = {}  # what is tied stays tied
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_floating_point() and parameter.itemsize < torch.float32.itemsize:
                if id(parameter) not in made:  # data set anew would leave a rank's slice as it was
                    made[id(parameter)] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                setattr(part, name, made[id(parameter)])


def check_split(path: str, ranks: int) -> None:
    """Whether the model can be split; raises :class:`ModelError`, which names the possible sizes."""
    config = read_config(path)
    text = config.get_text_config(decoder=True)
    if not text.base_model_tp_plan:
        raise ModelError(
            f"{path}: model type {config.model_type!r} cannot be split over ranks, transformers has no plan for it; "
            "use tensor_parallel_size 1"
        )
    if is_stateful(config):
        raise ModelError(f"{path}: model type {config.model_type!r} keeps a recurrent state; {ON_ONE_RANK}")
    told = [(name, getattr(layer, name, None)) for name in SPLIT_BY for layer in layers_of(text)]
    sizes = [(name, size) for name, size in told if isinstance(size, int)]
    for name, size in sizes:
        if size % ranks:
            common = math.gcd(*(size for _, size in sizes))
            possible = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            units = f"{size} {SPLIT_BY[name]}"
            raise ModelError(f"{path}: tensor_parallel_size {ranks} does not divide its {units}; possible: {possible}")


def check_devices(device: torch.device, ranks: int, *, own_gpus: bool) -> None:
    """Whether every rank has a device; raises :class:`ModelError`. ``own_gpus``: those seen are rank 0's alone."""
    if device.type == "cuda":
        if device.index is not None and device.index != torch.cuda.current_device():
            raise ModelError(
                f"device {str(device)!r} is one GPU, tensor_parallel_size {ranks} uses the first {ranks}; "
                "give cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        if not own_gpus and torch.cuda.device_count() < ranks:
            raise ModelError(f"tensor_parallel_size {ranks} needs {ranks} GPUs, there are {torch.cuda.device_count()}")
    elif torch.cuda.is_available():
        raise ModelError(
            f"tensor_parallel_size {ranks} uses the GPUs where there are some; "
            f"for device {device.type!r} hide them: set CUDA_VISIBLE_DEVICES to nothing"
        )


@contextmanager
def _told(progress: Progress | None) -> Iterator[None]:
    """Have ``progress`` hear what transformers would draw a bar of."""
    previous = transformers_logging.set_tqdm_hook(
        lambda bar, given, named: _counted(list(given[0]), progress) if given and progress else bar(*given, **named)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _counted(tensors: Sequence[Any], progress: Progress) -> Iterator[Any]:
    """The same; ``progress`` hears how many of them were taken."""
    for done, tensor in enumerate(tensors):
        share = done / len(tensors)
        if not done or int(TELLINGS * share) > int(TELLINGS * (done - 1) / len(tensors)):
            progress(Loading(f"loading weights: {done} of {len(tensors)} tensors", share))
        yield tensor


def read_tokenizer(path: str) -> Any:
    """Transformers' tokenizer of a folder or hub id; None if a folder has none. Raises ModelError."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    with _reading(path, "cannot read the tokenizer"), quiet():
        return AutoTokenizer.from_pretrained(**_source(path))


def tokens_of(path: str, tokenizer: Any, ends: Collection[int] = ()) -> dict[str, int]:
    """Token to id, of the tokenizer that was read from ``path``; empty when there is none. Raises ModelError.

    ``ends``: ids that end texts, by the model's configuration.

    What ``tokenizer.json`` says, where there is one, as routers read it: transformers appends what is named beside it
    alone, such as a token for padding, under ids that the model was never trained on.
    """
    vocabulary: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    # Without its files transformers may invent a tokenizer that knows its special tokens only.
    if tokenizer is None or len(vocabulary) <= len(tokenizer.all_special_ids):
        return {}
    try:
        file = folder_of(path) / TOKENIZER_FILES[0]
    except OSError:
        return vocabulary
    if file.is_file():
        with _reading(path, "cannot read the tokenizer"):
            stored: dict[str, int] = tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
        appended = vocabulary.keys() - stored.keys()
        if not any(token == tokenizer.eos_token or vocabulary[token] in ends for token in appended):
            return stored  # else texts would not end
    return vocabulary


def digest_of(tokens: dict[str, int]) -> int:
    """64-bit digest of the id-to-token map; 0 when there is none."""
    if not tokens:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for token, token_id in sorted(tokens.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice out of a server's output."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def revision_of(model: str, number_format: str) -> int:
    """A fingerprint of what a model says: 64 bits, never 0; or 0 if the files cannot be read.

    Two workers of one model name with the same fingerprint continue each other's text; others may not. What rounds
    differently (ranks, kernels, kinds of devices, steps that are not exact) is for :func:`engine.build.welcome` to
    name. It has to be quick even for weights of hundreds of gigabytes, so of each file it reads the beginning, where
    the format keeps its table of contents, and samples spread over the rest. Against mistakes, not against forgery.

    ``model``: a folder, or a hub id that was loaded before. ``number_format``: with the quantisation.
    """
    digest = hashlib.blake2b(number_format.encode(), digest_size=8)
    try:
        folder = folder_of(model)
        files = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
        for path in files:
            digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            _sample(path, digest)
    except OSError:
        return 0
    return (int.from_bytes(digest.digest(), "big") or 1) if files else 0


def head_revision(path: str, embedding_VD: Tensor) -> int:
    """The same of an EAGLE head that was read from ``path``, with the embeddings it stands beside: the target's.

    By it both ends know that they have the same head of the same target. Embeddings are compared as bfloat16, whatever
    each end computes in.
    """
    rows_S = torch.linspace(0, len(embedding_VD) - 1, SAMPLES, device=embedding_VD.device).long()
    sampled_SD = embedding_VD[rows_S].to(torch.bfloat16).cpu().contiguous()
    return revision_of(path, hashlib.blake2b(sampled_SD.view(torch.uint8).numpy().tobytes()).hexdigest())


def _sample(path: Path, digest: hashlib.blake2b) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for number in range(SAMPLES if size > HEAD_BYTES else 0):
            file.seek(HEAD_BYTES + (size - HEAD_BYTES) * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
