"""From a body to a request that can run, while other requests go on.

Decides which tokenizer is read for it, and what is done in a thread: grammars are tried in threads of their own, in
turns, so that hostile ones make only each other wait. What a body says is :mod:`router.schema.requests`' business.

A grammar may take seconds to try (:mod:`router.text.grammar_checker`), so a caller with an API key has a queue of its
own, half of the threads at most, and a budget of seconds that its trials may take. Of each caller no more wait for a
thread than it may use at once, in their order. Callers without a key are one caller, who may use everything. Megabytes
of text take many seconds as well, so a key never has all threads for bodies of a size either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from router.errors import ApiError
from router.generation import GenerationError, Generator, ServedModel
from router.limits import Bucket
from router.schema.request_schema import Kind
from router.schema.requests import ApiRequest, ModelEntry, model_asked, no_such_model, read_body, request_of
from router.schema.structured import demands_structure
from router.text.grammar_checker import trial_seconds
from router.text.tokenizer import Tokenizer, TokenizerError, Tokenizers

T = TypeVar("T")

TRIAL_SECONDS_PER_MINUTE = 30
"""What the trials of one API key's grammars may take."""
SHARE = 4
"""One API key's requests may be this part of all that wait."""


@dataclass(eq=False, slots=True)
class _Caller:
    turns: asyncio.Semaphore
    huge: asyncio.Semaphore
    """Of which no more than one at a time waits for the one place of huge requests."""
    max_requests: int
    budget: Bucket | None
    requests: int = 0
    """That are parsed, or wait for it."""


async def in_turn(
    executor: ThreadPoolExecutor,
    work: Callable[[], T],
    turns: Sequence[asyncio.Semaphore],
    ended: Callable[[], None] = lambda: None,
) -> T:
    """What ``work`` gives, in a thread, once it has a place in all ``turns``, which it keeps until it ends.

    What is cancelled before never runs. ``ended`` is called once, when it has ended or is not to run.
    """
    async with AsyncExitStack() as place:
        place.callback(ended)
        for turn in turns:
            await place.enter_async_context(turn)
        job = asyncio.get_running_loop().run_in_executor(executor, work)
        job.add_done_callback(partial(_leave, turns, ended))
        place.pop_all()
    return await asyncio.shield(job)


def _leave(turns: Sequence[asyncio.Semaphore], ended: Callable[[], None], job: asyncio.Future[T]) -> None:
    if not job.cancelled():
        job.exception()  # whoever asked may have gone
    ended()
    for turn in turns:
        turn.release()


class GrammarQueue:
    """Of one router. Used from one event loop."""

    def __init__(self, threads: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        """``max_waiting``: requests that are parsed or wait for it. ``clock`` in seconds."""
        self._threads, self._max_waiting, self._clock = threads, max_waiting, clock
        self._executor = ThreadPoolExecutor(threads, "grammars")
        self._turns, self._huge = asyncio.Semaphore(threads), asyncio.Semaphore(1)
        self._callers: dict[str, _Caller] = {}
        """As many as keys were ever used."""

    def __len__(self) -> int:
        return sum(caller.requests for caller in self._callers.values())

    async def run(self, name: str, work: Callable[[], T], *, huge: bool = False) -> T:
        """What ``work`` gives, in a thread, when it is the turn of the caller of this name; empty: who has no key.

        Of what is ``huge`` one runs at a time.
        What is cancelled while it waits never runs; what runs keeps its place until it ends. Raises :class:`ApiError`
        where too many wait, or the caller's budget is used up.
        """
        caller = self._admitted(name)
        seconds: list[float] = []
        context = copy_context()
        context.run(trial_seconds.set, seconds)
        turns = *((caller.huge, self._huge) if huge else ()), caller.turns, self._turns
        return await in_turn(self._executor, partial(context.run, work), turns, partial(self._leave, caller, seconds))

    def _admitted(self, name: str) -> _Caller:
        caller = self._callers.get(name)
        if caller is None and not name:
            caller = _Caller(asyncio.Semaphore(self._threads), asyncio.Semaphore(1), self._max_waiting, None)
        elif caller is None:
            budget = Bucket(TRIAL_SECONDS_PER_MINUTE, self._clock())
            turns, max_requests = asyncio.Semaphore(max(self._threads // 2, 1)), max(self._max_waiting // SHARE, 1)
            caller = _Caller(turns, asyncio.Semaphore(1), max_requests, budget)
        self._callers[name] = caller
        if len(self) >= self._max_waiting:
            raise _refusal(f"{self._max_waiting} requests wait for their grammars to be tried")
        if caller.requests >= caller.max_requests:
            raise _refusal(f"{caller.max_requests} requests of this API key wait for their grammars to be tried")
        if caller.budget is not None and caller.budget.level(now := self._clock()) <= 0:
            why = f"the grammars of this API key took more than {caller.budget.limit} seconds a minute to try"
            raise _refusal(why, caller.budget.wait(1, now))
        caller.requests += 1
        return caller

    def _leave(self, caller: _Caller, seconds: list[float]) -> None:
        if caller.budget is not None:
            caller.budget.take(sum(seconds), self._clock())
        caller.requests -= 1


def _refusal(why: str, wait: float | None = None) -> ApiError:
    return ApiError("overloaded", f"{why}; try again later", retry_after=wait)


log = logging.getLogger(__name__)

PARSED_INLINE_BYTES = 4 << 10
"""Larger bodies are parsed and tokenised in a thread, so that they do not hold up other requests' tokens.

Such a body takes some 3 ms, about as long as is lost by going to a thread and back while another one computes.
"""
SHORT_BYTES, SHORT_THREADS = 16 << 10, 3
"""Bodies up to this size have threads of their own, so that they do not wait for longer ones."""
LONG_BYTES, LONG_THREADS = 1 << 20, 4
"""Larger ones are read one at a time, and one with a grammar: a megabyte that is all tokens takes 300 MB meanwhile."""
GRAMMAR_THREADS = 4
"""In which requests with grammars are parsed; what is new is tried by one process, the rest is known."""
MAX_WAITING = 256
"""Requests with grammars that are being parsed or wait for it; more are refused."""


class BodyThreads:
    """In which bodies of some size are read: of several an API key leaves one to others. Used from one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor, self._turns = ThreadPoolExecutor(threads, name), asyncio.Semaphore(threads)
        self._of_key = max(1, threads - 1)
        self._keys: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(self._of_key))
        """By name, as many as were ever used."""

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        """What ``work`` gives, in a thread; ``caller``: name of the key, empty: none. See :func:`in_turn`."""
        return await in_turn(self._executor, work, (self._keys[caller], self._turns) if caller else (self._turns,))


class RequestReader:
    """Of one router."""

    def __init__(
        self,
        generator: Generator,
        tokenizers: Tokenizers,
        offered: Callable[[str, ServedModel, Tokenizer], ModelEntry],
        model_name: str | None = None,
    ) -> None:
        """``offered`` adds the bounds of this server to a model. ``model_name``: its public one, if there is one."""
        self._generator, self._tokenizers, self._offered = generator, tokenizers, offered
        self._model_name = model_name
        self._grammars = GrammarQueue(GRAMMAR_THREADS, MAX_WAITING)
        self._short = BodyThreads(SHORT_THREADS, "short bodies")
        self._long = BodyThreads(LONG_THREADS, "long bodies")
        self._huge = BodyThreads(1, "huge bodies")

    def models(self) -> Mapping[str, ServedModel]:
        """What is served now, by public name."""
        models = self._generator.models
        if self._model_name is not None and len(models) == 1:
            return dict.fromkeys([self._model_name], *models.values())
        return dict(models)

    def check_served(self) -> None:
        """Raises :class:`GenerationError` while there is no model."""
        if not self._generator.models:
            raise GenerationError("unavailable", "no target worker is connected; try again soon")

    def _names(self, models: Mapping[str, ServedModel], *, loading: bool = True) -> list[str]:
        """Public names of these, which are served now, then of those that are to be; also of those that load."""
        served = {model.name for model in models.values()}
        coming = (*self._generator.expected, *(sorted(self._generator.loading) if loading else ()))
        return list(dict.fromkeys((*models, *(name for name in coming if name not in served))))

    def served(self, name: str, models: Mapping[str, ServedModel]) -> ServedModel:
        """That of :meth:`models` with this name. Raises :class:`ApiError`, retryable while it has no target."""
        if (model := models.get(name)) is not None:
            return model
        if name in (names := self._names(models)):
            raise GenerationError("unavailable", f"no target worker of model {name} is connected; try again soon")
        raise no_such_model(name, names)

    async def read(self, kind: Kind, body: bytes, request_id: str, caller: str) -> tuple[ApiRequest, ModelEntry]:
        """The request, and what it is for, of the API key of this name. Raises ApiError, GenerationError."""
        self.check_served()
        size = len(body)
        read = await self._run(size, caller, partial(read_body, body, kind))
        models = self.models()
        name = model_asked(read, self._names(models, loading=read.model is not None))
        model_entry = await self._model_entry(name, self.served(name, models))
        make = partial(request_of, read, model_entry, request_id)
        if demands_structure(read):
            return await self._grammars.run(caller, make, huge=size > LONG_BYTES), model_entry
        return await self._run(size, caller, make), model_entry

    async def _run(self, size: int, caller: str, work: Callable[[], T]) -> T:
        """What is done for a body of this size, where that holds up no more than it must."""
        if size <= PARSED_INLINE_BYTES:
            return work()
        threads = self._short if size <= SHORT_BYTES else self._long if size <= LONG_BYTES else self._huge
        return await threads.run(caller, work)

    async def _model_entry(self, name: str, model: ServedModel) -> ModelEntry:
        try:
            return self._offered(name, model, await self._tokenizers.of(model))
        except TokenizerError as error:
            why = f"cannot read the tokenizer of {name}: {error}"
            log.error(why)
            raise GenerationError("unavailable", why) from None
