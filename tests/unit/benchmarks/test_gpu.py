"""``paceline bench gpu``: every stage end to end on a CPU, what fails, its figures, and what it does without."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.engine.settings import LlamaShape
from benchmarks.gpu import device, speculation
from benchmarks.gpu import run as gpu
from benchmarks.gpu.figures import GOALS, Speedup, StageResult, StepTiming, contender
from benchmarks.gpu.settings import (
    CASES,
    COMPILED,
    GENERATE,
    OURS,
    PROFILED,
    SHAPES,
    SPECULATION,
    STAGES,
    DraftingSetting,
    GpuOptions,
)
from benchmarks.harness import pair as pairs
from benchmarks.harness import processes
from benchmarks.harness.measure import Decoded, Run, TimedCommit, seeded
from benchmarks.harness.pair import BUNDLED, Pair
from benchmarks.harness.processes import ReadyProcess, WorkerFailed, WorkerPlan
from benchmarks.harness.report import Result
from cluster.cli import main

ENGINE = [stage for stage in STAGES if stage != SPECULATION]
LEFT_OUT = ("accelerate", "google.protobuf", "grpc", "httpx", "llguidance", "matplotlib", "psutil", "ray", "torchao")


def measured(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and figures of a run on a CPU."""
    file = tmp_path / "figures.json"
    code = main(["bench", "gpu", "--device", "cpu", "--json", str(file), *flags])
    return code, json.loads(file.read_text())


def by_stage(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {outcome["stage"]: outcome for outcome in document["outcomes"]}


def test_quantised_weights_are_measured_against_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.loading.quantisation.has_kernel", lambda: True
    )  # torchao's own product is taken, as on GPUs
    figures = []
    for flags in ([], ["--quantization", "int8"]):
        code, document = measured(tmp_path, "--stage", "floor,steps", *flags)
        assert code == 0
        figures.append(by_stage(document))
    plain, quantised = figures
    assert quantised["steps"]["facts"]["weights"].startswith("int8 weights of ")
    assert not plain["steps"]["facts"]

    def read(found: dict[str, dict[str, Any]]) -> float:
        """Megabytes of the layers; the output layer stays as it is, in float32."""
        tiny = SHAPES["tiny"]
        every = found["steps"]["steps"]["1 token"]["floor"] * found["floor"]["facts"]["GB/s"]
        return float(every - 4 * tiny.vocabulary * tiny.hidden / 1e6)

    assert 0.25 < read(quantised) / read(plain) < 0.3


def test_every_stage_runs_and_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = measured(tmp_path, "--stage", ",".join(ENGINE))
    found = by_stage(document)
    assert code == 0
    assert list(found) == ENGINE
    assert not any(outcome["failed"] for outcome in found.values())
    assert found["floor"]["facts"]["GB/s"] > 0
    for stage in ("steps", "draft"):
        steps = found[stage]["steps"]
        drafting = [f"{n} x 8 levels, {how}" for n in (1, 8) for how in ("a step each", "one launch")]
        assert list(steps) == [*CASES, *(drafting if stage == "draft" else ())]
        assert {name: (step["tokens"], step["rows"]) for name, step in steps.items() if name in CASES} == {
            "1 token": (1, 16),
            "chain 8": (8, 16),
            "tree 16": (16, 16),
            "16 x 1": (16, 16),
            "16 x 4": (64, 64),
            "64 x 1": (64, 64),
            "1 token, far": (1, 16),
            "tree 16, far": (16, 16),
        }
        for step in steps.values():
            assert 0 < step["layout"] < step["wall"]
            assert 0 < step["graph"] < step["wall"]
        assert all(steps[name]["floor"] > 0 for name in CASES)
    (prompt,) = found["prompt"]["steps"].values()
    assert (prompt["tokens"], prompt["rows"]) == (80, 0), "two pieces"
    assert 0 < prompt["graph"] < prompt["wall"]
    told = found["kernels"]["facts"]
    assert {name.split(": ")[0] for name in told} == set(PROFILED)
    assert all(float(text.split()[0]) >= 0 and text.split()[1:3] == ["ms", "in"] for text in told.values())
    facts = found["exact"]["facts"]
    assert facts["told"]
    assert sorted([*facts["given up"], *facts["rows"]]) == [16, 32, 64]
    names = [contender(name, batch) for batch in (1, 16) for name in (OURS, GENERATE, COMPILED)]
    assert sorted(found["transformers"]["rates"]) == sorted(names)
    assert all(min(rates) > 0 for rates in found["transformers"]["rates"].values())
    assert set(document["summary"]) == set(document["wanted"]) == {goal.key for goal in GOALS}
    said = capsys.readouterr().out
    for words in ("Must reach", "tree 16, far", "transformers compiled, 16 at once", "random weights"):
        assert words in said


@pytest.mark.thorough
def test_it_needs_nothing_that_serves_nor_the_development_environment(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({LEFT_OUT}))\n"  # None there: it cannot be imported
        "from cluster.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('router', 'target_service', 'protos')]\n"
        "sys.exit(code)\n"
    )
    flags = ["--device", "cpu", "--stage", "floor,exact", "--json", str(tmp_path / "figures.json")]
    ran = subprocess.run(
        [sys.executable, "-c", program, "bench", "gpu", *flags], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    assert set(by_stage(json.loads((tmp_path / "figures.json").read_text()))) == {"floor", "exact"}


def test_a_stage_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = Result.write_json

    def noted(result: Result, file: Path) -> None:
        written.append(len(result.figures["outcomes"]))
        write(result, file)

    def failing(_: device.Subject) -> StageResult:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(Result, "write_json", noted)
    monkeypatch.setitem(gpu.MEASURED, "exact", failing)
    code, document = measured(tmp_path, "--stage", "floor,exact", "--stage", "prompt")
    found = by_stage(document)
    assert code == 1
    assert found["exact"]["failed"] == "OutOfMemoryError: CUDA out of memory."
    assert not found["floor"]["failed"] and not found["prompt"]["failed"]
    assert found["prompt"]["steps"]
    assert written == [1, 2, 3], "figures are there after each stage"


def test_a_model_that_cannot_be_built_fails_its_stages_and_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[LlamaShape] = []

    def failing(shape: LlamaShape, _: device.TimedDevice) -> Any:
        tried.append(shape)
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(device, "random_module", failing)
    code, document = measured(tmp_path, "--stage", "floor,steps,prompt")
    found = by_stage(document)
    assert code == 1
    assert len(tried) == 1
    assert not found["floor"]["failed"]
    for stage in ("steps", "prompt"):
        assert "RuntimeError: no kernel image is available" in found[stage]["failed"]


def test_a_contender_that_cannot_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LlamaForCausalLM.generate

    def without_static(module: Any, *args: Any, **how: Any) -> Any:
        if "cache_implementation" in how:
            raise RuntimeError("backend='inductor' raised")
        return generate(module, *args, **how)

    monkeypatch.setattr(LlamaForCausalLM, "generate", without_static)
    code, document = measured(tmp_path, "--stage", "transformers")
    found = by_stage(document)["transformers"]
    assert code == 1
    for batch in (1, 16):
        assert f"{contender(COMPILED, batch)}: RuntimeError: backend='inductor' raised" in found["failed"]
        assert found["rates"][contender(OURS, batch)] and found["rates"][contender(GENERATE, batch)]
        assert contender(COMPILED, batch) not in found["rates"]


def test_steps_that_are_not_replayed_have_no_graph_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: device.ReplayTimer, __: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device.ReplayTimer, "__call__", refused)
    code, document = measured(tmp_path, "--stage", "steps")
    step = by_stage(document)["steps"]["steps"]["tree 16"]
    assert code == 0
    assert step["wall"] > 0
    assert step["graph"] is None and step["layout"] is None
    assert any("not replayed as CUDA graphs: RuntimeError: operation not permitted" in n for n in document["notes"])


def test_each_stage_measures_its_own_shapes_unless_others_are_asked_for() -> None:
    assert (
        GpuOptions().plan()
        == GpuOptions(stages=tuple(STAGES)).plan()
        == {
            "": ["floor"],
            "8B": ["steps", "exact", "prompt", "kernels", "transformers"],
            "1B": ["draft", "exact"],
            "tiny": ["draft", "exact"],
            "stretched": ["speculation"],
        }
    )
    assert GpuOptions(stages=("prompt", "floor"), shapes=("1B",)).plan() == {"": ["floor"], "1B": ["prompt"]}
    assert GpuOptions(stages=("draft",), device="cpu").plan() == {"tiny": ["draft"]}


def test_the_floor_counts_what_a_step_reads() -> None:
    """The products of the layers and of the output layer; norms are next to nothing."""
    a_layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    assert SHAPES["8B"].weights_read == pytest.approx(32 * a_layer + 4096 * 32_768, rel=1e-3)
    tiny = SHAPES["tiny"]
    a_layer = 128 * (128 + 2 * 64 + 128 + 3 * 352)
    assert tiny.weights_read == pytest.approx(2 * a_layer + 128 * 4096, rel=1e-2), "its output layer is tied"


def test_goals_are_the_worst_of_their_steps() -> None:
    def step(tokens: int, graph: float, wall: float) -> StepTiming:
        return StepTiming(tokens, 64, wall, graph, 0.1, 4.0)

    steps = {
        "1 token": step(1, 4.8, 5.0),
        "tree 16": step(16, 5.2, 5.6),
        "64 x 1": step(64, 6.0, 6.3),
        "tree 16, far": step(16, 6.4, 6.7),
    }
    rates = {contender(OURS, 1): [120.0, 100.0, 90.0], contender(COMPILED, 1): [100.0, 100.0, 100.0]}
    outcomes = [
        StageResult("steps", "8B", steps=steps),
        StageResult("draft", "1B", steps={"tree 16": step(16, 1.3, 1.5), "64 x 1": step(64, 2.0, 3.0)}),
        StageResult("draft", "tiny", steps={"1 x 8 levels, one launch": step(29, 2.0, 2.5)}),
        StageResult("exact", "8B", facts={"exact": True}),
        StageResult("exact", "1B", facts={"exact": False}),
        StageResult("transformers", "8B", rates=rates),
        StageResult("prompt", "8B", failed="OutOfMemoryError"),
        StageResult("speculation", "tiny", speedups=[speedup("own", DraftingSetting("right", 1, 0.0), 9.0)]),
        StageResult(
            "speculation",
            "stretched",
            speedups=[
                speedup("same GPU", DraftingSetting("right", 1, 0.0), 1.5),
                speedup("shared", DraftingSetting("right", 1, 0.0), 2.5, 2.0, 2.1),
                speedup("shared", DraftingSetting("wrong", 8, 0.0), 0.95),
                speedup("own", DraftingSetting("right", 1, 0.8), 1.9),
                speedup("own", DraftingSetting("right", 32, 0.0), 1.2),
            ],
        ),
    ]
    figures = {goal.key: goal.ours(outcomes) for goal in GOALS}
    assert figures == {
        "step_over_floor": pytest.approx(1.3),
        "step64_over_floor": pytest.approx(1.5),
        "wall_over_graph_ms": pytest.approx(0.4),
        "far_tree_over_floor": pytest.approx(1.6),
        "draft_1B_ms": 1.5,
        "draft_tiny_ms": None,
        "launch_tiny_ms": 2.5,
        "exact": 0.5,
        "over_compiled_1": 1.0,
        "over_compiled_16": None,
        "prompt_ms": None,
        "own_1": None,
        "own_1_sampled": 1.9,
        "own_8": None,
        "own_32": 1.2,
        "shared_1": 2.1,
        "shared_8": None,
        "slowest": 0.95,
    }


def speedup(placement: str, setting: DraftingSetting, *ratios: float) -> Speedup:
    plain, drafted = (100.0,) * len(ratios), tuple(100 * ratio for ratio in ratios)
    return Speedup(placement, setting, plain, drafted, ratios, 4.0, 3.0, 1.0, 5.0, 6.0)


def test_drafting_is_measured_setting_by_setting_and_a_drafter_dies_last() -> None:
    options = GpuOptions(stages=(SPECULATION,), device="cpu", drafters=("dead", "right"), temperatures=(0.0, 1.0))
    assert options.plan() == {"stretched": ["speculation"]}
    assert options.settings == [
        DraftingSetting(drafter, streams, temperature)
        for drafter in ("right", "dead")
        for streams in (1, 2)
        for temperature in (0.0, 1.0)
    ]
    in_turn = GpuOptions(device="cpu", placements=("shared",), streams=(4,), temperatures=(0.0,))
    assert [setting.drafter for setting in in_turn.settings] == ["right", "wrong"], "it would take the target with it"
    assert in_turn.sizes.streams == (4,)


def test_prompts_of_all_rounds_begin_differently() -> None:
    found = seeded(speculation.distinct([(1, 2, 3, 4), (5, 6, 7, 8)]), 3, 2, 8)
    assert [batch.prompts for batch in found] == [
        ((1, 2, 3, 4), (5, 6, 7, 8)),
        ((2, 3, 4), (6, 7, 8)),
        ((3, 4), (7, 8)),
    ]


def test_a_speedup_is_taken_round_by_round() -> None:
    def run(start: float, step: float, *commits: tuple[int, int, int], tokens: tuple[int, ...] = (1, 2)) -> Run:
        times = [start + step * number for number in range(len(commits))]
        made = [TimedCommit(at, *commit) for at, commit in zip(times, commits, strict=True)]
        return Run((Decoded(tokens, tuple(made)),))

    plain = [run(1.0, 0.25, *[(1, 0, 0)] * 5), run(9.0, 0.25, *[(1, 0, 0)] * 5)]
    drafted = [
        run(3.0, 0.5, (1, 0, 0), (4, 3, 6), (4, 3, 4)),
        run(5.0, 0.5, (1, 0, 0), (2, 1, 5), (2, 1, 1), tokens=(1, 3)),
    ]
    assert speculation.speedup_of("own", DraftingSetting("right", 1, 0.0), plain, drafted) == Speedup(
        placement="own",
        setting=DraftingSetting("right", 1, 0.0),
        plain=(4.0, 4.0),
        drafted=(8.0, 4.0),
        ratios=(2.0, 1.0),
        offered=4.0,
        kept=2.0,
        same_text=0.5,
        plain_ms=250.0,
        drafted_ms=500.0,
    )


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Pair("stretched", BUNDLED, BUNDLED, 1000, "", 0.8)
    monkeypatch.setattr(speculation, "stretched_pair", lambda *_: found)
    monkeypatch.setattr(speculation, "wrong_draft", lambda _: BUNDLED)


@pytest.mark.usefixtures("built")
def test_what_there_is_no_time_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(speculation.DraftingBench, "_start", never)
    code, document = measured(tmp_path, "--stage", "speculation", "--drafters", "right,wrong", "--budget-s", "0.01")
    pair, rest = document["outcomes"]
    assert code == 0
    assert pair["facts"] == {"parameters": 1000, "agreement": 0.8}
    assert rest["facts"] == {"not measured for want of time": "8 settings, from right drafter, 1 at once, T 0 on"}


@pytest.mark.usefixtures("built")
def test_a_worker_that_does_not_start_fails_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[WorkerPlan] = []

    @asynccontextmanager
    async def failing(plan: WorkerPlan) -> AsyncIterator[ReadyProcess]:
        wanted.append(plan)
        raise WorkerFailed("the target worker did not start")
        yield

    monkeypatch.setattr(processes, "running", failing)
    code, document = measured(tmp_path, "--stage", "floor,speculation", "--records", str(tmp_path))
    floor, pair, failed = document["outcomes"]
    assert code == 1
    assert not floor["failed"] and not pair["failed"]
    assert failed["failed"] == "WorkerFailed: the target worker did not start"
    names = ["cpu-right-draft", "cpu-target", "cpu-wrong-draft", "own-right-draft", "own-target", "own-wrong-draft"]
    names += ["shared-right-target", "shared-wrong-target"]
    assert sorted(plan.record.stem for plan in wanted if plan.record) == names
    assert all(
        ["--draft-model", str(BUNDLED)] == list(plan.flags)[-2:] for plan in wanted if "shared" in str(plan.record)
    )


@pytest.mark.thorough
def test_drafting_beside_plain_decoding_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pairs, "CACHE", tmp_path)
    flags = ["--placements", "shared,own", "--streams", "2", "--temperatures", "0,0.8"]
    code, document = measured(tmp_path, "--stage", "speculation", *flags, "--tokens", "8", "--rounds", "1")
    pair, *settings = document["outcomes"]
    assert code == 0
    assert not any(outcome["failed"] for outcome in document["outcomes"])
    assert 0.7 < pair["facts"]["agreement"] < 0.9
    found = [(one["placement"], *one["setting"].values()) for outcome in settings for one in outcome["speedups"]]
    assert found == [
        (placement, drafter, 2, temperature)
        for drafter in ("right", "wrong", "dead")
        for temperature in (0.0, 0.8)
        for placement in ("shared", "own")
        if (placement, drafter) != ("shared", "dead")
    ]
    for outcome in settings:
        for one in outcome["speedups"]:
            assert one["same_text"] == 1.0, "drafts change no text"
            assert len(one["ratios"]) == 1 and one["ratios"][0] > 0
            assert 0 <= one["kept"] <= one["offered"]
            if one["setting"]["drafter"] == "dead":
                assert one["offered"] == 0
    said = capsys.readouterr()
    assert "starting 5 workers" in said.err and "own wrong draft" in said.err
    assert "Drafting, tokens/s" in said.out
