"""One request to one server: what is sent, and what is heard of it to its end, by its kind if it goes wrong.

A request has OpenAI's fields, what the server offers beyond them, and what the user adds; prompts come from a file.
Servers differ in how they answer, and all of these occur:

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

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.harness import prompts
from benchmarks.harness.prompts import Prompt, PromptError
from benchmarks.serve.settings import BUNDLED_PROMPTS, PACELINE, VLLM, Json, ServeOptions, ServerContender
from cluster.completion import bearer, is_local
from cluster.config.environment import BUNDLED

CHUNK_SIZES = {PACELINE: {"include_speculation": True}, VLLM: {"continuous_usage_stats": True}}
"""What makes a server say how many tokens a chunk has."""
CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 10.0
"""Seconds that a sender waits at most because a server said so."""
MOST_BYTES = 1 << 24
BUSY, BUSY_LATER = "HTTP 429", "HTTP 429 with Retry-After"
LOST, NO_CONNECTION, LATE = "connection lost", "no connection", "timeout"
MALFORMED, FAILED, CUT = "malformed stream", "error in stream", "stream cut short"
NOT_SENT = "not sent: too many under way"


def read_prompts(source: str, chat: bool) -> list[Prompt]:
    """The prompts of a file, or the bundled ones. Raises :class:`benchmarks.harness.prompts.PromptError`."""
    try:
        found = prompts.read(BUNDLED / "prompts.jsonl" if source == BUNDLED_PROMPTS else Path(source))
    except PromptError as error:
        raise PromptError(f"--prompts {error}") from error
    for prompt in found:
        if prompt.messages and not chat:
            raise PromptError(f"--prompts {prompt.where} is a conversation; send it with --chat")
    return found


def path(chat: bool) -> str:
    """Of the endpoint."""
    return "/v1/chat/completions" if chat else "/v1/completions"


def body(options: ServeOptions, contender: ServerContender, prompt: Prompt, number: int) -> Json:
    """Of request ``number`` (below 0 to warm up), whose seed depends on it alone: it is the same for all contenders."""
    said: Json = {"prompt": prompt.text}
    if options.chat:
        said = {"messages": list(prompt.messages) or [{"role": "user", "content": prompt.text}]}
        said |= {"tools": list(prompt.tools)} if prompt.tools else {}
    fields: Json = {
        "model": contender.model,
        **said,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + abs(number),
        "stream": True,
        "stream_options": {"include_usage": True, **CHUNK_SIZES.get(contender.make, {})},
    }
    if contender.make == PACELINE:
        # Nobody drafts from the answers that others, or warming up, had to the same requests.
        fields["speculation"] = {"remember": False} | ({"enabled": False} if contender.plain else {})
    for key, value in contender.extra.items():
        own = fields.get(key)
        # Objects of the same name are merged, as in ``speculation``; else the user's word stands.
        fields[key] = own | value if isinstance(own, dict) and isinstance(value, dict) else value
    return {key: value for key, value in fields.items() if value is not None}


class AnswerError(Exception):
    """The answer is no good: of what kind, and one line about it."""

    def __init__(self, kind: str, message: str, pause: float = 0.0) -> None:
        """``pause``: seconds until the server wants to hear of us again."""
        super().__init__(message)
        self.kind, self.pause = kind, pause


class Events:
    """Server-sent events from bytes as they come (WHATWG HTML, 9.2.6); fields other than ``data`` are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> Iterator[str]:
        """The data of every event that is now complete. Raises :class:`AnswerError`."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode(errors="replace")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                yield "\n".join(self._data)
                self._data = []
        if len(self._rest) + sum(map(len, self._data)) > MOST_BYTES:
            raise AnswerError(MALFORMED, f"an event of more than {MOST_BYTES} bytes")


class Drafts(NamedTuple):
    """What became of drafts in one request."""

    accepted: int
    offered: int
    steps: int | None
    """Verifications with drafts; None: not said."""


@dataclass(slots=True)
class Heard:
    """One request as its client saw it so far; :meth:`take` adds an event. Times in seconds of this process's clock."""

    number: int = 0
    due: float = 0.0
    """When it should have been sent; latencies count from here."""
    sent: float = 0.0
    ended: float = 0.0
    """0: not yet."""
    times: list[float] = field(default_factory=list)
    """When each chunk with text or tokens came."""
    totals: list[int | None] = field(default_factory=list)
    """Tokens until then, by chunk; None where the server does not say."""
    usage: int | None = None
    """All tokens, as the server says."""
    text: str = ""
    """Reasoning included."""
    verifications: int = 0
    drafts: Drafts | None = None
    cached: int = 0
    """Prompt tokens that the server says it had computed before."""
    finished: bool = False
    """The server said that, or why, the text ended."""
    error: str = ""
    """Its kind; empty: it went well."""
    detail: str = ""
    pause: float = 0.0
    """Seconds after which the server wants to hear of its client again."""

    def take(self, data: str, now: float) -> None:
        """Raises :class:`AnswerError`."""
        if data == "[DONE]":
            self.finished = True
            return
        event = _object(data)
        if event.get("error") is not None or event.get("object") == "error":
            raise AnswerError(FAILED, error_text(event))
        choice = _first_choice(event)
        text, tokens = _text_of(choice), _number(event, "speculation", "tokens")
        self.verifications += bool(_number(event, "speculation", "offered"))
        ids = choice.get("token_ids")
        own = tokens if tokens is not None else len(ids) if isinstance(ids, list) else None
        usage = _number(event, "usage", "completion_tokens")
        if text or own:
            before = self.totals[-1] if self.totals else 0
            told = usage if usage is not None else _number(event, "timings", "predicted_n")
            self.totals.append(told if own is None else None if before is None else before + own)
            self.times.append(now)
            self.text += text
        self.finished |= choice.get("finish_reason") is not None
        self.usage = self.usage if usage is None else usage
        self.drafts = self._drafts_of(event) or self.drafts
        cached = _number(event, "usage", "prompt_tokens_details", "cached_tokens")
        self.cached = self.cached if cached is None else cached

    def _drafts_of(self, event: Json) -> Drafts | None:
        details = "usage", "completion_tokens_details"
        kept, refused = (_number(event, *details, f"{what}_draft_tokens") for what in ("accepted", "rejected"))
        if kept is not None and refused is not None:
            return Drafts(kept, kept + refused, self.verifications or None)
        for place, accepted, all_drafts, steps in (
            (("metrics", "speculative_decoding"), "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps"),
            (("timings",), "draft_n_accepted", "draft_n", ""),
        ):
            kept, offered = _number(event, *place, accepted), _number(event, *place, all_drafts)
            if kept is not None and offered is not None:
                return Drafts(kept, offered, _number(event, *place, steps))
        return None

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Tokens by chunk; None if the server does not say."""
        totals = [total for total in self.totals if total is not None]
        if len(totals) != len(self.totals):
            return None
        return tuple(max(total - earlier, 0) for earlier, total in pairwise([0, *totals]))

    @property
    def tokens(self) -> int:
        """By usage, else as chunks say, else one a chunk (see :attr:`guessed`)."""
        if self.usage is not None:
            return self.usage
        return len(self.times) if (sizes := self.sizes) is None else sum(sizes)

    @property
    def guessed(self) -> bool:
        """Tokens are nowhere counted: chunks are."""
        return self.usage is None and self.sizes is None

    @property
    def digest(self) -> str:
        """Of the text."""
        return hashlib.sha256(self.text.encode(errors="replace")).hexdigest()[:16]

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None: no text came."""
        return self.times[0] - self.due if self.times else None

    @property
    def e2e(self) -> float:
        """Seconds from end to end."""
        return self.ended - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds an output token; None: nothing came after the first chunk."""
        later = self.tokens - 1 if (sizes := self.sizes) is None else sum(sizes[1:])
        return (self.times[-1] - self.times[0]) / later if len(self.times) > 1 and later > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies in seconds: by token if the server says how many a chunk has, else by chunk."""
        between = [later - earlier for earlier, later in pairwise(self.times)]
        if (sizes := self.sizes) is None:
            return between
        return [gap / size for gap, size in zip(between, sizes[1:], strict=True) for _ in range(size)]


def connect(contender: ServerContender, options: ServeOptions) -> httpx.AsyncClient:
    """Connections to a contender, as many as are needed, kept between requests."""
    return httpx.AsyncClient(
        base_url=contender.url,
        headers=bearer(contender.api_key),
        timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, options.timeout)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=not is_local(contender.url),
    )


async def ask(client: httpx.AsyncClient, path: str, body: Json, timeout: float | None, heard: Heard) -> None:
    """Send it, and read the answer into ``heard`` to its end, or until so many seconds are over."""
    heard.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await read(client, path, body, heard)
    except TimeoutError:
        heard.error, heard.detail = LATE, f"not over after {timeout:g} s"
    except AnswerError as wrong:
        heard.error, heard.detail, heard.pause = wrong.kind, str(wrong), wrong.pause
    except (httpx.ConnectError, httpx.ConnectTimeout) as wrong:
        heard.error, heard.detail = NO_CONNECTION, str(wrong) or type(wrong).__name__
    except httpx.RequestError as wrong:
        heard.error, heard.detail = LOST, str(wrong) or type(wrong).__name__
    except asyncio.CancelledError:
        heard.error = heard.error or CUT
        raise
    finally:
        heard.ended = time.perf_counter()


async def read(client: httpx.AsyncClient, path: str, body: Json, heard: Heard) -> None:
    """Send a request, and take its answer in as it comes. Raises :class:`AnswerError`, httpx.RequestError."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise _refusal(response, await response.aread())
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise AnswerError(MALFORMED, f"the answer is {kind or 'of no type'}, not a stream of events")
        events = Events()
        async for received in response.aiter_bytes():
            now = time.perf_counter()
            for data in events.feed(received):
                heard.take(data, now)
    if not heard.finished:
        raise AnswerError(CUT, "the stream ended without saying why")


def _refusal(response: httpx.Response, raw: bytes) -> AnswerError:
    """An error instead of a stream; one that says when to come again does so in seconds, or else in one."""
    try:
        value: Any = response.json()
        reason = error_text(value if isinstance(value, dict) else {"error": value})
    except ValueError:
        reason = raw[:200].decode(errors="replace").strip() or response.reason_phrase
    status, later = response.status_code, response.headers.get("retry-after")
    if status != httpx.codes.TOO_MANY_REQUESTS:
        return AnswerError(f"HTTP {status}", reason)
    try:
        pause = min(max(float(later or 0.0), 0.0), LONGEST_PAUSE)
    except ValueError:
        pause = 1.0  # a date (RFC 9110)
    return AnswerError(BUSY if later is None else BUSY_LATER, reason, pause)


def error_text(value: Json) -> str:
    """What a server says of an error, in one line: OpenAI's form, FastAPI's, or a string."""
    error = value.get("error", value.get("detail", value))
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        param = f" ({error['param']})" if error.get("param") else ""
        error = f"{error['message']}{param}"
    return " ".join(str(error).split())[:300]


def _object(data: str) -> Json:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnswerError(MALFORMED, f"an event is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise AnswerError(MALFORMED, f"an event is not an object: {data[:80]!r}")
    return event


def _number(event: Any, *names: str) -> int | None:
    """What stands there, if that is a whole number."""
    for name in names:
        event = event.get(name) if isinstance(event, dict) else None
    return event if isinstance(event, int) else None


def _first_choice(event: Json) -> Json:
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise AnswerError(MALFORMED, f"an event has no choices: {str(event)[:80]}")
    return choices[0] if choices and isinstance(choices[0], dict) else {}


def _text_of(choice: Json) -> str:
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    return "".join(part for part in (choice.get("text"), reasoning, delta.get("content")) if isinstance(part, str))
