"""Asking a process of its own whether a grammar can be used, so that a hostile one costs a bounded time and no router.

What is asked and answered is :mod:`router.text.grammar_check`'s business; here the process is started when it is first
needed, and ended when it takes too long. Its answers are remembered.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

CHECK_SECONDS = 20.0
"""What a grammar may take to be tried on a busy machine, once the process is up. Its processor time ends sooner."""
START_SECONDS = 30.0
REMEMBERED = 256
READY = '["json", true, {}, []]'
"""A question whose answer shows that the process is up."""

trial_seconds: ContextVar[list[float]] = ContextVar("trial_seconds")
"""How long the process was busy for whoever asks, one entry a trial. Who wants to know sets a list."""


class GrammarRefused(Exception):
    """A grammar cannot be used. One line that says why."""


class GrammarChecker:
    """One process, asked by any thread, one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def grammar(
        self, form: str, text: object, options: Mapping[str, object] | None = None, tags: Sequence[str] = ()
    ) -> str:
        """What llguidance reads, of a ``json`` schema, a ``regex``, a ``choice`` of strings or a ``grammar``.

        ``llguidance``: it is one already. ``tags``: the tokens that it names. Blocks for as long as that takes; see
        :data:`CHECK_SECONDS`. Raises :class:`GrammarRefused`, and RuntimeError if the process does not start.
        """
        question = json.dumps([form, text, options or {}, [*tags]])
        grammar, error = self._answers.get(question) or self._in_turn(question)
        if error:
            raise GrammarRefused(error)
        return grammar

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _in_turn(self, question: str) -> tuple[str, str]:
        with self._lock:
            answer = self._answers.get(question)
            if answer is None:
                began = time.monotonic()
                try:
                    answer = self._answers[question] = self._ask(question)
                except BaseException:  # an answer may still come: nobody may take it for that of the next question
                    self._end()
                    raise
                finally:
                    trial_seconds.get([]).append(time.monotonic() - began)
                if len(self._answers) > REMEMBERED:
                    self._answers.popitem(last=False)
        return answer

    def _ask(self, question: str) -> tuple[str, str]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it died while nobody asked, which says nothing of this grammar
        if self._process is None:
            atexit.register(self.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("grammar_check.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._exchange(self._process, READY, START_SECONDS) is None:
                raise RuntimeError("the process that tries grammars does not start")
        line = self._exchange(self._process, question, CHECK_SECONDS)
        if line is None:
            raise GrammarRefused("it is too complex: compiling it takes too much time or memory")
        grammar, error = json.loads(line)
        return grammar, error

    @staticmethod
    def _exchange(process: subprocess.Popen[bytes], question: str, seconds: float) -> bytes | None:
        """The answer's line; None if none came in time."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        poll = select.poll()  # select() takes no descriptor from 1024 on, which a busy router reaches
        poll.register(process.stdout, select.POLLIN)
        line = process.stdout.readline() if poll.poll(seconds * 1000) else b""
        return line if line.endswith(b"\n") else None

    def _end(self) -> None:
        atexit.unregister(self.close)
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
