"""What runs: the cluster's configuration, the workload, and the bounds that hold for every row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.workload import Body, body
from cluster.checkout import BUNDLED

TARGETS, DRAFTS, ROUTERS, RANKS = 2, 2, 1, 2
SEED, TEMPERATURE = 100, 0.8
"""Of the first request; each has the next seed."""
MAX_SESSIONS = 40
"""Of the router: more requests at once get status 429."""
OVERLOAD = 4
"""How many times as many are offered to show that."""
RAMP_STREAMS = 32
FRESH = 10_000
"""Requests kept ready for a row; more than are ever asked for."""
BEGIN_SECONDS = 60.0
"""In which all streams must be under way."""
AFTER_SECONDS = 2.0
"""For which the streams go on when all is well again."""
HEAL_SECONDS = 180.0
"""In which all workers must be back."""
FINISH_SECONDS = 180.0
"""In which all streams must complete once no more are begun."""


@dataclass(frozen=True, slots=True)
class Options:
    """How large a run is, and where its results go."""

    command: str
    only: tuple[str, ...] = ()
    """Names of the scenarios to run; empty: all."""
    json: Path | None = None
    out: Path | None = None
    streams: int = 16
    tokens: int = 200
    """New tokens of a request."""
    dtype: str = "fp64"
    """Number format; in float64, rounding does not make a text depend on the batch it was computed in."""
    hang: float = 30.0
    """Seconds for which a process is held by SIGSTOP."""
    overload: float = 60.0
    """Seconds of too many requests."""
    seed: int = 0
    """Of the choice of victims, and of random faults."""
    minutes: float = 30.0
    """Of random faults."""

    def requests(self, tokens: int, count: int | None = None, first: int = 0) -> list[Body]:
        """As many as there are streams, or so many: held-out prompts, seeds one after the other."""
        lines = (BUNDLED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        numbers = range(first, first + (count or self.streams))
        return [body(prompts[number % len(prompts)], tokens, SEED + number, TEMPERATURE) for number in numbers]


def configuration(port: int, dtype: str) -> dict[str, Any]:
    """Of the cluster."""
    worker = {"gpus": 1, "device": "cpu", "dtype": dtype, "cache_tokens": 49152}
    return {
        "target": {
            **worker,
            "replicas": TARGETS,
            "tensor_parallel_size": RANKS,
            "gpu_class": "large",
            "max_running": 16,
            "max_waiting": MAX_SESSIONS,
        },
        "draft": {**worker, "replicas": DRAFTS, "gpu_class": "small"},
        "router": {"port": port, "replicas": ROUTERS, "max_sessions": MAX_SESSIONS},
        # The GPU nodes have no CPUs, which keeps routers away from them.
        "ray": {"cpus_per_worker": 0, "placement_timeout": 120},
    }
