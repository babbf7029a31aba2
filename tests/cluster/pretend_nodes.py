"""``python -m tests.cluster.pretend_nodes``: a Ray cluster of pretend nodes on this machine, until its input ends.

Prints its address. Each node has a loopback address of its own. One has two pretend GPUs, another has one.
"""

from __future__ import annotations

import os
import sys

from ray.cluster_utils import Cluster

from cluster.placement import GPU_CLASS

HEAD, LARGE, SMALL = "127.0.0.2", "127.0.0.10", "127.0.0.20"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""What the nodes and who joins them have to be started with."""


def main() -> None:
    size = 80 << 20
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=4, object_store_memory=size, include_dashboard=False, node_ip_address=HEAD)
        for address, gpus, name in ((LARGE, 2, "large"), (SMALL, 1, "small")):
            cluster.add_node(
                num_cpus=4,
                num_gpus=gpus,
                object_store_memory=size,
                node_ip_address=address,
                labels={GPU_CLASS: name},
            )
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        while os.read(sys.stdin.fileno(), 1):
            pass
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
