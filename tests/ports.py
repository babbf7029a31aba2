"""Ports for servers that tests start."""

from __future__ import annotations

from cluster.processes.child import HeldPort

_held: list[HeldPort] = []


def free_port() -> int:
    """A port that nothing but the server of this test is given, as long as the tests run."""
    _held.append(HeldPort())
    return _held[-1].number
