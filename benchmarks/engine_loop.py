"""The verify loop of a target worker, driven directly: requests in, tokens out, no process and no wire between."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.contenders import PLAIN
from benchmarks.measure import Batch, Commit, Decoded, Run
from cluster.config import Config
from cluster.serving import target_settings
from engine.build import EngineSettings, welcome
from engine.step import Engine
from router.generation import GenerationError
from speculation.messages import Close, Limits, Open, Refused, Sampling, SessionId, Token, Verification
from target_service.verify_loop import VerifyLoop
from transport.worker import Outgoing

LINK = "benchmark"


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
        """Decode all prompts of a batch at the same time; a :data:`benchmarks.measure.Runner`."""
        asked = time.perf_counter()
        sampling = Sampling(temperature=batch.temperature, seed=batch.seed)
        sessions = [
            self._open(prompt, tokens, sampling) for prompt, tokens in zip(batch.prompts, batch.wanted, strict=True)
        ]
        tokens: dict[SessionId, list[Token]] = {session: [] for session in sessions}
        commits: dict[SessionId, list[Commit]] = {session: [] for session in sessions}
        unfinished = set(sessions)
        while unfinished:
            verifications = self._step()
            now = time.perf_counter()
            for verification in verifications:
                tokens[verification.session] += verification.tokens
                commits[verification.session].append(Commit(now, len(verification.tokens)))
                if verification.finish:
                    unfinished.remove(verification.session)
        decoded = tuple(Decoded(tuple(tokens[session]), tuple(commits[session])) for session in sessions)
        return Run(decoded, asked=asked)

    @contextmanager
    def decoding(self, prompts: Sequence[Sequence[Token]], steps: int) -> Iterator[Callable[[], object]]:
        """All prompts past their first token, with at least ``steps`` more to go; yields the function that steps."""
        # While some prompts are computed in chunks, those before them decode already: a token a step.
        ahead = sum(len(prompt) for prompt in prompts)
        sessions = [self._open(prompt, ahead + steps, Sampling(temperature=0.0)) for prompt in prompts]
        waiting = set(sessions)
        try:
            while waiting:
                waiting.difference_update(verification.session for verification in self._step())
            yield self._step
        finally:
            for session in sessions:
                self._loop.receive(LINK, Close(session, 1))

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
