"""``paceline align draft`` on tiny models: what it learns from, how it goes on after a stop, what it leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment import distillation, workplace
from alignment.distillation import DistillationOutcome, score
from alignment.encoding import Batches
from alignment.options import DiskError, SettingsError
from alignment.pair import load_stock
from alignment.training import Trainer
from alignment.workplace import Workplace, read_checkpoint, write_checkpoint, write_whole
from cluster.cli import main
from engine.attention.row_attention import RowAttention
from engine.loading.loader import load
from models.corpus import SourceFile, train_tokenizer
from models.pair import ModelShape, build, load_tokenizer, publish
from tests.bundled import MODELS

TARGET = ModelShape(hidden_size=16, layers=1, heads=2, kv_heads=2, intermediate_size=24)
DRAFT = ModelShape(hidden_size=8, layers=1, heads=2, kv_heads=2, intermediate_size=16)
CONTEXT = 64
QUICK = {
    "--steps": "6",
    "--samples": "1000",
    "--new-tokens": "8",
    "--batch-tokens": "128",
    "--sequence": "32",
    "--rate": "0.02",
    "--temperature": "0,1",
    "--dtype": "fp32",
    "--device": "cpu",
}
Run = Callable[..., int]
DRAW = distillation.plot


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, draft, and a draft with another tokenizer; and data, each record of a word of its own."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = load_tokenizer(MODELS / "target")
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    publish(build(TARGET, CONTEXT, end, seed=1), tokenizer, folder / "target")
    publish(build(DRAFT, CONTEXT, end, seed=2), tokenizer, folder / "draft")
    other = train_tokenizer([SourceFile("a", "some other text " * 20)], 300, CONTEXT)
    publish(build(DRAFT, CONTEXT, 0, seed=2), other, folder / "other")
    records = ({"text": f"word{number}x " * 6} for number in range(200))
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(autouse=True)
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "plot", lambda *_: None)  # takes longer than the rest
    monkeypatch.setattr(distillation, "HELD_OUT_ROWS", 3)
    monkeypatch.setattr(distillation, "EVALUATIONS", 3)


@pytest.fixture
def run(pair: Path, tmp_path: Path) -> Run:
    def run(out: str = "out", *others: str, **flags: str) -> int:
        given = QUICK | {"--target": f"{pair}/target", "--draft": f"{pair}/draft", "--data": f"{pair}/data.jsonl"}
        given |= {"--out": str(tmp_path / out)} | {f"--{name.replace('_', '-')}": text for name, text in flags.items()}
        return main(["align", "draft", *(part for flag in given.items() for part in flag), *others])

    return run


def test_models_to_train_are_left_as_transformers_computes_them(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too: layers that are fused there know steps of an engine only."""
    monkeypatch.setattr("engine.loading.loader.find_attention", lambda *_: pytest.fail("computed by rows"))
    assert type(load_stock(str(pair / "target"), "float32", "cpu", 1).attention) is RowAttention


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def told(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "alignment.json").read_text())
    return loaded


@pytest.mark.parametrize("objective", ["forward-kl", "tv"])
def test_it_makes_a_draft_better_at_what_the_target_says(
    run: Run, pair: Path, tmp_path: Path, objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(objective=objective, steps="12") == 0
    outcome = DistillationOutcome(**told(tmp_path / "out")["figures"])
    assert score(outcome.after) > score(outcome.before) + 0.01
    assert max(found for _, found in outcome.history) == pytest.approx(score(outcome.after))
    said, progress = capsys.readouterr()
    assert "before and after" in said
    (written,) = re.findall(r"training on \d+ tokens of data and (\d+) that the target wrote", progress)
    assert 0 < int(written) <= 1024
    assert f"{outcome.before['written at 1']['overlap']:.3f} → {outcome.after['written at 1']['overlap']:.3f}" in said
    drafts = [load(str(folder), dtype="float32") for folder in (pair / "draft", tmp_path / "out")]
    assert drafts[0].tokenizer_digest == drafts[1].tokenizer_digest
    assert drafts[0].stop_tokens == drafts[1].stop_tokens
    assert not (tmp_path / "out" / ".align").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16", "as it was stored"


def test_a_run_that_was_stopped_anywhere_ends_as_if_it_had_not_been(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("whole") == 0
    monkeypatch.setattr("alignment.training.CHECKPOINT_SECONDS", 0.0)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    step, write = Trainer._step, distillation.Writer.write
    to_come: list[tuple[signal.Signals, object]] = [(signal.SIGINT, "write"), (signal.SIGTERM, 2), (signal.SIGINT, 4)]

    def stop_at(place: object) -> None:
        if to_come and to_come[0][1] == place:
            os.kill(os.getpid(), to_come.pop(0)[0])

    def stopped_step(trainer: Any, *rest: Any) -> None:
        step(trainer, *rest)
        stop_at(trainer.progress.step)

    def stopped_write(writer: Any, *rest: Any, **named: Any) -> Any:
        stop_at("write")
        return write(writer, *rest, **named)

    monkeypatch.setattr(Trainer, "_step", stopped_step)
    monkeypatch.setattr(distillation.Writer, "write", stopped_write)
    while to_come:
        assert run("parts") == 130
        assert "the same command goes on from there" in capsys.readouterr().err.splitlines()[-1]
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert run("parts") == 0
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert told(tmp_path / "parts")["figures"] == told(tmp_path / "whole")["figures"]


def test_what_is_held_out_is_never_trained_on(
    run: Run, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    made = Batches.__init__

    def spied(batches: Batches, ids: Any, seed: int) -> None:
        trained.extend(ids.tolist())
        made(batches, ids, seed)

    measured: list[int] = []
    measure = distillation.measure

    def spied_measure(*arguments: Any) -> Any:
        measured.extend(token for row in arguments[2] for token in row.tokens[: max(row.start, 32)])
        return measure(*arguments)

    monkeypatch.setattr(Batches, "__init__", spied)
    monkeypatch.setattr(distillation, "measure", spied_measure)
    assert run() == 0
    tokenizer = load_tokenizer(MODELS / "target")
    words = [
        {word for word in str(tokenizer.decode(ids)).split() if word.startswith("word")} for ids in (trained, measured)
    ]
    whole = [{word for word in found if word.endswith("x")} for found in words]
    assert len(whole[0]) > 100 and len(whole[1]) >= 3
    assert not whole[0] & whole[1]


def test_other_settings_are_refused_with_the_difference(
    run: Run, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step
    monkeypatch.setattr(Trainer, "_step", lambda trainer, *rest: (_ for _ in ()).throw(DiskError("stop here")))
    assert run() == 1
    monkeypatch.setattr(Trainer, "_step", step)
    assert run(steps="7") == 2
    assert "begun with steps 6, now 7; give the same, another folder, or --no-resume" in capsys.readouterr().err
    assert run() == 0
    first = weights(tmp_path / "out")
    assert run() == 0
    said = capsys.readouterr()
    assert "done before with the same settings" in said.err and "before and after" in said.out
    assert run(seed="1") == 2
    assert "begun with seed 0, now 1" in capsys.readouterr().err
    assert run("out", "--no-resume", seed="1") == 0
    assert weights(tmp_path / "out") != first
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    for others in ((), ("--no-resume",)):
        assert run("mine", *others) == 2
        assert "is not empty, and no alignment's" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_disk_that_fills_leaves_the_last_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("whole") == 0
    monkeypatch.setattr("alignment.training.CHECKPOINT_SECONDS", 0.0)
    save, saved = torch.save, iter(range(3))

    def full(state: Any, file: Any) -> None:
        if next(saved, None) is None:
            file.write(b"half of")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    assert run() == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint.pt: cannot be written: No space left on device; the last one is still there" in line
    work = tmp_path / "out" / ".align"
    assert not list(work.glob(".*")), "what was half written is gone"
    kept = read_checkpoint(work / "checkpoint.pt")
    assert kept is not None and kept["progress"][0] == 2, "step 2 was measured, and then saved again"
    monkeypatch.setattr(torch, "save", save)
    assert run() == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_a_disk_that_is_full_from_the_start_leaves_a_folder_to_begin_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="the same command goes on once there is room"):
        Workplace(tmp_path / "out", {}, resume=True)
    monkeypatch.undo()
    Workplace(tmp_path / "out", {}, resume=True)
    assert (tmp_path / "out" / ".align" / "settings.json").exists()


def test_nothing_is_gone_on_from_whose_settings_are_gone(tmp_path: Path) -> None:
    work = Workplace(tmp_path / "out", {"seed": 1}, resume=True).work
    (work / "checkpoint.pt").touch()
    (work / "settings.json").unlink()
    Workplace(tmp_path / "out", {"seed": 2}, resume=True)
    assert [path.name for path in work.iterdir()] == ["settings.json"]


def test_a_checkpoint_that_outgrows_a_real_limit_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(path, {"weights": torch.ones(3)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large; the last one is still there"):
            write_checkpoint(path, {"weights": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = read_checkpoint(path)
    assert kept is not None and torch.equal(kept["weights"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"PK not really")
    with pytest.raises(SettingsError, match=r"checkpoint.pt: not a checkpoint of this program; delete it"):
        read_checkpoint(tmp_path / "checkpoint.pt")


def test_a_model_that_cannot_be_written_costs_nothing_but_the_writing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = distillation.Distillation._save

    def full(course: Any, folder: Path) -> None:
        save(course, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(distillation.Distillation, "_save", full)
    assert run() == 1
    assert "the model cannot be written: " in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()
    monkeypatch.setattr(distillation.Distillation, "_save", save)
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("trained again"))
    assert run() == 0
    assert (tmp_path / "out" / "config.json").exists()


def test_a_model_may_have_folders_and_take_the_place_of_another(tmp_path: Path) -> None:
    for text in ("first", "second"):

        def save_model(folder: Path, text: str = text) -> None:
            (folder / "templates").mkdir(parents=True, mode=0o700)
            (folder / "templates" / text).write_text(text)
            (folder / "config.json").write_text(text)

        Workplace(tmp_path, {}, resume=False).finish({}, save_model)
        assert [path.name for path in (tmp_path / "templates").iterdir()] == [text]
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("templates", "config.json")]
    assert modes == [0o755, 0o644]


def test_it_ends_early_when_nothing_gets_better(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([0.5, 0.6] + [0.55] * 20)
    monkeypatch.setattr(
        distillation.Distillation,
        "_measure",
        lambda *_: {"written at 0": dict.fromkeys(("greedy", "coupled", "overlap"), next(figures))},
    )
    assert run(steps="18") == 0
    outcome = DistillationOutcome(**told(tmp_path / "out")["figures"])
    assert (outcome.best_step, outcome.steps) == (6, 18)
    monkeypatch.setattr(distillation, "EVALUATIONS", 9)
    figures = iter([0.5, 0.6] + [0.55] * 20)
    assert run("other", steps="18") == 0
    outcome = DistillationOutcome(**told(tmp_path / "other")["figures"])
    assert (outcome.best_step, outcome.steps) == (2, 2 + 2 * distillation.PATIENCE)


def test_a_plot_of_the_way(tmp_path: Path) -> None:
    figures = {"written at 0": {"greedy": 0.5, "coupled": 0.4, "overlap": 0.45}}
    outcome = DistillationOutcome(figures, figures, [[0, 0.4], [4, 0.5]], 4, 4)
    assert DRAW(outcome, tmp_path) == tmp_path / "alignment.png"
    assert (tmp_path / "alignment.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_is_gained_the_draft_stays_as_it_was_and_that_is_said(
    run: Run, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = iter([0.5] + [0.4] * 9)
    monkeypatch.setattr(
        distillation.Distillation,
        "_measure",
        lambda *_: {"written at 0": dict.fromkeys(("greedy", "coupled", "overlap"), next(figures))},
    )
    assert run() == 0
    assert "nothing was gained" in capsys.readouterr().out
    before, after = (
        load(str(folder), dtype="float32").module.state_dict() for folder in (pair / "draft", tmp_path / "out")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_tokenizer_is_refused_before_anything_is_made(
    run: Run, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(draft=f"{pair}/other") == 2
    line = capsys.readouterr().err
    assert "has another tokenizer than" in line and "it can draft, but not be aligned" in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "out").exists()


WRONG = {
    "steps": ("0", "--steps must be from 1"),
    "rate": ("nan", "--rate must be from 0.0 to 1.0, got nan"),
    "data_share": ("1", "--data-share must be from 0.0 to 0.9, got 1.0"),
    "temperature": ("0,hot", "--temperature 'hot': must be a number from 0 to 2"),
    "sequence": ("65", "--sequence must be more than --new-tokens (8) and at most the context (64), got 65"),
    "batch_tokens": ("31", "--batch-tokens must be at least --sequence (32), got 31"),
    "threads": ("0", "--threads must be 1 to"),
    "objective": ("mse", "invalid choice: 'mse'"),
    "dtype": ("fp16", "invalid choice: 'fp16'"),
    "device": ("tpu", "device 'tpu' cannot be used here"),
    "target": ("/nowhere", "/nowhere: no such folder"),
    "data": ("/nowhere.txt", "/nowhere.txt: no such file or folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_flags_are_told_in_one_line(
    run: Run, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, reason = WRONG[name]
    try:
        code = run(**{name: value})
    except SystemExit as ended:  # what argparse finds
        code = int(ended.code or 0)
    line = capsys.readouterr().err
    assert (code, len(line.splitlines())) == (2, 1), line
    assert reason in line
    assert not (tmp_path / "out").exists()


def test_too_little_data_is_told_and_more_may_be_given(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "little.txt").write_text("hardly anything\n")
    assert run(data=str(tmp_path / "little.txt")) == 2
    assert "too little text: " in capsys.readouterr().err
    assert run(steps="1") == 0


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def half(file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskError, match="No space left"):
        write_whole(path, half)
    assert list(tmp_path.iterdir()) == []
    write_whole(path, lambda file: file.write(b"all of it"))
    assert path.read_bytes() == b"all of it"
    shutil.rmtree(tmp_path)
    with pytest.raises(DiskError, match="No such file"):
        workplace.write_whole(path, lambda file: file.write(b""))
