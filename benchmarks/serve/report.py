"""A run from its beginning to what is shown of it: percentiles, what became of drafts, ratios with their uncertainty.

Of a request with chunks at ``t_1 .. t_n``, due at ``t_0``, over at ``t_e``, with ``k_i`` tokens in chunk ``i``:

* time to first token: ``t_1 - t_0``; end to end: ``t_e - t_0``;
* inter-token latency: ``(t_i - t_(i-1)) / k_i``, counted ``k_i`` times, for ``i > 1``; where a server does not say how
  many tokens a chunk has, ``t_i - t_(i-1)``, once: latency by chunk, which is another thing;
* time per output token: ``(t_n - t_1) / (k_2 + .. + k_n)``; with unknown ``k``, over all tokens but one.

Requests that failed are in no latency; they are counted by kind. Figures are as they stand in the JSON, which has every
request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from benchmarks.harness.report import Result, Table, cell, table_of
from benchmarks.serve.client import Drafts, Heard, read_prompts
from benchmarks.serve.rounds import Log, Turn, measure
from benchmarks.serve.settings import PACELINE, Json, ServeOptions, ServerContender
from cluster.console import complain, stages

RESAMPLES = 2000
MOST_DRAWS = 4_000_000
"""Of all resamples of one ratio together: long runs are resampled less often."""
LEVEL = 0.95


def spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds, of those that are not None; None if there are none."""
    values = 1e3 * np.asarray([value for value in seconds if value is not None])
    if not len(values):
        return None
    return {"mean": values.mean().item()} | {f"p{at}": np.percentile(values, at).item() for at in (50, 90, 99)}


def figures(log: Log, contender: ServerContender, options: ServeOptions) -> Json:
    """Of one contender, all rounds together, of what is in the log so far."""
    turns = [turn for turn in log.turns if turn.contender == contender]
    heard = list(chain.from_iterable(turn.heard for turn in turns))
    ok, seconds = [one for one in heard if not one.error], _total(turns, "seconds")
    tokens = _total(ok, "tokens")
    return {
        "requests": len(heard),
        "ok": len(ok),
        **_errors([one for one in heard if one.error]),
        "empty": sum(not one.times for one in ok),  # went well and had no text
        "unfinished": _total(turns, "running"),  # when the run was interrupted; in no other figure
        "seconds": seconds,
        "tokens": tokens,
        "guessed": any(one.guessed for one in ok),
        "cached": _total(ok, "cached"),
        "by_token": all(one.sizes is not None for one in ok),  # ``itl`` is by token, not by chunk
        **_latencies(ok),
        # How late this process sent requests that were due at a time of their own.
        "late": None if options.rate is None else spread(one.sent - one.due for one in heard),
        "request_rate": _over(len(ok), seconds),
        "token_rate": _over(tokens, seconds),
        **_drafts([one.drafts for one in ok if one.drafts is not None]),
        "client_share": _over(_total(turns, "client_cpu"), seconds),
    }


def _total(of: Sequence[object], name: str) -> Any:
    return sum(map(attrgetter(name), of))


def _latencies(ok: Sequence[Heard]) -> Json:
    found = {name: spread(map(attrgetter(name), ok)) for name in ("ttft", "tpot", "e2e")}
    return found | {"itl": spread(chain.from_iterable(map(attrgetter("gaps"), ok)))}


def _errors(failed: Sequence[Heard]) -> Json:
    """By kind, the commonest first: how often, and what the first said."""
    return {
        "errors": dict(Counter(one.error for one in failed).most_common()),
        "details": {one.error: one.detail for one in reversed(failed)},
    }


def _drafts(told: Sequence[Drafts]) -> Json:
    """Kept and offered, and tokens of a verification with drafts, its own included; None: no answer said."""
    if not told:
        return {"accepted": None, "offered": None, "acceptance_length": None}
    stepped = [(drafts.accepted, drafts.steps) for drafts in told if drafts.steps]
    length = 1 + _over(*map(sum, zip(*stepped, strict=True))) if stepped else None
    accepted, offered, _ = zip(*told, strict=True)
    return {"accepted": sum(accepted), "offered": sum(offered), "acceptance_length": length}


def baseline_of(contenders: Sequence[ServerContender]) -> ServerContender:
    """What the others are compared with: the plain one if there is one, else the first named."""
    return next((one for one in contenders if one.plain), contenders[0])


def compare(log: Log, contender: ServerContender, baseline: ServerContender, options: ServeOptions) -> Json:
    """A contender beside its baseline, over requests that both answered well and over rounds; above 1: faster."""
    ours, theirs = _by_number(log.turns, contender), _by_number(log.turns, baseline)
    pairs = [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]
    exact = options.temperature == 0 or contender.make == baseline.make == PACELINE
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


INTERRUPTED = 130
BUSY_CLIENT = 0.5
"""Of a core: beyond, this process may be what is measured."""
LATE_MS = 5.0
MISSING = "-"


def main(options: ServeOptions) -> int:
    """Measure, show, write; after Ctrl-C with what there is.

    Raises :class:`benchmarks.harness.prompts.PromptError` and :class:`benchmarks.serve.rounds.ServerError`.
    """
    prompts, log, interrupted = read_prompts(options.prompts, options.chat), Log(), False
    with stages() as progress:
        try:
            asyncio.run(measure(options, prompts, log, progress))
        except KeyboardInterrupt:
            interrupted = True
    if not any(turn.heard for turn in log.turns):
        complain("paceline: interrupted before any request was over")
        return INTERRUPTED
    result(log, options).publish()
    if interrupted:
        complain("paceline: interrupted; shown is what there was until then")
        return INTERRUPTED
    return int(all(one.error for turn in log.turns for one in turn.heard))


def result(log: Log, options: ServeOptions) -> Result:
    """What is in the log so far; without contenders that had no turn yet. Times: milliseconds from when it was due."""
    seen = [one for one in log.contenders if any(turn.contender == one for turn in log.turns)]
    baseline = baseline_of(log.contenders)
    rows = {one.name: figures(log, one, options) for one in seen}
    comparisons = [compare(log, one, baseline, options) for one in seen if one != baseline and baseline in seen]
    document = {
        "servers": {one.name: {"make": one.make, "model": one.model} for one in log.contenders},
        "figures": rows,
        "comparisons": comparisons,
        "requests": [_request(turn, one) for turn in log.turns for one in turn.heard],
    }
    found = [table for table in tables(rows, comparisons) if table.lines]
    said = notes(log, options, rows)
    return Result("Load on a server", options, found, said, document, indent=None)


def _request(turn: Turn, one: Heard) -> Json:
    return {
        "contender": turn.contender.name,
        "round": turn.round,
        "number": one.number,
        "due": round(1e3 * (one.due - turn.began), 3),
        "sent": round(1e3 * (one.sent - one.due), 3),
        "chunks": [round(1e3 * (at - one.due), 3) for at in one.times],
        "sizes": one.sizes,
        "ended": round(1e3 * (one.ended - one.due), 3),
        "tokens": one.tokens,
        "digest": one.digest,
        "drafts": None if one.drafts is None else one.drafts._asdict(),
        "error": one.error or None,
    }


def tables(rows: dict[str, Json], comparisons: Sequence[Json]) -> tuple[Table, ...]:
    """What users wait for, what the server does, how many times faster it is, and what failed."""
    waits = [
        (name, measure, *((f"{value:.1f}" for value in spread.values()) if spread else [MISSING] * 4))
        for name, row in rows.items()
        for measure, spread in (
            ("time to first token", row["ttft"]),
            ("inter-token latency" if row["by_token"] else "between chunks", row["itl"]),
            ("time per output token", row["tpot"]),
            ("end to end", row["e2e"]),
        )
    ]
    does = table_of(
        "What the server does",
        rows.items(),
        {
            "contender": lambda of: of[0],
            "requests": lambda of: of[1]["requests"],
            "ok": lambda of: of[1]["ok"],
            "failed": lambda of: of[1]["requests"] - of[1]["ok"],
            "requests/s": lambda of: of[1]["request_rate"],
            "tokens/s": lambda of: f"{of[1]['token_rate']:.1f}",
            "tokens": lambda of: f"{of[1]['tokens']}{' chunks' if of[1]['guessed'] else ''}",
            "drafts kept": lambda of: f"{of[1]['accepted'] / of[1]['offered']:.0%}" if of[1]["offered"] else MISSING,
            "length": lambda of: cell(of[1]["acceptance_length"], missing=MISSING),
        },
    )
    measures = {"first token": "ttft", "per token": "tpot", "end to end": "e2e", "tokens/s": "token_rate"}
    faster = [
        (
            *(one["variant"], one["baseline"]),
            *("{value:.2f} ({low:.2f} to {high:.2f})".format(**one[key]) if one[key] else MISSING
              for key in measures.values()),
            MISSING if one["same"] is None else f"{one['same']} of {one['compared']}",
        )
        for one in comparisons
    ]  # fmt: skip
    failed = [
        (name, kind, f"{times}", row["details"][kind])
        for name, row in rows.items()
        for kind, times in row["errors"].items()
    ]
    return (
        Table("What users wait for", ("contender", "measure, ms", "mean", "p50", "p90", "p99"), waits),
        does,
        Table("How many times faster", ("contender", "against", *measures, "same text"), faster),
        Table("Failed requests", ("contender", "kind", "times", "the first said"), failed),
    )


def notes(log: Log, options: ServeOptions, rows: dict[str, Json]) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    urls = {one.url for one in log.contenders}
    about = [f"{one.name}: {one.model} at {one.url} ({one.make})" for one in log.contenders if not one.plain]
    said = [f"{'; '.join(about)}. {_load(options)}"]
    if len(log.contenders) > 1:
        said.append(
            "Contenders took turns with the same requests, back and forth. Ratios: of means over the requests that "
            "both answered (tokens/s: over rounds), with 95 % bootstrap intervals of pairs; above 1 is faster."
        )
    if len(urls) < len(log.contenders):
        said.append(
            "Contenders at one address share its prefix cache: who comes second in a round finds prompts computed. "
            "The order changes with each round, so an even number of rounds shares that out evenly."
        )
    if cached := ", ".join(f"{row['cached']} of {name}" for name, row in rows.items() if row["cached"]):
        said.append(
            f"Prompt tokens that came from a prefix cache: {cached}. That flatters whoever has one beside whoever has "
            "none; prompts that no earlier run had avoid it."
        )
    return said + [f"{name}: {words}" for name, row in rows.items() for holds, words in _warnings(row) if holds]


def _load(options: ServeOptions) -> str:
    pace = f"{options.concurrency} at once"
    if options.rate is not None:
        pace = f"{options.rate:g} requests/s, Poisson arrivals (seed {options.seed})"
    return (
        f"{options.requests} requests of each contender in {options.rounds} rounds, {pace}, after {options.warmup} to "
        f"warm up. {'Chat' if options.chat else 'Completions'} of at most {options.max_tokens} tokens, temperature "
        f"{options.temperature:g}, seeds from {options.seed}."
    )


def _warnings(row: Json) -> list[tuple[object, str]]:
    late, share = (row["late"] or {}).get("p99", 0.0), row["client_share"]
    return [
        (row["empty"], f"{row['empty']} answers had no text; they are in no latency but end to end."),
        (row["unfinished"], f"interrupted with {row['unfinished']} requests under way, which are not counted."),
        (share > BUSY_CLIENT, f"this client used {share:.0%} of a core and may be what was measured."),
        (
            late > LATE_MS,
            f"1 of 100 requests was sent {late:.0f} ms late or later by this client; latencies count from when they "
            "were due.",
        ),
    ]
