"""Asks a server, before any load, whether it is one: its models, and a request of a few tokens.

What does not work is told in one line. Servers that list no models, or not the one that they serve (``transformers
serve`` lists what lies in its cache), are not refused for it: the request decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.harness.prompts import Prompt
from benchmarks.serve.answer import Answer, AnswerError
from benchmarks.serve.client import Refusal, body, path, read
from benchmarks.serve.settings import Make, ServeOptions, ServerContender
from cluster.console import FAILED, CommandError

TOKENS = 4
LIST_SECONDS = 10.0
MAKES = {"paceline": Make.PACELINE, "vllm": Make.VLLM, "llamacpp": Make.LLAMA_CPP}


class ServerError(CommandError):
    """The server cannot be measured. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FAILED)


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of a contender's server."""

    make: Make
    model: str
    note: str = ""


async def identify(
    client: httpx.AsyncClient, contender: ServerContender, options: ServeOptions, prompt: Prompt
) -> Server:
    """Raises :class:`ServerError`."""
    where = f"--url {contender.url}"
    try:
        owners = await _models(client, where, required=not contender.model)
        model = _chosen(owners, contender.model, where)
        known = {MAKES[owner] for owner in owners.values() if owner in MAKES}
        server = Server(known.pop() if len(known) == 1 else Make.OTHER, model)
        await _try(client, server, contender, options, prompt)
    except httpx.InvalidURL as error:
        raise ServerError(f"{where}: {error}") from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ServerError(f"{where}: nothing answers there ({_why(error)}); is the server up?") from error
    except httpx.RemoteProtocolError as error:
        raise ServerError(f"{where}: what answers there does not speak HTTP, or not well ({_why(error)})") from error
    except httpx.RequestError as error:
        raise ServerError(f"{where}: the connection broke off ({_why(error)})") from error
    except AnswerError as error:
        raise ServerError(f"{where}: {_refused(error, owners, model, options.chat)}") from error
    if owners and model not in owners:
        return Server(server.make, model, f"{contender.name} answers to {model}, but lists {_names(owners)}")
    return server


async def _models(client: httpx.AsyncClient, where: str, *, required: bool) -> dict[str, str]:
    """Owners by model, as the server lists them; none where it cannot and none are ``required``."""
    try:
        async with asyncio.timeout(LIST_SECONDS):
            # A server that fails at this may close the connection without saying so.
            response = await client.get("/v1/models", headers={"connection": "close"})
    except TimeoutError as error:
        raise ServerError(f"{where}: no answer to /v1/models within {LIST_SECONDS:g} s") from error
    status = response.status_code
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        hint = "name the variable that holds one by --api-key-env"
        raise ServerError(f"{where}: the server wants another API key ({status}); {hint}")
    if response.is_redirect:
        raise ServerError(f"{where}: it redirects to {response.headers.get('location')}; give that address")
    if not response.is_success:
        if not required:
            return {}
        raise ServerError(f"{where}: /v1/models is answered by {status}: not OpenAI's API, or name a model by --model")
    try:
        listed: Any = response.json()
        return {str(entry["id"]): str(entry.get("owned_by", "")) for entry in listed["data"]}
    except ValueError as error:
        kind = response.headers.get("content-type", "nothing")
        raise ServerError(f"{where}: /v1/models is answered by {kind}, not by JSON: not OpenAI's API") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(
            f"{where}: the JSON of /v1/models is not a list of models ({response.text[:60]}): not OpenAI's API"
        ) from error


def _chosen(owners: dict[str, str], wanted: str, where: str) -> str:
    if wanted:
        return wanted
    if not owners:
        raise ServerError(f"{where}: lists no models; name one by --model")
    if len(owners) > 1:
        raise ServerError(f"{where}: serves {_names(owners)}; choose by --model")
    return next(iter(owners))


async def _try(
    client: httpx.AsyncClient, server: Server, contender: ServerContender, options: ServeOptions, prompt: Prompt
) -> None:
    asked = body(options, contender, server.make, server.model, prompt, 0)
    asked |= {"max_tokens": min(TOKENS, options.max_tokens)} if "max_tokens" in asked else {}
    try:
        async with asyncio.timeout(options.timeout):
            await read(client, asked, options.chat, Answer())
    except TimeoutError as error:
        raise ServerError(
            f"--url {contender.url}: a first request of {TOKENS} tokens was not over after {options.timeout:g} s; "
            "give more by --timeout"
        ) from error


def _refused(error: AnswerError, owners: dict[str, str], model: str, chat: bool) -> str:
    status = error.status if isinstance(error, Refusal) else None
    if owners and model not in owners and status is not None:
        return f"does not serve {model!r}; it lists {_names(owners)} ({error})"
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return f"the server wants another API key ({status}); name the variable that holds one by --api-key-env"
    if status == httpx.codes.NOT_FOUND:
        other = "no --chat" if chat else "--chat"
        return f"POST {path(chat)} is answered by 404: {error}; another --model, or {other}?"
    return f"a first request failed: {error.kind}: {error}"


def _names(owners: Sequence[str] | dict[str, str]) -> str:
    names = list(owners)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
