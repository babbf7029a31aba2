"""A run from its beginning to what is shown of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from benchmarks.serve import report, rounds
from benchmarks.serve.prompts import Prompt, read
from benchmarks.serve.settings import Options
from cluster.console import complain, stages

INTERRUPTED = 130
Progress = Callable[[str], None]


def main(options: Options) -> int:
    """Measure, show, write; after Ctrl-C with what there is.

    Raises :class:`benchmarks.serve.prompts.PromptError` and :class:`benchmarks.serve.probe.ServerError`.
    """
    prompts, log = read(options.prompts, options.chat), rounds.Log()
    with stages() as progress:
        interrupted = _measure(options, prompts, log, progress)
    if not any(turn.heard for turn in log.turns):
        complain("paceline: interrupted before any request was over")
        return INTERRUPTED
    result = report.Result.of(log, options, datetime.now(UTC).date())
    report.show(result)
    if options.json is not None:
        report.write_json(result, options.json)
    if options.out is not None:
        report.write_folder(result, options.out)
    if interrupted:
        complain("paceline: interrupted; shown is what there was until then")
        return INTERRUPTED
    return int(all(row.ok == 0 for _, row in result.rows))


def _measure(options: Options, prompts: list[Prompt], log: rounds.Log, progress: Progress) -> bool:
    """Whether it was interrupted."""
    try:
        asyncio.run(rounds.measure(options, prompts, log, progress))
    except KeyboardInterrupt:
        return True
    return False
