"""What is shown of a fit: tables, the same as JSON, a plot; one sentence of advice, and the configuration to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fit.command import FitOptions, short
from benchmarks.fit.predict import DEPTHS, PAYS, SUFFIX_TOKENS, Agreement, Forecast, Known, Loaded, pays_until
from benchmarks.fit.validate import Validation
from benchmarks.harness.report import PlotLine, PlotPanel, Result, Table, draw, table_of
from simulation import costs
from simulation.costs import Costs
from speculation.messages import Source

MORE = 1.05
"""A kind of text gains most where its speed-up is so many times that of all."""


def advice(chosen: Forecast | None, forecasts: Sequence[Forecast], loaded: Sequence[Loaded]) -> str:
    """One line in words. ``loaded``: the chosen way under load."""
    if chosen is None:
        best = max(forecasts, key=lambda one: one.speedup)
        return (
            f"plain decoding: the best way to draft, {best.way}, makes it {best.speedup:.2f} x as fast, "
            f"and below {PAYS:g} x drafting is not worth its machines"
        )
    return "; ".join([f"{chosen.way}: {chosen.speedup:.1f} x plain decoding", _kinds(chosen), _until(loaded)])


def _kinds(chosen: Forecast) -> str:
    ranked = sorted(chosen.kinds, key=lambda kind: -chosen.kinds[kind])
    most = [kind for kind in ranked if chosen.kinds[kind] >= MORE * chosen.speedup]
    if not most or len(most) == len(ranked):
        return "all kinds of text gain alike" if len(ranked) > 1 else f"measured on {ranked[0]} alone"
    names = " and ".join(filter(None, (", ".join(most[:-1]), most[-1])))
    return f"{names} {'gains' if len(most) == 1 else 'gain'} most"


def _until(loaded: Sequence[Loaded]) -> str:
    most = pays_until(loaded)
    if most is None:
        return f"pays at all loads measured, up to {_requests(loaded[-1].sessions)}"
    return f"switch off above {_requests(most)}"


def _requests(count: int) -> str:
    return f"{count} concurrent request" + "s" * (count != 1)


def configuration(
    options: FitOptions, chosen: Forecast | None, loaded: Sequence[Loaded], translated: frozenset[str] = frozenset()
) -> str:
    """What to give ``paceline up --config``; drafters for one target at the largest load at which they pay.

    ``translated``: draft models with another tokenizer than the target.
    """
    found: dict[str, dict[str, Any]] = {"target": _worker(options, options.target)}
    if Source.SUFFIX in options.sources:
        remembers = chosen is not None and chosen.way.remembers
        found["target"]["suffix_tokens"] = SUFFIX_TOKENS if remembers else 0
    if chosen is None:
        found["speculation"] = {"enabled": False}
    else:
        way = chosen.way
        if Source.EAGLE in way.local:
            found["target"]["eagle"] = _path(options.eagle)
        if way.draft is not None:
            paid = [one for one in loaded if one.speedup >= PAYS] or list(loaded[:1])
            found["draft"] = _worker(options, way.draft) | {"replicas": paid[-1].drafters}
            if way.draft == options.away:
                found["target"] |= {"eagle": _path(options.eagle), "eagle_at": options.eagle_at}
                del found["draft"]["model"]  # it drafts with the target's head
            if way.draft in translated:
                found["draft"]["target_tokenizer"] = _path(options.target)
        found["speculation"] = {
            "enabled": True,
            "drafters": way.draft is not None,
            "lookup": Source.LOOKUP in way.local,
            "max_depth": chosen.depth,
        }
    return yaml.safe_dump(found, sort_keys=False)


def _worker(options: FitOptions, model: str) -> dict[str, Any]:
    """Settings of a worker as they were measured with."""
    given = {"dtype": options.dtype, "device": options.device, "threads": options.threads}
    default = FitOptions()
    return {"model": _path(model)} | {name: value for name, value in given.items() if value != getattr(default, name)}


def _path(model: str) -> str:
    """A folder, wherever the configuration is read from; or a hub id."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


SHOWN = (1, 2, 4, 8, 12)
"""Depths, and draft tokens a request, in tables."""
TRIED = 10
"""A depth tried less often is in no plot."""
VALIDATION = ("best", "lost", "worst", "same_text", "plain", "predicted_plain")
"""What the JSON has of a check beside its depths."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """All that a fit has found."""

    options: FitOptions
    known: Known
    forecasts: tuple[Forecast, ...]
    chosen: Forecast | None
    """Known better than as one of ``forecasts``: at every depth, along more text."""
    loaded: tuple[Loaded, ...] = ()
    validation: Validation | None = None
    forgetful: float | None = None
    """Speed-up of the way shown if it knew no earlier answers; None: it asks for none."""

    @property
    def configuration(self) -> str:
        """To paste."""
        return configuration(self.options, self.chosen, self.loaded, self.known.translated)

    @property
    def shown(self) -> Forecast:
        """The chosen way, or the fastest where none pays."""
        return self.chosen or max(self.forecasts, key=lambda one: one.speedup)


def shown(result: FitResult) -> Result:
    """Everything, with the advice last."""
    said = [*_sentences(result), advice(result.chosen, result.forecasts, result.loaded)]
    return Result("Fit", result.options, tables(result), said, as_json(result), plots=partial(plots, result))


def tables(result: FitResult) -> list[Table]:
    """In the order in which they explain each other; those that have lines."""
    made = (_acceptance, _costs, _speeds, _depths, _loads, _validation)
    return [table for make in made if (table := make(result)).lines]


def _acceptance(result: FitResult) -> Table:
    def at(depth: int) -> Callable[[Forecast], object]:
        return lambda one: next((its.kept / its.tried for its in one.agreement.depths if its.depth == depth), None)

    def of(kind: str) -> Callable[[Forecast], object]:
        return lambda one: one.by_kind[kind].first

    return table_of(
        "Share of drafts that are right",
        result.forecasts,
        {
            "way": lambda one: one.way,
            **{kind: of(kind) for kind in result.shown.kinds},
            "all": lambda one: one.agreement.first,
            **{f"depth {depth}": at(depth) for depth in SHOWN},
        },
    )


def _costs(result: FitResult) -> Table:
    alone, target = result.known.costs[None], short(result.options.target)
    verifying = {f"{target} verifies, each": alone}
    if result.known.heads:
        verifying[f"{target} with a head, each"] = replace(alone, verify=result.known.heads)
    lines = [
        (name, str(n), *(_ms(costs.verify_seconds(n, n * (1 + drafts))) for drafts in (0, *SHOWN)))
        for name, costs in verifying.items()
        for n in result.options.sessions
    ]
    for draft in result.options.drafters:
        curve = result.known.costs[draft].draft
        lines.append((f"{short(draft)} drafts", "", *(_ms(curve(1 + drafts)) for drafts in (0, *SHOWN))))
    columns = ("worker", "at a time", *(f"{1 + drafts} tokens" for drafts in (0, *SHOWN)))
    return Table("Milliseconds of a step", columns, lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _speeds(result: FitResult) -> Table:
    shown = result.shown
    rows = [shown if one.way == shown.way else one for one in result.forecasts]
    trips = [f"{1000 * rtt:g} ms" for rtt in result.options.round_trips]
    lines = [
        (
            str(row.way),
            f"{row.rate:.1f}",
            f"{row.rate / row.workers:.1f}",
            str(row.depth),
            *(f"{speedup:.2f}" for speedup in (*row.trips.values(), *row.kinds.values())),
        )
        for row in rows
    ]
    title = "Predicted, one request at a time: speed-up over plain decoding by round trip and kind"
    return Table(title, ("way", "tokens/s", "a worker", "best depth", *trips, *shown.kinds), lines)


def _depths(result: FitResult) -> Table:
    shown, cost = result.shown, _cost(result)
    return table_of(
        f"{shown.way} by depth: tokens a step and speed-up of the textbook (in turn), and predicted (ahead)",
        ((depth, textbook(shown.agreement, cost, depth)) for depth in shown.depths),
        {
            "depth K": lambda row: row[0],
            "E = (1-a^(K+1))/(1-a)": lambda row: row[1]["committed"],
            "E on this text": lambda row: row[1]["committed_along"],
            "textbook speed-up": lambda row: row[1]["speedup"],
            "predicted speed-up": lambda row: shown.depths[row[0]],
        },
    )


def textbook(found: Agreement, cost: float, depth: int) -> dict[str, float]:
    """The closed forms for a way, and what of them can be counted."""
    return {
        "committed": costs.expected_tokens(found.first, depth),
        "committed_along": costs.committed_along([run.right for run in found.runs], depth),
        "speedup": costs.expected_speedup(found.first, depth, cost),
    }


def _cost(result: FitResult) -> float:
    """Seconds of a draft token over those of a plain step, of the way shown; a source at the target takes none."""
    draft = result.shown.way.draft
    costs = result.known.costs[draft]
    return 0.0 if draft is None else costs.draft(1) / costs.verify_seconds(1, 1)


def _loads(result: FitResult) -> Table:
    return table_of(
        f"{result.shown.way} under load, predicted, one target",
        result.loaded,
        {
            "at a time": lambda one: one.sessions,
            "plain tokens/s": lambda one: f"{one.plain:.1f}",
            "tokens/s": lambda one: f"{one.rate:.1f}",
            "a request": lambda one: f"{one.rate / one.sessions:.1f}",
            "a worker": lambda one: f"{one.rate / (1 + one.drafters):.1f}",
            "speed-up": lambda one: one.speedup,
            "drafters": lambda one: one.drafters,
        },
    )


def _validation(result: FitResult) -> Table:
    return table_of(
        f"{result.shown.way}, predicted and measured",
        result.validation.depths if result.validation is not None else (),
        {
            "depth": lambda one: one.depth,
            "speed-up": lambda one: one.predicted,
            "measured": lambda one: one.measured,
            "error": lambda one: f"{100 * one.error:+.0f} %",
            "tokens a step": lambda one: one.predicted_step,
            "measured step": lambda one: one.measured_step,
        },
    )


def _sentences(result: FitResult) -> Iterator[str]:
    """What tables do not say."""
    shown, found = result.shown, result.validation
    cost, first = _cost(result), shown.agreement.first
    if shown.way.draft is not None:
        longest = costs.best_length(first, cost, DEPTHS[-1])
        speedup = costs.expected_speedup(first, longest, cost)
        yield f"The textbook's best for {shown.way} (a = {first:.2f}, c = {cost:.3f}): K = {longest}, {speedup:.2f} x."
    if result.forgetful is not None:
        gain = shown.speedup - 1
        share = f", {(shown.speedup - result.forgetful) / gain:.0%} of its gain" if gain > 0 else ""
        yield (
            f"Earlier answers to these prompts, in their order, make {shown.way} {shown.speedup:.2f} x as fast as "
            f"plain decoding instead of {result.forgetful:.2f} x{share}; the first to come know none."
        )
    if found is not None:
        predicted, measured = found.best
        yield (
            f"Best depth: {predicted} predicted, {measured} measured, which makes a difference of "
            f"{100 * found.lost:.0f} % at most. Largest error of a speed-up: {100 * found.worst:.0f} %."
        )
        yield (
            f"Plain: {found.predicted_plain:.1f} tokens/s predicted, {found.plain:.1f} measured. "
            f"Texts as without drafts: {100 * found.same_text:.0f} %."
        )


def as_json(result: FitResult) -> dict[str, Any]:
    """Everything, in seconds and shares."""
    options, chosen, checked = result.options, result.chosen, result.validation
    drafts: Sequence[str | None] = (None, *options.drafters)
    models = ("target", "drafts", "eagle", "eagle_at")
    named = (*models, "tokens", "temperature", "seed", "dtype", "device", "threads")
    heads = replace(result.known.costs[None], verify=result.known.heads)
    return {
        "options": {"prompts": len(options.prompts), **{name: getattr(options, name) for name in named}},
        "costs": {
            draft or "": {
                "verify": _verify_json(costs, options.sessions),
                "draft": {str(tokens): costs.draft(tokens) for tokens in (1, *SHOWN)},
                "to_target": costs.to_target,
                "to_draft": costs.to_draft,
            }
            for draft in drafts
            for costs in [result.known.costs[draft]]
        },
        "heads": _verify_json(heads, options.sessions) if result.known.heads else None,
        "ways": [_forecast_json(one) for one in result.forecasts],
        "chosen": _forecast_json(chosen) if chosen else None,
        "textbook": {
            str(depth): textbook(result.shown.agreement, _cost(result), depth) for depth in result.shown.depths
        },
        "loads": [asdict(one) for one in result.loaded],
        "speedup_without_earlier_answers": result.forgetful,
        "validation": {
            "way": str(checked.way),
            "depths": [asdict(one) | {"error": one.error} for one in checked.depths],
            **{name: getattr(checked, name) for name in VALIDATION},
        }
        if checked is not None
        else None,
    }


def _verify_json(costs: Costs, sessions: Sequence[int]) -> dict[str, Any]:
    return {str(n): {str(d): costs.verify_seconds(n, n * (1 + d)) for d in (0, *SHOWN)} for n in sessions}


def _forecast_json(one: Forecast) -> dict[str, Any]:
    return {
        "way": str(one.way),
        "draft": one.way.draft,
        "sources": sorted(one.way.sources),
        "acceptance": one.agreement.first,
        "acceptance_by_kind": {kind: found.first for kind, found in one.by_kind.items()},
        "by_depth": [asdict(depth) for depth in one.agreement.depths],
        "speedup_by_depth": {str(depth): speedup for depth, speedup in one.depths.items()},
        "speedup_by_round_trip": {str(rtt): speedup for rtt, speedup in one.trips.items()},
        "speedup_by_kind": dict(one.kinds),
        "best_depth": one.depth,
        "tokens_per_second": one.rate,
        "tokens_per_second_per_worker": one.rate / one.workers,
    }


def plots(result: FitResult, folder: Path) -> dict[str, str]:
    """Speed-up by depth beside the textbook's, acceptance by depth and kind, speed-up under load; what it shows."""
    shown, checked, cost = result.shown, result.validation, _cost(result)
    grey, dots = {"linestyle": "--", "color": "tab:grey"}, {"marker": "."}
    by_depth: list[PlotLine] = [
        (str(one.way), list((shown if one.way == shown.way else one).depths.items()), dots) for one in result.forecasts
    ]
    textbook = [(depth, costs.expected_speedup(shown.agreement.first, depth, cost)) for depth in shown.depths]
    by_depth.append(("textbook, in turn", textbook, grey))
    if checked is not None:
        measured = [(one.depth, one.measured) for one in checked.depths]
        by_depth.append(("measured", measured, {"color": "black", "marker": "x", "linestyle": ""}))
    right: list[PlotLine] = [
        (kind, [(at.depth, at.kept / at.tried) for at in found.depths if at.tried >= TRIED], dots)
        for kind, found in shown.by_kind.items()
    ]
    sessions = [one.sessions for one in result.loaded]
    loads: list[PlotLine] = [
        ("speed-up", [(one.sessions, one.speedup) for one in result.loaded], dots),
        ("plain", [(count, 1.0) for count in sessions], grey),
    ]
    panels = [
        PlotPanel("depth", "speed-up over plain", by_depth),
        PlotPanel("depth of the draft token", "share right, where all above was", right, str(shown.way), top=1),
        PlotPanel("requests at a time", "speed-up over plain", loads, ticks=sessions),
    ]
    draw(folder / "fit.png", panels, 4.3, 4, legends=True)
    return {"fit.png": "Speed-up by depth, drafts that are right by depth, and speed-up under load."}
