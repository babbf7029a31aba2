"""How this process gets to Ray: starts one of its own or joins a cluster, sees when its own is gone, and ends it.

Also whether a cluster asks who joins it: one that wants no token lets anybody who connects run code there. Knows
nothing of what runs there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cluster.config.config import Config
from cluster.config.environment import current
from cluster.console import CommandError, complain, first_line
from cluster.placement import APPLICATION
from cluster.processes.starting import NICENESS
from transport.address import is_loopback, parse

REFUSAL_SECONDS, REACH_SECONDS = 0.5, 5.0
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def join(config: Config) -> None:
    """Start Ray or connect to the cluster. Raises :class:`cluster.console.CommandError`; ``ray.shutdown`` undoes it."""
    settings = config.ray
    options: dict[str, Any] = {}
    if settings.address == "local":
        size = settings.object_store_mb << 20
        options = {"num_cpus": settings.num_cpus, "object_store_memory": size, "include_dashboard": False}
    elif settings.address != "auto":
        try:  # Ray itself would try for minutes
            socket.create_connection(parse(settings.address), timeout=REACH_SECONDS).close()
        except OSError as error:
            where = f"no Ray cluster at {settings.address} ({error.strerror or error})"
            raise CommandError(f"{where}; --address takes its HOST:PORT") from error
    # A thread that still starts Serve when this process is interrupted would have another Ray started. Asked on import.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    try:
        with _uninterrupted():
            ray.init(
                address=settings.address,
                namespace=APPLICATION,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
    except Exception as error:  # ConnectionError, RuntimeError, ValueError ... all end the same way
        raise CommandError(f"cannot start or reach Ray: {first_line(error)}") from error
    from ray import serve  # noqa: F401 - sets the level of its logger when first imported

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it would write into our own lines


def answers_anyone(address: str) -> bool:
    """Whether Ray's control service at ``HOST:PORT`` answers a call without a token."""
    import grpc

    # As Ray itself does: a proxy of the environment that cannot get there would make any cluster look guarded.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_CHECK_ALIVE, bytes, bytes)(b"", timeout=REACH_SECONDS)
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
    if not (config.router.allow_remote or all(map(is_loopback, nodes))):
        raise CommandError(f"{reason}; {remedy}, or add --allow-remote if only trusted machines can connect")
    complain(f"paceline: {reason}; {remedy}")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM: Ray crashes when it is interrupted while it starts, and replaces our handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
    if came:
        raise KeyboardInterrupt


def prepare_environment() -> None:
    """Settings of Ray that can only be made through the environment, for a Ray of our own."""
    for switch in ("RAY_USAGE_STATS_ENABLED", "RAY_SERVE_LOG_TO_STDERR", "RAY_enable_metrics_collection"):
        os.environ[switch] = "0"
    # Processes in advance, one a core, are none that a deployment could use: each wants an environment of its own.
    for switch in ("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart"):
        os.environ[switch] = "0"
    os.environ.update(NICENESS)
    # Whoever reserves no GPU sees all, as a plain process does, also where the environment tells Ray to hide them.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # Ray listens on all interfaces. A token of this run's own keeps others out, and no file is written for it.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def is_broken() -> bool:
    """Whether a process has ended, or is about to, without which the Ray that was started here is none."""
    from ray._private import worker

    node: Any = worker._global_node
    if node is None:
        return False
    return any(kind in ("gcs_server", "raylet") for kind, _ in node.dead_processes()) or _refuses(node.gcs_address)


def _refuses(address: str) -> bool:
    """Whether nobody listens there: Ray's control process stops to at once when told to end, and ends seconds later."""
    try:
        with socket.create_connection(parse(address), timeout=REFUSAL_SECONDS):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:  # too busy to answer
        return False


def end_own_processes() -> None:
    """Kill what is left of a Ray of our own: whoever carries this run's token."""
    token = f"RAY_AUTH_TOKEN={current()['RAY_AUTH_TOKEN']}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        number = int(file.parent.name)
        with contextlib.suppress(OSError):  # somebody else's, or it has just ended
            if number != os.getpid() and token in file.read_bytes().split(b"\0"):
                os.kill(number, signal.SIGKILL)
