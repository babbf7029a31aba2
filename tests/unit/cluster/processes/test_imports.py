"""Nobody imports what it cannot use, nothing is collected meanwhile, and afterwards everything is as it was."""

import gc
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from cluster.config.config import Config
from cluster.config.environment import CHECKOUT
from cluster.config.pools import DraftConfig, TargetConfig
from cluster.processes.imports import reads_plain_weights, uncollected
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
