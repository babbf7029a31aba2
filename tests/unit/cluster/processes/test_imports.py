"""Nobody imports what it cannot use, nothing is collected meanwhile, and afterwards everything is as it was."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from cluster.config.config import Config
from cluster.config.environment import CHECKOUT, VISIBLE_GPUS
from cluster.config.pools import DraftConfig, TargetConfig
from cluster.config.settings import CheckError
from cluster.processes.imports import on_own_gpu, reads_plain_weights, uncollected
from speculation.events import Role

FRESH = """
import sys
from cluster.processes.imports import do_without, list_models_once
do_without()
list_models_once()
import draft_service.service, target_service.service
from engine.loading.loader import load
load("models/draft")
unused = ("accelerate", "torch._dynamo.symbolic_convert", "torch._inductor", "torch.distributed.tensor")
assert not [name for name in (*unused, "torchao") if sys.modules.get(name)]
import torch
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(2)).tolist() == [2, 2]
assert sys.modules["torch._dynamo.symbolic_convert"], "it was not compiled"
"""
"""What a fresh process of a worker with a plain model imports; that something can be compiled in it all the same."""

LISTED = """
from cluster.processes.imports import list_models_once
list_models_once()
import transformers.models as given
from transformers.utils.import_utils import _LazyModule, define_import_structure
listed = _LazyModule("transformers.models", given.__file__, define_import_structure(given.__file__))
assert len(given._class_to_module) > 1000
assert (given._class_to_module, given._modules) == (listed._class_to_module, listed._modules)
"""
"""What transformers lists of its models by itself is what it is given."""

LIGHT = """
import sys
import cluster.cli, cluster.local.backend, httpx, router.service
from cluster.config.config import Config
from cluster.config.serving import router_settings
router_settings(Config())
assert not {"torch", "transformers", "ray"} & set(sys.modules)
"""
"""What ``paceline up --backend local`` and the router import."""


@pytest.mark.parametrize(
    ("role", "target", "draft", "visible", "seen", "devices"),
    [
        (Role.TARGET, "cuda:1", "auto", "3,5", "5", ("cuda", "auto")),
        (Role.DRAFT, "cuda:0", "cuda:1", None, "1", ("cuda:0", "cuda")),
        (Role.DRAFT, "cuda:1", "auto", "3,5", "3,5", ("cuda:1", "auto")),
        (Role.TARGET, "cuda:2", "auto", "3,5", "3,5", ("cuda:2", "auto")),
        (Role.TARGET, "cuda:1", "auto", "", "", ("cuda:1", "auto")),
        (Role.TARGET, "cuda", "cpu", "3,5", "3,5", ("cuda", "cpu")),
    ],
)
def test_a_worker_sees_the_gpu_that_its_device_names(role, target, draft, visible, seen, devices, monkeypatch):
    """It is the first it sees, on which every thread launches what it has to."""
    monkeypatch.setenv(VISIBLE_GPUS, "")  # restored in the end, whatever is set meanwhile
    monkeypatch.delenv(VISIBLE_GPUS)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_GPUS, visible)
    config = on_own_gpu(Config(target=TargetConfig(device=target), draft=DraftConfig(device=draft)), role)
    assert os.environ[VISIBLE_GPUS] == seen
    assert (config.target.device, config.draft.device) == devices


def test_two_models_of_a_process_share_the_gpu_that_one_of_them_names(monkeypatch):
    monkeypatch.setenv(VISIBLE_GPUS, "3,5")
    config = on_own_gpu(
        Config(target=TargetConfig(device="cuda:1"), draft=DraftConfig(placement="shared")), Role.TARGET
    )
    assert (config.target.device, config.draft.device, os.environ[VISIBLE_GPUS]) == ("cuda", "auto", "5")
    monkeypatch.setenv(VISIBLE_GPUS, "3,5")
    beside = Config(target=TargetConfig(device="cpu"), draft=DraftConfig(device="cuda:1", placement="shared"))
    config = on_own_gpu(beside, Role.TARGET)
    assert (config.target.device, config.draft.device, os.environ[VISIBLE_GPUS]) == ("cpu", "cuda", "5")
    apart = Config(target=TargetConfig(device="cuda:0"), draft=DraftConfig(device="cuda:1", placement="shared"))
    with pytest.raises(CheckError, match=r"is cuda:0, draft\.device is cuda:1, but a draft model in its target's"):
        on_own_gpu(apart, Role.TARGET)
    ranks = Config(target=TargetConfig(device="cuda:0", tensor_parallel_size=2))
    assert on_own_gpu(ranks, Role.TARGET) == ranks


def test_nothing_is_collected_meanwhile_and_what_is_there_is_never_looked_at_again():
    before = gc.get_freeze_count()
    kept = [[] for _ in range(100)]
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on():
    try:
        with pytest.raises(ImportError), uncollected():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_who_has_switched_it_off_is_left_alone():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("script", [FRESH, LIGHT, LISTED], ids=["worker", "command and router", "models"])
def test_what_has_no_use_is_not_imported(script):
    subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, check=True)


@pytest.fixture
def plain(tmp_path) -> str:
    """A folder that is described as a model of plain weights."""
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


@pytest.fixture
def quantised(tmp_path) -> str:
    """One whose weights are stored quantised."""
    folder = tmp_path / "quantised"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    return str(folder)


def of(target, draft) -> Config:
    on_cpu = [worker if worker.device == "cuda" else replace(worker, device="cpu") for worker in (target, draft)]
    return replace(Config(), target=on_cpu[0], draft=on_cpu[1])


def test_models_of_plain_weights_need_no_more(plain):
    config = of(TargetConfig(model=plain), DraftConfig(model=plain, assistant=plain))
    assert all(reads_plain_weights(config, role) for role in Role)


def test_other_models_need_all_that_transformers_has(plain, quantised):
    others = [{"model": quantised}, {"model": "Org/Name"}, {"model": plain, "quantization": "int8"}]
    for other in [*others, {"model": plain, "tensor_parallel_size": 2}, {"model": plain, "device": "cuda"}]:
        config = of(TargetConfig(**other), DraftConfig(**other))
        assert not any(reads_plain_weights(config, role) for role in Role), other


def test_every_model_of_the_process_counts(plain, quantised):
    assert not reads_plain_weights(of(TargetConfig(), DraftConfig(model=plain, assistant=quantised)), Role.DRAFT)
    for placement, counts in (("shared", True), ("own", False)):
        config = of(TargetConfig(model=plain), DraftConfig(model=quantised, placement=placement))
        assert reads_plain_weights(config, Role.TARGET) != counts, placement
