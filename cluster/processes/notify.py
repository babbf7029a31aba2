"""Tells systemd how a service of ``Type=notify`` does (the protocol of sd_notify(3)); elsewhere nothing happens."""

from __future__ import annotations

import contextlib
import socket

from cluster.config.environment import notify_socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """Send a state to who started this process, if that is systemd."""
    address = notify_socket()
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
