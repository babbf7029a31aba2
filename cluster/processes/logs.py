"""What routers and workers log on stderr: text for people or JSON for collectors, one line for each record.

A line about a session has its number and the id of its request as fields, so that one request can be followed through
its log; modules pass them as ``extra`` (:class:`transport.tracing.SessionLog`).
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from datetime import UTC, datetime

from cluster.config.flags import add_parent
from cluster.processes.starting import exit_with

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = ("request", "session")
"""What a record may say beyond its message."""
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""What a terminal obeys, or what ends a line for some reader."""


def add_flags(parser: argparse._ActionsContainer) -> None:
    """The flags of processes that serve."""
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="of log lines on stderr (default: text)")
    parser.add_argument("--log-level", choices=LEVELS, default="warning", help="least level logged (default: warning)")
    add_parent(parser)


def set_up(args: argparse.Namespace) -> None:
    """Log from now on as the flags say, in place of what was set up before, and end with the parent that they name."""
    if args.exit_with is not None:
        exit_with(args.exit_with)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RecordFormatter(json=args.log_format == "json"))
    logging.basicConfig(handlers=[handler], level=args.log_level.upper(), force=True)


class RecordFormatter(logging.Formatter):
    """``2026-01-02T03:04:05.678Z WARNING router.service: message (request=..., session=...)``, a traceback below it.

    In JSON an object with ``time``, ``level``, ``logger``, ``message``, the fields there are, and ``traceback``.
    """

    def __init__(self, *, json: bool) -> None:
        super().__init__()
        self._json = json

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        told = {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}
        message, level = record.getMessage(), record.levelname
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            entry = {"time": at, "level": level.lower(), "logger": record.name, "message": message, **told}
            line = json.dumps(entry | ({"traceback": traceback} if traceback else {}), ensure_ascii=False, default=str)
            return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line)
        fields = ", ".join(f"{name}={value}" for name, value in told.items())
        line = f"{at} {level} {record.name}: {_one_line(message)}" + (f" ({_one_line(fields)})" if fields else "")
        return "\n".join((line, *map(_one_line, traceback.splitlines())))


def _one_line(text: str) -> str:
    """What others wrote cannot begin a line of its own, nor have a terminal change those before it."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
