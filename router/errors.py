"""Every error a client can see, in one table.

Decides the HTTP status, OpenAI's error ``type`` and whether trying again can help; nothing else in ``router``
knows a status code. Names are stable: clients, logs and metrics may rely on them. Where OpenAI's API has a
code for the same thing, that is the name. Every :class:`ApiError` carries one of these rows,
and every ``speculation.messages.RefusalCode`` is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One row of the table."""

    name: str
    status: int
    type: str
    retryable: bool
    """Whether the very same request can succeed later."""
    meaning: str


def _request(name: str, meaning: str, status: int = 400) -> ErrorCode:
    return ErrorCode(name, status, "invalid_request_error", retryable=False, meaning=meaning)


def _server(name: str, meaning: str, status: int = 500, *, retryable: bool = True) -> ErrorCode:
    return ErrorCode(name, status, "server_error", retryable=retryable, meaning=meaning)


_ROWS = (
    _request("invalid_json", "The body is not a JSON object in UTF-8."),
    _request("missing_required_parameter", "A field that must be there is not."),
    _request("unknown_parameter", "No such field."),
    _request("unsupported_parameter", "A known field with a value this server cannot carry out yet."),
    _request("invalid_type", "A field of the wrong JSON type."),
    _request("invalid_value", "A field of the right type whose value is not allowed."),
    _request("context_length_exceeded", "The prompt, or the prompt and max_tokens, do not fit the model's context."),
    _request("no_chat_template", "The model has no chat template, so it cannot chat."),
    _request("invalid", "A worker found the request impossible."),
    _request("invalid_api_key", "No API key, or one that is not known here.", status=401),
    _request(
        "permission_denied", "What is asked for is not for this API key, or for pages of this origin.", status=403
    ),
    _request("model_not_found", "No such model here.", status=404),
    _request("not_found", "No such endpoint.", status=404),
    _request("method_not_allowed", "The endpoint exists, for another method.", status=405),
    _request("body_too_large", "The body is larger than this server reads.", status=413),
    _request("request_timeout", "The body did not come in time.", status=408),
    _request("slow_reader", "The client reads so much more slowly than text comes that it was cut off.", status=408),
    _request("bad_request", "Any other refusal of the HTTP layer."),
    ErrorCode("overloaded", 429, "rate_limit_error", True, "No room now; nothing was started."),
    ErrorCode(
        "rate_limit_exceeded", 429, "rate_limit_error", True, "Beyond a limit on requests or tokens; see the headers."
    ),
    _server("timeout", "The time that the request had is over.", status=504, retryable=False),
    _server("unavailable", "No target worker is connected, or none of this model.", status=503),
    _server(
        "resource_exhausted", "The router has no file descriptor, memory or process left for a request.", status=503
    ),
    _server("draining", "The router is stopping, or a worker is and no other took the session.", status=503),
    _server("unknown_session", "The worker lost the session and no other took it.", status=503),
    _server("faulty", "The generation failed on every worker that tried it.", retryable=False),
    _server("internal", "A fault of this server."),
)

CODES: Mapping[str, ErrorCode] = {row.name: row for row in _ROWS}


def code_of_status(status: int) -> ErrorCode:
    """The row for a refusal that the HTTP layer itself made with this status."""
    by_status = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    return CODES[by_status.get(status, "bad_request" if status < 500 else "internal")]


class ApiError(Exception):
    """A request that is refused, or that fails. ``param`` is the path of the field at fault."""

    def __init__(self, name: str, message: str, param: str | None = None, retry_after: float | None = None) -> None:
        """``name``: a row of the table, else ``internal``; ``retry_after``: seconds until the same may succeed."""
        super().__init__(message)
        self.code = CODES.get(name, CODES["internal"])
        self.message = message
        self.param = param
        self.retry_after = retry_after
