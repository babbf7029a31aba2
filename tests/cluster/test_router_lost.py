"""The only router on a real Ray is killed behind HAProxy; behind Serve's own proxy: test_serve."""

import pytest

from benchmarks.chaos.settings import haproxy_environment
from tests.cluster.processes import STARTS, Paceline
from tests.cluster.streams import ask_while_no_router_runs
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


async def test_who_asks_while_no_router_runs_is_told_to_ask_again(monkeypatch, slow_target):
    for name, value in haproxy_environment().items():
        monkeypatch.setenv(name, value)
    with Paceline("up", "--target", str(slow_target), "--dtype", "fp32", "--port", str(free_port())) as up:
        up.expect("Ctrl-C stops it", STARTS)
        url = up.expect(r"Paceline serves at (\S+)")
        await ask_while_no_router_runs(url, up.descendants("ray::ServeReplica:paceline:Router"))
