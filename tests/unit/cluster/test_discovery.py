"""The list of workers in a file: what it may say, and that a router follows its changes but never a broken edit."""

import asyncio
import logging
import os
from contextlib import asynccontextmanager

import pytest

from cluster.discovery import FileDirectory, WorkerListError, read_list
from speculation.events import Role

LIST = """\
# the rack by the door
target 10.0.0.5:7001
draft  10.0.0.6:7002   # small
target [fd00::1]:7001

draft 10.0.0.6:7002
"""
WORKERS = {Role.TARGET: ["10.0.0.5:7001", "[fd00::1]:7001"], Role.DRAFT: ["10.0.0.6:7002"]}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "workers.txt"
    path.write_text(LIST)
    return path


def test_a_list(file):
    assert read_list(file) == WORKERS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "target 10.0.0.5:7001\nrouter 10.0.0.7:1",
            "line 2: must be 'target HOST:PORT' or 'draft HOST:PORT', got 'rou",
        ),
        ("target 10.0.0.5", "line 1: address '10.0.0.5' is not HOST:PORT"),
        ("target 10.0.0.5:7001 10.0.0.6:7001", "line 1: must be"),
        ("draft 10.0.0.5:7001", "lists no target worker"),
        ("", "lists no target worker"),
        ("\0" * (1 << 21), "is larger than 1 MiB"),
        ("target 10.0.0.5:7001 # \u00e9\n" * (1 << 17), "is larger than 1 MiB"),
        (b"\xff", "is not a text file"),
    ],
)
def test_a_list_that_cannot_be_used(file, text, words):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WorkerListError) as refused:
        read_list(file)
    assert str(refused.value).startswith(str(file))
    assert words in str(refused.value)


def test_no_list(tmp_path):
    with pytest.raises(WorkerListError, match="cannot be read: No such file"):
        FileDirectory(tmp_path / "nowhere")


@asynccontextmanager
async def followed(file):
    """What a router hears."""
    heard: asyncio.Queue[tuple[Role, list[str]]] = asyncio.Queue()
    directory = FileDirectory(file, poll_seconds=0.01)
    directory.start(lambda role, addresses: heard.put_nowait((role, list(addresses))))
    try:
        assert dict([heard.get_nowait(), heard.get_nowait()]) == WORKERS
        yield heard
    finally:
        directory.close()


async def test_changes_are_told_role_by_role(file):
    async with followed(file) as heard, asyncio.timeout(60):
        file.write_text(LIST + "draft 10.0.0.8:7002\n")
        assert await heard.get() == (Role.DRAFT, ["10.0.0.6:7002", "10.0.0.8:7002"])
        other = file.with_suffix(".new")
        other.write_text("target 10.0.0.9:7001")  # put in its place at once, as careful editors do
        os.replace(other, file)
        assert dict([await heard.get(), await heard.get()]) == {
            Role.TARGET: ["10.0.0.9:7001"],
            Role.DRAFT: [],
        }
        assert heard.empty()


@pytest.mark.parametrize("broken", ["target 10.0.0.5", "", None])
async def test_a_broken_edit_changes_nothing_and_says_so(file, caplog, broken):
    async with followed(file) as heard, asyncio.timeout(60):
        with caplog.at_level(logging.ERROR):
            file.unlink() if broken is None else file.write_text(broken)
            while not caplog.records:
                await asyncio.sleep(0.01)
        assert "the list before it stays in force" in caplog.text
        assert heard.empty()
        file.write_text(LIST.replace("10.0.0.6", "10.0.0.7"))
        assert await heard.get() == (Role.DRAFT, ["10.0.0.7:7002"])
        assert len(caplog.records) == 1
