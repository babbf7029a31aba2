"""Answers in OpenAI's JSON, streamed and not, and errors.

Decides shapes only. Beyond OpenAI's fields there are two of our own: ``usage.completion_tokens_details``
counts ``accepted_draft_tokens`` and ``rejected_draft_tokens``, and with
``stream_options.include_speculation`` every chunk that stands for a commit, even one without text, has

    "speculation": {"accepted": a, "offered": o, "tokens": n, "pieces": [{"text": "...", "drafted": true},
    ...]}

where ``n`` tokens were committed, ``a`` of them drafted, out of ``o`` draft tokens verified; the texts of the
pieces together are the text of the chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.choices import Chunk
from router.errors import CODES, ErrorCode
from speculation.messages import FinishReason

Json = dict[str, Any]


def encode(value: Mapping[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The last event of a stream that went well."""


def error_body(code: ErrorCode, message: str, param: str | None = None) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": code.type.value, "param": param, "code": code.name}}


def internal_error_body() -> Json:
    """For a fault of this server: says nothing of what went wrong, which the log does."""
    return error_body(CODES["internal"], "internal error")


def model_body(name: str, created: int, context: int) -> Json:
    """One entry of ``/v1/models``; ``max_model_len`` is vLLM's name for the context."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "max_model_len": context,
    }


@dataclass(slots=True)
class Usage:
    """Counts of one request; ``add`` takes every chunk of it.

    What is said of a prompt is counted once, of the first of its ``n`` choices: the others find it in the cache.
    """

    prompt: int
    n: int = 1
    completion: int = 0
    accepted: int = 0
    offered: int = 0
    cached: int = 0

    def add(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self.completion += chunk.tokens
        self.accepted += chunk.accepted
        self.offered += chunk.offered
        if chunk.index % self.n == 0:
            self.cached += chunk.cached

    def body(self) -> Json:
        """The ``usage`` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_draft_tokens": self.accepted,
                "rejected_draft_tokens": self.offered - self.accepted,
            },
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all parts of one answer share."""

    kind: Literal["completion", "chat"]
    id: str
    created: int
    model: str
    include_usage: bool = False
    include_speculation: bool = False

    def whole(self, texts: Sequence[str], finishes: Sequence[FinishReason], usage: Usage) -> Json:
        """The answer that is not streamed; ``texts`` and ``finishes`` by choice."""
        choices = []
        for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            content: Json = {"text": text}
            if self.kind == "chat":
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": finish.value})
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._outer(name, choices) | {"usage": usage.body()}

    def opening(self, index: int) -> Json:
        """Chat only: the first chunk of a choice, which gives the role."""
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""}, "", None)])

    def text(self, chunk: Chunk) -> Json:
        """A chunk with the text of a commit."""
        body = self._chunk([self._choice(chunk.index, {"content": chunk.text}, chunk.text, None)])
        if self.include_speculation:
            body["speculation"] = {
                "accepted": chunk.accepted,
                "offered": chunk.offered,
                "tokens": chunk.tokens,
                "pieces": [{"text": piece.text, "drafted": piece.drafted} for piece in chunk.pieces],
            }
        return body

    def closing(self, index: int, finish: FinishReason) -> Json:
        """The last chunk of a choice."""
        return self._chunk([self._choice(index, {}, "", finish)])

    def usage(self, usage: Usage) -> Json:
        """The last chunk of a stream that asked for it."""
        return self._chunk([]) | {"usage": usage.body()}

    def _choice(self, index: int, delta: Json, text: str, finish: FinishReason | None) -> Json:
        content = {"delta": delta} if self.kind == "chat" else {"text": text}
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": finish.value if finish else None,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return self._outer(name, choices) | ({"usage": None} if self.include_usage else {})

    def _outer(self, name: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
