"""How many files and connections this process may have open: as many as it can need, where the system lets it."""

from __future__ import annotations

import contextlib
import resource

MAX_DESCRIPTORS = 65536
"""What systemd units say too: every stream of a router takes one, and many systems give a process 1,024 at first."""


def raise_limit() -> None:
    """Take :data:`MAX_DESCRIPTORS`, or the most that this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
