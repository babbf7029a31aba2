"""From requests to figures: percentiles, what became of drafts, and ratios with their uncertainty.

Of a request with chunks at ``t_1 .. t_n``, due at ``t_0``, over at ``t_e``, with ``k_i`` tokens in chunk ``i``:

* time to first token: ``t_1 - t_0``; end to end: ``t_e - t_0``;
* inter-token latency: ``(t_i - t_(i-1)) / k_i``, counted ``k_i`` times, for ``i > 1``; where a server does not say how
  many tokens a chunk has, ``t_i - t_(i-1)``, once: latency by chunk, which is another thing;
* time per output token: ``(t_n - t_1) / (k_2 + .. + k_n)``; with unknown ``k``, over all tokens but one.

Requests that failed are in no latency; they are counted by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from benchmarks.serve.client import Heard
from benchmarks.serve.rounds import Log, Turn
from benchmarks.serve.settings import Make, ServeOptions, ServerContender

RESAMPLES = 2000
MOST_DRAWS = 4_000_000
"""Of all resamples of one ratio together: long runs are resampled less often."""
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread | None:
        """Of those that are not None; None if there are none."""
        known = [value for value in seconds if value is not None]
        if not known:
            return None
        values = 1e3 * np.asarray(known)
        return cls(float(values.mean()), *np.percentile(values, (50, 90, 99)).tolist())


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one contender, all rounds together."""

    requests: int
    ok: int
    empty: int
    """Went well and had no text."""
    unfinished: int
    """Under way when the run was interrupted; in no other figure."""
    errors: Mapping[str, int]
    details: Mapping[str, str]
    """By kind: what the server said first."""
    seconds: float
    tokens: int
    guessed: bool
    cached: int
    """Prompt tokens found in the server's prefix cache, as answers say."""
    by_token: bool
    """``itl`` is by token, not by chunk."""
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    late: Spread | None
    """How late this process sent requests that were due; None: nothing was due at a time of its own."""
    request_rate: float
    """Requests that went well, a second."""
    token_rate: float
    accepted: int | None
    """Draft tokens kept, as answers say; None: they do not."""
    offered: int | None
    acceptance_length: float | None
    """Tokens of a verification with drafts, its own included: 1 + accepted / verifications; None: not said."""
    client_share: float


def figures(log: Log, contender: ServerContender, options: ServeOptions) -> Figures:
    """Of what is in the log so far."""
    turns = [turn for turn in log.turns if turn.contender == contender]
    heard = list(chain.from_iterable(turn.heard for turn in turns))
    ok = [one for one in heard if not one.error]
    seconds = sum(turn.seconds for turn in turns)
    tokens = sum(one.tokens for one in ok)
    accepted, offered, acceptance_length = _drafts(ok)
    errors, details = _failures(heard)
    return Figures(
        requests=len(heard),
        ok=len(ok),
        empty=sum(not one.times for one in ok),
        unfinished=sum(turn.running for turn in turns),
        errors=errors,
        details=details,
        seconds=seconds,
        tokens=tokens,
        guessed=any(one.guessed for one in ok),
        cached=sum(one.cached for one in ok),
        by_token=all(one.sizes is not None for one in ok),
        ttft=Spread.of(map(ttft, ok)),
        itl=Spread.of(chain.from_iterable(map(gaps, ok))),
        tpot=Spread.of(map(tpot, ok)),
        e2e=Spread.of(map(e2e, ok)),
        late=None if options.pace.rate is None else Spread.of(map(lateness, heard)),
        request_rate=_over(len(ok), seconds),
        token_rate=_over(tokens, seconds),
        accepted=accepted,
        offered=offered,
        acceptance_length=acceptance_length,
        client_share=_over(sum(turn.client_cpu for turn in turns), seconds),
    )


def _failures(heard: Sequence[Heard]) -> tuple[dict[str, int], dict[str, str]]:
    """How many requests failed by error, the commonest first, and what the first of each said."""
    failed = [one for one in heard if one.error]
    return dict(Counter(one.error for one in failed).most_common()), {one.error: one.detail for one in reversed(failed)}


def _drafts(ok: Iterable[Heard]) -> tuple[int | None, int | None, float | None]:
    """Drafts accepted and offered, and tokens a step of the requests that told of their steps; None: none said."""
    told = [one.drafts for one in ok if one.drafts is not None]
    if not told:
        return None, None, None
    stepped = [(drafts.accepted, drafts.steps) for drafts in told if drafts.steps]
    length = 1 + sum(accepted for accepted, _ in stepped) / sum(steps for _, steps in stepped) if stepped else None
    return sum(drafts.accepted for drafts in told), sum(drafts.offered for drafts in told), length


def ttft(one: Heard) -> float | None:
    """Seconds; None: no text came."""
    return one.times[0] - one.due if one.times else None


def lateness(one: Heard) -> float:
    """Seconds by which it was sent after it was due."""
    return one.sent - one.due


def e2e(one: Heard) -> float:
    """Seconds."""
    return one.ended - one.due


def tpot(one: Heard) -> float | None:
    """Seconds; None: nothing came after the first chunk."""
    later = sum(one.sizes[1:]) if one.sizes is not None else one.tokens - 1
    return (one.times[-1] - one.times[0]) / later if len(one.times) > 1 and later > 0 else None


def gaps(one: Heard) -> list[float]:
    """Inter-token latencies in seconds: by token if the server says how many a chunk has, else by chunk."""
    between = [later - earlier for earlier, later in zip(one.times, one.times[1:], strict=False)]
    if one.sizes is None:
        return between
    return [gap / size for gap, size in zip(between, one.sizes[1:], strict=True) for _ in range(size)]


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """How many times faster a variant is than its baseline, with the bounds of a 95 % interval."""

    value: float
    low: float
    high: float
    n: int
    """Requests, or rounds, that were compared."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A contender beside its baseline, request by request and round by round. Above 1: faster."""

    variant: str
    baseline: str
    ttft: RatioInterval | None
    tpot: RatioInterval | None
    e2e: RatioInterval | None
    token_rate: RatioInterval | None
    """By rounds, the others by requests; None where the rate of requests was given, which decides it."""
    same: int | None
    """Texts that are the same; None: they need not be (another server, and a temperature)."""
    compared: int


def baseline_of(contenders: Sequence[ServerContender]) -> ServerContender:
    """What the others are compared with: the plain one if there is one, else the first named."""
    return next((one for one in contenders if one.plain), contenders[0])


def compare(log: Log, contender: ServerContender, baseline: ServerContender, options: ServeOptions) -> Comparison:
    """Over requests that both answered well."""
    ours, theirs = _by_number(log.turns, contender), _by_number(log.turns, baseline)
    both = sorted(ours.keys() & theirs.keys())
    pairs = [(ours[number], theirs[number]) for number in both]
    makes = {log.servers[one.name].make for one in (contender, baseline)}
    exact = options.temperature == 0 or makes == {Make.PACELINE}
    rates, base_rates = _rates(log.turns, contender), _rates(log.turns, baseline)
    rounds = [(rates[turn], base_rates[turn]) for turn in sorted(rates.keys() & base_rates.keys())]
    return Comparison(
        variant=contender.name,
        baseline=baseline.name,
        ttft=_ratio(pairs, ttft, options.seed),
        tpot=_ratio(pairs, tpot, options.seed),
        e2e=_ratio(pairs, e2e, options.seed),
        token_rate=bootstrap(rounds, options.seed) if options.pace.rate is None else None,
        same=sum(one.digest == other.digest for one, other in pairs) if exact else None,
        compared=len(pairs),
    )


def bootstrap(pairs: Sequence[tuple[float, float]], seed: int) -> RatioInterval | None:
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
    return RatioInterval(above / below, low, high, count)


def _ratio(
    pairs: Sequence[tuple[Heard, Heard]], measure: Callable[[Heard], float | None], seed: int
) -> RatioInterval | None:
    """Of times: the baseline's over the variant's."""
    values = [(measure(baseline), measure(variant)) for variant, baseline in pairs]
    return bootstrap([(base, own) for base, own in values if base is not None and own is not None], seed)


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
