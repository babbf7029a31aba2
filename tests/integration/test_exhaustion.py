"""A router on a machine without file descriptors left: what is refused, how, and how often that is logged."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest

from cluster.cli import main
from cluster.config.environment import CHECKOUT
from cluster.config.flags import BAD_INPUT
from router.http import exhaustion, request_reader
from router.http.exhaustion import MAX_DESCRIPTORS, QUIET_SECONDS, ExhaustionLog, raise_limit
from router.schema import structured
from router.service import Router, RouterSettings
from router.text.grammar_checker import GrammarChecker
from tests.fakes import FakeGenerator
from tests.integration.test_http_api import in_memory, model

NO_FILE = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_request_that_finds_no_file_is_refused_for_the_time_being_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with in_memory(FakeGenerator(lambda _: (), model=model(), error=NO_FILE)) as client:
        answers = [await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 9}) for _ in range(3)]
    for answer in answers:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-should-retry"] == "true"
        assert answer.json()["error"]["code"] == "resource_exhausted"
    assert [record.message for record in caplog.records] == [
        "cannot answer POST /v1/completions: [Errno 24] Too many open files; see the limits on open files "
        "and processes (ulimit -n, -u)"
    ]


async def test_a_grammar_that_finds_no_process_is_refused_for_the_time_being(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(structured, "_checker", GrammarChecker())
    monkeypatch.setattr(subprocess, "Popen", refuse)
    async with in_memory(FakeGenerator(lambda _: (), model=model())) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "guided_regex": "[ab]"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "resource_exhausted")


async def test_a_body_that_finds_no_thread_is_refused_for_the_time_being(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "x" * request_reader.PARSED_INLINE_BYTES, "max_tokens": 9}
    async with in_memory(FakeGenerator(lambda _: (), model=model())) as client:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", no_thread)
            answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "resource_exhausted")


def no_thread(*_: object) -> None:
    """As CPython where the system gives none."""
    raise RuntimeError("can't start new thread")


async def test_another_fault_of_the_system_is_a_fault_of_ours() -> None:
    async with in_memory(FakeGenerator(lambda _: (), model=model(), error=OSError(errno.EIO, "broken"))) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 9})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


async def test_connections_that_cannot_be_accepted_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    exhaustion, loop = ExhaustionLog(lambda: now), asyncio.get_running_loop()
    with socket.socket() as listener:
        context = {"message": "socket.accept() out of system resource", "exception": NO_FILE, "socket": listener}
        for _ in range(2048):
            exhaustion.handle(loop, context)
        now = QUIET_SECONDS
        exhaustion.handle(loop, context)
    said = "cannot accept a connection: [Errno 24] Too many open files"
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        said,
        f"{said}, and 2047 times since the last such line",
    ]


async def test_what_else_goes_wrong_in_the_event_loop_is_logged_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    for context in ({"message": "one"}, {"message": "two", "exception": NO_FILE}):
        ExhaustionLog().handle(asyncio.get_running_loop(), context)
    assert [(record.name, record.message) for record in caplog.records] == [("asyncio", "one"), ("asyncio", "two")]


async def test_a_router_that_cannot_accept_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "connect", no_workers)
    router, before = Router(RouterSettings(port=0)), resource.getrlimit(resource.RLIMIT_NOFILE)
    await router.start()
    loop, where = asyncio.get_running_loop(), urlsplit(router.address)
    try:
        with socket.socket() as client:
            client.setblocking(False)
            with socket.socket() as next_free:
                resource.setrlimit(resource.RLIMIT_NOFILE, (next_free.fileno(), before[1]))
            await loop.sock_connect(client, (where.hostname, where.port))
            while not caplog.records:
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        await router.stop()
        loop.set_exception_handler(None)
    assert ["cannot accept" in record.message for record in caplog.records] == [True]


async def no_workers(_: Router) -> None:
    """There are none to connect to."""


def test_no_request_brings_modules() -> None:
    """They are files, which may not be opened just then."""
    script = [sys.executable, "-m", "tests.modules_of_requests"]
    done = subprocess.run(script, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert {request: modules for request, modules in found.items() if modules} == {}


def test_a_router_may_have_as_many_files_as_it_needs() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        raise_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_router_starts_with_all_descriptors_that_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[str] = []
    monkeypatch.setattr(exhaustion, "raise_limit", lambda: raised.append("before it looks at anything"))
    assert main(["router", "--workers", "/nowhere"]) == BAD_INPUT
    assert raised
