"""Contenders take turns, round by round, with the same requests; what each heard is noted as it comes.

In a round every contender has its turn, one after the other, and the order is turned around in the next: what else the
machine does, and what a first turn leaves warm, falls on all. Round ``r`` of ``R`` has the requests ``r``, ``r + R``,
``r + 2 R`` and so on, the same for all; number ``n`` has prompt ``n`` (modulo their number) and a seed of its own.

Requests are sent at a rate of their own, or as soon as one of a fixed number of senders is free. At a rate (an open
loop), a request is due when the clock says so, however slow the server is; its latency counts from that moment even if
this process was late to send it. So a stall counts against all requests that it delays, not only against the one that
it hit (Tene's "coordinated omission").

Before any load each server is asked whether it is one: its models, and a request of a few tokens. Servers that list no
models, or not the one that they serve (``transformers serve`` lists what lies in its cache), are not refused for it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from benchmarks.harness.prompts import Prompt
from benchmarks.serve.client import NOT_SENT, AnswerError, Heard, ask, body, connect, path, read
from benchmarks.serve.settings import OTHER, PACELINE, PLAIN_SUFFIX, VLLM, ServeOptions, ServerContender
from cluster.console import FAILED, CommandError

TOKENS = 4
LIST_SECONDS = 10.0
MAKES = {"paceline": PACELINE, "vllm": VLLM, "llamacpp": "llama.cpp"}
"""By the owner of what is in a server's list of models."""
MOST_OPEN = 4096
"""Requests under way at once; those beyond are not sent, and counted."""


class ServerError(CommandError):
    """The server cannot be measured. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FAILED)


async def identify(
    client: httpx.AsyncClient, contender: ServerContender, options: ServeOptions, prompt: Prompt
) -> ServerContender:
    """With its model and its make. Raises :class:`ServerError`."""
    where = f"--url {contender.url}"
    try:
        owners = await _models(client, where, required=not contender.model)
        model = contender.model or _only(owners, where)
        known = {MAKES[owner] for owner in owners.values() if owner in MAKES}
        found = replace(contender, model=model, make=known.pop() if len(known) == 1 else OTHER)
        asked = body(options, found, prompt, 0)
        asked |= {"max_tokens": min(TOKENS, options.max_tokens)} if "max_tokens" in asked else {}
        async with asyncio.timeout(options.timeout):
            await read(client, path(options.chat), asked, Heard())
    except TimeoutError as error:
        late = f"a first request of {TOKENS} tokens was not over after {options.timeout:g} s; give more by --timeout"
        raise ServerError(f"{where}: {late}") from error
    except (httpx.InvalidURL, httpx.RequestError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ServerError(f"{where}: nothing answers there, or not in HTTP ({why}); is the server up?") from error
    except AnswerError as error:
        listed = f" (it lists {_names(owners)})" if owners and model not in owners else ""
        hint = (
            f"another --model{listed}, --chat or not, or a key by --api-key-env?"
            if error.kind.startswith("HTTP")
            else "is it one?"
        )
        failed = f"a first request by {path(options.chat)} for {model} failed: {error.kind}: {error}"
        raise ServerError(f"{where}: {failed}; {hint}") from error
    return found


async def _models(client: httpx.AsyncClient, where: str, *, required: bool) -> dict[str, str]:
    """Owners by model, as the server lists them; none where it cannot and none are ``required``."""
    try:
        async with asyncio.timeout(LIST_SECONDS):
            # A server that fails at this may close the connection without saying so.
            response = await client.get("/v1/models", headers={"connection": "close"})
    except TimeoutError as error:
        raise ServerError(f"{where}: no answer to /v1/models within {LIST_SECONDS:g} s") from error
    if not response.is_success:
        if not required:
            return {}
        said = f"/v1/models is answered by {response.status_code}: not OpenAI's API, or it wants another address"
        raise ServerError(f"{where}: {said}, a key by --api-key-env, or a model by --model")
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


def _names(owners: Iterable[str]) -> str:
    names = list(owners)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


RESUMED = 0.2
"""Seconds that servers which stood still have for what is overdue, such as closing connections that were idle."""
Ask = Callable[[int, float], Coroutine[Any, Any, float]]
"""Send the request of this number, due then; when it is over, for how long its sender should pause."""


def offsets(rate: float, seed: int, turn: int) -> Iterator[float]:
    """Seconds after the start at which requests are due, as a Poisson process, without end; the same for the same."""
    source = random.Random(f"arrivals {seed} {turn}")
    at = 0.0
    while True:
        at += source.expovariate(rate)
        yield at


async def at_rate(numbers: Iterator[int], due: Iterator[float], ask: Ask) -> None:
    """Send each request when it is due; return when all are over."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number, offset in zip(numbers, due, strict=False):
            await asyncio.sleep(max(began + offset - time.perf_counter(), 0.0))
            group.create_task(ask(number, began + offset))


async def at_once(numbers: Iterator[int], concurrency: int, ask: Ask) -> None:
    """So many senders, each with one request after the other."""

    async def send() -> None:
        for number in numbers:
            await asyncio.sleep(await ask(number, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(send())


@dataclass(slots=True)
class Turn:
    """One contender in one round."""

    contender: ServerContender
    round: int
    began: float
    """When its first request was due, or sent."""
    heard: list[Heard] = field(default_factory=list)
    """Of requests that are over, in the order in which they ended."""
    running: int = 0
    """Requests under way: above 0 in the end only if the run was interrupted."""
    client_cpu: float = 0.0
    """Processor seconds of this process."""

    @property
    def seconds(self) -> float:
        """Until the last request was over."""
        return max((one.ended for one in self.heard), default=self.began) - self.began


@dataclass(slots=True)
class Log:
    """All that was measured so far; it stays if the run is interrupted."""

    contenders: tuple[ServerContender, ...] = ()
    """As their servers were found, with those that only differ in being plain."""
    turns: list[Turn] = field(default_factory=list)


async def measure(
    options: ServeOptions, prompts: list[Prompt], log: Log, report: Callable[[str], None] = lambda _: None
) -> None:
    """Fill ``log``. Raises :class:`benchmarks.serve.rounds.ServerError` before any load."""
    async with AsyncExitStack() as stack:
        clients: dict[str, httpx.AsyncClient] = {}
        found = list[ServerContender]()
        for contender in options.contenders:
            report(f"asking {contender.url}")
            client = clients[contender.name] = await stack.enter_async_context(connect(contender, options))
            found.append(await identify(client, contender, options, prompts[0]))
        log.contenders = with_plain(found) if options.against_plain else tuple(found)

        async def send(contender: ServerContender, number: int, due: float) -> Heard:
            client, heard = clients[contender.name.removesuffix(PLAIN_SUFFIX)], Heard(number, due)
            asked = body(options, contender, prompts[number % len(prompts)], number)
            await ask(client, path(options.chat), asked, options.timeout, heard)
            return heard

        for contender in log.contenders:
            report(f"warming up {contender.name}")
            # With the last prompts, counted from behind, so that as few as possible are measured again.
            for number in range(1, options.warmup + 1):
                await send(contender, -number, time.perf_counter())
        for number in range(options.rounds):
            for contender in log.contenders[:: 1 if number % 2 == 0 else -1]:
                report(f"round {number + 1} of {options.rounds}: {contender.name}")
                async with stopped(one.process for one in options.contenders if one.url != contender.url):
                    await take(partial(send, contender), Turn(contender, number, time.perf_counter()), options, log)


async def take(send: Callable[[int, float], Awaitable[Heard]], turn: Turn, options: ServeOptions, log: Log) -> None:
    """One turn, into ``log`` from its beginning."""
    log.turns.append(turn)
    used = time.process_time()

    async def noted(request: int, due: float) -> float:
        if turn.running >= MOST_OPEN:
            heard = Heard(request, due, due, due, error=NOT_SENT)
        else:
            turn.running += 1
            heard = await send(request, due)
            turn.running -= 1
        turn.heard.append(heard)
        return heard.pause

    requests = iter(range(turn.round, options.requests, options.rounds))
    try:
        if options.rate is not None:
            await at_rate(requests, offsets(options.rate, options.seed, turn.round), noted)
        else:
            await at_once(requests, options.concurrency, noted)
    finally:
        turn.client_cpu = time.process_time() - used


@asynccontextmanager
async def stopped(processes: Iterable[int | None]) -> AsyncIterator[None]:
    """The groups of these processes stand still meanwhile. Raises :class:`ServerError` where one is gone."""
    groups = list[int]()
    try:
        for process in filter(None, processes):
            try:
                groups.append(os.getpgid(process))
                os.killpg(groups[-1], signal.SIGSTOP)
            except (ProcessLookupError, PermissionError) as error:
                raise ServerError(f"--process {process}: cannot be stopped: {error}") from error
        yield
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)
        if groups:
            await asyncio.sleep(RESUMED)


def with_plain(contenders: Iterable[ServerContender]) -> tuple[ServerContender, ...]:
    """Each, followed by the same without speculation where it can be asked. Raises :class:`ServerError`."""
    found = []
    for contender in contenders:
        found.append(contender)
        if contender.make == PACELINE:
            found.append(replace(contender, name=contender.name + PLAIN_SUFFIX, plain=True))
    if not any(one.plain for one in found):
        raise ServerError("--against-plain: only Paceline can be asked not to speculate, and no --url is one")
    return tuple(found)
