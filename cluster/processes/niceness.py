"""With what claim to the processor Ray runs our processes: the same for what serves as for what starts.

Ray's own is 15, but a process takes it on only once it has joined its node. Before, for the seconds in which it imports
Ray, it has niceness 0: the weight of 28 processes that serve (``sched_prio_to_weight`` in Linux: 1024 to 36). Where
cores are few, a replica that is started then all but stops those that stream.
"""

from __future__ import annotations

from collections.abc import Mapping

NICENESS: Mapping[str, str] = {"RAY_worker_niceness": "0"}
"""The environment that says so: of a replica, or of a node, for Serve's controller and proxies as well."""
