"""How workers share the GPUs of one machine: never more than there is of any, and a target more than a drafter."""

from __future__ import annotations

import math

import pytest
import torch

from cluster.config.config import Config, Override, from_mapping, load
from cluster.config.serving import SHARED_GPU, draft_settings, shared_drafter, target_settings
from cluster.local import gpus
from cluster.local.gpus import Turns, divided, placed
from draft_service.service import DraftSettings
from engine.settings import EngineSettings
from tests.cluster.processes import run
from tests.ports import free_port


def configured(**settings: object) -> Config:
    return load(None, [Override(key.replace("_", ".", 1), str(text), "--set") for key, text in settings.items()])


def shares(config: Config) -> tuple[float, float]:
    return config.target.gpus, config.draft.gpus


@pytest.mark.parametrize(
    ("settings", "count", "expected"),
    [
        ({}, 0, (0, 0)),
        ({}, 1, (0.8, 0.2)),
        ({}, 2, (1, 1)),
        ({"target_replicas": 2, "draft_replicas": 3}, 2, (0.5714, 0.1428)),
        ({"target_replicas": 2, "draft_replicas": 6}, 8, (1, 1)),
        ({"target_tensor_parallel_size": 8}, 8, (0.8, 0.2)),
        ({"target_tensor_parallel_size": 8, "draft_replicas": 8}, 8, (0.52, 0.06)),
        ({"target_replicas": 2, "speculation_enabled": "false"}, 1, (0.5, 0.5)),
        ({"draft_device": "cpu"}, 1, (1, 0)),
        ({"draft_placement": "cpu"}, 1, (1, 0)),
        ({"draft_placement": "shared"}, 1, (1, 0)),
        ({"draft_placement": "shared", "target_replicas": 2}, 1, (0.5, 0)),
        ({"draft_max_replicas": 4}, 1, (0.52, 0.12)),
        ({"target_gpus": 0.4}, 1, (0.4, 0)),
        ({"draft_device": "cuda:1"}, 2, (0, 0)),
        ({"target_tensor_parallel_size": 2, "target_replicas": 2, "backend": "ray"}, 2, (0, 0)),
        ({"target_tensor_parallel_size": 2, "target_replicas": 2, "backend": "local"}, 2, (0.4, 0.2)),
    ],
)
def test_what_ranks_have_of_a_gpu(settings: dict[str, object], count: int, expected: tuple[float, float]) -> None:
    found = shares(divided(configured(**settings), count))
    assert found == expected or ("speculation_enabled" in settings and found[0] == expected[0])


@pytest.mark.parametrize(
    ("settings", "count", "expected"),
    [
        ({}, 0, "auto"),
        ({}, 1, "shared"),
        ({}, 2, "auto"),
        ({"draft_placement": "own"}, 1, "own"),
        ({"draft_replicas": 2}, 1, "auto"),
        ({"target_gpus": 0.5}, 1, "auto"),
        ({"draft_device": "cpu"}, 1, "auto"),
        ({"draft_model": "org/somewhere-else"}, 1, "auto"),
        ({"speculation_enabled": "false"}, 1, "auto"),
    ],
)
def test_two_models_do_not_share_the_only_gpu_in_two_processes(
    settings: dict[str, object], count: int, expected: str
) -> None:
    assert placed(configured(**settings), count).draft.placement == expected


@pytest.mark.parametrize("targets", range(1, 6))
@pytest.mark.parametrize("drafts", range(1, 12))
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_order_leaves_room(targets: int, drafts: int, count: int) -> None:
    """Ray fills one GPU after the other, in any order of deployments."""
    config = divided(configured(target_replicas=targets, draft_replicas=drafts, backend="local"), count)
    target, draft = shares(config)
    for asked in ([draft] * drafts + [target] * targets, [target] * targets + [draft] * drafts):
        left = [1.0] * count
        for share in asked:
            fitting = [gpu for gpu in range(count) if left[gpu] + 1e-9 >= share]
            assert fitting, (targets, drafts, count, share, left)
            left[min(fitting, key=lambda gpu: left[gpu])] -= share


def test_each_model_of_several() -> None:
    pools = {"a": {"target": {}, "drafts": {"d": {}}}, "b": {"target": {}, "drafts": {"d": {"device": "cpu"}}}}
    config = divided(from_mapping({"models": pools}, "here"), 1)
    a, b = config.models["a"], config.models["b"]
    assert (a.target.gpus, b.target.gpus, a.drafts["d"].gpus, b.drafts["d"].gpus) == (0.4, 0.4, 0.2, 0)


def test_workers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    config = divided(configured(target_replicas=2, draft_replicas=3), 2)
    turns = Turns(2)
    workers = [config.target] * 2 + [config.draft] * 3
    assert [turns.environment(worker)[gpus.VISIBLE] for worker in workers] == ["0", "1", "0", "1", "0"]
    pair = divided(configured(target_tensor_parallel_size=2), 4)
    monkeypatch.setenv(gpus.VISIBLE, "5,3,GPU-a,GPU-b")
    turns = Turns(4)
    assert turns.environment(pair.target) == {gpus.VISIBLE: "5,3"}
    assert turns.environment(pair.draft) == {gpus.VISIBLE: "GPU-a"}
    assert turns.environment(configured(draft_device="cuda:1").draft) == {}
    assert Turns(0).environment(pair.target) == {}


@pytest.mark.parametrize(
    ("settings", "target", "draft"),
    [
        ({}, "auto", "auto"),
        ({"target_gpus": 1}, "cuda", "auto"),
        ({"target_gpus": 1, "draft_gpus": 0.5}, "cuda", "cuda"),
        ({"target_gpus": 1, "target_device": "cpu", "draft_gpus": 1, "draft_device": "cuda:1"}, "cpu", "cuda:1"),
    ],
)
def test_who_reserves_a_gpu_must_have_one(settings: dict[str, object], target: str, draft: str) -> None:
    config = configured(**settings)
    assert target_settings(config).engine.device == target
    assert draft_settings(config).engine.device == draft


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_that_reserves_a_gpu_ends_where_there_is_none(tmp_path) -> None:
    """It says why, and does not compute on the CPU, a hundred times slower than anybody expects."""
    settings = tmp_path / "paceline.yaml"
    settings.write_text("target: {gpus: 1}\n")
    done = run("worker", "target", "--config", str(settings), "--listen", f"127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert "device 'cuda' cannot be used here: " in done.stderr


def test_a_drafter_in_its_targets_process_demands_no_gpu_that_nobody_reserved(monkeypatch) -> None:
    built: list[EngineSettings] = []

    def note(settings: DraftSettings, progress: object) -> None:
        built.append(settings.engine)

    monkeypatch.setattr("draft_service.service.build_in_turn", note)
    for settings in ({"draft_placement": "shared"}, {"draft_placement": "shared", "draft_gpus": 0.25}):
        make = shared_drafter(configured(**settings))
        assert make is not None
        make(lambda line: None)
    assert [(one.device, one.gpu_share) for one in built] == [("auto", SHARED_GPU), ("cuda", 0.25)]


def test_workers_are_told_their_share() -> None:
    config = divided(configured(), 1)
    assert target_settings(config).engine.gpu_share == 0.8
    assert draft_settings(config).engine.gpu_share == 0.2
    assert target_settings(configured(target_gpus=2)).engine.gpu_share == 1.0
    assert math.isclose(target_settings(configured()).engine.gpu_share, 1.0)
