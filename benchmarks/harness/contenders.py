"""Who takes part: what each request asks for, and which draft length a baseline runs with.

All contenders but those of another library are requests to the same processes; what differs is what the request says.
No answer is remembered: all are asked the same, and one that drafts from what was said before would copy another's.
The baselines get their best draft length: each is tried with several in the very setting it is measured in, and then
measured again with the best, so that the choice does not flatter the figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, TypeVar

from benchmarks.harness.measure import Run
from speculation.messages import Schedule, Source, Speculation

Choice = TypeVar("Choice")
PLAIN = Speculation(enabled=False, remember=False)
DRAFTED = Speculation(sources=frozenset({Source.DRAFT}), remember=False)
"""Ours with drafts of the draft model only, so that it is compared with others on equal terms."""
WITH_LOOKUP = Speculation(remember=False)
"""What a request gets that asks for nothing, but that nothing was said before."""
LENGTHS = {Schedule.SEQUENTIAL: (2, 4, 6, 8, 10, 12), Schedule.PARALLEL: (6, 8, 10, 12)}
"""Draft lengths K that baselines are tried with: one drafts, then verifies, in turn (Leviathan et al. 2023); the other
drafts the next K tokens during verification, and drops them at a refusal (as PEARL does, Liu et al. 2024)."""


def in_chains(schedule: Schedule, length: int) -> Speculation:
    """A baseline, over the same wire."""
    return replace(DRAFTED, max_depth=length, schedule=schedule)


def pace(runs: Sequence[Run]) -> float:
    """Tokens a second over all runs together; long waits count as long as they were."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def best(tried: Mapping[Choice, Sequence[Run]]) -> Choice:
    """The choice with the highest pace; the first of equals."""
    return max(tried, key=lambda choice: pace(tried[choice]))


def rows(runs: Mapping[str, Sequence[Run]], *, exact: bool = True) -> list[dict[str, Any]]:
    """What each contender came to, run by run beside the first of them.

    ``exact``: all have to say the same, else this raises AssertionError.
    """
    base = next(iter(runs.values()))
    found = []
    for name, own in runs.items():
        commits = [commit for run in own for commit in run.counted]
        offered = sum(commit.offered for commit in commits)
        ratios = [run.rate / other.rate for run, other in zip(own, base, strict=True)]
        same = [
            one.tokens == other.tokens
            for run, beside in zip(own, base, strict=True)
            for one, other in zip(run.decoded, beside.decoded, strict=True)
        ]
        assert all(same) or not exact, "the text depends on how it was drafted"
        found.append(
            {
                "contender": name,
                "tokens_per_second": round(median(run.rate for run in own), 1),
                "ratio_to_plain": round(median(ratios), 2),
                "lowest_and_highest": [round(min(ratios), 2), round(max(ratios), 2)],
                "tokens_per_step": round(fmean(commit.tokens for commit in commits), 2),
                "kept_of_offered": round(sum(commit.accepted for commit in commits) / offered, 2) if offered else None,
                "accepted": dict(Counter(str(source) for commit in commits for source in commit.sources)),
                "same_text": fmean(same),
            }
        )
    return found
