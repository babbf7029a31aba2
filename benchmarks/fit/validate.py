"""Is the prediction true? The chosen way once more, really served, at a few depths and in turn with plain decoding.

Other runs than those that the prediction was made from, on workers started anew. Contenders decode the same texts, so
each draws on earlier outputs of its own alone: under a key of its own, and of nothing that came before what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.fit.command import DEPTH, PLAIN, FitOptions, Way
from benchmarks.fit.predict import FINE, Known, Predictor, best_depth
from benchmarks.fit.serving import TargetText, serving, spread
from benchmarks.harness.measure import Batch, Run, Runner, pace, served, take_turns
from benchmarks.harness.processes import connected
from router.dispatch import Dispatcher
from speculation.events import Role
from speculation.messages import RequestOptions

TEXTS = 24
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Checked:
    """One depth, predicted and measured."""

    depth: int
    predicted: float
    measured: float
    predicted_step: float
    """Tokens a step, which no other work on the machine can change much."""
    measured_step: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Validation:
    """How true the prediction was."""

    way: Way
    depths: tuple[Checked, ...]
    plain: float
    """Tokens a second, measured."""
    predicted_plain: float
    same_text: float
    """Share of the drafted texts that are the target's own."""

    @property
    def best(self) -> tuple[int, int]:
        """The best of the depths, as predicted and as measured."""
        return (
            best_depth({one.depth: one.predicted for one in self.depths}),
            best_depth({one.depth: one.measured for one in self.depths}),
        )

    @property
    def lost(self) -> float:
        """Share of the best measured speed that the depth predicted to be the best misses: the curve is flat there."""
        measured = {one.depth: one.measured for one in self.depths}
        return 1 - measured[self.best[0]] / max(measured.values())

    @property
    def worst(self) -> float:
        """The largest error, as a share."""
        return max(abs(one.error) for one in self.depths)


def depths_around(best: int) -> list[int]:
    """Those that are tried: the best, its neighbours, half of it, and the deepest."""
    return sorted({max(best // 2, 1), max(best - 1, 1), best, min(best + 1, DEPTH), DEPTH})


async def validate(
    options: FitOptions,
    way: Way,
    best: int,
    known: Known,
    texts: Sequence[TargetText],
    folder: Path,
    report: Callable[[str], None],
) -> Validation:
    """Serve and compare, next door; ``texts`` are those of ``known``. Raises what workers raise."""
    depths = depths_around(best)
    some = spread(texts, TEXTS)
    batches = [Batch((text.prompt,), len(text.tokens), options.temperature, options.seed) for text in some]
    report(f"loading {options.target}")
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(
            serving(options, Role.TARGET, options.target, folder / "checked-target.jsonl")
        )
        draft = None
        if way.draft is not None:
            record = folder / "checked-draft.jsonl"
            draft = await stack.enter_async_context(serving(options, Role.DRAFT, way.draft, record))
        dispatcher = await stack.enter_async_context(connected(target, draft))
        unheard = _contenders(dispatcher, way, depths, remember=False)
        runners = _contenders(dispatcher, way, depths, remember=way.remembers)
        report("checking the prediction")
        await take_turns(unheard, batches[:WARM_UP], 0)
        runs = await take_turns(runners, batches, 0)
    places = [texts.index(text) for text in some]
    passages = {draft: [found[i] for i in places] for draft, found in known.passages.items()}
    predictor = Predictor(replace(known, passages=passages, kinds=[known.kinds[i] for i in places]), options.seed, FINE)
    plain = pace(runs[0])
    return Validation(
        way,
        tuple(_checked(predictor, way, depth, runs[depth], plain) for depth in depths),
        plain,
        predictor.plain(way, 1),
        fmean(
            run.decoded[0].tokens == text.tokens
            for depth in depths
            for run, text in zip(runs[depth], some, strict=True)
        ),
    )


def _contenders(dispatcher: Dispatcher, way: Way, depths: Sequence[int], *, remember: bool) -> dict[int, Runner]:
    """The way at each depth, and plain decoding as 0; ``remember``: each may draft from what it has said itself."""
    asked = {0: PLAIN.speculation()} | {depth: way.speculation(depth) for depth in depths}
    return {
        depth: served(dispatcher, replace(one, remember=remember), RequestOptions(scope=f"depth {depth}"))
        for depth, one in asked.items()
    }


def _checked(predictor: Predictor, way: Way, depth: int, runs: Sequence[Run], plain: float) -> Checked:
    step = fmean(commit.tokens for run in runs for commit in run.counted)
    predicted = predictor.report(way, depth=depth).tokens_per_verification
    return Checked(depth, predictor.speedup(way, depth=depth), pace(runs) / plain, predicted, step)
