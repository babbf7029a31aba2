"""What the workers' step records say about costs and agreement: what the simulator needs to predict this set-up.

A worker started with ``--record FILE`` writes one JSON object a step (:mod:`target_service.verify_loop`,
:mod:`draft_service.lookahead`). The records should come from a run in which messages were not held back, and best from
one in which plain and drafted requests alternate, so that few and many drafts are verified.

Times are means, since what a run takes is the sum of its steps; only a step that took far longer than most of its size
counts as less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import fmean, median, quantiles
from typing import Any

from simulation.costs import Costs, Curve
from speculation.drafting.draft_session import NONE_RIGHT, Outcome

BACK_TO_BACK = 0.002
"""Seconds; a worker that takes longer to begin its next step had nothing to do. Sending takes half a millisecond."""
OUTLIER = 3.0
"""A time this many times the median counts as that long only: the machine did something else meanwhile."""
LARGEST_DRAFT = 64
"""Tokens; a drafter's larger steps read a prompt."""
RELAY = 0.0014
"""Seconds from worker to worker through the router on one machine, where a record shows too few cases to tell."""
FEWEST = 5

FREE = Curve.straight(0.0, 0.0)
"""Steps of a drafter that does not take part."""
NO_STEP = "it holds no step in which a target decodes; record a target worker too"

Line = Mapping[str, Any]
Times = defaultdict[tuple[int, int], list[float]]
"""Seconds of steps by their numbers of sessions and tokens."""


class UselessRecord(ValueError):
    """A record lacks something that cannot be done without. Says what."""


def read(lines: Iterable[Line]) -> tuple[Costs, list[Outcome]]:
    """What a run has shown of costs and agreement, from the lines of all workers, in any order.

    Raises :class:`UselessRecord` when something is missing; KeyError, TypeError or ValueError for any other line.
    """
    lines = list(lines)
    costs = costs_in(lines)
    outcomes = _outcomes(sorted((line for line in lines if line["role"] == "draft"), key=itemgetter("start")))
    if not outcomes:
        raise UselessRecord("it holds no drafts that the target decided on; record requests that use the draft model")
    return costs, outcomes


def costs_in(lines: Iterable[Line], *, drafter: bool = True) -> Costs:
    """What steps and messages took, from the lines of a target and a drafter. Raises as :func:`read`.

    ``drafter``: False where none takes part, so that its steps cost nothing.
    """
    lines = list(lines)
    target = sorted((line for line in lines if line["role"] == "target" and "start" in line), key=itemgetter("start"))
    waits = [line["wait"] for line in lines if line["role"] == "target" and "wait" in line]
    draft = sorted((line for line in lines if line["role"] == "draft"), key=itemgetter("start"))
    idle = [after["start"] for before, after in pairwise(draft) if after["start"] - before["end"] > BACK_TO_BACK]
    contention, verify = _verify(target, draft)
    return Costs(
        verify=verify,
        contention=contention,
        draft=_draft(draft) if drafter else FREE,
        to_target=_relay([end for _, end in waits], draft),
        to_draft=_relay(idle, target),
        verify_pause=_pause(target),
        draft_pause=_pause(draft),
    )


def slowdown(steps: Iterable[Line], costs: Costs) -> float:
    """How many times as long as by ``costs`` the target's steps among some lines took that read no prompts.

    Raises UselessRecord without any.
    """
    found = [_seconds(step) / costs.verify_seconds(len(step["sessions"]), step["tokens"]) for step in _decoding(steps)]
    if not found:
        raise UselessRecord(NO_STEP)
    return _usual(found)


def _seconds(line: Line) -> float:
    return float(line["end"] - line["start"])


def _verify(steps: Iterable[Line], draft: Sequence[Line]) -> tuple[float, dict[int, Curve]]:
    """How much longer steps take beside a drafter, and what they take without; those that read prompts are left out.

    The latter by number of sessions. How much longer is told from sizes of which there are enough of both kinds.
    """
    quiet: Times = defaultdict(list)
    beside: Times = defaultdict(list)
    starts, ends = [line["start"] for line in draft], [line["end"] for line in draft]
    for step in _decoding(steps):
        overlapped = bisect_right(starts, step["end"]) > bisect_right(ends, step["start"])
        (beside if overlapped else quiet)[len(step["sessions"]), step["tokens"]].append(_seconds(step))
    if not quiet and not beside:
        raise UselessRecord(NO_STEP)
    contention = _contention(quiet, beside)
    seconds: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (sessions, tokens), times in quiet.items():
        seconds[sessions][tokens] += times
    for (sessions, tokens), times in beside.items():
        seconds[sessions][tokens] += [time / contention for time in times]
    return contention, {sessions: _curve(by_tokens) for sessions, by_tokens in seconds.items()}


def _contention(quiet: Times, beside: Times) -> float:
    both = [size for size in beside if min(len(beside[size]), len(quiet.get(size, ()))) >= FEWEST]
    weights = [len(beside[size]) for size in both]
    ratios = [_usual(beside[size]) / _usual(quiet[size]) for size in both]
    return max(fmean(ratios, weights), 1.0) if both else 1.0


def _decoding(lines: Iterable[Line]) -> list[Line]:
    """The target's steps in which nothing of a prompt is read."""
    steps = [line for line in lines if line["role"] == "target" and "start" in line and line["sessions"]]
    return [step for step in steps if all(session["feed"] == 1 for session in step["sessions"])]


def _draft(steps: Iterable[Line]) -> Curve:
    """What a level of drafts takes; those of one launch count as steps that took as long each."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        levels = step.get("levels", 1)
        tokens = -(-step["tokens"] // levels)
        if tokens <= LARGEST_DRAFT:
            seconds[tokens].append(_seconds(step) / levels)
    if not seconds:
        raise UselessRecord("it holds no step of a drafter; record a draft worker too")
    return _curve(seconds)


def _curve(seconds: Mapping[int, Sequence[float]]) -> Curve:
    return Curve((tokens, _usual(times), len(times)) for tokens, times in seconds.items())


def _usual(times: Sequence[float]) -> float:
    longest = OUTLIER * median(times)
    return fmean(min(time, longest) for time in times)


def _pause(steps: Sequence[Line]) -> float:
    gaps = [after["start"] - before["end"] for before, after in pairwise(steps)]
    gaps = [gap for gap in gaps if gap <= BACK_TO_BACK]
    return max(fmean(gaps), 0.0) if gaps else 0.0


def _relay(woken: Iterable[float], steps: Sequence[Line]) -> float:
    """Seconds from the end of a step to the moment at which its message ended the other worker's idleness.

    Not every such moment is due to a message, so a low one of many is taken.
    """
    ends = sorted(float(step["end"]) for step in steps)
    after = [when - ends[at - 1] for when in woken if (at := bisect_right(ends, when))]
    return quantiles(after, n=4)[0] if len(after) >= FEWEST else RELAY


def _outcomes(steps: Iterable[Line]) -> list[Outcome]:
    """Session by session, in the order of the text. A record of before this was kept has none.

    Of sessions that drafted chains, only the first choice at each place is known; beside others they are left out.
    """
    found: defaultdict[int, list[Outcome]] = defaultdict(list)
    for step in steps:
        for learned in step.get("learned", ()):
            for confidences, right in learned["outcomes"]:
                if not confidences or not NONE_RIGHT <= right < len(confidences):
                    raise UselessRecord(f"an outcome says that candidate {right} of {len(confidences)} was right")
                found[learned["session"]].append(Outcome(tuple(confidences), right))
    width = {session: max(len(one.confidences) for one in outcomes) for session, outcomes in found.items()}
    widest = max(width.values(), default=0)
    return [outcome for session, outcomes in found.items() if width[session] == widest for outcome in outcomes]
