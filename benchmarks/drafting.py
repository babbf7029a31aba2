"""Ways to draft without a small sibling, and with one, beside plain decoding: each part measures one, side by side.

A part starts its workers and lets its contenders take turns prompt by prompt. What ``paceline align`` and ``paceline
fit`` say of themselves (acceptance before and after; ``--validate``) is not measured again here.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks import step_costs
from benchmarks.bench import DraftingOptions
from benchmarks.grammar_prompts import KINDS
from benchmarks.harness.measure import (
    DRAFTED,
    PLAIN,
    WITH_LOOKUP,
    Batch,
    Runner,
    in_chains,
    reached,
    rows,
    seeded,
    served,
    take_turns,
)
from benchmarks.harness.pair import ROOT, Pair, Shape, held_out, noiseless_target, stretched_eagle, stretched_pair
from benchmarks.harness.processes import WorkerPlan, routed
from benchmarks.harness.report import Goal, Result, table_of, tell
from cluster.console import say
from cluster.local.stretched import HIDDEN, LAYERS
from router.dispatch import Dispatcher
from router.schema.structured import json_schema_grammar
from router.text.tokenizer import Tokenizer
from speculation.events import Role
from speculation.messages import RequestOptions, Schedule, Source, Speculation

Row = Mapping[str, Any]
ABOUT = "Each contender beside plain decoding, in turn prompt by prompt; ratios are medians over the prompts."
WARM_UP = 2
SAME, OTHER = ROOT / "models" / "draft", ROOT / "models" / "draft_other"
OTHER_NAME = "draft, another tokenizer"


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a part is measured."""

    rounds: int
    """Prompts that count."""
    tokens: int
    temperatures: tuple[float, ...]
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Part:
    """One way to draft, or a few that are alike."""

    name: str
    measure: Callable[[Size], AsyncIterator[Sequence[Row]]]
    full: Size
    quick: Size | None = None
    """None: a quick run leaves it out."""


async def compared(
    runners: Mapping[str, Runner],
    batches: Sequence[Batch],
    warm_up: int = WARM_UP,
    *,
    skip: int = 0,
    exact: bool = True,
    places: bool = False,
    **where: object,
) -> list[dict[str, Any]]:
    """What contenders come to in turn, behind ``where`` and how many rounds count.

    See :func:`take_turns`, :func:`rows`. ``places``: with the share of steps that kept a draft at the first place, the
    second, and so on.
    """
    runs = await take_turns(runners, batches, warm_up, skip)
    found = [{**where, "rounds": len(batches) - skip, **row} for row in rows(runs, exact=exact)]
    for row in found if places else ():
        kept = [commit.accepted for run in runs[row["contender"]] for commit in run.counted]
        row["steps_reaching_place"] = reached(kept, 4)
    return found


def _told() -> Pair:
    """The stretched pair, after saying what it is."""
    pair = stretched_pair(Shape())
    say(pair.about)
    return pair


def _drafting(target: Path, *drafts: tuple[Path, Sequence[str]]) -> AbstractAsyncContextManager[list[Dispatcher]]:
    """A target on a core of its own, alone or with each drafter (its model and flags) on another; all in bfloat16."""
    flags = ("--dtype", "bfloat16")
    plans = [WorkerPlan(Role.TARGET, target, 0, flags=flags)]
    plans += [WorkerPlan(Role.DRAFT, model, 1, flags=(*flags, *own)) for model, own in drafts]
    return routed(plans, [(0, number) for number in range(1, len(plans))] or [(0,)])


# -- an EAGLE-3 head, at the target and away from it -------------------------------------------------------------------

REMOTE, LOCAL = "head at a draft worker", "head at the target"
ON_A_GPU = Shape(hidden=4096, layers=24)


async def eagle(size: Size) -> AsyncIterator[Sequence[Row]]:
    """The bundled head for the stretched target without noise; three targets, of which one at a time is at work.

    Every contender finds nothing of another's text in a cache, and no prompt comes twice.
    """
    on_cuda = size.device == "cuda"
    shape = ON_A_GPU if on_cuda else Shape()
    target, head = noiseless_target(shape.hidden, shape.layers, torch.device(size.device)), stretched_eagle(shape)
    # A GPU that several share has no free memory to be shared out by each.
    flags = ("--device", size.device, "--dtype", "bfloat16", *(("--cache-tokens", "8192") if on_cuda else ()))
    headed = (*flags, "--draft-eagle", str(head))
    target_core, draft_core = (None, None) if on_cuda else (0, 1)
    plans = [
        WorkerPlan(Role.TARGET, target, target_core, flags=flags),
        WorkerPlan(Role.TARGET, target, target_core, flags=(*headed, "--eagle-at", "drafter")),
        WorkerPlan(Role.DRAFT, target, draft_core, flags=headed),
        WorkerPlan(Role.TARGET, target, target_core, flags=headed),
    ]
    async with routed(plans, [(0,), (1, 2), (3,)], together=on_cuda) as (without, away, beside):
        for seed, temperature in enumerate(size.temperatures):
            scope = RequestOptions(scope=f"at {temperature}")
            runners = {
                "plain": served(without, PLAIN, scope),
                REMOTE: served(away, DRAFTED, scope),
                LOCAL: served(beside, Speculation(sources=frozenset({Source.EAGLE}), remember=False), scope),
            }
            prompts = held_out(WARM_UP + size.rounds)
            batches = [Batch((prompt,), size.tokens, temperature, seed) for prompt in prompts]
            yield await compared(runners, batches, 0, skip=WARM_UP, exact=False, places=True, temperature=temperature)


async def steps(size: Size) -> AsyncIterator[Sequence[Row]]:
    """What drafting takes from a target's steps, on the stretched target, one session and eight."""
    shape = Shape()
    target = noiseless_target(shape.hidden, shape.layers)
    loops = step_costs.costed_loops(target, stretched_eagle(shape))
    prompts = itertools.cycle(held_out())
    for sessions in (1, 8):
        yield step_costs.measure(loops, prompts, sessions, size.rounds, size.tokens)


# -- output that repeats, drafted for without a model ------------------------------------------------------------------

REPETITION = {
    "plain": PLAIN,
    "lookup": Speculation(sources=frozenset({Source.LOOKUP}), remember=False),
    "suffix": Speculation(sources=frozenset({Source.SUFFIX})),
    "both": Speculation(sources=frozenset({Source.LOOKUP, Source.SUFFIX})),
}
NOT_COUNTED = 2
"""Requests of a kind that come first: nothing was remembered for them."""


async def repetition(size: Size) -> AsyncIterator[Sequence[Row]]:
    """Several similar requests of each kind. Every contender remembers in a scope of its own, and copies from none."""
    target = _told().target
    tokenizer = Tokenizer.load(str(target))
    async with _drafting(target) as (dispatcher,):
        for kind, temperature in itertools.product(KINDS, size.temperatures):
            runners = {
                name: served(dispatcher, speculation, RequestOptions(scope=f"{kind} at {temperature}, {name}"))
                for name, speculation in REPETITION.items()
            }
            batches = [
                Batch((tokenizer.encode(one.prompt, special=False),), size.tokens, temperature, number, (), one.grammar)
                for number, one in enumerate(KINDS[kind]()[: size.rounds + NOT_COUNTED])
            ]
            yield await compared(runners, batches, 0, skip=NOT_COUNTED, kind=kind, temperature=temperature)


# -- a draft with another tokenizer ------------------------------------------------------------------------------------


async def vocabularies(size: Size) -> AsyncIterator[Sequence[Row]]:
    """The target alone, and with two drafts of one size, never both at work."""
    target = _told().target
    translated = OTHER, ("--target-tokenizer", str(target))
    async with _drafting(target, (SAME, ()), translated) as (with_same, with_other):
        runners = {
            "plain": served(with_same, PLAIN),
            "draft, same tokenizer": served(with_same, DRAFTED),
            OTHER_NAME: served(with_other, DRAFTED),
        }
        for temperature in size.temperatures:
            batches = seeded(held_out(), size.rounds, 1, size.tokens, temperature)
            yield await compared(runners, batches, exact=False, temperature=temperature)


# -- a dear draft model, whose own steps verify guesses ----------------------------------------------------------------

STAGED = {
    "draft model": ("--second-level", "none"),
    "with guesses of lookup": ("--second-level", "lookup"),
    "and of a smaller model": ("--assistant", str(SAME)),
}
DEAR = 6
"""Layers of the draft model, of the target's width and a quarter of its depth: a step of it costs a quarter too."""


async def staged(size: Size) -> AsyncIterator[Sequence[Row]]:
    """One target and a drafter for each kind of guesses, never two at work; under our schedule and the sequential."""
    draft = noiseless_target(Shape().hidden, DEAR)
    async with _drafting(_told().target, *((draft, way) for way in STAGED.values())) as paired:
        for how, temperature in itertools.product((DRAFTED, in_chains(Schedule.SEQUENTIAL, 6)), size.temperatures):
            runners = {"plain": served(paired[0], PLAIN)}
            runners |= {name: served(each, how) for name, each in zip(STAGED, paired, strict=True)}
            batches = seeded(held_out(), size.rounds, 1, size.tokens, temperature)
            yield await compared(runners, batches, schedule=how.schedule.value, temperature=temperature)


# -- JSON that a schema demands ----------------------------------------------------------------------------------------

_ARGUMENT = {
    "identifier": {"type": "string", "maxLength": 12},
    "required": {"type": "boolean"},
    "position": {"type": "integer", "minimum": 0, "maximum": 99},
}


def _object(properties: Row) -> Row:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


RECORD = _object(
    {
        "name": {"type": "string", "maxLength": 24},
        "arguments": {"type": "array", "items": _object(_ARGUMENT), "minItems": 2, "maxItems": 3},
        "visibility": {"enum": ["public", "private", "protected"]},
    }
)
LAYOUTS: Mapping[str, dict[str, object]] = {
    "compact": {"whitespace_flexible": False, "whitespace_pattern": None},
    "free": {},
}
"""Compact JSON leaves much text without a choice, JSON with free whitespace none."""
STRUCTURED = {
    "plain": PLAIN,
    "forced text alone": Speculation(sources=frozenset({Source.GRAMMAR}), remember=False),
    "draft alone": DRAFTED,
    "all sources": WITH_LOOKUP,
}


async def structured(size: Size) -> AsyncIterator[Sequence[Row]]:
    """One schema, in two layouts."""
    pair = _told()
    async with _drafting(pair.target, (pair.draft, ())) as (dispatcher,):
        runners = {name: served(dispatcher, speculation) for name, speculation in STRUCTURED.items()}
        for layout, form in LAYOUTS.items():
            grammar = json_schema_grammar(dict(RECORD), "schema", form)
            batches = [Batch((prompt,), size.tokens, grammar=grammar) for prompt in held_out(size.rounds)]
            yield await compared(runners, batches, layout=layout)


# -- where a draft model works -----------------------------------------------------------------------------------------


async def placement(size: Size) -> AsyncIterator[Sequence[Row]]:
    """Where a draft model may work, with the threads that ``up`` gives; the pair of ``paceline up --stretched``."""
    target, cores = noiseless_target(HIDDEN, LAYERS), len(os.sched_getaffinity(0))
    beside, fewer = ("--draft-model", str(SAME)), max(cores - 1, 1)
    flags, wide_flags, alone = (
        ("--dtype", "auto", "--threads", str(threads), "--max-threads", str(most))
        for threads, most in ((fewer, cores), (cores, cores), (1, 1))
    )
    plans = (
        WorkerPlan(Role.TARGET, target, None, flags=flags),
        WorkerPlan(Role.DRAFT, SAME, None, flags=alone),
        WorkerPlan(Role.TARGET, target, None, flags=(*flags, *beside)),
        WorkerPlan(Role.TARGET, target, None, flags=(*wide_flags, *beside)),
    )
    async with routed(plans, [(0, 1), (2,), (3,)]) as (own, in_turn, wide):
        runners = {
            f"plain, {fewer} of {cores} cores": served(own, PLAIN),
            "own": served(own, DRAFTED),
            f"shared, {fewer} of {cores} cores": served(in_turn, DRAFTED),
            "plain, all cores": served(wide, PLAIN),
            "shared, all cores": served(wide, DRAFTED),
        }
        for streams, temperature in itertools.product((1, 4, 8), size.temperatures):
            batches = seeded(held_out(), size.rounds, streams, size.tokens, temperature)
            yield await compared(runners, batches, 1, exact=False, streams=streams, temperature=temperature)


# -- the run -----------------------------------------------------------------------------------------------------------


Found = Mapping[str, Sequence[Row]]


def _alone(part: str, *contenders: str, **where: object) -> Callable[[Found], float | None]:
    """The best of them over plain decoding, at temperature 0; None: the part was not measured."""
    wanted = {"temperature": 0.0, **where}

    def best(found: Found) -> float | None:
        greedy = [row for row in found.get(part, ()) if wanted.items() <= row.items()]
        return max((float(row["ratio_to_plain"]) for row in greedy if row["contender"] in contenders), default=None)

    return best


def _dearest_step(found: Found) -> float | None:
    ratios = [float(row["ratio_to_none"]) for row in found.get("steps", ()) if row["drafting"] == step_costs.REMOTE]
    return max(ratios, default=None)


PARTS = (
    Part("eagle", eagle, Size(12, 96, (0.0, 0.8)), Size(3, 48, (0.0,))),
    Part("steps", steps, Size(6, 96, ()), Size(1, 48, ())),
    Part("repetition", repetition, Size(6, 200, (0.0, 0.7)), Size(2, 200, (0.0,))),
    Part("vocabularies", vocabularies, Size(10, 96, (0.0, 0.8)), Size(3, 48, (0.0,))),
    Part("staged", staged, Size(12, 64, (0.0, 0.8))),
    Part("structured", structured, Size(12, 200, (0.0,))),
    Part("placement", placement, Size(4, 64, (0.0, 0.8))),
)
GOALS: tuple[Goal[Found], ...] = (
    Goal("eagle", "an EAGLE-3 head at a draft worker over plain decoding", 2.5, False, _alone("eagle", REMOTE)),
    Goal("steps", "a target's step with such a head over one without any", 1.02, True, _dearest_step),
    *(
        Goal(
            f"repetition_{kind}",
            f"lookup or suffix alone over plain decoding, {kind}",
            1.8,
            False,
            _alone("repetition", "lookup", "suffix", kind=kind),
        )
        for kind in ("rows", "edits")
    ),
    Goal(
        "vocabularies",
        "a draft with another tokenizer over plain decoding",
        1.2,
        False,
        _alone("vocabularies", OTHER_NAME),
    ),
)


def main(options: DraftingOptions) -> int:
    """Measure and report."""
    found: dict[str, list[Row]] = {}
    for part in PARTS:
        size = part.quick if options.quick else part.full
        if part.name in options.only or (size and not options.only):
            size = size or part.full
            size = replace(size, rounds=options.rounds or size.rounds, device=options.device)
            found[part.name] = asyncio.run(_measure(part, size))
    tables = [table_of(name, rows, {key: itemgetter(key) for key in rows[0]}) for name, rows in found.items()]
    goals = [goal for goal in GOALS if goal.ours(found) is not None]
    Result("Ways to draft", options, tables, [ABOUT], {"parts": found}, goals, found).publish()
    return 0


async def _measure(part: Part, size: Size) -> list[Row]:
    say(f"\n{part.name}")
    found: list[Row] = []
    async for some in part.measure(size):
        for row in some:
            tell(row)
        found += some
    return found
