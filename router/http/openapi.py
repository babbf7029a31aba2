"""The OpenAPI 3.1 description of the HTTP API, as ``/openapi.json`` gives it.

Request bodies come from their models and error answers from the table of errors, so that neither can say anything
else than what the server does. Answers list the fields that may be there; those of OpenAI's are named as OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.errors import CODES
from router.http.auth import PICKER_PATH
from router.schema.fields import Schema, json_schema
from router.schema.request_schema import BODIES

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_REFUSED = (400, 401, 404, 408, 413, 429, 500, 503, 504)
"""Statuses of errors that any request for text can end with."""


def _object(properties: Mapping[str, Any], *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


_ERROR = {
    "message": _STRING,
    "type": {"enum": sorted({row.type for row in CODES.values()})},
    "param": _or_null(_STRING),
    "code": {"enum": sorted(CODES)},
}
_FUNCTION = _object({"name": _STRING, "arguments": _STRING})
_CALLS = _array(_object({"id": _STRING, "type": {"const": "function"}, "function": _FUNCTION}))
_MESSAGE = {"role": {"const": "assistant"}, "content": _or_null(_STRING), "refusal": {"type": "null"}}
_COMPLETION_LOGPROBS = {
    "tokens": _array(_STRING),
    "token_logprobs": _array(_or_null(_NUMBER)),
    "top_logprobs": _array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
    "text_offset": _array(_INTEGER),
}
_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _or_null(_array(_INTEGER))}
_TOKENS = _array(_object(_TOKEN | {"top_logprobs": _array(_object(_TOKEN))}))
_CHAT_LOGPROBS = {"content": _TOKENS, "refusal": {"type": "null"}}
_MODEL = {"id": _STRING, "object": _STRING, "created": _INTEGER, "owned_by": _STRING, "max_model_len": _INTEGER}


def description(version: str) -> Schema:
    """The whole document."""
    message = _object(_MESSAGE | {"tool_calls": _CALLS}, "tool_calls")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": version,
            "summary": "OpenAI's API, and vLLM's fields, over disaggregated speculative decoding.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {
                "Error": _object({"error": _object(_ERROR)}),
                "CompletionRequest": _body(json_schema(BODIES["completion"])),
                "ChatCompletionRequest": _body(json_schema(BODIES["chat"])),
                "Completion": _answer({"text": _STRING}, _object(_COMPLETION_LOGPROBS)),
                "ChatCompletion": _answer({"message": message}, _object(_CHAT_LOGPROBS)),
                "Model": _object(_MODEL),
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _paths() -> Schema:
    text = {"200": {"description": "Text", "content": {"text/plain": {"schema": _STRING}}}}
    models = _object({"object": {"const": "list"}, "data": _array(_ref("Model"))})
    named = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": _STRING}]}
    return {
        "/v1/completions": {"post": _generation("Continue texts", "Completion")},
        "/v1/chat/completions": {"post": _generation("Answer a conversation", "ChatCompletion")},
        "/v1/models": {"get": _get("The served models", models)},
        "/v1/models/{name}": {"get": _get("One served model", _ref("Model"), 404, 503) | named},
        "/health": {"get": _get("Whether the process serves", _object({"status": _STRING}))},
        "/ready": {"get": _ready()},
        "/metrics": {"get": {"summary": "Metrics for Prometheus", "responses": text}},
        PICKER_PATH: {"get": {"summary": "Of these, for pickers", "responses": text}},
        "/cluster": {"get": _get("What this router knows of its workers", {"type": "object"})},
        "/openapi.json": {"get": _get("This description", {"type": "object"})},
    }


def _generation(summary: str, answer: str) -> Schema:
    content = _json(_ref(answer)) | {"text/event-stream": {"example": "data: {...}\n\ndata: [DONE]\n\n"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(_ref(f"{answer}Request"))},
        "responses": {"200": {"description": "The answer, or its stream", "content": content}} | _errors(*_REFUSED),
    }


def _get(summary: str, answer: Schema, *errors: int) -> Schema:
    found = {"description": summary, "content": _json(answer)}
    return {"summary": summary, "responses": {"200": found} | _errors(401, *errors)}


def _ready() -> Schema:
    fraction: Schema = {"type": ["number", "null"]}
    worker = _object({"role": _STRING, "model": _STRING, "doing": _STRING, "fraction": fraction})
    answer = _object({"status": _STRING, "reason": _STRING, "starting": _array(worker)}, "reason", "starting")
    told = {"description": "Yes or no", "content": _json(answer)}
    return {"summary": "Whether requests can be served now", "responses": {"200": told, "503": told}}


def _errors(*statuses: int) -> Schema:
    return {
        str(status): {
            "description": " ".join(row.meaning for row in CODES.values() if row.status == status),
            "content": _json(_ref("Error")),
        }
        for status in statuses
    }


def _body(schema: Schema) -> Schema:
    """An object where null leaves out any field that it need not have."""
    required = schema.get("required", ())
    properties = {name: _property(field, name in required) for name, field in schema["properties"].items()}
    return schema | {"properties": properties}


def _property(field: Schema, required: bool) -> Schema:
    field = {key: part for key, part in field.items() if key != "default"}
    if "properties" in field:
        field = _body(field)
    elif "properties" in field.get("items", ()):
        field |= {"items": _body(field["items"])}
    if required or None in field.get("enum", ()):
        return field
    around = {key: field.pop(key) for key in ("description", "examples") if key in field}
    return _or_null(field) | around


def _answer(content: Mapping[str, Schema], logprobs: Schema) -> Schema:
    finish = {"enum": ["stop", "length", "tool_calls"]}
    choice = {"index": _INTEGER, **content, "logprobs": _or_null(logprobs), "finish_reason": finish}
    # vLLM's fields: in the choices of a completion; about the prompt, beside the choices of a chat.
    entry = _object({"logprob": _NUMBER, "rank": _or_null(_INTEGER), "decoded_token": _STRING})
    place = _or_null({"type": "object", "additionalProperties": entry})
    prompt = {"prompt_token_ids": _array(_INTEGER), "prompt_logprobs": _array(place)}
    choices = _array(_object(choice | prompt | {"token_ids": _array(_INTEGER)}, *prompt, "token_ids"))
    outer = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING, "choices": choices}
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER)
    details = {"type": "object", "additionalProperties": _INTEGER}
    usage = _object(counts | {"prompt_tokens_details": details, "completion_tokens_details": details})
    return _object(outer | {"usage": usage} | prompt, *prompt)
