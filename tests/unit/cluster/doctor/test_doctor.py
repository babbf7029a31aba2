"""What the doctor says of faults planted in what it looks at: a folder, a certificate, a node, a worker, a machine."""

import json
import shutil
import socket
import struct
from collections import Counter
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from packaging.requirements import Requirement
from ray import serve
from ray.serve.schema import ServeDeploySchema
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.cli import main
from cluster.completion import CompletionTally
from cluster.config.config import Config, RouterConfig, SecurityConfig, from_mapping, max_replicas_of, min_replicas_of
from cluster.config.pools import DraftConfig, ModelConfig, TargetConfig
from cluster.doctor import certificates, endpoint, machine, models, ray_nodes, versions, workers
from cluster.doctor.finding import Level
from cluster.doctor.models import WeightsError, read_weights
from cluster.placement import GPU_CLASS, ClusterNode
from cluster.ray import connection
from cluster.ray.cluster import ApplicationStatus, DeploymentStatus
from cluster.ray.parts import all_settings, declaration, replicas_in, with_replicas
from engine.host.memory import GIB
from speculation.events import Role
from speculation.messages import Welcome
from tests.authority import issue, make_authority, make_intermediate, write
from tests.bundled import MODELS
from tests.ports import free_port
from tests.unit.engine.engine_models import TINY, save_model

TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")


def levels(findings):
    return [finding.level.value for finding in findings]


def only(findings):
    """The one finding, which must say what to do if it is not well."""
    (found,) = findings
    assert "\n" not in str(found)
    assert bool(found.fix) == (found.level is not Level.OK)
    return str(found)


# -- versions ----------------------------------------------------------------------------------------------------------


def test_python_and_packages():
    have = {"torch": "2.13.0+cpu", "ray": "2.59.0"}.get
    assert only(versions.check_python(">=3.11", "3.12.1")) == "ok       python: 3.12.1"
    assert "3.10.2, but Paceline needs >=3.11" in only(versions.check_python(">=3.11", "3.10.2"))
    assert "ray is 2.59.0, but Paceline needs ==2.60.0" in only(
        versions.check_packages([Requirement("torch>=2.13"), Requirement("ray[serve]==2.60.0")], have)
    )
    assert "grpcio is not installed" in only(versions.check_packages([Requirement("grpcio>=1.85")], have))
    assert levels(versions.check_packages([Requirement("torch>=2.13")], have)) == ["ok"]
    assert "torch is 2.13.0+cpu, tested is 2.13.1" in only(versions.check_lock({"torch": "2.13.1"}, have))
    assert not list(versions.check_lock({"torch": "2.13.0+cu126"}, have))


def test_this_environment_is_as_asked():
    assert set(levels(versions.check())) == {"ok"}


def test_without_a_checkout_the_distribution_says_what_it_needs(tmp_path):
    _, wanted = versions.requirements(tmp_path)
    assert {"torch", "ray", "grpcio"} <= {need.name for need in wanted}
    assert versions.locked_versions(tmp_path) == {}


# -- model files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """A copy of the bundled draft model."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "draft", folder)
    return folder


def told(folder, **settings):
    return only(models.check_folder("draft model", DraftConfig(model=str(folder), **settings)))


def test_a_sound_model(model):
    assert "20 tensors, 893568 weights" in told(model)
    assert levels(models.check(Config())) == ["ok", "ok", "ok"]


def test_a_model_without_its_files(model):
    (model / "tokenizer.json").unlink()
    assert told(model).startswith("problem  draft model: ") and "has no tokenizer.json" in told(model)
    (model / "config.json").unlink()
    assert "it has no config.json" in told(model)


def test_a_configuration_that_is_none(model):
    (model / "config.json").write_text("{")
    assert told(model).startswith("problem  draft model: ") and "cannot read the configuration" in told(model)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_weights_that_are_cut_short(model, length):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    assert "model.safetensors is cut short" in told(model)


def test_weights_in_several_files(model):
    content = (model / "model.safetensors").read_bytes()
    names = list(json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]]))
    tensors = [name for name in names if name != "__metadata__"]
    (model / "model.safetensors").rename(model / "part-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part-1.safetensors")}

    def write_index():
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    write_index()
    assert told(model).startswith("ok ")
    index["weight_map"]["model.lost.weight"] = "part-1.safetensors"
    write_index()
    assert "lacks 1 of the tensors" in told(model) and "'model.lost.weight'" in told(model)
    index["weight_map"]["model.lost.weight"] = "part-2.safetensors"
    write_index()
    assert "part-2.safetensors is missing" in told(model)
    (model / "model.safetensors.index.json").write_text('["weights"]')
    assert "index.json cannot be read" in told(model)


def test_header_that_is_rubbish(model):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[1]}" + bytes(100))
    with pytest.raises(WeightsError, match="cannot be read"):
        read_weights(model)


def test_weights_in_another_format(model):
    (model / "model.safetensors").unlink()
    assert "no safetensors weights" in told(model)


def test_heads_that_cannot_be_divided(model):
    assert told(model, tensor_parallel_size=2).startswith("ok ")
    said = told(model, tensor_parallel_size=3)
    assert "tensor_parallel_size 3 does not divide its 2 key/value heads; possible: 1, 2" in said


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {}, "model type 'gpt2' cannot be split over ranks, transformers has no plan for it; use"),
        (
            "llama",
            {"intermediate_size": 97},
            "2 does not divide its 97 inner units of a layer (intermediate_size); poss",
        ),
        ("olmo_hybrid", {}, "model type 'olmo_hybrid' keeps a recurrent state; a target serves it on one rank"),
    ],
)
def test_what_a_worker_refuses_to_split_is_no_less_refused_here(tmp_path, family, changes, words):
    folder = save_model(family, tmp_path, **changes)
    shutil.copy(MODELS / "target" / "tokenizer.json", tmp_path)
    assert told(folder).startswith("ok ")
    said = told(folder, tensor_parallel_size=2)
    assert said.startswith("problem ") and words in said


def test_every_pool_of_several_models(model):
    spoilt = {
        "big": DraftConfig(model=DRAFT, tensor_parallel_size=5),
        "none": DraftConfig(model="/nowhere", replicas=0),
    }
    config = Config(
        models={
            "one": ModelConfig(TargetConfig(model=TARGET), {"small": DraftConfig(model=str(model))}),
            "two": ModelConfig(TargetConfig(model=TARGET), spoilt),
        }
    )
    lines = list(map(str, models.check(config)))
    assert [line.split(": ")[0].split(maxsplit=1) for line in lines] == [
        ["ok", "model of target of one"],
        ["ok", "model of draft small of one"],
        ["ok", "vocabulary of draft small of one"],
        ["ok", "model of target of two"],
        ["problem", "model of draft big of two"],
        ["ok", "vocabulary of draft big of two"],
    ]


def test_vocabularies_that_differ(model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "4000 and 4000 tokens, 2 ids mean something else" in only(
        models.check_pair("vocabulary", TARGET, str(model))
    )
    assert only(models.check_pair("vocabulary", TARGET, DRAFT)).startswith("ok ")


@pytest.mark.parametrize("draft", ["Org/B", "/nowhere/draft"])
def test_vocabularies_that_cannot_be_compared_are_not_called_equal(draft):
    for pair in (("Org/A", draft), (TARGET, draft), (draft, TARGET)):
        assert only(models.check_pair("vocabulary", *pair)).startswith("warning  vocabulary: not compared")
    assert only(models.check_pair("vocabulary", draft, draft)).startswith("ok ")


def test_a_folder_that_is_not_there_cannot_be_copied_again(model):
    assert told("/nowhere/draft").endswith("see `paceline config`")
    (model / "config.json").unlink()
    assert told(model).endswith(models.COPY_AGAIN)


# -- this machine ------------------------------------------------------------------------------------------------------


def test_more_threads_than_cores():
    config = Config(target=TargetConfig(threads=3, replicas=2), draft=DraftConfig(threads=2))
    assert "compute with 8 threads, but there are 4 cores" in only(machine.check_threads(config, 4))
    assert levels(machine.check_threads(config, 8)) == ["ok"]
    assert levels(machine.check_threads(Config(), 1)) == ["ok"]  # auto: `up` divides them


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "Address already in use" in only(machine.check_port("127.0.0.1", port))
    assert only(machine.check_port("127.0.0.1", port)).startswith("ok ")


def test_a_family_without_attention_has_no_heads_to_divide(tmp_path):
    """Unlike in the engine's tests, where every family is given numbers of heads."""
    config = AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=256, state_size=4)
    assert not hasattr(config, "num_attention_heads")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shutil.copy(Path(MODELS) / "target" / "tokenizer.json", tmp_path)
    (one,) = models.check_folder("model", DraftConfig(model=str(tmp_path)))
    assert one.level is Level.OK and "tensors" in one.text
    (two,) = models.check_folder("model", DraftConfig(model=str(tmp_path), tensor_parallel_size=2))
    assert two.level is Level.PROBLEM and "model type 'mamba' cannot be split over ranks" in two.text
    memory = machine._memory(TargetConfig(model=str(tmp_path), dtype="float32"), machine.Devices(False, None, [], GIB))
    assert memory is not None and memory[0] > 0 and memory[1] == 0


def test_heads_that_differ_from_layer_to_layer_are_divided_as_all_of_them_can_be(tmp_path):
    folder = save_model("gemma4_text", tmp_path)
    shutil.copy(Path(MODELS) / "target" / "tokenizer.json", tmp_path)
    assert told(folder).startswith("ok ")
    said = told(folder, tensor_parallel_size=2)
    assert "tensor_parallel_size 2 does not divide its 1 key/value heads; possible: 1" in said
    here = machine.Devices(False, None, [], GIB)
    _, cache, _ = machine._memory(TargetConfig(model=folder, dtype="float32", cache_tokens=100), here)
    # Two layers of two heads of 16 numbers, one of one head of 32, all of them of keys and values.
    assert cache == 100 * (2 * 2 * 16 + 32) * 2 * 4


def test_disk_and_shared_memory():
    folder = Path("/tmp")
    assert "Ray stops at 95%" in only(machine.check_disk(folder, 100 * GIB, 4 * GIB))
    assert levels(machine.check_disk(folder, 100 * GIB, 0)) == ["problem"]
    assert levels(machine.check_disk(folder, 20 * GIB, 1_500_000_000)) == ["warning"]
    assert levels(machine.check_disk(folder, 100 * GIB, 50 * GIB)) == ["ok"]
    assert levels(machine.check_disk(folder, *machine.room_of(Path("/nowhere")))) == []
    assert "64 MB free, Ray's object store takes 80" in only(machine.check_shared_memory(64 << 20, 64 << 20, 80))
    assert levels(machine.check_shared_memory(100 * GIB, 50 * GIB, 80)) == ["ok"]
    assert levels(machine.check_shared_memory(*machine.room_of(Path("/nowhere")), 80)) == ["warning"]


LARGE, SMALL = machine.Gpu("H100", 80 * GIB), machine.Gpu("L4", 24 * GIB)


@pytest.mark.parametrize(
    ("seen", "config", "words"),
    [
        (machine.Devices(True, "12.8", [LARGE], GIB), Config(), "H100 with 80 GiB; CUDA 12.8"),
        (machine.Devices(True, None, [], GIB), Config(), "this PyTorch is built for the CPU"),
        (machine.Devices(True, "13.0", [], GIB), Config(), "sees no GPU"),
        (machine.Devices(False, None, [], GIB), Config(target=TargetConfig(gpus=1.0)), "asks for GPUs"),
        (machine.Devices(False, None, [], GIB), Config(draft=DraftConfig(device="cuda:1")), "asks for GPUs"),
        (machine.Devices(False, None, [], GIB), Config(), "the CPU computes"),
    ],
)
def test_driver_and_gpus(seen, config, words):
    assert words in only(machine.check_driver(seen, config))


@pytest.mark.parametrize(
    ("ranks", "gpus", "memory", "level"),
    [
        (2, [LARGE, LARGE], 0, "ok"),
        (2, [LARGE, SMALL], 0, "warning"),
        (1, [SMALL, SMALL], 0, "problem"),
        (2, [], 100 * GIB, "warning"),
        (2, [], 200 * GIB, "ok"),
        (2, [], 60 * GIB, "problem"),
    ],
)
def test_memory(ranks, gpus, memory, level):
    need = machine.DeviceNeed("target", "target", ranks, weights=20 * GIB, cache=15 * GIB)
    assert levels(machine.check_memory([need], machine.Devices(bool(gpus), None, gpus, memory))) == [level]


def test_workers_that_share_a_gpu_are_added_up():
    def found(*shares):
        needs = [machine.DeviceNeed("target", "target", 1, 20 * GIB, 10 * GIB, share) for share in shares]
        return list(machine.check_memory(needs, machine.Devices(True, None, [LARGE], 0)))

    assert [finding.level for finding in found(0.5, 0.5)] == ["ok", "ok"]
    assert [finding.level for finding in found(0.8, 0.5)] == ["warning", "warning"]
    assert "1.3 GPUs of 1" in str(found(0.8, 0.5))
    assert "its share of the largest GPU (40%) is 32.0" in str(found(0.4))


def test_what_computes_on_the_cpu_needs_no_gpu():
    beside = machine.DeviceNeed("draft", "draft", 1, 20 * GIB, 10 * GIB, on_cpu=True)
    own = replace(beside, pool="target", on_cpu=False)
    found = list(machine.check_memory([own, beside], machine.Devices(True, None, [LARGE], 200 * GIB)))
    assert [finding.level for finding in found] == ["ok", "ok"]
    (finding,) = machine.check_memory([beside], machine.Devices(True, None, [SMALL], 25 * GIB))
    assert finding.level == "problem" and "25.0 GiB of main memory are left" in str(finding)
    config = from_mapping({"draft": {"placement": "cpu"}}, "here")
    needs = list(machine.needs(config, machine.Devices(True, None, [LARGE], GIB)))
    assert [need.on_cpu for need in needs] == [False, True]


def test_one_gpu_is_shared_as_at_the_start(monkeypatch):
    monkeypatch.setattr(machine, "seen", lambda: machine.Devices(True, "13.0", [LARGE], GIB))
    judged: list[machine.DeviceNeed] = []
    monkeypatch.setattr(machine, "check_memory", lambda needs, _: judged.extend(needs) or ())
    assert levels(machine.check_devices(Config())) == ["ok"]
    assert [need.share for need in judged] == [0.8, 0.2]


def test_memory_is_not_said_to_do_for_a_model_that_is_not_here(monkeypatch):
    monkeypatch.setattr(machine, "seen", lambda: machine.Devices(False, None, [], 64 * GIB))
    config = from_mapping({"target": {"model": "Org/A"}, "draft": {"model": "Org/B"}}, "here")
    assert [str(each) for each in machine.check_devices(config) if each.subject == "memory"] == [
        "warning  memory: not counted: target, draft, without a folder here whose weights can be read; "
        "give folders to know whether they fit"
    ]
    config = from_mapping({"target": {"model": "Org/A"}}, "here")
    assert [each.level for each in machine.check_devices(config) if each.subject == "memory"] == ["warning", "ok"]
    assert [each.level for each in machine.check_devices(Config()) if each.subject == "memory"] == ["ok"]


def test_kernels_need_a_compiler_where_there_are_gpus(tmp_path, monkeypatch):
    there, none = machine.Devices(True, "13.0", [LARGE], GIB), machine.Devices(False, None, [], GIB)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert f"there is no Python.h in {tmp_path}" in only(machine.check_compiler(there, tmp_path))
    (tmp_path / "Python.h").touch()
    assert not list(machine.check_compiler(there, tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "there is no C compiler" in only(machine.check_compiler(there, tmp_path))
    assert not list(machine.check_compiler(none, tmp_path))
    monkeypatch.setenv("CC", "tcc")
    assert not list(machine.check_compiler(there, tmp_path))


def test_of_a_model_that_is_not_here_no_hub_is_asked_what_it_needs(monkeypatch):
    monkeypatch.setattr(machine, "read_config", lambda path: pytest.fail(f"asks for {path}"))
    config = Config(target=TargetConfig(model="Org/A"), draft=DraftConfig(model="Org/B"))
    assert list(machine.needs(config, machine.Devices(False, None, [], GIB))) == []


def test_what_a_model_needs():
    config = Config(target=TargetConfig(dtype="fp32", tensor_parallel_size=2, replicas=3, cache_tokens=1000))
    target, draft = machine.needs(config, machine.Devices(False, None, [], GIB))
    assert (target.pool, target.ranks, draft.ranks) == ("target", 6, 1)
    weights = read_weights(MODELS / "target")
    assert target.weights == (weights.numbers + weights.embedding) * 4 // 2  # its output layer is packed beside that
    assert target.cache == 1000 * 6 * 2 * 4 * 32 * 4 // 2  # layers, keys and values, heads, their size, bytes; halved


@pytest.mark.parametrize(
    ("settings", "widened", "size"),
    [({}, True, 2), ({"plain_cuda": True}, True, 4), ({"tensor_parallel_size": 2}, True, 4), ({}, False, 4)],
)
def test_weights_that_our_own_products_widen_need_what_they_are_stored_in(settings, widened, size, monkeypatch):
    """On a processor without bfloat16."""
    monkeypatch.setattr("engine.loading.checkpoint.computes_bfloat16", lambda _: False)
    monkeypatch.setattr("engine.loading.loader.widens", lambda _: widened)
    config = Config(target=TargetConfig(**settings))
    target, _ = machine.needs(config, machine.Devices(False, None, [], GIB))
    ranks = settings.get("tensor_parallel_size", 1)
    weights = read_weights(MODELS / "target")
    assert target.weights == (weights.numbers + weights.embedding) * size // ranks


@pytest.mark.parametrize(("gpu", "kernels"), [(False, True), (True, False), (True, True)])
def test_weights_that_are_unpacked_need_what_they_are_then(gpu, kernels, tmp_path, monkeypatch):
    """On a CPU, and on a GPU that has no products for packed ones."""
    monkeypatch.setattr("engine.loading.checkpoint.is_kernels_available", lambda: kernels)
    config = AutoConfig.for_model("llama", **TINY)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    config.save_pretrained(tmp_path)
    stored = {"norm.weight": torch.ones(64), "a.weight": torch.ones(64, 64).to(torch.float8_e4m3fn)}
    save_file(stored | {"b_blocks": torch.ones(8, 16, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    pool = TargetConfig(model=str(tmp_path), dtype="float32", cache_tokens=8)
    devices = machine.Devices(gpu, None, [machine.Gpu("H100", GIB)] if gpu else [], GIB)
    packed = 64 * 4 + 64 * 64 + 8 * 16
    unpacked = (64 + 64 * 64 + 2 * 8 * 16) * 4
    assert machine._memory(pool, devices)[0] == (packed if gpu and kernels else unpacked)


def test_a_context_that_a_worker_refuses_to_begin_with_is_refused_here(tmp_path):
    folder = save_model("llama", tmp_path, num_hidden_layers=2, max_position_embeddings=1 << 20)
    here, there = machine.Devices(False, None, [], 3 * GIB), machine.Devices(True, "13.0", [machine.Gpu("A", GIB)], 0)

    def found(devices, **settings):
        config = Config(target=TargetConfig(model=folder, dtype="fp32", **settings), draft=DraftConfig(replicas=0))
        (finding,) = machine.check_memory(machine.needs(config, devices), devices)
        return finding

    # Two layers of two heads of 16 numbers, of keys and values: half a GiB for a GiB of tokens.
    for devices in (replace(here, memory=2 * GIB), replace(there, gpus=[machine.Gpu("A", GIB // 2)])):
        refused = found(devices)
        assert refused.level is Level.PROBLEM and refused.fix == machine.SHORTER
        assert found(devices, cache_tokens=4096).level is Level.OK
    assert "takes 0.5 GiB, it may have 0.4" in str(found(replace(here, memory=2 * GIB - (400 << 20))))
    assert found(here).level is Level.OK and found(there).level is Level.OK


def test_caches_in_one_process_are_each_of_a_whole_context_and_a_head_needs_none(tmp_path):
    folder = save_model("llama", tmp_path, num_hidden_layers=2, max_position_embeddings=1 << 20)
    whole, told = 512 << 20, 512 * 4096
    target, draft = TargetConfig(model=folder, dtype="fp32"), DraftConfig(model=folder, dtype="fp32")

    def longest(**settings):
        return [need.longest for need in machine.needs(Config(**settings), machine.Devices(False, None, [], GIB))]

    shared = replace(draft, placement="shared")
    assert longest(target=target, draft=shared) == [2 * whole]
    assert longest(target=replace(target, cache_tokens=4096), draft=shared) == [told + whole]
    assert longest(target=target, draft=replace(shared, cache_tokens=4096)) == [whole + told]
    assert longest(target=replace(target, cache_tokens=4096), draft=replace(shared, cache_tokens=4096)) == [0]
    assert longest(target=target, draft=replace(draft, eagle="/models/head")) == [whole, 0]


def test_a_model_that_keeps_a_state_may_be_of_any_context(tmp_path):
    folder = save_model("olmo_hybrid", tmp_path, max_position_embeddings=1 << 20)
    config = Config(target=TargetConfig(model=folder, dtype="fp32"), draft=DraftConfig(replicas=0))
    (need,) = machine.needs(config, machine.Devices(False, None, [], GIB))
    assert need.longest == 0


@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt2", True), ("llama", False)])
def test_an_output_layer_that_is_the_embedding_takes_as_much_again_on_a_cpu_alone(family, tied, stored, tmp_path):
    folder = save_model(family, tmp_path, tie_word_embeddings=tied)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors.get("model.embed_tokens.weight", tensors.get("transformer.wte.weight"))
    if stored == 2:
        save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    held = sum(tensor.numel() for name, tensor in tensors.items() if name != "lm_head.weight") * 2
    pool = TargetConfig(model=folder, dtype="bf16", cache_tokens=8)
    on_cpu, *_ = machine._memory(pool, machine.Devices(False, None, [], GIB))
    on_gpu, *_ = machine._memory(pool, machine.Devices(True, "13.0", [LARGE], GIB))
    assert on_cpu == held + embedding.nbytes // 2
    assert on_gpu == held + (0 if tied else embedding.nbytes // 2)


def test_what_is_quantised_lies_between_the_embedding_and_the_output_layer(tmp_path):
    folder = save_model("llama", tmp_path, tie_word_embeddings=False)
    weights = read_weights(tmp_path)
    pool = TargetConfig(model=folder, dtype="bf16", quantization="int8", cache_tokens=8)
    found, *_ = machine._memory(pool, machine.Devices(True, "13.0", [LARGE], GIB))
    assert found == weights.numbers + weights.embedding + weights.head


def test_a_target_needs_what_the_draft_model_in_its_process_does():
    seen = machine.Devices(False, None, [], GIB)
    shared = Config(draft=DraftConfig(placement="shared"))
    target, draft = machine.needs(Config(), seen)
    (both,) = machine.needs(shared, seen)
    assert (both.pool, both.weights, both.cache) == (
        "target",
        target.weights + draft.weights,
        target.cache + draft.cache,
    )
    assert any("draft model of target" in str(finding) for finding in models.check(shared))


# -- certificates ------------------------------------------------------------------------------------------------------

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def authorities():
    return make_authority(NOW), make_authority(NOW)


def certified(folder, authorities, *, days=90, signer=0, other_key=False, now=NOW, **options):
    """What is found in a certificate made that way."""
    issued = issue(authorities[signer], NOW - timedelta(days=1), NOW + timedelta(days=days), **options)
    if other_key:
        issued = replace(issued, key=issue(authorities[0], NOW, NOW + timedelta(days=1)).key)
    files = write(folder, issued, authorities[0])
    return list(certificates.check(*files, now=now))


def test_a_sound_certificate(tmp_path, authorities):
    assert "valid for another 90 days" in only(certified(tmp_path, authorities))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"days": 5}, "expires in 5 days"),
        ({"days": 0, "now": NOW + timedelta(minutes=1)}, "expired at 2030-01-01 00:00 UTC"),
        ({"now": NOW - timedelta(days=2)}, "valid only from 2029-12-31"),
        ({"signer": 1}, "was not issued by"),
        ({"other_key": True}, "is not the key of"),
        ({"names": ["target.paceline"]}, "is for a target and not meant for server auth"),
        ({"names": ["llm.example.com"]}, "names llm.example.com, and so no role"),
        ({"names": []}, "names nobody"),
    ],
)
def test_a_certificate_with_a_fault(tmp_path, authorities, options, words):
    assert words in only(certified(tmp_path, authorities, **options))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("other", [timedelta(days=1), timedelta(0)])
def test_any_of_several_authorities_may_have_issued_it(tmp_path, authorities, first, other):
    certified(tmp_path, authorities)
    listed = [authorities[0].certificate_pem, make_authority(NOW, other).certificate_pem]
    (tmp_path / "ca.crt").write_bytes(listed[first] + listed[1 - first])
    assert "valid for another 90 days" in only(looked_at(tmp_path))


def test_the_authority_that_issued_it_must_be_valid(tmp_path, authorities):
    old = make_authority(NOW, timedelta(0))
    certified(tmp_path, [old])
    (tmp_path / "ca.crt").write_bytes(authorities[0].certificate_pem + old.certificate_pem)
    assert "ca.crt expired at 2030-01-01 00:00 UTC" in only(looked_at(tmp_path))
    ending = make_authority(NOW, timedelta(days=3))
    certified(tmp_path, [ending])
    assert "ca.crt expires in 3 days" in only(looked_at(tmp_path))


@pytest.mark.parametrize(
    ("days", "chain", "words"),
    [
        (50, True, "ok       certificate: "),
        (50, False, "was not issued by"),
        (5, True, "tls.crt expires in 5 days"),
        (0, True, "tls.crt expired at 2030-01-01"),
    ],
)
def test_intermediates_may_stand_between(tmp_path, authorities, days, chain, words):
    between = make_intermediate(authorities[0], NOW - timedelta(days=1), NOW + timedelta(days=days))
    own = issue(between, NOW - timedelta(days=1), NOW + timedelta(days=90))
    write(tmp_path, own, authorities[0])
    if chain:
        (tmp_path / "tls.crt").write_bytes(own.certificate_pem + between.certificate_pem)
    assert words in only(looked_at(tmp_path))


def looked_at(folder):
    return list(certificates.check(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", NOW))


def test_certificates_of_the_roles_on_this_machine(tmp_path):
    now = datetime.now(UTC)
    router = tmp_path / "router"
    router.mkdir()
    authority = make_authority(now)
    write(router, issue(authority, now, now + timedelta(days=50)), authority)
    paths = [f"{tmp_path}/{{role}}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
    assert "router/tls.crt" in only(certificates.check_all(*paths))
    (router / "tls.crt").unlink()
    missing = only(certificates.check_all(*paths))
    assert missing.startswith(f"problem  certificate: {router}/tls.crt: cannot be read: No such file")


def test_certificate_files_that_are_missing_or_none(tmp_path, authorities):
    certified(tmp_path, authorities)
    files = [tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")]
    for file, words in zip(
        files, ("holds no certificate", "holds no private key", "holds no certificate"), strict=True
    ):
        kept = file.read_bytes()
        file.write_text("rubbish")
        assert words in only(certificates.check(*files, now=NOW))
        file.unlink()
        assert f"{file}: cannot be read: No such file" in only(certificates.check(*files, now=NOW))
        file.write_bytes(kept)


# -- a Ray cluster -----------------------------------------------------------------------------------------------------


def node(address, gpus, gpu_class, **more):
    return ray_nodes.Seen(ClusterNode(8.0, gpus, {GPU_CLASS: gpu_class}, address=address), **more)


PLACED = Config(
    target=TargetConfig(gpus=1, gpu_class="large", tensor_parallel_size=2), draft=DraftConfig(gpus=1, gpu_class="small")
)


def test_room_on_the_nodes():
    large, small = node("10.0.0.1", 2, "large"), node("10.0.0.2", 1, "small")
    assert "2 nodes" in only(ray_nodes.check_room(PLACED, [large, small]))
    assert "no Ray node has the label for 1 x draft" in only(ray_nodes.check_room(PLACED, [large]))
    assert "no room for 1 x target of 2 ranks" in only(
        ray_nodes.check_room(PLACED, [node("10.0.0.1", 1, "large"), small])
    )


def test_paceline_is_named_by_its_code(tmp_path):
    digests = []
    for file in ("engine/a.py", "engine/cpu/b.cpp", "engine/a.py", "tests/c.py", "engine/d.so"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / file).open("a") as written:
            written.write("x")
        digests.append(versions.code_digest(tmp_path))
    assert len(set(digests)) == 3 and len(set(digests[2:])) == 1
    assert ray_nodes.versions()["paceline"] == versions.code_digest() != digests[0]


def test_what_runs_on_the_nodes():
    here = {"torch": "2.13.0", "ray": "2.60.0"}
    same = node("10.0.0.1", 1, "small", says=here)
    assert levels(ray_nodes.check_nodes([same], here)) == ["ok"]
    other = node("10.0.0.2", 1, "small", says={**here, "torch": "2.12.0"})
    assert "torch is 2.12.0 there and 2.13.0 here" in only(ray_nodes.check_nodes([same, other], here))
    newer = {**here, "paceline": "5f0a"}
    mixed = node("10.0.0.2", 1, "small", says={**here, "paceline": "77c2"})
    assert "paceline is 77c2 there and 5f0a here; install the same Paceline" in only(
        ray_nodes.check_nodes([node("10.0.0.1", 1, "small", says=newer), mixed], newer)
    )
    assert "paceline is an older one there" in only(ray_nodes.check_nodes([same], newer))
    mute = node("10.0.0.3", 1, "small", silence="cannot run Paceline (No module named 'cluster')")
    assert "No module named" in only(ray_nodes.check_nodes([mute], here))
    bare = node("10.0.0.4", 1, "small", says=here, lacks=["/srv/models/llama-8b"])
    assert "has no /srv/models/llama-8b" in only(ray_nodes.check_nodes([bare], here))
    assert ray_nodes.inspect([TARGET, "/nowhere"])[1] == ["/nowhere"]


def test_what_up_refuses_to_serve_from_is_told_before(monkeypatch):
    open_to = {"10.0.0.1:6379": True, "10.0.0.1:6380": False}
    monkeypatch.setattr(connection, "answers_anyone", open_to.__getitem__)
    trusted, guarded = Config(router=RouterConfig(allow_remote=True)), Config(security=SecurityConfig("c", "k", "a"))
    for config, host, port, words in (
        (Config(), "127.0.0.2", 6379, ""),
        (Config(), "10.0.0.2", 6380, "10.0.0.2 can be reached from other machines"),
        (guarded, "10.0.0.2", 6379, "asks for no token"),
        (guarded, "10.0.0.2", 6380, ""),
        (trusted, "10.0.0.2", 6379, ""),
    ):
        found = list(ray_nodes.check_doors(config, f"10.0.0.1:{port}", [host]))
        assert bool(found) == bool(words)
        assert all(str(finding).startswith("problem  doors: ") and words in str(finding) for finding in found)


def test_models_are_looked_for_where_they_may_be_read():
    config = Config(target=TargetConfig(gpus=1, gpu_class="large"), draft=DraftConfig(gpus=1, gpu_class="small"))
    head, router = ClusterNode(0.0, 0.0, {}), ClusterNode(4.0, 0.0, {})
    small, large = (node("10.0.0.1", 1, kind).room for kind in ("small", "large"))
    found = [ray_nodes.models_on(config, place) for place in (head, router, small, large)]
    assert found == [[], [TARGET], [DRAFT, TARGET], [TARGET]]


def test_all_that_workers_load_is_looked_for():
    head, draft = {"eagle": "/head"}, {"assistant": "/assistant", "target_tokenizer": "/tokenizer", "gpus": 1}
    place = node("10.0.0.1", 1, "small").room
    for sections, folders in (
        ({"draft": draft}, ["/assistant", "/tokenizer", DRAFT, TARGET]),
        (
            {"draft": {"placement": "shared", "model": "/draft"}, "target": {"gpus": 1} | head},
            ["/draft", "/head", TARGET],
        ),
        ({"target": {"eagle": "mtp"}, "speculation": {"drafters": False}}, [TARGET]),
        ({"router": {"tokenizer": "/tokenizer"}, "target": {"gpu_class": "large"}}, ["/tokenizer", DRAFT]),
    ):
        assert ray_nodes.models_on(from_mapping(sections, "test"), place) == sorted(folders), sections


def test_models_that_are_not_here_are_looked_at_by_a_router_node(monkeypatch):
    config = Config(target=TargetConfig(model="/nowhere", gpus=1), draft=DraftConfig(replicas=0))
    head, router = ClusterNode(0.0, 0.0, {}, "head"), ClusterNode(4.0, 0.0, {}, "router")
    monkeypatch.setattr(ray_nodes, "_ask", lambda node, function, config: (node, function(config)))
    asked = []
    monkeypatch.setattr(ray, "get", lambda asking, timeout: asked.append(asking[0]) or asking[1])
    assert "no such folder" in only(ray_nodes.check_models(config, [head, router]))
    assert asked == ["router"]
    assert "no node for routers runs" in only(ray_nodes.check_models(config, [head]))
    assert "/nowhere" in ray_nodes.models_on(config, router)


def test_the_doctor_leaves_models_to_the_cluster_only_where_they_are_not_here(monkeypatch, capsys):
    for model, elsewhere in ((TARGET, False), ("/nowhere", True)):
        args = {"target": {"model": model}, "draft": {"replicas": 0}, "ray": {"address": "auto"}}
        seen = []
        monkeypatch.setattr(ray_nodes, "deployed", lambda config, args=args: (args, {}))
        monkeypatch.setattr(ray_nodes, "check", lambda config, listed, models, seen=seen: seen.append(models) or [])
        assert main(["doctor", "--address", "10.0.0.5:6379"]) == 0
        assert seen == [elsewhere]
        assert ("model of target" in capsys.readouterr().out) != elsewhere


LLAMA = Config(models={"llama-8b": ModelConfig(TargetConfig(), {"small": DraftConfig()})})


@pytest.mark.parametrize("config", [Config(), LLAMA])
def test_workers_that_are_deployed_are_found_by_whatever_name(monkeypatch, config):
    """``replicas``: of each deployment, what each of its replicas that run answers."""
    replicas = {
        "TargetWorker-llama-8b": ["10.0.0.1:7001"],
        "DraftWorker-llama-8b.small": ["10.0.0.2:7002"],
        "Router": [],
    }
    found = {Role.TARGET: [], Role.DRAFT: ["10.0.0.3:7003"]}
    findings = deployed(monkeypatch, replicas, config, found)
    assert found == {Role.TARGET: ["10.0.0.1:7001"], Role.DRAFT: ["10.0.0.3:7003", "10.0.0.2:7002"]}
    if config is LLAMA:
        assert only(findings) == "ok       application: running"
    else:
        assert str(findings.pop(0)) == "ok       application: running"
        assert only(findings).startswith(
            "warning  application: has DraftWorker-llama-8b.small, TargetWorker-llama-8b, and none that this "
            "configuration describes; give by --config what was deployed"
        )


def test_pools_without_replicas(monkeypatch):
    findings = deployed(monkeypatch, {"TargetWorker": [], "DraftWorker": [], "Router": []}, Config(), {})
    assert list(map(str, findings)) == [
        "ok       application: running",
        "problem  target TargetWorker: none runs; see its message in `serve status`, and Ray's logs",
    ]


def test_why_replicas_do_not_start_is_told(monkeypatch):
    said = "A replica failed to start with exception. Retrying 997 more time(s). Error:\n{}\n  File x\n{}\n"
    messages = {
        "TargetWorker": said.format(
            "Traceback", "engine.model.ModelError: device 'cuda' cannot be used here: old driver"
        ),
        "DraftWorker": said.format("Traceback", "OSError: gone"),
    }
    nobody = {"TargetWorker": [], "DraftWorker": [], "Router": []}
    lines = list(map(str, deployed(monkeypatch, nobody, Config(), {}, **messages)))
    end = "see its message in `serve status`, and Ray's logs"
    assert lines[1:] == [
        f"problem  target TargetWorker: none runs: device 'cuda' cannot be used here: old driver; {end}",
        f"problem  draft DraftWorker: none runs: OSError: gone; {end}",
    ]


def test_a_worker_that_does_not_answer(monkeypatch):
    replicas = {"TargetWorker": ["10.0.0.1:7001"], "DraftWorker": TimeoutError(), "Router": []}
    found = {}
    _, silent = deployed(monkeypatch, replicas, Config(), found)
    assert str(silent).startswith("problem  DraftWorker: does not say where it listens (TimeoutError); ")
    assert found == {Role.TARGET: ["10.0.0.1:7001"], Role.DRAFT: []}


def test_an_application_that_does_not_do_well(monkeypatch):
    failed = ApplicationStatus("DEPLOY_FAILED", "no\nluck", {})
    monkeypatch.setattr(ray_nodes, "applications", lambda: {"paceline": failed})
    first, second = ray_nodes.check_application(Config(), {})
    assert str(first) == "problem  application: DEPLOY_FAILED: no luck; see Ray's logs"
    assert "has no workers, and none that this configuration describes" in str(second)
    monkeypatch.setattr(ray_nodes, "applications", dict)
    assert "not deployed yet" in only(ray_nodes.check_application(Config(), {}))


def deployed(monkeypatch, replicas, config, found, **messages):
    """What is found where Serve runs these replicas. No handle is left open."""
    closed = []

    def answer(name, timeout_s):
        if isinstance(replicas[name], Exception):
            raise replicas[name]
        return replicas[name]

    def handle(name, application):
        asked = SimpleNamespace(results=lambda timeout_s: answer(name, timeout_s))
        return SimpleNamespace(broadcast=lambda method: asked, shutdown=lambda: closed.append(name))

    states = {
        name: DeploymentStatus("", messages.get(name, ""), Counter({"RUNNING": 1} if answers else {}))
        for name, answers in replicas.items()
    }
    monkeypatch.setattr(ray_nodes, "applications", lambda: {"paceline": ApplicationStatus("RUNNING", "", states)})
    monkeypatch.setattr(serve, "get_deployment_handle", handle)
    findings = list(ray_nodes.check_application(config, found))
    assert closed == [name for name, answers in replicas.items() if answers]
    return findings


def test_configuration_of_a_rayservice_is_read_back_and_that_of_up_is_not():
    args = {"models": {"llama-8b": {"target": {"gpus": 1}}}, "security": {"api_keys": "/etc/keys"}}
    serves = {"args": args, "deployments": [{"name": "Router", "num_replicas": 2}]}
    assert all_settings(serves) == args
    assert all_settings({"args": args}) == args
    assert all_settings(declaration(LLAMA)) is None
    taken = ServeDeploySchema.model_validate({"applications": [declaration(LLAMA)]}).model_dump(exclude_unset=True)
    assert all_settings(taken["applications"][0]) is None


def test_room_is_judged_by_the_numbers_of_replicas_that_stand_beside_the_settings():
    """Of a RayService: none of the drafters yet, as the load asks for none, and two targets at least."""
    scaled = {"min_replicas": 0, "max_replicas": 4}
    service = {
        "args": asdict(PLACED),
        "deployments": [
            {"name": "TargetWorker", "num_replicas": 2},
            {"name": "DraftWorker", "num_replicas": None, "autoscaling_config": scaled},
            {"name": "Router", "ray_actor_options": {}},
        ],
    }
    there = with_replicas(PLACED, replicas_in(service))
    target, draft = (pool.settings for pool in there.pools())
    assert (min_replicas_of(target), max_replicas_of(target)) == (2, 2)
    assert (min_replicas_of(draft), max_replicas_of(draft)) == (0, 4)
    assert there.router == PLACED.router
    two = [node("10.0.0.1", 2, "large"), node("10.0.0.2", 2, "large")]
    assert levels(ray_nodes.check_room(there, two)) == ["ok"]
    assert "no room for 2 x target of 2 ranks" in only(ray_nodes.check_room(there, two[:1]))


def test_the_doctor_takes_what_is_deployed_where_no_file_is_given(monkeypatch, tmp_path, capsys):
    args = {"models": {"llama-8b": {"target": {"model": TARGET}}}, "ray": {"address": "auto"}}
    seen = []
    monkeypatch.setattr(ray_nodes, "deployed", lambda config: (args, {}))
    monkeypatch.setattr(ray_nodes, "check", lambda config, listed, models: seen.append(config) or [])
    assert main(["doctor", "--address", "10.0.0.5:6379", "--set", "router.port=8001"]) == 0
    assert "ok       configuration: as deployed at 10.0.0.5:6379, and flags\n" in capsys.readouterr().out
    file = tmp_path / "paceline.yaml"
    file.write_text("router: {port: 8002}\n")
    assert main(["doctor", "--address", "10.0.0.5:6379", "--config", str(file)]) == 0
    monkeypatch.setattr(ray_nodes, "deployed", lambda config: None)
    assert main(["doctor", "--address", "10.0.0.5:6379"]) == 0
    taken = [(list(config.models), config.router.port, config.ray.address) for config in seen]
    assert taken == [(["llama-8b"], 8001, "10.0.0.5:6379"), ([], 8002, "10.0.0.5:6379"), ([], 8000, "10.0.0.5:6379")]


# -- workers and HTTP --------------------------------------------------------------------------------------------------


def met(role, tokenizer=1, *, says=None, trips=(0.001, 0.001, 0.002), speculates=True):
    welcome = Welcome(says or role.value, "m", 10, 10, tokenizer, dtype="fp32", speculates=speculates)
    return workers.Met(role, "10.0.0.1:7001", welcome=welcome, trips=trips)


def test_workers_that_fit():
    lines = list(map(str, workers.judge([met(Role.TARGET), met(Role.DRAFT), met(Role.DRAFT, 0)])))
    assert len(lines) == 3
    assert lines[0] == "ok       target 10.0.0.1:7001: m in fp32, round trip 1.00 ms, worst of 3 2.00 ms"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([met(Role.TARGET), met(Role.DRAFT, 2)], "the tokenizer of m is that of no target"),
        ([met(Role.TARGET), met(Role.DRAFT, says="target")], "is a target worker; list it as --target"),
        ([met(Role.TARGET), workers.Met(Role.DRAFT, "x:1", "Connection refused")], "Connection refused; start the"),
        ([met(Role.TARGET), workers.Met(Role.DRAFT, "x:1", trips=(0.001,))], "does not introduce itself"),
        ([met(Role.DRAFT, says="target")], "is a target worker; list it as --target"),
        (
            [workers.Met(Role.TARGET, "x:1", trips=(1.0,), reasons=("a", "b")), met(Role.TARGET)],
            "introduce itself: a; b; ",
        ),
        ([met(Role.DRAFT)], "no target worker answers"),
        ([met(Role.TARGET, speculates=False)], "cannot speculate"),
        ([met(Role.TARGET, trips=(0.001, 0.001, 0.09))], "uneven"),
    ],
)
def test_workers_that_do_not_fit(found, words):
    faults = [finding for finding in workers.judge(found) if finding.level is not Level.OK]
    assert words in only(faults)


def test_nobody_listed_is_no_fault():
    assert not list(workers.judge([]))


def test_distance_pays_or_not():
    near = [met(Role.TARGET), met(Role.DRAFT)]
    assert only(workers.judge_distance(near, 0.03, 0.002, 0.8)).startswith(
        "ok       distance: 2.0 ms from drafter to target"
    )
    far = [met(Role.TARGET), met(Role.DRAFT, trips=(2.0,))]
    assert only(workers.judge_distance(far, 0.005, 0.004, 0.3)).startswith("warning  distance: 2001.0 ms")
    assert not list(workers.judge_distance([met(Role.TARGET)], 0.03, 0.002, 0.8))


def test_a_pool_that_may_grow_is_looked_at():
    config = from_mapping({"draft": {"replicas": 0, "max_replicas": 4, "threads": 100}}, "args")
    assert config.drafts == 4
    assert [need.pool for need in machine.needs(config, machine.Devices(False, None, [], GIB))] == ["target", "draft"]
    assert levels(machine.check_threads(config, 64)) == ["warning"]
    assert {"model of draft", "vocabulary of draft"} <= {finding.subject for finding in models.check(config)}


def test_the_same_text_with_and_without_drafts():
    drafted = CompletionTally(text="ab", tokens=2, accepted=1, offered=2)
    plain = CompletionTally(text="ab", tokens=2)
    assert only(endpoint.judge("http x", drafted, plain)).startswith("ok ")
    assert "no drafts were offered" in only(endpoint.judge("http x", plain, plain))
    assert "the text differs" in only(endpoint.judge("http x", drafted, CompletionTally(text="ac", tokens=2)))


def test_nothing_serves():
    port = free_port()
    assert only(endpoint.check(f"http://127.0.0.1:{port}")).startswith(
        f"problem  http http://127.0.0.1:{port}: does not"
    )
    for url in ("rubbish", "http://["):
        assert only(endpoint.check(url)).startswith("problem ")


@pytest.mark.parametrize(("url", "by_proxy"), [("http://paceline.example", True), ("http://127.0.0.1:9", False)])
def test_a_server_elsewhere_is_asked_by_the_proxy_of_the_environment(monkeypatch, url, by_proxy):
    """As by the completions that follow."""
    asked = []

    class Client:
        def __init__(self, *, trust_env, **options):
            asked.append(trust_env)
            raise endpoint.httpx.ConnectError("nobody")

    monkeypatch.setattr(endpoint.httpx, "Client", Client)
    assert "does not serve: nobody" in only(endpoint.check(url))
    assert asked == [by_proxy]


def test_a_router_on_a_taken_port_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = Config(router=RouterConfig(port=taken.getsockname()[1]))
        assert "problem" in levels(machine.check_machine(config))
