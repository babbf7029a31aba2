"""Model folders: complete, fit for their tensor-parallel size, of which vocabulary, and how large.

Of weights, what the headers of their safetensors files tell.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.config.checks import CheckError, check_model, check_tokenizer
from cluster.config.config import Config, max_replicas_of
from cluster.config.environment import expanded, is_folder
from cluster.config.pools import DraftConfig, TargetConfig
from cluster.config.serving import difference
from cluster.doctor.finding import Finding, ok, problem, warning
from engine.loading.checkpoint import check_split, read_config
from engine.model import ModelError
from speculation.events import Role

COPY_AGAIN = "copy the model folder again, or download it again"


def check(config: Config) -> Iterator[Finding]:
    """The models of all pools that are folders here; those that are hub ids are only named."""
    pools = [pool for pool in config.pools() if max_replicas_of(pool.settings) or pool.role is Role.TARGET]
    for pool in pools:
        yield from check_folder(f"model of {pool}", pool.settings)
        if pool.role is Role.DRAFT:
            yield from check_pair(f"vocabulary of {pool}", config.of_worker(pool).target.model, pool.settings.model)
        elif draft := config.shared_draft(pool):
            yield from check_folder(f"draft model of {pool}", draft)


def check_folder(subject: str, pool: TargetConfig | DraftConfig) -> Iterator[Finding]:
    """One model, for the workers of one pool."""
    try:
        check_model(pool.model, "model")
        check_tokenizer(pool.model, "model")
    except CheckError as error:
        again = f"; {COPY_AGAIN}" if is_folder(expanded(pool.model)) else ""
        yield problem(subject, str(error), f"see `paceline config`{again}")
        return
    folder = expanded(pool.model)
    if not is_folder(folder):
        yield warning(subject, f"{pool.model} is a hub id", "workers download it; give a folder to have it checked")
        return
    try:
        read_config(pool.model)
        weights = read_weights(folder)
    except (ModelError, WeightsError) as error:
        yield problem(subject, f"{pool.model}: {str(error).removeprefix(f'{pool.model}: ')}", COPY_AGAIN)
        return
    if weights is None:
        yield warning(subject, f"{pool.model} has no safetensors weights", "convert them; they cannot be checked")
        return
    try:
        if pool.tensor_parallel_size > 1:
            check_split(pool.model, pool.tensor_parallel_size)
    except ModelError as error:
        text, _, fix = str(error).rpartition("; ")
        yield problem(subject, text, fix)
        return
    yield ok(subject, f"{pool.model}: {weights.tensors} tensors, {_count(weights.numbers)} weights")


def check_pair(subject: str, target: str, draft: str) -> Iterator[Finding]:
    """Whether both number the same tokens the same way, where that can be seen."""
    if target != draft and not all((expanded(model) / "tokenizer.json").is_file() for model in (target, draft)):
        fix = "give folders; of hub ids, say draft.target_tokenizer if it is another than the target's"
        yield warning(subject, "not compared with the target's: not both are folders here with a tokenizer.json", fix)
        return
    try:
        found = difference(target, draft)
    except CheckError as error:
        yield problem(subject, str(error), COPY_AGAIN)
        return
    if found:
        text = f"another than the target's ({found}), so its workers translate"
        yield warning(subject, text, "a draft model with the target's tokenizer has more of its drafts accepted")
    else:
        yield ok(subject, "that of the target")


def _count(numbers: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if numbers >= size:
            return f"{numbers / size:.1f} {unit}"
    return str(numbers)


INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Formats that weights are stored in; all others hold quantised ones."""
BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Of a number in these; of others it is one."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


class WeightsError(Exception):
    """Files that are missing, cut short or not what the index says. One line."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How large a model is."""

    tensors: int
    numbers: int
    """Weights stored as floating-point numbers, which loading converts to the chosen format."""
    fixed_bytes: int
    """Bytes of what keeps the format it is stored in."""
    packed: int = 0
    """Weights in those that are fp8 or MXFP4."""
    embedding: int = 0
    head: int = 0
    """Of ``numbers``, those of the embedding and of the output layer; 0 where none is stored under a usual name."""


def read_weights(folder: Path) -> Weights | None:
    """None if the weights are in another format, or none are there; raises :class:`WeightsError`."""
    index = folder / INDEX
    if index.is_file():
        expected = _expected(index)
    elif (folder / WHOLE).is_file():
        expected = {WHOLE: set()}
    else:
        return None
    found = {name: _tensors(folder / name) for name in sorted(expected)}
    for name, tensors in expected.items():
        if missing := sorted(tensors - found[name].keys()):
            lacking = f"{len(missing)} of the tensors that {INDEX} promises, first {missing[0]!r}"
            raise WeightsError(f"{name} lacks {lacking}")
    return _counted({name: size for tensors in found.values() for name, size in tensors.items()})


def _counted(tensors: dict[str, tuple[str, int]]) -> Weights:
    plain = sum(count for dtype, count in tensors.values() if dtype in FLOATS)
    fixed = sum(count * BYTES.get(dtype, 1) for dtype, count in tensors.values() if dtype not in FLOATS)
    packed = sum(count for dtype, count in tensors.values() if dtype == "F8_E4M3")
    packed += sum(2 * count for name, (dtype, count) in tensors.items() if dtype == "U8" and name.endswith("_blocks"))
    ends = (_largest(tensors, EMBEDDINGS), _largest(tensors, HEADS))
    return Weights(len(tensors), plain, fixed, packed, *ends)


def _largest(tensors: dict[str, tuple[str, int]], named: tuple[str, ...]) -> int:
    """Numbers of the largest tensor whose name ends like that."""
    found = (count for name, (dtype, count) in tensors.items() if dtype in FLOATS and name.endswith(named))
    return max(found, default=0)


def _expected(index: Path) -> dict[str, set[str]]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        expected = defaultdict(set)
        for tensor, file in places.items():
            expected[str(file)].add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from error
    return expected


def _tensors(file: Path) -> dict[str, tuple[str, int]]:
    """The format of each tensor, and how many numbers it holds."""
    try:
        with safe_open(file, "np") as stored:
            parts = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
            return {name: (part.get_dtype(), math.prod(part.get_shape())) for name, part in parts.items()}
    except FileNotFoundError as error:
        raise WeightsError(f"{file.name} is missing") from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file.name} is cut short, or cannot be read: {error}") from error
