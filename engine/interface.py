"""What workers use of an engine, whichever kind it is."""

from __future__ import annotations

import torch

from engine.forward import Chunk
from engine.parallel.group import RankError
from engine.stateful import StatefulEngine
from engine.step import Engine

__all__ = ["FATAL", "Chunk", "StepEngine"]

StepEngine = Engine | StatefulEngine
"""Computes trees of drafts over the slot cache, or runs a model that takes none."""

FATAL = (RankError, torch.AcceleratorError)
"""After these no step succeeds any more: a rank is lost, or the device fails whatever it is asked. The worker has to
end, so that it is started again; running out of memory is none of them."""
