"""Log lines: one per record whatever is in it, with the fields that follow a request."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from cluster.processes.logs import RecordFormatter, add_flags, set_up
from speculation.messages import SessionId
from transport.tracing import SessionLog

log = logging.getLogger("router.test")


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """What a few records become under these flags."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    set_up(parser.parse_args(flags))
    log.info("quiet")
    SessionLog(log, SessionId(7), "req-1").warning("worker said %r", 'a\n"b"')
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed\nhere")
    return capsys.readouterr().err.splitlines()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *traceback = lines(capsys)
    assert first.endswith("""Z WARNING router.test: worker said 'a\\n"b"' (request=req-1, session=7)""")
    assert second.endswith(r"ERROR router.test: failed\nhere")
    assert traceback[-1] == "ValueError: boom"


def test_a_terminal_obeys_nothing_that_others_wrote() -> None:
    record = log.makeRecord(
        log.name, logging.WARNING, "", 0, "said: %s", ("\x1b[1A\x1b[2K\x9b2J\u2028\x7f \u00fc",), None
    )
    line = RecordFormatter(json=False).format(record)
    assert line.endswith(r"said: \x1b[1A\x1b[2K\x9b2J\u2028\x7f " + "\u00fc")
    line = RecordFormatter(json=True).format(record)
    assert line.isprintable()
    assert json.loads(line)["message"] == record.getMessage()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_terminal_obeys_nothing_in_a_traceback(form: str) -> None:
    try:
        raise ValueError("quoted: \x1b[2J\x9b2J")
    except ValueError:
        record = log.makeRecord(log.name, logging.ERROR, "", 0, "failed", (), sys.exc_info())
    lines = RecordFormatter(json=form == "json").format(record).split("\n")
    assert all(line.isprintable() for line in lines)
    assert "quoted: " in lines[-1]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, warned, failed = map(json.loads, lines(capsys, "--log-format", "json", "--log-level", "info"))
    assert (quiet["level"], quiet["message"]) == ("info", "quiet")
    assert "session" not in quiet
    assert (warned["session"], warned["request"], warned["logger"]) == (7, "req-1", "router.test")
    assert failed["message"] == "failed\nhere"
    assert failed["traceback"].endswith("ValueError: boom")


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_is_logged_with_no_traceback_is_one_line(capsys: pytest.CaptureFixture[str], form: str) -> None:
    lines(capsys, "--log-format", form)
    log.error("not exported: %s", "away", exc_info=False)  # as OpenTelemetry does
    (line,) = capsys.readouterr().err.splitlines()
    assert "not exported: away" in line


@pytest.mark.parametrize("formatter", [RecordFormatter(json=False), RecordFormatter(json=True)])
def test_fields_that_are_not_there_are_left_out(formatter: logging.Formatter) -> None:
    record = logging.makeLogRecord({"msg": "hello", "request": "", "session": None})
    assert "request" not in formatter.format(record)
    assert "session" not in formatter.format(record)
