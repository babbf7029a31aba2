"""What tests of several kinds share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.pair import load, load_tokenizer, save_tokenizer
from models.stretch import stretch
from tests.stack import MODELS


@pytest.fixture(scope="session")
def slow_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target at several times its cost, so that drafts come in time on any machine; same text."""
    folder = tmp_path_factory.mktemp("slow") / "target"
    stretch(load(MODELS / "target", torch.float32), hidden_size=512, layers=12).save_pretrained(folder)
    save_tokenizer(load_tokenizer(MODELS / "target"), folder)
    return folder
