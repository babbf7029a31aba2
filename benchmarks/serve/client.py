"""One request to one server: what is sent, and what is heard of it to its end, by its kind if it goes wrong.

A request has OpenAI's fields, what the server offers beyond them, and what the user adds; prompts come from a file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.harness import prompts
from benchmarks.harness.prompts import Prompt, PromptError
from benchmarks.serve.answer import CUT, MALFORMED, Answer, AnswerError, Drafts, Events, error_text
from benchmarks.serve.settings import BUNDLED_PROMPTS, Json, Make, ServeOptions, ServerContender
from cluster.completion import bearer
from cluster.config.environment import BUNDLED
from transport.address import is_loopback


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


CHUNK_SIZES = {Make.PACELINE: {"include_speculation": True}, Make.VLLM: {"continuous_usage_stats": True}}
"""What makes a server say how many tokens a chunk has."""


def path(chat: bool) -> str:
    """Of the endpoint."""
    return "/v1/chat/completions" if chat else "/v1/completions"


def body(
    options: ServeOptions, contender: ServerContender, make: Make, model: str, prompt: Prompt, number: int
) -> Json:
    """Of request ``number`` (below 0 to warm up), whose seed depends on it alone: it is the same for all contenders."""
    said: Json = {"prompt": prompt.text}
    if options.chat:
        said = {"messages": list(prompt.messages) or [{"role": "user", "content": prompt.text}]}
    fields: Json = {
        "model": model,
        **said,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + abs(number),
        "stream": True,
        "stream_options": {"include_usage": True, **CHUNK_SIZES.get(make, {})},
    }
    if make is Make.PACELINE:
        # Nobody drafts from the answers that others, or warming up, had to the same requests.
        fields["speculation"] = {"remember": False} | ({"enabled": False} if contender.plain else {})
    return {key: value for key, value in _merged(fields, contender.extra).items() if value is not None}


def remembers(contender: ServerContender) -> bool:
    """Whether a Paceline may keep its answers to draft for later requests, which the user has to ask for."""
    said = contender.extra.get("speculation", {})
    return not isinstance(said, Mapping) or said.get("remember", False) is not False


def _merged(fields: Json, extra: Mapping[str, Any]) -> Json:
    """Objects of the same name are merged, as in ``speculation``; else the user's word stands."""
    both = {
        key for key in fields.keys() & extra.keys() if isinstance(fields[key], dict) and isinstance(extra[key], dict)
    }
    return fields | dict(extra) | {key: fields[key] | extra[key] for key in both}


CONNECT_SECONDS = 10.0
LONGEST_PAUSE = 10.0
"""Seconds that a sender waits at most because a server said so."""
BUSY, BUSY_LATER = "HTTP 429", "HTTP 429 with Retry-After"
LOST, NO_CONNECTION, LATE = "connection lost", "no connection", "timeout"
NOT_SENT = "not sent: too many under way"


@dataclass(frozen=True, slots=True)
class Heard:
    """One request as its client saw it. Times in seconds of this process's clock."""

    number: int
    due: float
    """When it should have been sent; latencies count from here."""
    sent: float
    ended: float
    times: tuple[float, ...] = ()
    """When each chunk with text or tokens came."""
    sizes: tuple[int, ...] | None = None
    """Tokens of each of them; None: not said."""
    tokens: int = 0
    guessed: bool = False
    """``tokens`` are chunks, as the server does not count tokens."""
    digest: str = ""
    drafts: Drafts | None = None
    cached: int = 0
    error: str = ""
    """Its kind; empty: it went well."""
    detail: str = ""
    pause: float = 0.0
    """Seconds after which the server wants to hear of its client again."""


def connect(contender: ServerContender, options: ServeOptions) -> httpx.AsyncClient:
    """Connections to a contender, as many as are needed, kept between requests."""
    return httpx.AsyncClient(
        base_url=contender.url,
        headers=bearer(contender.api_key),
        timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, options.timeout)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        # A proxy from the environment cannot reach this machine's loopback.
        trust_env=not is_loopback(urlsplit(contender.url).hostname or ""),
    )


async def ask(client: httpx.AsyncClient, body: Json, options: ServeOptions, number: int, due: float) -> Heard:
    """Send it, and read the answer to its end or until the time is up."""
    sent, answer = time.perf_counter(), Answer()
    error, detail, pause = "", "", 0.0
    try:
        async with asyncio.timeout(options.timeout):
            await read(client, body, options.chat, answer)
    except TimeoutError:
        error, detail = LATE, f"not over after {options.timeout:g} s"
    except AnswerError as wrong:
        error, detail = wrong.kind, str(wrong)
        pause = wrong.pause if isinstance(wrong, Refusal) else 0.0
    except httpx.ConnectError as wrong:
        error, detail = NO_CONNECTION, str(wrong)
    except httpx.ConnectTimeout:
        error, detail = NO_CONNECTION, f"not connected after {min(CONNECT_SECONDS, options.timeout):g} s"
    except httpx.RequestError as wrong:
        error, detail = LOST, str(wrong) or type(wrong).__name__
    said = {name: getattr(answer, name) for name in ("sizes", "tokens", "guessed", "digest", "drafts", "cached")}
    ended, times = time.perf_counter(), tuple(answer.times)
    return Heard(number, due, sent, ended, times, **said, error=error, detail=detail, pause=pause)


class Refusal(AnswerError):
    """The server answered with an error instead of a stream."""

    def __init__(self, status: int, message: str, retry_after: str | None) -> None:
        busy = BUSY_LATER if retry_after is not None else BUSY
        super().__init__(busy if status == httpx.codes.TOO_MANY_REQUESTS else f"HTTP {status}", message)
        self.status = status
        self.pause = _seconds(retry_after) if status == httpx.codes.TOO_MANY_REQUESTS else 0.0


async def read(client: httpx.AsyncClient, body: Json, chat: bool, answer: Answer) -> None:
    """Send a request, and take its answer in as it comes. Raises :class:`AnswerError`, httpx.RequestError."""
    async with client.stream("POST", path(chat), json=body) as response:
        if response.status_code != httpx.codes.OK:
            raw = await response.aread()
            raise Refusal(response.status_code, _reason(response, raw), response.headers.get("retry-after"))
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise AnswerError(MALFORMED, f"the answer is {kind or 'of no type'}, not a stream of events")
        events = Events()
        async for received in response.aiter_bytes():
            now = time.perf_counter()
            for data in events.feed(received):
                answer.take(data, now)
    if not (answer.finished or answer.done):
        raise AnswerError(CUT, "the stream ended without saying why")


def _reason(response: httpx.Response, raw: bytes) -> str:
    try:
        value: Any = response.json()
    except ValueError:
        return raw[:200].decode(errors="replace").strip() or response.reason_phrase
    return error_text(value if isinstance(value, dict) else {"error": value})


def _seconds(retry_after: str | None) -> float:
    """Of a header in seconds; one with a date (RFC 9110) waits a second."""
    try:
        return min(max(float(retry_after or 0.0), 0.0), LONGEST_PAUSE)
    except ValueError:
        return 1.0
