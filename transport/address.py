"""Where a worker listens: ``HOST:PORT``, port 0 for any free one."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress


class AddressError(Exception):
    """An address that cannot be read, or listened on. One line, for the operator."""


def parse(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; IPv6 hosts stand in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise AddressError(f"address {address!r} is not HOST:PORT, for instance 127.0.0.1:7001")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around IPv6 hosts."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """A TCP socket at this address. Raises :class:`AddressError` if something listens there already.

    asyncio switches Nagle's algorithm off for sockets whose protocol reads TCP, and here the accepted ones inherit it.
    With 0, the default, events of a kept connection wait for the client's delayed acknowledgement: 40 ms more to the
    first token.
    """
    made = socket.socket(family_of(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, TypeError, UnicodeError) as error:
        made.close()
        # What bind raises but for an OSError it does of names in letters beyond ASCII.
        why = error.strerror or error if isinstance(error, OSError) else f"{host!r} cannot be a host's name"
        raise AddressError(f"cannot listen on {join(host, port)}: {why}") from error
    return made


def family_of(host: str) -> socket.AddressFamily:
    """Of IP; version 4 for a name with addresses of both, and for one with none, of which binding says why."""
    if ":" in host:
        return socket.AF_INET6
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError):
            socket.getaddrinfo(host, None, family)
            return family
    return socket.AF_INET


def check_free(address: str) -> None:
    """Raise :class:`AddressError` if something listens there already.

    gRPC reports this late or not at all; asking the kernel first gives one clear line.
    """
    bound(*parse(address)).close()
