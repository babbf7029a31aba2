"""A run from its beginning to what is shown of it; its JSON has every request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from benchmarks.harness.report import Result, Table, cell, describe_machine, table_of
from benchmarks.serve.client import Heard, read_prompts, remembers
from benchmarks.serve.figures import Comparison, Figures, RatioInterval, Spread, baseline_of, compare, figures
from benchmarks.serve.rounds import Log, Turn, measure
from benchmarks.serve.settings import Json, Make, ServeOptions
from cluster.console import complain, stages

Rows = Sequence[tuple[str, Figures]]
INTERRUPTED = 130
BUSY_CLIENT = 0.5
"""Of a core: beyond, this process may be what is measured."""
LATE_MS = 5.0
MISSING = "-"


def main(options: ServeOptions) -> int:
    """Measure, show, write; after Ctrl-C with what there is.

    Raises :class:`benchmarks.harness.prompts.PromptError` and :class:`benchmarks.serve.probe.ServerError`.
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


def result(log: Log, options: ServeOptions, **about: Any) -> Result:
    """What is in the log so far; without contenders that had no turn yet. Times: milliseconds from when it was due."""
    seen = [one for one in log.contenders if any(turn.contender == one for turn in log.turns)]
    baseline = baseline_of(log.contenders)
    rows = [(one.name, figures(log, one, options)) for one in seen]
    comparisons = [compare(log, one, baseline, options) for one in seen if one != baseline and baseline in seen]
    found = latencies(rows), throughput(rows), ratios(comparisons), errors(rows)
    document = {
        "machine": describe_machine(),
        "servers": {name: {"make": server.make.value, "model": server.model} for name, server in log.servers.items()},
        "figures": {name: asdict(row) for name, row in rows},
        "comparisons": [asdict(one) for one in comparisons],
        "requests": [_request(turn, one) for turn in log.turns for one in turn.heard],
    }
    tables, said = [table for table in found if table.lines], notes(log, options, rows)
    return Result("serve", "Load on a server", options, tables, said, document, width=200, indent=None, **about)


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
        "drafts": None if one.drafts is None else asdict(one.drafts),
        "error": one.error or None,
    }


def latencies(rows: Rows) -> Table:
    """What a user waits for."""
    columns = ("contender", "measure, ms", "mean", "p50", "p90", "p99")
    lines = []
    for name, row in rows:
        measures = (
            ("time to first token", row.ttft),
            ("inter-token latency" if row.by_token else "between chunks", row.itl),
            ("time per output token", row.tpot),
            ("end to end", row.e2e),
        )
        lines += [(name, measure, *_cells(spread)) for measure, spread in measures]
    return Table("What users wait for", columns, lines)


def throughput(rows: Rows) -> Table:
    """What the server does, and what became of requests and drafts."""
    return table_of(
        "What the server does",
        rows,
        {
            "contender": lambda of: of[0],
            "requests": lambda of: of[1].requests,
            "ok": lambda of: of[1].ok,
            "failed": lambda of: of[1].requests - of[1].ok,
            "requests/s": lambda of: of[1].request_rate,
            "tokens/s": lambda of: f"{of[1].token_rate:.1f}",
            "tokens": lambda of: f"{of[1].tokens}{' chunks' if of[1].guessed else ''}",
            "drafts kept": lambda of: _share(of[1].accepted, of[1].offered),
            "length": lambda of: cell(of[1].acceptance_length, missing=MISSING),
        },
    )


def ratios(comparisons: Sequence[Comparison]) -> Table:
    """How many times faster, with 95 % intervals."""
    return table_of(
        "How many times faster",
        comparisons,
        {
            "contender": lambda one: one.variant,
            "against": lambda one: one.baseline,
            "first token": lambda one: _ratio(one.ttft),
            "per token": lambda one: _ratio(one.tpot),
            "end to end": lambda one: _ratio(one.e2e),
            "tokens/s": lambda one: _ratio(one.token_rate),
            "same text": lambda one: MISSING if one.same is None else f"{one.same} of {one.compared}",
        },
    )


def errors(rows: Rows) -> Table:
    """Failed requests by kind."""
    lines = [(name, kind, f"{times}", row.details[kind]) for name, row in rows for kind, times in row.errors.items()]
    return Table("Failed requests", ("contender", "kind", "times", "the first said"), lines)


def notes(log: Log, options: ServeOptions, rows: Rows) -> list[str]:
    """What a reader of the figures must know, a sentence or two each."""
    known = {make: make.value for make in Make} | {Make.OTHER: "a server of another make"}
    servers, urls = log.servers, [one.url for one in log.contenders]
    about = "; ".join(
        f"{one.name}: {servers[one.name].model} at {one.url} ({known[servers[one.name].make]})"
        for one in options.contenders
    )
    said: list[tuple[object, str]] = [
        (True, f"{about}. {_load(options)}"),
        *((True, note) for note in sorted({server.note for server in servers.values() if server.note})),
        (
            len(log.contenders) > 1,
            "Contenders took turns with the same requests, back and forth. Ratios: of means over the requests that "
            "both answered (tokens/s: over rounds), with 95 % bootstrap intervals of pairs; above 1 is faster.",
        ),
        *_remembering(log),
        (
            len(set(urls)) < len(urls),
            "Contenders at one address share its prefix cache: who comes second in a round finds prompts computed. "
            "The order changes with each round, so an even number of rounds shares that out evenly.",
        ),
        *_counting(rows),
    ]
    return [words for holds, words in said if holds] + [words for name, row in rows for words in _warnings(name, row)]


def _remembering(log: Log) -> list[tuple[object, str]]:
    """Who may draft from earlier answers; each where there is somebody to name."""
    ours = [one for one in log.contenders if log.servers[one.name].make is Make.PACELINE]
    return [
        (
            named := ", ".join(one.name for one in ours if not remembers(one)),
            f"{named}: answers are not kept to draft for later requests (speculation.remember is false), so that no "
            "contender copies what another said to the same request.",
        ),
        (
            named := ", ".join(one.name for one in ours if remembers(one)),
            f"{named}: answers may be kept to draft for later requests, as --extra-body wants; contenders at the same "
            "address may copy them.",
        ),
    ]


def _counting(rows: Rows) -> list[tuple[object, str]]:
    """What servers say of tokens, and what they do not; each where there is somebody to name."""
    return [
        (
            named := ", ".join(name for name, row in rows if not row.by_token and row.ok),
            f"{named}: how many tokens a chunk has is not said, so latencies are between chunks.",
        ),
        (
            named := ", ".join(name for name, row in rows if row.guessed),
            f"{named}: tokens are not counted by the server; each chunk counts as one.",
        ),
        (
            named := ", ".join(f"{row.cached} of {name}" for name, row in rows if row.cached),
            f"Prompt tokens that came from a prefix cache: {named}. That flatters whoever has one beside whoever has "
            "none; prompts that no earlier run had avoid it.",
        ),
    ]


def _warnings(name: str, row: Figures) -> list[str]:
    late = 0.0 if row.late is None else row.late.p99
    said = (
        (row.empty, f"{row.empty} answers had no text; they are in no latency but end to end."),
        (row.unfinished, f"interrupted with {row.unfinished} requests under way, which are not counted."),
        (
            row.client_share > BUSY_CLIENT,
            f"this client used {row.client_share:.0%} of a core and may be what was measured.",
        ),
        (
            late > LATE_MS,
            f"1 of 100 requests was sent {late:.0f} ms late or later by this client; latencies count from when they "
            "were due.",
        ),
    )
    return [f"{name}: {words}" for holds, words in said if holds]


def _load(options: ServeOptions) -> str:
    spread = f", Poisson arrivals (seed {options.seed})" if options.pace.rate is not None else ""
    return (
        f"{options.requests} requests of each contender in {options.rounds} rounds, {options.pace}{spread}, "
        f"after {options.warmup} to warm up. {'Chat' if options.chat else 'Completions'} of at most "
        f"{options.max_tokens} tokens, temperature {options.temperature:g}, seeds from {options.seed}."
    )


def _cells(spread: Spread | None) -> list[str]:
    return [MISSING] * 4 if spread is None else [f"{value:.1f}" for value in astuple(spread)]


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else MISSING


def _ratio(ratio: RatioInterval | None) -> str:
    return MISSING if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
