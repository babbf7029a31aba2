"""Which workers continue each other's text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import welcome
from engine.exactness import EXACT
from engine.loading.loader import load
from engine.settings import EngineSettings
from speculation.messages import Welcome
from tests.unit.engine.engine_models import save_model


@pytest.mark.parametrize(("dtype", "apart"), [("fp32", False), ("bf16", True)])
def test_ranks_and_exactness_decide_who_goes_on_with_a_text(dtype: str, apart: bool, tmp_path: Path) -> None:
    """Sums of slices are rounded in another order; where steps decide bits, only the like may go on."""
    settings = EngineSettings(save_model("llama", tmp_path, num_hidden_layers=1), dtype=dtype)
    model = load(settings.model, dtype=dtype, device="cpu", self_test=False)

    def introduced(ranks: int = 1, exactness: str = EXACT) -> Welcome:
        return welcome(replace(settings, tensor_parallel_size=ranks), model, "target", exactness)

    alone, split = introduced(), introduced(2)
    assert alone.revision == introduced().revision
    assert (alone.revision != split.revision) == apart
    assert (introduced(4).revision != split.revision) == apart
    assert split.dtype == f"{alone.dtype}, 2 ranks"
    one, other = introduced(exactness="not exact: in a batch, 3%"), introduced(exactness="not exact: in a tree, 4%")
    assert one.revision == other.revision
    assert (one.revision != alone.revision) == apart


@pytest.mark.parametrize(
    ("dtype", "exactness", "apart"),
    [("bf16", EXACT, True), ("bf16", "not exact: in a batch, 3%", False), ("fp32", EXACT, False)],
)
def test_only_gpus_of_one_kind_go_on_with_each_others_exact_texts(
    dtype: str, exactness: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(save_model("llama", tmp_path, num_hidden_layers=1), dtype=dtype)
    loaded = load(settings.model, dtype=dtype, device="cpu", self_test=False)

    def revision(device: str, name: str = "") -> int:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
        return welcome(settings, replace(loaded, device=torch.device(device)), "target", exactness).revision

    one = revision("cuda", "NVIDIA L4")
    assert one == revision("cuda", "NVIDIA L4")
    assert (one != revision("cuda", "NVIDIA H100 80GB HBM3")) == apart
    assert (one != revision("cpu")) == apart
