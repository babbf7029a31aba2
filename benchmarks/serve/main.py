"""A run from its beginning to what is shown of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.serve import report, rounds
from benchmarks.serve.requests import Prompt, read
from benchmarks.serve.settings import ServeOptions
from cluster.console import complain, stages

INTERRUPTED = 130
Progress = Callable[[str], None]


def main(options: ServeOptions) -> int:
    """Measure, show, write; after Ctrl-C with what there is.

    Raises :class:`benchmarks.serve.requests.PromptError` and :class:`benchmarks.serve.probe.ServerError`.
    """
    prompts, log = read(options.prompts, options.chat), rounds.Log()
    with stages() as progress:
        interrupted = _measure(options, prompts, log, progress)
    if not any(turn.heard for turn in log.turns):
        complain("paceline: interrupted before any request was over")
        return INTERRUPTED
    report.result(log, options).publish()
    if interrupted:
        complain("paceline: interrupted; shown is what there was until then")
        return INTERRUPTED
    return int(all(one.error for turn in log.turns for one in turn.heard))


def _measure(options: ServeOptions, prompts: list[Prompt], log: rounds.Log, progress: Progress) -> bool:
    """Whether it was interrupted."""
    try:
        asyncio.run(rounds.measure(options, prompts, log, progress))
    except KeyboardInterrupt:
        return True
    return False
