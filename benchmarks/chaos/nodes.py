"""``python -m benchmarks.chaos.nodes``: a Ray cluster of pretend nodes on this machine, until its input ends.

Each node has a loopback address and pretend GPUs of its own. The first line of output is the address of the cluster.
Every line of input, ``remove NAME`` or ``add NAME``, is answered by a line once it is done. A removed node is gone at
once, with everything that ran there, as when its power fails; its sockets are closed by the kernel.

The GPU nodes have no CPUs for Ray to give away, so that whatever asks for some, such as a router, is on the head.
Applications of Ray Serve are reached through the head alone: a client's own connection cannot outlive the node that it
leads to, and what serves clients does not belong on a GPU node.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil  # type: ignore[import-untyped]
from ray.cluster_utils import Cluster

from cluster.console import say
from cluster.placement import GPU_CLASS
from cluster.processes.starting import NICENESS

HEAD = "127.0.0.2"
HEAD_CPUS = 4
OBJECT_STORE_BYTES = 80 << 20
PATIENCE_SECONDS = 600
"""In which Serve says nothing of replicas that wait for room, as while their node is gone."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    **NICENESS,
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""What the nodes and who joins them have to be started with."""


@dataclass(frozen=True, slots=True)
class PretendNode:
    """A node besides the head."""

    name: str
    address: str
    gpu_class: str
    gpus: int
    cpus: int = 0


SMALL = (PretendNode("small-1", "127.0.0.20", "small", 1), PretendNode("small-2", "127.0.0.21", "small", 1))
LARGE = (PretendNode("large-1", "127.0.0.10", "large", 2), PretendNode("large-2", "127.0.0.11", "large", 2))


def kill_tree(roots: Any) -> None:
    """Kill processes with everything below them, all stopped first, so that none sees another go."""
    family: list[Any] = []
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            family += [root, *root.children(recursive=True)]
    for number in ("suspend", "kill"):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, number)()


def start_serve(address: str, port: int) -> None:
    """Start Ray Serve with its only HTTP door on the head; ``paceline up`` then uses it as it is."""
    import ray
    from ray import serve

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        controller_options={"runtime_env": {"env_vars": {"RAY_SERVE_SLOW_STARTUP_WARNING_S": str(PATIENCE_SECONDS)}}},
    )
    ray.shutdown()


def main(nodes: Sequence[PretendNode] = (*LARGE, *SMALL)) -> None:
    """Run a cluster, and carry out the lines of the input until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=int, metavar="PORT", help="start Ray Serve with its HTTP door there")
    args = parser.parse_args()
    cluster, known, running = Cluster(), {node.name: node for node in nodes}, dict[str, Any]()
    start = partial(cluster.add_node, object_store_memory=OBJECT_STORE_BYTES)

    def add(name: str) -> None:
        node = known[name]
        how: Any = {"num_cpus": node.cpus, "num_gpus": node.gpus, "labels": {GPU_CLASS: node.gpu_class}}
        running[name] = start(node_ip_address=node.address, **how)

    def remove(name: str) -> None:
        node = running.pop(name)
        kill_tree(info.process.pid for infos in node.all_processes.values() for info in infos)
        cluster.remove_node(node, allow_graceful=False)

    orders = {"add": add, "remove": remove}
    try:
        start(node_ip_address=HEAD, num_cpus=HEAD_CPUS, include_dashboard=False)
        for name in known:
            add(name)
        if args.serve:
            start_serve(str(cluster.address), args.serve)
        say(str(cluster.address))
        for line in sys.stdin:
            order, name = line.split()
            orders[order](name)
            say(f"did {line.strip()}")
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
