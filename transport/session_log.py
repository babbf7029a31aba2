"""Log lines about one session: each carries the session's number and the id of its request."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from speculation.messages import SessionId


class SessionLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records have ``session`` and ``request``."""

    def __init__(self, log: logging.Logger, session: SessionId, request_id: str) -> None:
        """Logs to ``log``."""
        super().__init__(log, {"session": int(session), "request": request_id})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the fields."""
        return msg, {**kwargs, "extra": self.extra}
