"""A test that hangs fails alone, and says where it stood."""

import subprocess
import sys

from tests.words import ROOT

HOOK = """
from tests import time_limit
from tests.time_limit import pytest_runtest_call

time_limit.SECONDS = 1.0
"""
TESTS = """
import asyncio
import threading
from contextlib import suppress

left = []


async def deep():
    await asyncio.Event().wait()


async def wait():
    try:
        await deep()
    finally:
        left.append(1)


async def test_waits():
    async with asyncio.TaskGroup() as group:
        group.create_task(wait(), name="the second task")


async def test_waits_for_ever_again():
    while True:
        with suppress(Exception):
            await asyncio.sleep(0)


def test_is_blocked():
    threading.Event().wait()


def test_is_quick():
    assert left
"""


def test_a_test_that_hangs_fails_alone_and_says_where_it_stood(tmp_path):
    (tmp_path / "conftest.py").write_text(HOOK)
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ["-o", "asyncio_mode=auto", "-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", "-ra", "-c", "/dev/null", *options, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    said = ended.stdout
    assert ended.returncode == 1, said + ended.stderr
    for name in ("waits", "waits_for_ever_again", "is_blocked"):
        assert f"Hung: test_some.py::test_{name} took more than 1 s" in said
    assert "3 failed, 1 passed" in said
    assert "the second task waits:" in said
    assert "in deep\n    await asyncio.Event().wait()" in said
    assert "Current thread" in said
