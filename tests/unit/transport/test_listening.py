"""The router's socket: what it accepts sends small events at once."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.applications import Starlette

from router.http.asgi import BoundedHttp
from router.service import server_config
from transport.address import AddressError, bound, family_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_no_event_waits_for_an_acknowledgement_of_the_one_before(host) -> None:
    try:
        listener = bound(host, 0)
    except AddressError:
        pytest.skip(f"no {host} on this machine")
    accepted = asyncio.get_running_loop().create_future()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
        assert await asyncio.wait_for(accepted, 60)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(("families", "chosen"), [("6", socket.AF_INET6), ("46", socket.AF_INET), ("", socket.AF_INET)])
def test_a_name_is_listened_on_at_an_address_that_it_has(families, chosen, monkeypatch) -> None:
    known = {"4": socket.AF_INET, "6": socket.AF_INET6}

    def look_up(_: str, __: object, family: int) -> None:
        if family not in [known[name] for name in families]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert family_of("worker.example") == chosen
    assert family_of("::1") == socket.AF_INET6


def test_a_connection_is_kept_longer_than_load_balancers_keep_theirs() -> None:
    config = server_config(Starlette(), "127.0.0.1", 0)
    assert config.timeout_keep_alive > 60
    assert config.http is BoundedHttp
