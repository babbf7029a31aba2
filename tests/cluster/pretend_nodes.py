"""``python -m tests.cluster.pretend_nodes``: a Ray cluster of pretend nodes on this machine, until its input ends.

Prints its address. Each node has a loopback address of its own. One has two pretend GPUs, another has one.
"""

from __future__ import annotations

from benchmarks.chaos.nodes import ENVIRONMENT as ENVIRONMENT
from benchmarks.chaos.nodes import PretendNode, main

LARGE, SMALL = "127.0.0.10", "127.0.0.20"

if __name__ == "__main__":
    main([PretendNode("large", LARGE, "large", gpus=2, cpus=4), PretendNode("small", SMALL, "small", gpus=1, cpus=4)])
