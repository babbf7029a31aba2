"""From requests to figures: percentiles, what became of drafts, and ratios with their uncertainty.

Of a request with chunks at ``t_1 .. t_n``, due at ``t_0``, over at ``t_e``, with ``k_i`` tokens in chunk ``i``:

* time to first token: ``t_1 - t_0``; end to end: ``t_e - t_0``;
* inter-token latency: ``(t_i - t_(i-1)) / k_i``, counted ``k_i`` times, for ``i > 1``; where a server does not say how
  many tokens a chunk has, ``t_i - t_(i-1)``, once: latency by chunk, which is another thing;
* time per output token: ``(t_n - t_1) / (k_2 + .. + k_n)``; with unknown ``k``, over all tokens but one.

Requests that failed are in no latency; they are counted by kind. Figures are as they stand in the JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.serve.client import PACELINE, Heard
from benchmarks.serve.rounds import Log, Turn
from benchmarks.serve.settings import Json, ServeOptions, ServerContender

RESAMPLES = 2000
MOST_DRAWS = 4_000_000
"""Of all resamples of one ratio together: long runs are resampled less often."""
LEVEL = 0.95


def spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds, of those that are not None; None if there are none."""
    values = 1e3 * np.asarray([value for value in seconds if value is not None])
    if not len(values):
        return None
    return dict(
        zip(
            ("mean", "p50", "p90", "p99"),
            [values.mean().item(), *np.percentile(values, (50, 90, 99)).tolist()],
            strict=True,
        )
    )


def figures(log: Log, contender: ServerContender, options: ServeOptions) -> Json:
    """Of one contender, all rounds together, of what is in the log so far."""
    turns = [turn for turn in log.turns if turn.contender == contender]
    heard = list(chain.from_iterable(turn.heard for turn in turns))
    ok, failed = [one for one in heard if not one.error], [one for one in heard if one.error]
    seconds, tokens = sum(turn.seconds for turn in turns), sum(one.tokens for one in ok)
    drafts = [one.drafts for one in ok if one.drafts is not None]
    stepped = [(told.accepted, told.steps) for told in drafts if told.steps]
    return {
        "requests": len(heard),
        "ok": len(ok),
        "empty": sum(not one.times for one in ok),  # went well and had no text
        "unfinished": sum(turn.running for turn in turns),  # when the run was interrupted; in no other figure
        "errors": dict(Counter(one.error for one in failed).most_common()),
        "details": {one.error: one.detail for one in reversed(failed)},  # what the first of each kind said
        "seconds": seconds,
        "tokens": tokens,
        "guessed": any(one.guessed for one in ok),
        "cached": sum(one.cached for one in ok),
        "by_token": all(one.sizes is not None for one in ok),  # ``itl`` is by token, not by chunk
        "ttft": spread(one.ttft for one in ok),
        "itl": spread(chain.from_iterable(one.gaps for one in ok)),
        "tpot": spread(one.tpot for one in ok),
        "e2e": spread(one.e2e for one in ok),
        # How late this process sent requests that were due at a time of their own.
        "late": None if options.rate is None else spread(one.sent - one.due for one in heard),
        "request_rate": _over(len(ok), seconds),
        "token_rate": _over(tokens, seconds),
        "accepted": sum(told.accepted for told in drafts) if drafts else None,
        "offered": sum(told.offered for told in drafts) if drafts else None,
        # Tokens of a verification with drafts, its own included.
        "acceptance_length": 1 + _over(*map(sum, zip(*stepped, strict=True))) if stepped else None,
        "client_share": _over(sum(turn.client_cpu for turn in turns), seconds),
    }


def baseline_of(contenders: Sequence[ServerContender]) -> ServerContender:
    """What the others are compared with: the plain one if there is one, else the first named."""
    return next((one for one in contenders if one.plain), contenders[0])


def compare(log: Log, contender: ServerContender, baseline: ServerContender, options: ServeOptions) -> Json:
    """A contender beside its baseline, over requests that both answered well and over rounds; above 1: faster."""
    ours, theirs = _by_number(log.turns, contender), _by_number(log.turns, baseline)
    pairs = [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]
    makes = {log.servers[one.name].make for one in (contender, baseline)}
    exact = options.temperature == 0 or makes == {PACELINE}
    rates, base_rates = _rates(log.turns, contender), _rates(log.turns, baseline)
    rounds = [(rates[turn], base_rates[turn]) for turn in sorted(rates.keys() & base_rates.keys())]
    times = {
        measure: bootstrap([pair for pair in found if None not in pair], options.seed)
        for measure in ("ttft", "tpot", "e2e")
        for found in [[(getattr(other, measure), getattr(own, measure)) for own, other in pairs]]
    }
    return {
        "variant": contender.name,
        "baseline": baseline.name,
        **times,
        # A given rate of requests decides that of tokens.
        "token_rate": bootstrap(rounds, options.seed) if options.rate is None else None,
        # None: texts need not be the same, of another server at a temperature.
        "same": sum(one.text == other.text for one, other in pairs) if exact else None,
        "compared": len(pairs),
    }


def bootstrap(pairs: Sequence[tuple[Any, Any]], seed: int) -> dict[str, float] | None:
    """Mean of the first over mean of the second, resampling pairs (Efron's percentile interval); None: no pairs."""
    values_N2 = np.asarray(pairs, dtype=float).reshape(-1, 2)
    if not (values_N2.sum(axis=0) > 0).all():
        return None
    count = len(values_N2)
    draws = min(RESAMPLES, max(MOST_DRAWS // count, 100))
    drawn_R2 = values_N2[np.random.default_rng(seed).integers(count, size=(draws, count))].sum(axis=1)
    some_R2 = drawn_R2[drawn_R2[:, 1] > 0]
    low, high = np.percentile(some_R2[:, 0] / some_R2[:, 1], (50 * (1 - LEVEL), 50 * (1 + LEVEL))).tolist()
    above, below = values_N2.sum(axis=0).tolist()
    return {"value": above / below, "low": low, "high": high, "n": count}


def _by_number(turns: Sequence[Turn], contender: ServerContender) -> dict[int, Heard]:
    return {one.number: one for turn in turns if turn.contender == contender for one in turn.heard if not one.error}


def _rates(turns: Sequence[Turn], contender: ServerContender) -> dict[int, float]:
    return {
        turn.round: _over(sum(one.tokens for one in turn.heard if not one.error), turn.seconds)
        for turn in turns
        if turn.contender == contender and turn.heard
    }


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
