"""From a body to a request in one call, as :class:`router.http.request_reader.RequestReader` does it in steps."""

from __future__ import annotations

from collections.abc import Mapping

from router.schema.requests import ApiRequest, ModelEntry, model_asked, read_body, request_of


def parse_completion(body: bytes, offers: Mapping[str, ModelEntry], request_id: str) -> ApiRequest:
    """The body of ``POST /v1/completions``. Raises :class:`router.errors.ApiError`."""
    read = read_body(body, "completion")
    return request_of(read, offers[model_asked(read, offers)], request_id)


def parse_chat(body: bytes, offers: Mapping[str, ModelEntry], request_id: str) -> ApiRequest:
    """The body of ``POST /v1/chat/completions``. Raises :class:`router.errors.ApiError`."""
    read = read_body(body, "chat")
    return request_of(read, offers[model_asked(read, offers)], request_id)
