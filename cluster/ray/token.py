"""Whether a Ray cluster that is joined asks for a token. One that does not lets anybody who connects run code there."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.config.config import Config
from cluster.config.flags import FAILED
from cluster.console import CommandError, complain
from transport.address import is_loopback

_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_SECONDS = 5.0


def answers_anyone(address: str) -> bool:
    """Whether Ray's control service at ``HOST:PORT`` answers a call without a token."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_CHECK_ALIVE, bytes, bytes)(b"", timeout=_SECONDS)
        except grpc.RpcError:
            return False
    return True


def check_token(config: Config, address: str, nodes: Iterable[str]) -> None:
    """Refuse an open cluster with nodes on a network, unless the operator allows it; say so of any other open one.

    ``address`` is that of Ray's control service, ``nodes`` are the hosts. Raises CommandError.
    """
    if not answers_anyone(address):
        return
    reason = f"the Ray cluster at {address} asks for no token: who can connect to it can run code on it"
    remedy = "start Ray with RAY_AUTH_MODE=token"
    if config.router.allow_remote or all(map(is_loopback, nodes)):
        complain(f"paceline: {reason}; {remedy}")
        return
    raise CommandError(f"{reason}; {remedy}, or add --allow-remote if only trusted machines can connect", FAILED)
