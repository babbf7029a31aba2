"""What routers and workers log on stderr: text for people or JSON for collectors, one line for each record.

A line about a session has its number and the id of its request as fields, so that one request can be followed through
its log; modules pass them as ``extra`` (:class:`transport.tracing.SessionLog`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = ("request", "session")
"""What a record may say beyond its message."""


def add_flags(parser: argparse._ActionsContainer) -> None:
    """The flags of processes that log."""
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="of log lines on stderr (default: text)")
    parser.add_argument("--log-level", choices=LEVELS, default="warning", help="least level logged (default: warning)")


def set_up(args: argparse.Namespace) -> None:
    """Log from now on as the flags say; replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if args.log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=args.log_level.upper(), force=True)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``2026-01-02T03:04:05.678Z WARNING router.service: message (request=..., session=...)``, a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        fields = ", ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {_one_line(record.getMessage())}"
        line += f" ({_one_line(fields)})" if fields else ""
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """An object with ``time``, ``level``, ``logger``, ``message``, the fields there are, and ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info is not None:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _one_line(text: str) -> str:
    """What others wrote cannot begin a line of its own."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
