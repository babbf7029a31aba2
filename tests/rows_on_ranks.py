"""``python -m tests.rows_on_ranks PID``: a rank that computes as on GPUs, with stand-ins for what needs one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cluster.processes import rank_processes
from engine import build
from engine.layers.layer_ops import LayerOps
from engine.loading import loader
from tests.by_rows import PlainRows
from tests.ranks import Forked

CANNOT_RECORD = "PACELINE_TEST_CANNOT_RECORD"
"""In the environment of ranks other than 0: they fail to record anything."""


class Replays:
    """Records by calling again, into one place as a graph does; counts."""

    replayed = 0

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        place_RX = compute().clone()
        if CANNOT_RECORD in os.environ:
            raise RuntimeError("planted")

        def replay() -> Tensor:
            Replays.replayed += 1
            return place_RX.copy_(compute())

        return replay


def stand_ins(replace: Callable[[Any, str, Any], None]) -> None:
    """Put stand-ins in the place of kernels and graphs; ``replace`` sets an attribute of a module."""
    import engine.layers.layer_kernels

    replace(loader, "find_attention", lambda *_: PlainRows(2))
    replace(loader, "pack_linears", lambda module: 0)
    replace(engine.layers.layer_kernels, "TritonOps", LayerOps)
    replace(build, "CudaRecorder", Replays)


class ByRows(Forked):
    """Ranks that compute so."""

    module = __name__


if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_ins(setattr)
    raise SystemExit(rank_processes.main())
