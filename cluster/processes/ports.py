"""Ports of the loopback interface that are kept for a process until it listens, and while it is started again."""

from __future__ import annotations

import socket
import sys

from cluster.config.flags import FAILED
from cluster.console import CommandError


class HeldPort:
    """A port that nobody else is given: neither whoever asks for a free one, nor a connection.

    It is bound and not listened on. Linux lets one other socket listen there nevertheless, where both say SO_REUSEADDR,
    as servers do; a second one is refused as ever. Elsewhere nothing is held: the port was free a moment ago.
    """

    def __init__(self) -> None:
        """Raises :class:`cluster.console.CommandError` when no port is free."""
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", 0))
            self.number: int = self._socket.getsockname()[1]
        except OSError as error:
            self._socket.close()
            raise CommandError(f"no port of 127.0.0.1 is free: {error.strerror}", FAILED) from error
        self.address = f"127.0.0.1:{self.number}"
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()
