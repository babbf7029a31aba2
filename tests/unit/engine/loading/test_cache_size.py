"""The cache's size follows from the memory that is free, and from what one token really takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.build import build, cache_for
from engine.cache.kv_cache import KVCache
from engine.cache.kv_store import KVStore
from engine.host.memory import GIB, GpuMemory, available_bytes, gpu_memory
from engine.interface import Chunk
from engine.loading import cache_size
from engine.loading.cache_size import MAX_CONTEXTS, allowed_bytes, bytes_a_token, fitting_tokens, token_bytes
from engine.model import ModelError
from engine.settings import EngineSettings
from engine.step import Engine
from tests.bundled import MODELS
from tests.unit.engine.engine_models import load_tiny, save_model

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt_oss", "gemma4_text", "jetmoe", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_token_takes_is_what_the_store_holds(family: str, tmp_path: Path, monkeypatch) -> None:
    model = load_tiny(family, tmp_path)
    cache = KVCache(model.layers, 32, dtype=model.dtype, device=model.device)
    held = []
    write = KVStore.write

    def measured(store, *args):
        stored = write(store, *args)
        held.extend(each.nbytes for each in stored)
        return stored

    monkeypatch.setattr(KVStore, "write", measured)
    Engine(model, cache).run([Chunk(cache.sequence(), [5])])
    assert len(held) == 2 * model.layers
    assert token_bytes(model) == sum(held) // cache.capacity


@pytest.mark.parametrize(
    ("family", "changes", "kinds"),
    [
        ("qwen3_5_text", {"num_hidden_layers": 8}, 2),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "mlp", "attention", "mamba"]}, 1),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3}, 1),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}, 1),
        ("zamba2", {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3}, 1),
        ("gemma3_text", {"num_hidden_layers": 6}, 6),
    ],
)
def test_layers_that_keep_no_keys_take_no_room(family: str, changes: dict[str, Any], kinds: int) -> None:
    config = AutoConfig.for_model(family, num_attention_heads=4, num_key_value_heads=4, hidden_size=64, **changes)
    config.head_dim = 16
    assert bytes_a_token(config, 2) == kinds * 2 * 4 * 16 * 2


def test_heads_that_differ_from_layer_to_layer_are_served_in_what_is_free(tmp_path: Path) -> None:
    engine = build(EngineSettings(save_model("gemma4_text", tmp_path), dtype="fp32"))
    assert engine.cache.capacity >= engine.model.context


def test_a_share_of_what_is_free_but_no_more_than_can_be_used(tmp_path: Path, monkeypatch) -> None:
    model = load_tiny("llama", tmp_path)
    a_token = token_bytes(model)
    monkeypatch.setattr(cache_size, "available_bytes", lambda: 1000 * a_token * 4)
    assert fitting_tokens(model) == 1000
    assert build(EngineSettings(str(tmp_path), dtype="fp32")).cache.capacity == 1008
    assert build(EngineSettings(str(tmp_path), dtype="fp32", cache_tokens=64)).cache.capacity == 64
    monkeypatch.setattr(cache_size, "available_bytes", lambda: 10**15)
    assert fitting_tokens(model) == MAX_CONTEXTS * model.context


@pytest.mark.parametrize(("family", "copies"), [("llama", 1), ("gpt_neox", 1), ("phi3", 2), ("olmo2", 2)])
def test_ranks_of_one_machine_share_what_is_free(family: str, copies: int, tmp_path: Path, monkeypatch) -> None:
    model = load_tiny(family, tmp_path)
    monkeypatch.setattr(cache_size, "available_bytes", lambda: 1000 * token_bytes(model) * 4)
    ranks: Any = SimpleNamespace(world=2, minimum=int)
    cache = cache_for(EngineSettings(str(tmp_path)), model, ranks)
    assert cache.capacity == -(-(1000 // copies) // model.block) * model.block


def test_a_rank_on_a_gpu_has_room_for_its_part_of_the_heads(tmp_path: Path, monkeypatch) -> None:
    model = load_tiny("gpt_neox", tmp_path)
    monkeypatch.setattr(cache_size, "allowed_bytes", lambda *_: 1000 * token_bytes(model))
    ranks: Any = SimpleNamespace(world=2, minimum=int)
    monkeypatch.setattr(type(model), "new_cache", lambda _, capacity: capacity)
    there = replace(model, device=torch.device("cuda"))
    assert cache_for(EngineSettings(str(tmp_path)), there, ranks) == 2000


def test_a_context_that_does_not_fit_is_refused_with_the_figures(tmp_path: Path, monkeypatch) -> None:
    model = replace(load_tiny("llama", tmp_path), name="some/model", context=1 << 20)
    assert token_bytes(model) == 3 * 2 * 2 * 16 * 4
    monkeypatch.setattr(cache_size, "available_bytes", lambda: GIB)
    why = (
        r"^some/model: a cache for one context of 1048576 tokens needs 0\.75 GiB, it may have 0\.25 GiB "
        r"\(25% of what is free\); set cache_tokens to serve shorter texts: 349525 fit$"
    )
    with pytest.raises(ModelError, match=why):
        fitting_tokens(model)


def test_a_share_of_a_gpu_includes_what_is_loaded_and_not_what_others_hold(monkeypatch) -> None:
    gpu, cuda = GpuMemory(total=80 * GIB, free=60 * GIB, own=16 * GIB), torch.device("cuda")
    monkeypatch.setattr(cache_size, "gpu_memory", lambda device: gpu)
    assert allowed_bytes(cuda, 1.0) == 54 * GIB  # 90 % of what is free: others hold some
    assert allowed_bytes(cuda, 0.5) == 20 * GIB
    assert allowed_bytes(cuda, 0.1) == 0


def test_memory_of_a_process_that_has_just_died_is_waited_for(monkeypatch) -> None:
    cuda, polls = torch.device("cuda"), []
    dying = GpuMemory(total=80 * GIB, free=20 * GIB, own=16 * GIB)
    gone = GpuMemory(total=80 * GIB, free=63 * GIB, own=16 * GIB)
    monkeypatch.setattr(cache_size, "gpu_memory", lambda device: gone if len(polls) > 3 else dying)
    assert allowed_bytes(cuda, 1.0, polls.append) == 56 * GIB
    assert len(polls) == 4
    polls.clear()
    assert allowed_bytes(cuda, 0.4, polls.append) == int(12.8 * GIB)  # others may hold what is theirs
    assert polls == []


def test_who_keeps_the_memory_of_a_gpu_is_waited_for_no_longer_than_half_a_minute(monkeypatch, caplog) -> None:
    polls = []
    held = GpuMemory(total=80 * GIB, free=20 * GIB, own=16 * GIB)
    monkeypatch.setattr(cache_size, "gpu_memory", lambda device: held)
    assert allowed_bytes(torch.device("cuda"), 1.0, polls.append) == 18 * GIB
    assert sum(polls) == 30
    assert "others hold 44.0 GiB of the GPU" in caplog.text


def test_memory_that_torch_only_keeps_counts_as_free(monkeypatch) -> None:
    kept = [30]
    monkeypatch.setattr("torch.cuda.empty_cache", kept.clear)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (40 - sum(kept), 80))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 10 + sum(kept))
    assert gpu_memory(torch.device("cuda")) == GpuMemory(total=80, free=40, own=10)


def machine(root: Path, groups: str, **files: str) -> Path:
    """A file system with 8 GiB available, and ``files`` about control groups."""
    texts = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\n", "proc/self/cgroup": groups}
    texts |= {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def group(folder: str, limit: int | str, used: int, cached: int) -> dict[str, str]:
    """A control group of version 2."""
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon 7\ninactive_file {cached}\nactive_file 9\n",
    }


def test_no_control_group_limits_nothing(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "0::/\n")) == 8 * GIB
    assert available_bytes(machine(tmp_path, "0::/a\n", **group("a/", "max", 5, 0))) == 8 * GIB


def test_the_narrowest_control_group_counts_without_what_it_can_drop(tmp_path: Path) -> None:
    outer, inner = group("pod/", 4 * GIB, 3 * GIB, GIB), group("pod/main/", 3 * GIB, GIB, 0)
    assert available_bytes(machine(tmp_path, "0::/pod/main\n", **outer, **inner)) == 2 * GIB
    assert available_bytes(machine(tmp_path, "0::/pod/main\n", **group("pod/", 4 * GIB, 3 * GIB, 0))) == GIB
    assert available_bytes(machine(tmp_path, "0::/pod/main\n", **group("pod/", GIB, 3 * GIB, 0))) == 0


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/../host/name/that/is/not/here\n", **group("", 2 * GIB, GIB, 0))
    assert available_bytes(root) == GIB


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
        "memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n",
    }
    assert available_bytes(machine(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", **files)) == 3 * GIB // 2


def test_this_machine_has_memory() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50


def test_the_caches_of_the_bundled_pair_stay_below_a_gib_however_much_is_free() -> None:
    configs = [AutoConfig.from_pretrained(MODELS / name) for name in ("target", "draft")]
    max_bytes = [MAX_CONTEXTS * config.max_position_embeddings * bytes_a_token(config, 4) for config in configs]
    assert 0 < sum(max_bytes) < GIB
