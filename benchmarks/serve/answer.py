"""Reads a streamed answer: which tokens came when, and what the server says of them.

Servers differ, and all of these occur:

* A first chunk with a role and no text (chat), comment lines in between (``: ping``), chunks of several tokens,
  reasoning in a field of its own, usage in a chunk of its own without choices (OpenAI, vLLM, llama.cpp), in the last
  chunk with a choice (older llama.cpp, transformers) or in every chunk (vLLM with ``continuous_usage_stats``), no
  ``[DONE]`` at the end (transformers), an error as an event, as an object or as a string.
* How many tokens a chunk has is in ``speculation.tokens`` (Paceline), in ``token_ids`` (vLLM, when asked for) or
  follows from usage, or from llama.cpp's ``timings.predicted_n``, in every chunk; or it is not said at all.
* What became of drafts is in ``usage.completion_tokens_details`` (Paceline), in ``metrics.speculative_decoding`` (vLLM
  with ``--per-request-spec-decode-metrics``) or in ``timings`` (llama.cpp).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 1 << 24
REASONING = ("reasoning_content", "reasoning")


class AnswerError(Exception):
    """The answer is no good: of what kind, and one line about it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


MALFORMED, FAILED, CUT = "malformed stream", "error in stream", "stream cut short"


class Events:
    """Server-sent events from bytes as they come (WHATWG HTML, 9.2.6); fields other than ``data`` are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of every event that is now complete. Raises :class:`AnswerError`."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        complete = []
        for line in lines:
            text = line.removesuffix(b"\r").decode(errors="replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                complete.append("\n".join(self._data))
                self._data = []
        if len(self._rest) + sum(map(len, self._data)) > MOST_BYTES:
            raise AnswerError(MALFORMED, f"an event of more than {MOST_BYTES} bytes")
        return complete


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of drafts in one request."""

    accepted: int
    offered: int
    steps: int | None
    """Verifications with drafts; None: not said."""


@dataclass(slots=True)
class Answer:
    """What has come so far; :meth:`take` adds an event."""

    times: list[float] = field(default_factory=list)
    """When each chunk with text or tokens came."""
    finished: bool = False
    """Some chunk gave a reason why the text ended."""
    done: bool = False
    """The last event came that OpenAI's streams end with."""
    drafts: Drafts | None = None
    cached: int = 0
    """Prompt tokens that the server says it had computed before."""
    _totals: list[int | None] = field(default_factory=list)
    """Tokens until then, by chunk; None where the server does not say."""
    _usage: int | None = None
    _verifications: int = 0
    _text: Any = field(default_factory=hashlib.sha256)

    def take(self, data: str, now: float) -> None:
        """Raises :class:`AnswerError`."""
        if data == "[DONE]":
            self.done = True
            return
        event = _object(data)
        if event.get("error") is not None or event.get("object") == "error":
            raise AnswerError(FAILED, error_text(event))
        choice = _first_choice(event)
        text = _text_of(choice)
        total = self._total(event, choice)
        if text or _inner(event, "speculation").get("tokens") or choice.get("token_ids"):
            self.times.append(now)
            self._totals.append(total)
            self._text.update(text.encode())
        self.finished |= choice.get("finish_reason") is not None
        usage = _inner(event, "usage").get("completion_tokens")
        self._usage = usage if isinstance(usage, int) else self._usage
        self.drafts = self._drafts_of(event) or self.drafts
        cached = _inner(_inner(event, "usage"), "prompt_tokens_details").get("cached_tokens")
        self.cached = cached if isinstance(cached, int) else self.cached

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Tokens by chunk; None if the server does not say."""
        totals = [total for total in self._totals if total is not None]
        if len(totals) != len(self._totals):
            return None
        return tuple(max(total - earlier, 0) for total, earlier in zip(totals, [0, *totals], strict=False))

    @property
    def tokens(self) -> int:
        """By usage, else as chunks say, else one a chunk (see :attr:`guessed`)."""
        if self._usage is not None:
            return self._usage
        return sum(self.sizes) if self.sizes is not None else len(self.times)

    @property
    def guessed(self) -> bool:
        """Tokens are nowhere counted: chunks are."""
        return self._usage is None and self.sizes is None

    @property
    def digest(self) -> str:
        """Of the text, reasoning included."""
        return str(self._text.hexdigest()[:16])

    def _total(self, event: dict[str, Any], choice: dict[str, Any]) -> int | None:
        before = self._totals[-1] if self._totals else 0
        own = _inner(event, "speculation").get("tokens")
        if isinstance(own, int):
            self._verifications += bool(_inner(event, "speculation").get("offered"))
            return None if before is None else before + own
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            return None if before is None else before + len(ids)
        for total in (_inner(event, "usage").get("completion_tokens"), _inner(event, "timings").get("predicted_n")):
            if isinstance(total, int):
                return total
        return None

    def _drafts_of(self, event: dict[str, Any]) -> Drafts | None:
        details = _inner(_inner(event, "usage"), "completion_tokens_details")
        kept, refused = details.get("accepted_draft_tokens"), details.get("rejected_draft_tokens")
        if isinstance(kept, int) and isinstance(refused, int):
            return Drafts(kept, kept + refused, self._verifications or None)
        told = _inner(_inner(event, "metrics"), "speculative_decoding")
        kept, offered = told.get("num_accepted_draft_tokens"), told.get("num_draft_tokens")
        steps = told.get("num_spec_steps")
        if not isinstance(offered, int):
            timings = _inner(event, "timings")
            kept, offered, steps = timings.get("draft_n_accepted"), timings.get("draft_n"), None
        if isinstance(kept, int) and isinstance(offered, int):
            return Drafts(kept, offered, steps if isinstance(steps, int) else None)
        return None


def error_text(value: dict[str, Any]) -> str:
    """What a server says of an error, in one line: OpenAI's form, FastAPI's, or a string."""
    error = value.get("error", value.get("detail", value))
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        param = f" ({error['param']})" if error.get("param") else ""
        return " ".join(f"{error['message']}{param}".split())[:300]
    return " ".join(str(error).split())[:300]


def _object(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnswerError(MALFORMED, f"an event is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise AnswerError(MALFORMED, f"an event is not an object: {data[:80]!r}")
    return event


def _inner(event: dict[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def _first_choice(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise AnswerError(MALFORMED, f"an event has no choices: {str(event)[:80]}")
    return choices[0] if choices and isinstance(choices[0], dict) else {}


def _text_of(choice: dict[str, Any]) -> str:
    delta = _inner(choice, "delta")
    reasoning = next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), "")
    return "".join(part for part in (choice.get("text"), reasoning, delta.get("content")) if isinstance(part, str))
