"""A group whose first step fails. Apart from tests that keep a group, since a process has one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model import ModelError
from engine.settings import EngineSettings
from engine.step import Engine
from tests.ranks import Forked, alive, needs_no_gpu, on_ranks
from tests.unit.engine.engine_models import save_model

pytestmark = needs_no_gpu


def test_ranks_end_where_warming_up_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(_: Engine) -> None:
        raise ModelError("no room for the cache")

    monkeypatch.setattr("engine.build.warm_up", warm_up)
    ranks = Forked()
    settings = EngineSettings(save_model("llama", tmp_path, num_hidden_layers=1), dtype="fp32", device="cpu")
    with pytest.raises(ModelError, match="no room"), on_ranks(settings, ranks):
        pass
    assert len(ranks.pids) == 1
    assert not any(alive(pid) for pid in ranks.pids.values())
