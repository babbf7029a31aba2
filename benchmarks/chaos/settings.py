"""What runs: the cluster's configuration, the workload, and the bounds that hold for every row."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import yaml

from benchmarks.harness.options import Options, flag
from cluster.config.environment import BUNDLED, CHECKOUT, current
from cluster.config.pools import DTYPES
from cluster.console import BadInput

TARGETS, DRAFTS, ROUTERS, RANKS = 2, 2, 1, 2
SEED, TEMPERATURE = 100, 0.8
"""Of the first request; each has the next seed."""
MAX_SESSIONS = 40
"""Of the router: more requests at once get status 429."""
OVERLOAD = 4
"""How many times as many are offered to show that."""
RAMP_STREAMS = 32
LONG_TOKENS = 800
"""Of a stream that is to last: with a prompt, most of what the bundled model's context holds."""
FRESH = 10_000
"""Requests kept ready for a row; more than are ever asked for."""
HEAL_SECONDS = 180.0
"""In which all workers must be back."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions(Options):
    """How large a run is."""

    MODULE = "benchmarks.chaos.run"
    out: Path | None = flag(
        None, "write figures and a page there, such as benchmarks/results/DATE-chaos", metavar="DIR"
    )
    streams: int = flag(16, "streams at once", least=1, most=32)
    """More would be refused, which is a fault of its own."""
    tokens: int = flag(200, "new tokens of a request", least=8, most=800)
    """With a prompt, at most what the bundled model's context holds."""
    dtype: str = flag("fp64", "number format (default: fp64, where rounding decides nothing)", choices=DTYPES)
    """In float64, rounding does not make a text depend on the batch it was computed in."""
    seed: int = flag(0, "of the choice of faults and victims")

    def checked(self) -> Self:
        """See :class:`benchmarks.harness.options.Options`."""
        if not find_spec("psutil"):
            raise BadInput("faults are injected by means of psutil: pip install psutil")
        return self

    def requests(self, tokens: int, count: int | None = None, first: int = 0) -> list[Body]:
        """As many as there are streams, or so many: held-out prompts, seeds one after the other."""
        lines = (BUNDLED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        numbers = range(first, first + (count or self.streams))
        return [body(prompts[number % len(prompts)], tokens, SEED + number, TEMPERATURE) for number in numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions(FaultOptions):
    """Of the table."""

    BENCH = "chaos"
    ABOUT = "streams under faults: workers killed and hung, nodes removed, the pool replaced, too much load"
    DETAILS = "On a Ray cluster of pretend nodes on this machine. Takes about half an hour; exit code 1 if a row fails."
    listed: bool = flag(False, "name the faults, and do nothing", name="--list")
    only: tuple[str, ...] = flag((), "only this fault; may be given again")
    hang: float = flag(30.0, "seconds that a process is stopped for", positive=True, metavar="S")
    overload: float = flag(60.0, "seconds of too much load", positive=True, metavar="S")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions(FaultOptions):
    """Of random faults."""

    BENCH = "soak"
    ABOUT = "streams under random faults every few seconds, and what is left of them in the end"
    DETAILS = "On the cluster of `chaos`."
    minutes: float = flag(30.0, "for how long", positive=True)


def body(prompt: str, tokens: int, seed: int, temperature: float) -> Body:
    """A completion that never ends early."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": seed, "ignore_eos": True}


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


def haproxy_environment() -> dict[str, str]:
    """What the manifests tell every node of HAProxy, with this checkout for that of the image."""
    service = yaml.safe_load((CHECKOUT / "deploy/kubernetes/base/rayservice.yaml").read_text(encoding="utf-8"))
    (head,) = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    told = {entry["name"]: entry["value"] for entry in head["env"] if "PROXY" in entry["name"]}
    python = {"PATH": f"{Path(sys.executable).parent}:{current()['PATH']}"}
    return python | {name: value.replace("/app/", f"{CHECKOUT}/") for name, value in told.items()}
