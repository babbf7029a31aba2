"""The tokenizer of each served model: read when it is first needed, and once.

Models come and go while a router runs, and a model may be replaced by one with another tokenizer, even in the same
folder; what its targets say of the tokenizer decides whether the one that was read is right. Where it is read they do
not decide: a folder or hub id that nobody configured is not opened on the word of a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from router.generation import ServedModel
from router.text.tokenizer import Tokenizer, TokenizerError

RETRY_SECONDS = 10.0
"""Pause after a tokenizer could not be read, or was read again and is not that of a model: every request would try."""


class Tokenizers:
    """Of one router. Used from one event loop."""

    def __init__(self, preferred: str = "", configured: Collection[str] | None = None) -> None:
        """``preferred``: folder or hub id to read from where that is a model's tokenizer; else where the model is.

        ``configured``: all others that may be read; None: whatever targets say.
        """
        self._preferred, self._configured = preferred, configured
        self._read: dict[str, Tokenizer] = {}
        self._reading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._again: dict[str, float] = {}
        """By source: when it may be read once more, where it was before."""
        self._found: dict[tuple[str, int], Tokenizer] = {}
        """By the source and the digest that a model names."""
        self._refused: dict[ServedModel, tuple[TokenizerError, float]] = {}
        """With the time when to try again."""

    async def of(self, model: ServedModel) -> Tokenizer:
        """The one of a model. Raises :class:`router.text.tokenizer.TokenizerError`."""
        wanted = model.source, model.tokenizer
        if wanted in self._found:
            return self._found[wanted]
        error, until = self._refused.get(model, (None, 0.0))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise error
        try:
            found = self._found[wanted] = await self._find(model)
            return found
        except TokenizerError as error:
            self._refused[model] = error, asyncio.get_running_loop().time() + RETRY_SECONDS
            raise

    async def _find(self, model: ServedModel) -> Tokenizer:
        sources = [source for source in dict.fromkeys((self._preferred, *self._sources_of(model))) if source]
        for source in sources:
            stale = source in self._read
            tokenizer = await self.read(source)
            if stale and not _fits(tokenizer, model):  # the files may have been replaced
                tokenizer = await self._read_again(source)
            if _fits(tokenizer, model):
                return tokenizer
        listed = " or ".join(repr(source) for source in sources) or "no folder"
        raise TokenizerError(f"the tokenizer in {listed} is not that of the served model {model.name}")

    def _sources_of(self, model: ServedModel) -> Collection[str]:
        """Where it may be read: where its targets say, if somebody configured that, else wherever it is found."""
        if self._configured is None or model.source in self._configured:
            return (model.source,)
        return self._configured if model.tokenizer else ()

    async def read(self, source: str) -> Tokenizer:
        """The one in a folder or of a hub id. Raises :class:`router.text.tokenizer.TokenizerError`."""
        return self._read[source] if source in self._read else await self._load(source)

    async def _read_again(self, source: str) -> Tokenizer:
        """As it is now, or was a moment ago."""
        now = asyncio.get_running_loop().time()
        if source not in self._reading:
            if now < self._again.get(source, 0.0):
                return self._read[source]
            self._again[source] = now + RETRY_SECONDS
        return await self._load(source)

    async def _load(self, source: str) -> Tokenizer:
        """Read it, once for all who ask meanwhile; it goes on without them."""
        if source not in self._reading:
            reading = self._reading[source] = asyncio.create_task(self._load_now(source))
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to who still waits
        return await asyncio.shield(self._reading[source])

    async def _load_now(self, source: str) -> Tokenizer:
        try:
            tokenizer = self._read[source] = await asyncio.to_thread(Tokenizer.load, source)
            return tokenizer
        finally:
            del self._reading[source]


def _fits(tokenizer: Tokenizer, model: ServedModel) -> bool:
    return model.tokenizer in (0, tokenizer.digest)
