"""Where a worker listens: ``HOST:PORT``, port 0 for any free one."""

from __future__ import annotations

import ipaddress
import re
import socket


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


def check_free(address: str) -> None:
    """Raise :class:`AddressError` if something listens there already.

    gRPC and uvicorn report this late or not at all; asking the kernel first gives one clear line.
    """
    host, port = parse(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AddressError(f"cannot listen on {address}: {error.strerror or error}") from error
        except (TypeError, UnicodeError) as error:  # as bind refuses names in letters beyond ASCII
            raise AddressError(f"cannot listen on {address}: {host!r} cannot be a host's name") from error
