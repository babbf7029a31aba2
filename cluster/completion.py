"""One streamed completion over HTTP, with what it cost: the client side of ``paceline complete``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from cluster.console import BadInput, CommandError
from transport.address import is_loopback

SILENCE_SECONDS = 60.0
"""Without a byte for this long the stream is given up."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What to complete."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    chat: bool = False
    api_key: str = field(default="", repr=False)
    model: str = ""
    """Which of the server's; empty: the only one."""

    def body(self, *, speculate: bool) -> dict[str, Any]:
        """As the API takes it. The answer is not kept: the same request, asked again, could copy it and look fast."""
        prompt = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        options = {"include_usage": True, "include_speculation": True}
        settings = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        speculation = {"enabled": speculate, "remember": False}
        model = {"model": self.model} if self.model else {}
        return {**model, **prompt, **settings, "stream": True, "stream_options": options, "speculation": speculation}


@dataclass(slots=True)
class CompletionTally:
    """What was seen of a completion so far."""

    text: str = ""
    tokens: int = 0
    accepted: int = 0
    offered: int = 0
    first: int = 0
    """Tokens of the first commit, which came with the prompt's computation."""
    started: float = 0.0
    ended: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second between the first and the last commit; None if there is nothing between."""
        seconds = self.ended - self.started
        return (self.tokens - self.first) / seconds if seconds > 0 and self.tokens > self.first else None

    def add(self, speculation: dict[str, Any], now: float) -> None:
        """Count a commit."""
        if not self.tokens:
            self.first, self.started = speculation["tokens"], now
        self.ended = now
        self.tokens += speculation["tokens"]
        self.accepted += speculation["accepted"]
        self.offered += speculation["offered"]


def bearer(api_key: str) -> dict[str, str]:
    """The header that carries a key, if there is one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def is_local(url: str) -> bool:
    """Whether a server is on loopback, which no proxy can reach. Raises :class:`BadInput` for what names no server."""
    try:
        urlsplit(url)  # refuses a bracket that nothing closes, which httpx takes for a name
        return is_loopback(httpx.URL(url).host)
    except (httpx.InvalidURL, ValueError) as error:  # the latter for names in letters beyond ASCII
        raise BadInput(f"--url {url}: {error}") from error


def stream(
    url: str, request: CompletionRequest, tally: CompletionTally, *, speculate: bool = True
) -> Iterator[tuple[str, bool]]:
    """Text as it arrives, and whether it was drafted and accepted; counted in ``tally``. Raises CommandError."""
    path = "/v1/chat/completions" if request.chat else "/v1/completions"
    body = request.body(speculate=speculate)
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=5.0)
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=not is_local(url)) as client,
            client.stream("POST", url.rstrip("/") + path, json=body, headers=bearer(request.api_key)) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise _refusal(response)
            for event in _events(response):
                tally.add(event["speculation"], time.perf_counter())
                for piece in event["speculation"]["pieces"]:
                    tally.text += piece["text"]
                    yield piece["text"], piece["drafted"]
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise CommandError(f"no Paceline at {url}; start one with `paceline up`") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise BadInput(f"--url {url}: {error}") from error
    except httpx.ReadTimeout as error:
        raise CommandError(f"{url} sent nothing for {SILENCE_SECONDS:.0f} s") from error
    except httpx.TransportError as error:
        raise CommandError(f"lost the connection to {url} after {tally.tokens} tokens: {error}") from error


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise CommandError(f"the server gave up: {event['error']['message']}")
        if event.get("speculation") is not None:
            yield event


def _refusal(response: httpx.Response) -> CommandError:
    try:
        error = response.json()["error"]
        reason = f"{error['message']} ({error['param']})" if error.get("param") else str(error["message"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {response.status_code}; is this a Paceline server?"
    if response.is_client_error:
        return BadInput(f"the server refused: {reason}")
    return CommandError(f"the server failed: {reason}")
