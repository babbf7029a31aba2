"""Who decodes in this process, in turn on the same core: our verify loop, and the same model in transformers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from benchmarks.engine.steps import Work, chain
from benchmarks.harness.contenders import PLAIN
from benchmarks.harness.measure import Batch, Decoded, Run, TimedCommit
from benchmarks.harness.transformers_baseline import Stock
from cluster.config.config import Config
from cluster.config.serving import target_settings
from engine.build import welcome
from engine.settings import EngineSettings
from engine.step import Engine
from router.generation import GenerationError
from speculation.messages import Limits, Open, Refused, Sampling, SessionId, Token, Verification
from target_service.verify_loop import VerifyLoop
from transport.worker import Outgoing

LINK = "benchmark"
PREFIX = "transformers "
"""Of what is named as ours is."""


class Loop:
    """A target worker without its server, with its usual limits. Every request decodes plainly and ends by length only.

    What the worker refuses raises :class:`router.generation.GenerationError`.
    """

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        """``settings``: what ``engine`` was built from."""
        self.engine = engine
        self._loop = VerifyLoop(engine, welcome(settings, engine.model, "target"), target_settings(Config()).limits)
        self._numbers = itertools.count(1)

    async def run(self, batch: Batch) -> Run:
        """Decode all prompts of a batch at the same time; a :data:`benchmarks.harness.measure.Runner`."""
        asked = time.perf_counter()
        sampling = Sampling(temperature=batch.temperature, seed=batch.seed)
        sessions = [
            self._open(prompt, tokens, sampling) for prompt, tokens in zip(batch.prompts, batch.wanted, strict=True)
        ]
        tokens: dict[SessionId, list[Token]] = {session: [] for session in sessions}
        commits: dict[SessionId, list[TimedCommit]] = {session: [] for session in sessions}
        unfinished = set(sessions)
        while unfinished:
            verifications = self._step()
            now = time.perf_counter()
            for verification in verifications:
                tokens[verification.session] += verification.tokens
                commits[verification.session].append(TimedCommit(now, len(verification.tokens)))
                if verification.finish:
                    unfinished.remove(verification.session)
        decoded = tuple(Decoded(tuple(tokens[session]), tuple(commits[session])) for session in sessions)
        return Run(decoded, asked=asked)

    def _open(self, prompt: Sequence[Token], tokens: int, sampling: Sampling) -> SessionId:
        session = SessionId(next(self._numbers))
        end = Limits(len(prompt) + tokens)
        opened = Open(session, 1, tuple(prompt), sampling, end, PLAIN.speculation)
        _refuse(self._loop.receive(LINK, opened, time.perf_counter()))
        return session

    def _step(self) -> list[Verification]:
        sent = self._loop.step()
        assert sent is not None, "the verify loop idles while requests are open"
        _refuse(sent)
        return [message for _, message in sent if isinstance(message, Verification)]


def _refuse(sent: Outgoing) -> None:
    """Raise what the worker refused."""
    for _, message in sent:
        if isinstance(message, Refused):
            raise GenerationError(message.code, message.message)


def stock_works(stock: Stock, context: Sequence[int], sizes: Sequence[int]) -> dict[str, Work]:
    """Steps of transformers over a cached context that can be timed, by the names ours have, prefixed."""
    cache = DynamicCache(config=stock.model.config)
    with torch.inference_mode():
        stock.model(input_ids=torch.tensor([context]), past_key_values=cache, logits_to_keep=1)

    def work(tokens: int) -> Work:
        ids_1T = torch.arange(1, tokens + 1)[None]

        @torch.inference_mode()
        def step() -> None:
            stock.model(input_ids=ids_1T, past_key_values=cache).logits.argmax(-1).tolist()
            cache.crop(-tokens)

        return step

    return {PREFIX + chain(size): work(size) for size in sizes}
