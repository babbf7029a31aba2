"""From a body to a request that can run, while other requests go on.

Decides which tokenizer is read for it, and what is done in a thread: grammars are tried in threads of their own, in
turns (:mod:`router.http.grammar_queue`), so that hostile ones make only each other wait. What a body says is
:mod:`router.schema.requests`' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from router.generation import GenerationError, Generator, ServedModel
from router.http.grammar_queue import GrammarQueue
from router.schema.request_schema import Kind
from router.schema.requests import ApiRequest, ModelEntry, model_asked, read_body, request_of
from router.schema.structured import demands_structure
from router.text.tokenizer import Tokenizer, TokenizerError
from router.text.tokenizers import Tokenizers

log = logging.getLogger(__name__)

PARSED_INLINE_BYTES = 16 << 10
"""Larger bodies are parsed and tokenised in a thread, so that they do not hold up other requests' tokens."""
GRAMMAR_THREADS = 4
"""In which requests with grammars are parsed; what is new is tried by one process, the rest is known."""
MAX_WAITING = 256
"""Requests with grammars that are being parsed or wait for it; more are refused."""


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

    async def read(self, kind: Kind, body: bytes, request_id: str, caller: str) -> tuple[ApiRequest, ModelEntry]:
        """The request, and what it is for. ``caller``: the name of the API key, if there is one.

        Raises :class:`router.errors.ApiError`, :class:`GenerationError`.
        """
        self.check_served()
        small = len(body) <= PARSED_INLINE_BYTES
        read = read_body(body, kind) if small else await asyncio.to_thread(read_body, body, kind)
        models = self.models()
        name = model_asked(read, models)
        model_entry = await self._model_entry(name, models[name])
        arguments = (read, model_entry, request_id)
        if demands_structure(read):
            return await self._grammars.run(caller, partial(request_of, *arguments)), model_entry
        return request_of(*arguments) if small else await asyncio.to_thread(request_of, *arguments), model_entry

    async def _model_entry(self, name: str, model: ServedModel) -> ModelEntry:
        try:
            return self._offered(name, model, await self._tokenizers.of(model))
        except TokenizerError as error:
            why = f"cannot read the tokenizer of {name}: {error}"
            log.error(why)
            raise GenerationError("unavailable", why) from None
