"""A fit from beginning to end: watch workers that serve, ask each draft about the text, simulate, say what to do."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.fit import predict, report, teacher
from benchmarks.fit.command import FitOptions
from benchmarks.fit.predict import Forecast, Known, Predictor, forecast
from benchmarks.fit.serving import TargetText, Watched, spread, watch
from benchmarks.fit.validate import validate
from benchmarks.harness.processes import losses_unsaid
from cluster.config.environment import on_cpu
from cluster.console import say, stages
from cluster.local.gpus import here
from router.text.tokenizer import Tokenizer
from simulation.agreement import AgreementPassage


def main(options: FitOptions) -> int:
    """Fit and report. Raises FitError, PromptError, TokenizerError and what workers raise."""
    publish(fit(options))
    return 0


def publish(result: report.FitResult) -> None:
    """Show it, the configuration to paste last, and write both where the options say."""
    report.shown(result).publish()
    say(f"\npaceline.yaml, for `paceline up --config paceline.yaml`:\n\n{result.configuration}")
    if result.options.out is not None:
        (result.options.out / "paceline.yaml").write_text(result.configuration, encoding="utf-8")


def fit(options: FitOptions) -> report.FitResult:
    """Measure, predict, choose and, if asked to, check."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer.load(options.target)
    prompts = [prompt.tokens(tokenizer) for prompt in options.prompts]
    with losses_unsaid(), stages() as progress, tempfile.TemporaryDirectory(prefix="paceline-fit-") as name:
        progress("comparing tokenizers")
        translated = teacher.translated(options)
        watched = asyncio.run(watch(options, prompts, Path(name), progress))
        texts = spread(watched.texts, len(watched.texts))
        known = replace(learned(options, watched, texts, progress), translated=translated)
        result = _predict(options, known, progress)
        if options.validate:
            shown = result.shown
            checking = validate(options, shown.way, shown.depth, known, texts, Path(name), progress)
            result = replace(result, validation=asyncio.run(checking))
    return result


def learned(
    options: FitOptions, watched: Watched, texts: Sequence[TargetText], progress: Callable[[str], None]
) -> Known:
    """Costs from the records, and what each draft model, and a head, say along the texts."""
    alone = [AgreementPassage(text.prompt, text.tokens) for text in texts]
    if options.eagle:
        progress(f"what {options.eagle} says along the text")
        alone = [replace(one, by_age=said) for one, said in zip(alone, teacher.by_age(options, texts), strict=True)]
    passages: dict[str | None, list[AgreementPassage]] = {None: alone}
    if options.away:
        passages[options.away] = alone
    for draft in options.drafts:
        progress(f"what {draft} says along the text")
        drafted = teacher.passages(options, draft, texts)
        passages[draft] = [replace(one, places=said.places) for one, said in zip(alone, drafted, strict=True)]
    costs, kinds = {draft: watched.costs(draft) for draft in passages}, [text.kind for text in texts]
    return Known(costs, passages, kinds, watched.vocabulary, heads=watched.heads, away=options.away)


def most_drafters(options: FitOptions) -> int:
    """One for each GPU beside the target's. Of an only GPU, more would take what the target was measured with."""
    gpus = 0 if on_cpu(options.device) else here()
    return max(gpus - 1, 1) if gpus else predict.DRAFTERS[-1]


def _predict(options: FitOptions, known: Known, progress: Callable[[str], None]) -> report.FitResult:
    most = most_drafters(options)
    rough, fine = (Predictor(known, options.seed, tokens, most) for tokens in (predict.ROUGH, predict.FINE))
    forecasts: list[Forecast] = []
    for way in options.ways:
        progress(f"simulating {way}")
        forecasts.append(forecast(rough, way, options.round_trips))
    chosen = predict.recommended(forecasts)
    if chosen is None:
        return report.FitResult(options, known, tuple(forecasts), None)
    progress(f"simulating {chosen.way} at every depth and load")
    chosen = forecast(fine, chosen.way, options.round_trips, predict.DEPTHS)
    found = predict.loads(rough, chosen, options.round_trips[0], options.sessions)
    near = predict.TargetLoad(rtt=options.round_trips[0])
    forgetful = fine.forgetful(chosen.way, near, chosen.depth) if chosen.way.remembers else None
    return report.FitResult(options, known, tuple(forecasts), chosen, tuple(found), forgetful=forgetful)
