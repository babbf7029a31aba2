"""What the local backend promises of its processes: ports that nobody else is given, and their last words."""

from __future__ import annotations

import errno
import os
import queue
import socket
import sys

import pytest

from cluster.processes import child
from cluster.processes.child import HeldPort
from transport.address import AddressError, check_free

IP_LOCAL_PORT_RANGE = 51  # of Linux 6.3 and later


def test_a_held_port_is_given_to_nobody_but_one_server() -> None:
    port = HeldPort()
    with pytest.raises(OSError, match=r"Cannot assign|in use"):
        connected_from(port.number)
    check_free(port.address)  # whoever sets SO_REUSEADDR may listen
    with socket.create_server(("127.0.0.1", port.number)), pytest.raises(AddressError, match="already in use"):
        check_free(port.address)
    port.close()
    assert connected_from(port.number) == port.number


def connected_from(port: int) -> int:
    """The port of a connection for which the kernel may choose this one only."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        try:
            client.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, ((port << 16) | port).to_bytes(4, sys.byteorder))
        except OSError:
            pytest.skip("this kernel cannot be told which port to give a connection")
        client.connect(server.getsockname())
        return client.getsockname()[1]


def test_the_last_words_of_a_process_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come only some time after the process has ended."""
    monkeypatch.setattr(child, "LAST_WORDS_SECONDS", 60.0)
    words = "import os, sys, time\nif os.fork() == 0: time.sleep(0.3); print('last words', file=sys.stderr)"
    one = child.Child("one", [sys.executable, "-c", words], lambda *_: None)
    one.start(0.0)
    one.stop(30.0)
    assert one.reason == "last words"


def test_a_held_process_waits_for_the_end_of_its_input_and_its_successor_does_not() -> None:
    script = "import sys\nprint('waits', file=sys.stderr)\nsys.stdin.read()\nprint('goes on', file=sys.stderr)"
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    one = child.Child("one", [sys.executable, "-c", script], lambda _, line: said.put(line))
    one.start(0.0, held=True)
    assert said.get(timeout=30) == "waits"
    assert said.empty()
    one.release()
    assert said.get(timeout=30) == "goes on"
    one.stop(30.0)
    one.start(0.0)
    assert [said.get(timeout=30), said.get(timeout=30)] == ["waits", "goes on"]
    one.stop(30.0)


def test_a_process_that_cannot_be_started_again_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one = child.Child("one", ["true"], lambda *_: None)
    one.start(0.0)
    one.stop(30.0)
    assert one.restart_if_due(1.0) == "one ended (exit code 0); starting it again"
    with monkeypatch.context() as patch:
        patch.setattr(child, "spawn", no_file_left)
        assert one.restart_if_due(2.0) == "one cannot be started (Too many open files); trying again"
        assert one.restart_if_due(3.0) is None
    assert one.restart_if_due(2.0 + child.RESTART_SECONDS[-1]) is None
    one.stop(30.0)
    assert one.restart_if_due(20.0) == "one ended (exit code 0); starting it again"


def no_file_left(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
