"""Asks a server, before any load, whether it is one: its models, and a request of a few tokens.

What does not work is told in one line. Servers that list no models, or not the one that they serve (``transformers
serve`` lists what lies in its cache), are not refused for it: the request decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.harness.prompts import Prompt
from benchmarks.serve.client import PACELINE, VLLM, AnswerError, Heard, body, path, read
from benchmarks.serve.settings import ServeOptions, ServerContender
from cluster.console import FAILED, CommandError

TOKENS = 4
LIST_SECONDS = 10.0
MAKES = {"paceline": PACELINE, "vllm": VLLM, "llamacpp": "llama.cpp"}
"""By what a server says of itself in its list of models; what it offers depends on it."""
OTHER = "not known"


class ServerError(CommandError):
    """The server cannot be measured. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FAILED)


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of a contender's server."""

    make: str
    model: str
    note: str = ""


async def identify(
    client: httpx.AsyncClient, contender: ServerContender, options: ServeOptions, prompt: Prompt
) -> Server:
    """Raises :class:`ServerError`."""
    where = f"--url {contender.url}"
    try:
        owners = await _models(client, where, required=not contender.model)
        model = contender.model or _only(owners, where)
        known = {MAKES[owner] for owner in owners.values() if owner in MAKES}
        make = known.pop() if len(known) == 1 else OTHER
        asked = body(options, contender, make, model, prompt, 0)
        asked |= {"max_tokens": min(TOKENS, options.max_tokens)} if "max_tokens" in asked else {}
        async with asyncio.timeout(options.timeout):
            await read(client, asked, options.chat, Heard())
    except TimeoutError as error:
        late = f"a first request of {TOKENS} tokens was not over after {options.timeout:g} s; give more by --timeout"
        raise ServerError(f"{where}: {late}") from error
    except (httpx.InvalidURL, httpx.RequestError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ServerError(f"{where}: nothing answers there, or not in HTTP ({why}); is the server up?") from error
    except AnswerError as error:
        raise ServerError(f"{where}: {_refused(error, owners, model, options.chat)}") from error
    other = bool(owners) and model not in owners
    return Server(make, model, f"{contender.name} answers to {model}, but lists {_names(owners)}" if other else "")


async def _models(client: httpx.AsyncClient, where: str, *, required: bool) -> dict[str, str]:
    """Owners by model, as the server lists them; none where it cannot and none are ``required``."""
    try:
        async with asyncio.timeout(LIST_SECONDS):
            # A server that fails at this may close the connection without saying so.
            response = await client.get("/v1/models", headers={"connection": "close"})
    except TimeoutError as error:
        raise ServerError(f"{where}: no answer to /v1/models within {LIST_SECONDS:g} s") from error
    status = response.status_code
    if status in KEYS_WANTED:
        raise ServerError(f"{where}: {KEYS_WANTED[status]}")
    if response.is_redirect:
        raise ServerError(f"{where}: it redirects to {response.headers.get('location')}; give that address")
    if not response.is_success:
        if not required:
            return {}
        raise ServerError(f"{where}: /v1/models is answered by {status}: not OpenAI's API, or name a model by --model")
    try:
        listed: Any = response.json()
        return {str(entry["id"]): str(entry.get("owned_by", "")) for entry in listed["data"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        kind = f"{response.headers.get('content-type', 'nothing')} ({response.text[:60]})"
        raise ServerError(f"{where}: /v1/models is answered by {kind}, no list of models: not OpenAI's API") from error


def _only(owners: dict[str, str], where: str) -> str:
    if len(owners) == 1:
        return next(iter(owners))
    listed = f"serves {_names(owners)}; choose" if owners else "lists no models; name one"
    raise ServerError(f"{where}: {listed} by --model")


KEYS_WANTED = {
    status: f"the server wants another API key ({status}); name the variable that holds one by --api-key-env"
    for status in (httpx.codes.UNAUTHORIZED.value, httpx.codes.FORBIDDEN.value)
}


def _refused(error: AnswerError, owners: dict[str, str], model: str, chat: bool) -> str:
    if owners and model not in owners and error.status is not None:
        return f"does not serve {model!r}; it lists {_names(owners)} ({error})"
    if error.status in KEYS_WANTED:
        return KEYS_WANTED[error.status]
    if error.status == httpx.codes.NOT_FOUND:
        other = "no --chat" if chat else "--chat"
        return f"POST {path(chat)} is answered by 404: {error}; another --model, or {other}?"
    return f"a first request failed: {error.kind}: {error}"


def _names(owners: Iterable[str]) -> str:
    names = list(owners)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
